"""`splitpoint compose`: an override of docker-compose.yml for a node of several GPUs.

The making of the files is pure: numbers in, text out. The commands in them are those of
docker-compose.yml, to which tests compare them; Compose replaces a command as a whole, so an
override has to repeat what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from splitpoint.config import format_size, parse_size
from splitpoint.errors import AlreadyExists, InvalidArgument
from splitpoint.host.files import replace_file
from splitpoint.options import worker
from splitpoint.options.option import Option
from splitpoint_cli.files import check_output
from splitpoint_cli.options import of, takes_options
from splitpoint_cli.output import out
from splitpoint_cli.stack.options import HOST_MEMORY

# First line of each written file; files that begin with it may be replaced.
MARK = "# Written by `splitpoint compose`: changes made here are lost."
MOST_GPUS = 64
# Room for a few slots of a small model; a smaller size probably lacks its unit.
LEAST_MEMORY = 16 << 20
# Memory of the store's container in addition to the arena, in bytes.
STORE_MEMORY = 2 << 30
METRICS_PORT = 9400

_SOCKETS = "unix:/run/splitpoint"
_MODEL = "/models/${SPLITPOINT_MODEL_NAME:-stdlib-llama}"
_COMMON = (
    f"--model {_MODEL}",
    "--dtype ${SPLITPOINT_DTYPE:-auto}",
)
# The store's chunks belong to one format of the weights.
_WEIGHTS = "--weights ${SPLITPOINT_WEIGHTS:-native}"
_REDIS_AND_METRICS = (
    "--redis redis://splitpoint@redis:6379",
    "--redis-password-file /etc/splitpoint-redis/password",
    f"--metrics 0.0.0.0:{METRICS_PORT} --metrics-open",
)


@dataclass(frozen=True, slots=True)
class Node:
    """Settings of the services of one node. Raises InvalidArgument for impossible ones.

    Attributes:
        gpus: workers, one for each of the devices 0 to gpus - 1.
        host_memory_bytes: size of the arena; None: $SPLITPOINT_HOST_MEMORY.
        device_memory_bytes: memory of each GPU for weights and cache; None: most of it.
        max_batch: sequences that run at once on a GPU; None: the worker chooses.
    """

    gpus: int
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    max_batch: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS:
            raise InvalidArgument(f"--gpus is 1 to {MOST_GPUS}, not {self.gpus}", field="gpus")
        for size, field in (
            (self.host_memory_bytes, "host-memory"),
            (self.device_memory_bytes, "device-memory"),
        ):
            if size is not None and size < LEAST_MEMORY:
                raise InvalidArgument(
                    f"--{field}: {format_size(size)} is below the smallest size of "
                    f"{format_size(LEAST_MEMORY)}; was a unit forgotten (64GiB)?",
                    field=field,
                )
        if self.max_batch is not None and self.max_batch < 1:
            raise InvalidArgument("--max-batch is at least 1", field="max-batch")

    @property
    def workers(self) -> list[str]:
        """Names of the services, which are also the workers' ids."""
        return [f"worker-gpu-{gpu}" for gpu in range(self.gpus)]


def socket_of(service: str) -> str:
    return f"{_SOCKETS}/{service}.sock"


def store_command(node: Node) -> list[str]:
    """Return the store's command; each text is a word, or an option with its value."""
    memory = "${SPLITPOINT_HOST_MEMORY:-1g}"
    return [
        "python -m kvstore_service",
        f"--listen {socket_of('kvstore')}",
        *_COMMON,
        _WEIGHTS,
        f"--host-memory {memory if node.host_memory_bytes is None else node.host_memory_bytes}",
        "--arena /run/splitpoint-arena/arena",
        "--replace-arena",
        "--keep-arena",
        *_REDIS_AND_METRICS,
        "${SPLITPOINT_KVSTORE_ARGS:-}",
    ]


