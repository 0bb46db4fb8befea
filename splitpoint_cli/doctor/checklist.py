"""All checks in the order of the report, for a stack that is to be started.

A stack of this instance that is running already is checked, too: whether it serves.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from splitpoint import config
from splitpoint.arena import presence
from splitpoint.client import INFERENCE_SERVICE
from splitpoint.config import reachable_address, runtime_path
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.extras import need
from splitpoint.host.memory import default_host_memory, memory_facts
from splitpoint.options import store
from splitpoint.options.speculation import read_speculative_config
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.shapes import ArenaLayout, ModelShape, WeightFormat
from splitpoint.transport.tls import read_identity, trusting_own_server
from splitpoint_cli.checks import disk, gpu, memory, model, ports, redis, security
from splitpoint_cli.checks.finding import Check, Finding, Verdict, attempt, run_check
from splitpoint_cli.doctor.command import DoctorOptions
from splitpoint_cli.request.probe import obstacle_of
from splitpoint_cli.stack.devices import choose_devices, visible_gpu_count
from splitpoint_cli.stack.instance import running_process
from splitpoint_cli.stack.places import arena_bytes, instance_of

_ANSWER_SECONDS = 3.0
# The first Linux with open file description locks.
_LEAST_KERNEL = (3, 15)


@dataclass(frozen=True, slots=True)
class OwnStack:
    """A healthy stack of the instance, which itself uses the ports and the arena."""

    process_id: int
    address: str


def find_own_stack(
    instance: str, listen: str, *, certificate: str | None, key: str | None, ca: str | None
) -> OwnStack | None:
    """Return the stack of this name that serves at `listen`; None if there is none."""
    process_id = running_process(runtime_path(instance), seconds=0)
    if process_id is None:
        return None
    address = reachable_address(listen)
    try:
        identity = read_identity(certificate=certificate, key=key, authorities=ca)
        obstacle = obstacle_of(
            address,
            service=INFERENCE_SERVICE,
            identity=trusting_own_server(identity),
            seconds=_ANSWER_SECONDS,
        )
    except SplitpointError:  # wrong options, which are findings of other checks
        return None
    return OwnStack(process_id, address) if obstacle is None else None


def check_instance(instance: str, own: OwnStack | None) -> Finding:
    """Check whether a stack of this name runs already."""
    beside = "splitpoint up with another --listen port or --instance"
    if own is not None:
        return Finding(
            "instance",
            Verdict.OK,
            f"a stack of this instance is running: {instance}, process {own.process_id}, "
            f"serves at {own.address}",
            f"To start it anew: splitpoint down first; beside it: {beside}",
        )
    if running_process(runtime_path(instance), seconds=0) is None:
        return Finding("instance", Verdict.OK, f"no stack named {instance} is running")
    return Finding(
        "instance",
        Verdict.PROBLEM,
        f"a stack named {instance} is running",
        f"Stop it: splitpoint down --instance {instance}; or start another one beside it: {beside}",
    )


def check_kernel(system: os.uname_result) -> Finding:
    """Check that the kernel has the locks by which a store knows that a worker is gone."""
    # The part after the first dash is the distributor's.
    release = system.release.partition("-")[0]
    found = f"{system.sysname} {release} on {system.machine}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", release)[:2])
    if system.sysname != "Linux" or numbers < _LEAST_KERNEL:
        least = ".".join(map(str, _LEAST_KERNEL))
        return Finding("kernel", Verdict.PROBLEM, found, f"Linux {least} or newer is needed.")
    if system.machine != "x86_64":
        return Finding(
            "kernel",
            Verdict.WARNING,
            f"{found}: the arena's order of writes is only proven on x86-64",
            'Use an x86-64 host, or see docs/arena-format.md, "Order of writes".',
        )
    return Finding("kernel", Verdict.OK, found)


def check_locks(folder: Path) -> Finding:
    """Check in the folder of arenas that an open file sees the lock of another one."""
    name, session = "file locks", b"doctor\0\0"
    why = "one open file does not see the lock of another"
    with tempfile.NamedTemporaryFile(dir=folder, prefix="splitpoint-doctor-") as file:
        other = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            presence.hold(file.fileno(), session)
            if presence.is_held(other, session):
                return Finding(name, Verdict.OK, f"open file description locks work in {folder}")
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            os.close(other)
    return Finding(
        name,
        Verdict.PROBLEM,
        f"open file description locks do not work in {folder}: {why}",
        "Run on the host's own kernel (in a container: the default runtime, not a user-space "
        "kernel), or no store can tell whether a worker is alive.",
    )


def examine(options: DoctorOptions) -> Iterator[Finding]:
    """Yield every finding, in order. Does not raise."""
    own = attempt("instance", lambda: _own_stack(options))
    if isinstance(own, Finding):  # wrong options, which other checks report
        own = None
    for check in (*_machine(options), *_stack(options, own), *_network(options, own)):
        yield from run_check(check)


def _own_stack(options: DoctorOptions) -> OwnStack | None:
    return find_own_stack(
        _instance(options),
        options.listen,
        certificate=options.tls_cert,
        key=options.tls_key,
        ca=options.tls_ca,
    )


def _machine(options: DoctorOptions) -> Iterator[Check]:
    yield Check("kernel", lambda: check_kernel(os.uname()))
    yield Check("file locks", lambda: check_locks(options.places.shm))
    yield Check("open files", lambda: memory.check_open_files(*_limit(resource.RLIMIT_NOFILE)))


def _stack(options: DoctorOptions, own: OwnStack | None) -> Iterator[Check]:
    """Yield the checks of GPUs, the model, and the memory for both."""
    on_bus = gpu.pci_gpu_count(options.places)
    visible = visible_gpu_count()
    yield Check("GPU", lambda: gpu.check_presence(options.device, on_bus, visible))
    has_gpu = bool(visible) and options.device != "cpu"
    driver = gpu.read_driver() if has_gpu else gpu.Driver()
    if has_gpu:
        yield Check("driver", lambda: gpu.check_driver(driver))
        yield Check("torch", lambda: gpu.check_torch(gpu.ask_torch(), driver))
    known = attempt(
        "model",
        lambda: model.find_model(
            options.model, options.dtype, options.model_backend, WeightFormat(options.weights)
        ),
    )
    found = known if isinstance(known, Finding) else known.finding
    shape = None if isinstance(known, Finding) else known.shape
    yield Check("model", lambda: found)
    if not isinstance(known, Finding) and known.folder is not None:
        yield from _checkpoint(known.folder, shape)
    draft = attempt("speculation", lambda: _draft_model(options, known))
    draft_bytes = 0
    if isinstance(draft, Finding):
        wrong_options = replace(draft, advice="See `splitpoint up --help` and docs/speculation.md")
        yield Check("speculation", lambda: wrong_options)
    elif draft is not None:
        of_draft = draft.finding
        yield Check("draft model", lambda: of_draft)
        draft_bytes = 0 if draft.shape is None else WeightSizes.of(draft.shape).total
    if shape is not None and not isinstance(known, Finding):
        weights = _weight_bytes(options, shape) + draft_bytes
        sizes = tuple(each.memory_bytes for each in driver.gpus if each.memory_bytes is not None)
        can_stream = known.can_stream_weights
        yield Check(
            "device memory",
            lambda: model.check_device_memory(
                weights, options.device_memory, sizes, can_stream_weights=can_stream
            ),
        )
    yield Check("memory", lambda: _memory(options, shape, draft_bytes, has_gpu=has_gpu, own=own))
    if options.tier_disk is not None or options.tier_disk_size != store.TIER_DISK_SIZE.default:
        folder = None if options.tier_disk is None else Path(options.tier_disk)
        yield Check(
            "disk tier",
            lambda: disk.check_tier_disk(
                folder,
                options.tier_disk_size,
                options.places,
                None if shape is None else _layout(shape),
            ),
        )
    yield Check("huge pages", lambda: memory.check_huge_pages(options.huge_pages, options.places))


def _layout(shape: ModelShape) -> ArenaLayout:
    """Return the layout of a store's chunks without options about it."""
    return ArenaLayout.of(
        shape,
        chunk_tokens=store.CHUNK_TOKENS.default,
        has_activations=shape.activations_can_pay,
    )