def worker_command(name: str, device: str, node: Node) -> list[str]:
    """Return one worker's command; its container sees one GPU only, as cuda:0."""
    return [
        "python -m worker_service",
        f"--listen {socket_of(name)}",
        f"--worker-id {name}",
        *_COMMON,
        _WEIGHTS,
        "--numerics ${SPLITPOINT_NUMERICS:-auto}",
        f"--kvstore {socket_of('kvstore')}",
        f"--device {device}",
        *_option("--device-memory", node.device_memory_bytes),
        *_option("--max-batch", node.max_batch),
        *_REDIS_AND_METRICS,
        "${SPLITPOINT_WORKER_ARGS:-}",
    ]


def scheduler_command(workers: Sequence[str]) -> list[str]:
    """Return the scheduler's command with the names of all workers.

    Redis lists them, too; named, they also work without it, and `splitpoint status` reports
    one that is missing.
    """
    return [
        "python -m scheduler_service",
        "--listen 0.0.0.0:50050",
        "--tls-cert /etc/splitpoint/server.pem",
        "--tls-key /etc/splitpoint/server-key.pem",
        "--tokens /etc/splitpoint/tokens.toml",
        "--server-key-file /var/lib/splitpoint/server.key",
        *_COMMON,
        *(f"--worker {socket_of(worker)}" for worker in workers),
        *_REDIS_AND_METRICS,
        "${SPLITPOINT_SCHEDULER_ARGS:-}",
    ]


def targets_file(node: Node) -> str:
    """Return the workers' targets for Prometheus (file_sd)."""
    targets = ", ".join(f'"{worker}:{METRICS_PORT}"' for worker in node.workers)
    # Replaces deploy/prometheus/targets/workers.yml.
    return f"{MARK}\n- targets: [{targets}]\n  labels: {{host: local}}\n"


def override_file(node: Node, targets: str) -> str:
    """Return the override of docker-compose.yml; `targets` is the path of `targets_file`."""
    parts = [
        MARK,
        f"# {node.gpus} GPU{'s' if node.gpus > 1 else ''} of one node, to be given behind the "
        "file it completes:",
        "#   docker-compose -f docker-compose.yml -f THIS_FILE --profile gpu up -d",
        "",
        *([_GPU_WORKER] if node.gpus > 1 else []),
        "services:",
        _service("kvstore", store_command(node)),
        *_store_limit(node),
        _service("scheduler", scheduler_command(node.workers)),
        # Its device is in docker-compose.yml.
        _service("worker-gpu-0", worker_command("worker-gpu-0", "cuda:0", node)),
        *(_further_worker(gpu, name, node) for gpu, name in enumerate(node.workers[1:], start=1)),
        "  prometheus:",
        "    volumes:",
        f"      - {targets}:/etc/prometheus/targets/workers.yml:ro",
    ]
    if node.host_memory_bytes is not None:
        parts += ["", _ARENA.format(size=node.host_memory_bytes)]
    return "\n".join(parts) + "\n"


def _store_limit(node: Node) -> list[str]:
    """Return the store's memory limit, to which the arena is charged."""
    if node.host_memory_bytes is None:
        return []
    limit = node.host_memory_bytes + STORE_MEMORY
    return [f"    mem_limit: ${{SPLITPOINT_KVSTORE_MEMORY:-{limit}}}"]


def _option(name: str, value: object | None) -> list[str]:
    return [] if value is None else [f"{name} {value}"]


def _service(name: str, command: Sequence[str]) -> str:
    lines = "".join(f"\n      {part}" for part in command)
    return f"  {name}:\n    command: >-{lines}"


def _further_worker(gpu: int, name: str, node: Node) -> str:
    command = _service(name, worker_command(name, "cuda:0", node))
    head, _, rest = command.partition("\n")
    return f"{head}\n    <<: *gpu-worker\n{rest}\n" + _DEVICE.format(
        gpu=gpu, socket=socket_of(name)
    )


# As worker-gpu-0 in docker-compose.yml, of which Compose cannot extend a service that has
# dependencies.
_GPU_WORKER = """\
x-gpu-worker: &gpu-worker
  user: "10001:10001"
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: unless-stopped
  mem_limit: ${SPLITPOINT_WORKER_MEMORY:-48g}
  pids_limit: 4096
  logging:
    driver: json-file
    options: {max-size: 10m, max-file: "5"}
  image: splitpoint-cuda:${SPLITPOINT_TAG:-local}
  build:
    context: .
    dockerfile: deploy/Dockerfile
    network: ${SPLITPOINT_BUILD_NETWORK:-default}
    target: cuda
    args:
      PYTHON_IMAGE: ${PYTHON_IMAGE:-python:3.11-slim-bookworm}
      REVISION: ${SPLITPOINT_REVISION:-}
      TORCH_CUDA_INDEX: ${TORCH_CUDA_INDEX:-}
  profiles: [gpu]
  ulimits:
    memlock: {soft: -1, hard: -1}
  tmpfs: ["/tmp:exec,mode=1777,size=1g"]
  volumes:
    - type: bind
      source: ${SPLITPOINT_MODEL_DIR:-./models/stdlib-llama}
      target: /models/${SPLITPOINT_MODEL_NAME:-stdlib-llama}
      read_only: true
    - sockets:/run/splitpoint
    - arena:/run/splitpoint-arena
    - redis-secret:/etc/splitpoint-redis:ro
  networks: [control, metrics]
  depends_on:
    setup: {condition: service_completed_successfully}
    kvstore: {condition: service_healthy}
    redis: {condition: service_healthy}
  stop_grace_period: 45s
"""
_DEVICE = """\
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              device_ids: ["{gpu}"]
              capabilities: [gpu]
    healthcheck:
      interval: 10s
      timeout: 10s
      retries: 3
      test:
        [CMD, python, -m, splitpoint_cli.request.probe, "{socket}",
         --service, splitpoint.v1.WorkerService]
      start_period: 900s"""
_ARENA = """\
volumes:
  arena:
    driver: local
    driver_opts:
      type: tmpfs
      device: tmpfs
      o: size={size},mode=0700,uid=10001,gid=10001,huge=${{SPLITPOINT_HUGE_PAGES:-never}}"""


_READABLE = 0o644


_GPUS: Option[int] = Option(
    "gpus", int, 0, "Number of GPUs of this node, with one worker each.", unit="N", is_required=True
)
_HOST_MEMORY: Option[str | None] = replace(
    HOST_MEMORY,
    help="Size of the arena in bytes; absent: $SPLITPOINT_HOST_MEMORY of the environment or .env.",
)


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """Values of the options of `splitpoint compose`."""

    gpus: int = of(_GPUS)
    host_memory: str | None = of(_HOST_MEMORY)
    device_memory: str | None = of(worker.DEVICE_MEMORY)
    max_batch: int | None = of(worker.MAX_BATCH)


@takes_options
def compose(
    options: ComposeOptions,
    output: Annotated[
        Path,
        typer.Option(
            help="File for the services; FILE.targets.yml beside it lists the workers' metrics."
        ),
    ] = Path("docker-compose.gpu.yml"),
) -> None:
    """Write the services of a node with several GPUs, for Docker Compose (docs/deployment.md).

    The same options write the same files. Files of other origin are left alone.
    """
    host, device = options.host_memory, options.device_memory
    node = Node(
        options.gpus,
        None if host is None else parse_size(host, field="host-memory"),
        None if device is None else parse_size(device, field="device-memory"),
        options.max_batch,
    )
    check_output(output, "output")
    targets = output.with_suffix(".targets.yml")
    # Compose reads relative paths as relative to its first file.
    there = Path(targets.name) if output.parent == Path() else targets.absolute()
    shown = f"./{there}" if not there.is_absolute() else str(there)
    files = {targets: targets_file(node), output: override_file(node, shown)}
    for path in files:
        if path.exists() and not path.read_text(errors="replace").startswith(MARK):
            raise AlreadyExists(f"{path} was not written by this command; give another --output")
    for path, text in files.items():
        replace_file(path, text.encode(), _READABLE)
        out.print(str(path), markup=False)
    out.print(
        f"\n  docker-compose -f docker-compose.yml -f {output} --profile gpu up -d", markup=False
    )