def _checkpoint(folder: Path, shape: ModelShape | None) -> Iterator[Check]:
    yield Check("weights", lambda: model.check_weights(folder))
    if shape is not None:
        yield Check("tokenizer", lambda: model.check_tokenizer(folder, shape.vocabulary_size))
        yield Check("chat template", lambda: model.check_chat_template(folder))


def _draft_model(
    options: DoctorOptions, served: model.FoundModel | Finding
) -> model.FoundModel | None:
    """Return the draft model; None if there is none. Raises InvalidArgument (options)."""
    wanted = read_speculative_config(options.speculative_config, options.draft_model)
    if wanted is None or wanted.model is None:
        return None
    if isinstance(served, Finding):
        served = model.FoundModel(served)
    return model.find_draft_model(wanted.model, served)


def _weight_bytes(options: DoctorOptions, shape: ModelShape) -> int:
    return WeightSizes.of(shape, WeightFormat(options.weights)).total


def _memory(
    options: DoctorOptions,
    shape: ModelShape | None,
    draft_bytes: int,
    *,
    has_gpu: bool,
    own: OwnStack | None,
) -> Iterator[Finding]:
    """Check all uses of host memory, and the part that is to be page-locked."""
    there = arena_bytes(_arena(options))
    chosen = options.host_memory is None
    if options.host_memory is not None:
        size = config.parse_size(options.host_memory, field="host_memory")
    else:
        # A missing folder is a finding below.
        is_there = options.places.shm.is_dir()
        size = there or (default_host_memory(options.places.shm) if is_there else 0)
    yield memory.check_shared_memory(options.places.shm, size, is_chosen=chosen, there_bytes=there)
    if shape is not None and not chosen:
        too_small = memory.check_chunks(size, _layout(shape))
        if too_small is not None:
            yield too_small
    # On a GPU node the weights are on the GPU; `check_device_memory` speaks of them. Those of
    # a stack that runs are loaded already.
    weights = (
        0
        if shape is None or has_gpu or own is not None
        else (_weight_bytes(options, shape) + draft_bytes) * (options.workers or 1)
    )
    facts = memory_facts(options.places.proc, options.places.sys / "fs/cgroup")
    yield memory.check_memory(facts, max(0, size - there), weights)
    pinned = size
    if options.pin_limit is not None:
        pinned = min(size, config.parse_size(options.pin_limit, field="pin_limit"))
    soft, _ = _limit(resource.RLIMIT_MEMLOCK)
    yield memory.check_locked_memory(soft, pinned, has_gpu=has_gpu)


def _metrics(wanted: str, options: DoctorOptions) -> Finding:
    """Check ports from this one on, as `up` takes them, or a service's HOST:PORT."""
    if not wanted.isdigit():
        return ports.check_free("metrics", wanted, "--metrics")
    workers = len(_devices(options))
    listens = ports.scheduler_addresses(options.listen, options.schedulers)
    addresses = ports.metrics_addresses(int(wanted), listens, workers, http=options.http)
    return ports.check_metrics(addresses)


def _listen(options: DoctorOptions, *, has_tls: bool, has_tokens: bool) -> Iterator[Finding]:
    for address in ports.scheduler_addresses(options.listen, options.schedulers):
        yield ports.check_listen(address, has_tls=has_tls, has_tokens=has_tokens)


def _http(address: str, options: DoctorOptions) -> Finding:
    """Check the gateway's address, and that it is installed."""
    need("a gateway (--http)", "gateway")
    try:
        ports.check_http_address(
            address,
            ports.scheduler_addresses(options.listen, options.schedulers),
            has_tls=options.tls_cert is not None,
            has_tokens=options.tokens is not None,
        )
    except InvalidArgument as error:
        advice = "Listen at this host only: --http 127.0.0.1:8000, or see docs/security.md"
        return Finding("http", Verdict.PROBLEM, error.message, advice)
    return ports.check_free("http", address, "--http")


def _network(options: DoctorOptions, own: OwnStack | None) -> Iterator[Check]:
    has_tls, has_tokens = options.tls_cert is not None, options.tokens is not None
    yield Check("instance", lambda: check_instance(_instance(options), own))
    if own is None:  # else it uses the ports itself
        yield Check("listen", lambda: _listen(options, has_tls=has_tls, has_tokens=has_tokens))
    if options.http is not None and own is None:
        http = options.http
        yield Check("http", lambda: _http(http, options))
    if options.metrics is not None and own is None:
        metrics = options.metrics
        yield Check("metrics", lambda: _metrics(metrics, options))
    if options.redis is not None:
        url = options.redis
        yield Check(
            "Redis", lambda: redis.check_redis(url, options.redis_password_file, options.redis_ca)
        )
    if options.tls_cert or options.tls_key or options.tls_ca:
        yield Check(
            "TLS files",
            lambda: security.check_tls(
                options.tls_cert, options.tls_key, options.tls_ca, options.listen, datetime.now(UTC)
            ),
        )
    if options.tokens is not None:
        tokens = options.tokens
        yield Check("tokens", lambda: security.check_tokens(tokens))


def _devices(options: DoctorOptions) -> tuple[str, ...]:
    """Return the devices that `up` would choose; another check reports a missing GPU."""
    if options.device == "cuda" and not visible_gpu_count():
        return ("cuda:0",) * (options.workers or 1)
    return choose_devices(options.device, options.workers)


def _instance(options: DoctorOptions) -> str:
    return instance_of(options.listen, options.instance)


def _arena(options: DoctorOptions) -> Path:
    """Return the path of `config.arena_path`, below the folder that is checked."""
    return options.places.shm / f"splitpoint-{os.getuid()}-{_instance(options)}" / "arena"


def _limit(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)
