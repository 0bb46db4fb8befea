"""All checks in the order of the report, for the stack that somebody wants to start."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from splitpoint import config
from splitpoint.host.memory import available_cores, memory_facts
from splitpoint.host.processor import instruction_sets
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint_cli.devices import choose_devices, visible_gpu_count
from splitpoint_cli.doctor.checks import (
    arenas,
    gpu,
    gpu_facts,
    kernel,
    limits,
    memory,
    model,
    own_stack,
    ports,
    power,
    processors,
    redis,
    security,
    software,
)
from splitpoint_cli.doctor.finding import Check, Finding, Places, attempt, run_check
from splitpoint_cli.stack.metrics_ports import metrics_addresses
from splitpoint_cli.stack.plan import default_host_memory, instance_of

# As of `up`, whose --chunk-tokens is not asked for here.
_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `splitpoint up` would be asked for; names and meanings are its options'."""

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    workers: int | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    huge_pages: str = "auto"
    numa_node: str = "auto"
    pin_limit: str | None = None
    listen: str = config.DEFAULT_ADDRESS
    instance: str | None = None
    metrics: str | None = None
    redis: str | None = None
    redis_password_file: str | None = None
    redis_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tokens: str | None = None
    places: Places = field(default_factory=Places)


def examine(wishes: Wishes) -> Iterator[Finding]:
    """Every finding, in order. Never raises."""
    own = attempt("instance", lambda: _own_stack(wishes))
    if isinstance(own, Finding):  # wrong options, which other checks tell of
        own = None
    for check in (*_machine(wishes), *_stack(wishes, own), *_network(wishes, own)):
        yield from run_check(check)


def _own_stack(wishes: Wishes) -> own_stack.OwnStack | None:
    return own_stack.find_own_stack(
        _instance(wishes),
        wishes.listen,
        certificate=wishes.tls_cert,
        key=wishes.tls_key,
        ca=wishes.tls_ca,
    )


def _machine(wishes: Wishes) -> Iterator[Check]:
    places = wishes.places
    named = os.uname()
    yield Check("kernel", lambda: kernel.check_kernel(named.sysname, named.release, named.machine))
    yield Check("file locks", lambda: kernel.check_locks(places.shm))
    yield Check("Python", lambda: software.check_python(sys.version_info[:3]))
    yield Check(
        "packages",
        lambda: software.check_packages(software.own_requirements(), software.installed_version),
    )
    yield Check(
        "cores",
        lambda: processors.check_cores(
            available_cores(), _cpu_workers(wishes), places, flags=instruction_sets()
        ),
    )
    yield Check("NUMA", lambda: processors.check_numa(wishes.numa_node, places))
    yield Check("CPU energy", lambda: power.check_rapl(places))
    yield Check("open files", lambda: limits.check_open_files(*_limit(resource.RLIMIT_NOFILE)))


def _stack(wishes: Wishes, own: own_stack.OwnStack | None) -> Iterator[Check]:
    """What depends on each other: GPUs, the model, and the memory for both."""
    on_bus = gpu_facts.pci_gpu_count(wishes.places)
    visible = visible_gpu_count()
    yield Check("GPU", lambda: gpu.check_presence(wishes.device, on_bus, visible))
    has_gpu = bool(visible) and wishes.device != "cpu"
    driver = gpu_facts.read_driver() if has_gpu else gpu_facts.Driver()
    if has_gpu:
        yield Check("driver", lambda: gpu.check_driver(driver))
        yield Check("torch", lambda: gpu.check_torch(gpu_facts.ask_torch(), driver))
    known = attempt("model", lambda: model.find_model(wishes.model, wishes.dtype))
    found = known if isinstance(known, Finding) else known.finding
    shape = None if isinstance(known, Finding) else known.shape
    yield Check("model", lambda: found)
    if not isinstance(known, Finding) and known.folder is not None:
        yield from _checkpoint(known.folder, shape)
    if shape is not None:
        yield Check("device memory", lambda: _device_memory(wishes, shape, driver))
    yield Check("memory", lambda: _memory(wishes, shape, has_gpu=has_gpu, own=own))
    yield Check("huge pages", lambda: memory.check_huge_pages(wishes.huge_pages, wishes.places))
    yield Check(
        "arenas",
        lambda: arenas.check_arenas(
            arenas.find_arenas(wishes.places.shm, os.getuid()),
            None if own is not None else _instance(wishes),
        ),
    )


def _checkpoint(folder: Path, shape: ModelShape | None) -> Iterator[Check]:
    yield Check("weights", lambda: model.check_weights(folder))
    if shape is not None:
        yield Check("tokenizer", lambda: model.check_tokenizer(folder, shape.vocabulary_size))


def _device_memory(
    wishes: Wishes, shape: ModelShape, driver: gpu_facts.Driver
) -> Iterator[Finding]:
    sizes = tuple(found.memory_bytes for found in driver.gpus if found.memory_bytes is not None)
    return model.check_device_memory(shape, wishes.device_memory, sizes)


def _memory(
    wishes: Wishes, shape: ModelShape | None, *, has_gpu: bool, own: own_stack.OwnStack | None
) -> Iterator[Finding]:
    """All that host memory is needed for, and how much of it is to be locked."""
    there = _arena_bytes(_arena(wishes))
    chosen = wishes.host_memory is None
    if wishes.host_memory is not None:
        size = config.parse_size(wishes.host_memory, field="host_memory")
    else:
        # A missing folder is a finding below.
        is_there = wishes.places.shm.is_dir()
        size = there or (default_host_memory(wishes.places.shm) if is_there else 0)
    yield memory.check_shared_memory(wishes.places.shm, size, is_chosen=chosen, there_bytes=there)
    if shape is not None and not chosen:
        layout = ArenaLayout.of(
            shape,
            chunk_tokens=_CHUNK_TOKENS,
            has_activations=shape.activations_can_pay,
        )
        too_small = memory.check_chunks(size, layout)
        if too_small is not None:
            yield too_small
    # On a GPU node the weights are on the GPU; `check_device_memory` speaks of them. Those of
    # a stack that runs are loaded already.
    weights = (
        0
        if shape is None or has_gpu or own is not None
        else shape.weight_bytes * (wishes.workers or 1)
    )
    facts = memory_facts(wishes.places.proc, wishes.places.sys / "fs/cgroup")
    yield memory.check_memory(facts, max(0, size - there), weights)
    pinned = size
    if wishes.pin_limit is not None:
        pinned = min(size, config.parse_size(wishes.pin_limit, field="pin_limit"))
    soft, _ = _limit(resource.RLIMIT_MEMLOCK)
    yield limits.check_locked_memory(soft, pinned, has_gpu=has_gpu)


def _metrics(wanted: str, wishes: Wishes) -> Finding:
    """A port as of `up`, which takes one for each service, or a service's own HOST:PORT."""
    if not wanted.isdigit():
        return ports.check_free("metrics", wanted, "--metrics")
    workers = len(_devices(wishes))
    return ports.check_metrics(metrics_addresses(int(wanted), wishes.listen, workers))


def _network(wishes: Wishes, own: own_stack.OwnStack | None) -> Iterator[Check]:
    has_tls, has_tokens = wishes.tls_cert is not None, wishes.tokens is not None
    if own is not None:  # its ports are taken by itself
        running = own
        yield Check("instance", lambda: own_stack.check_own_stack(running))
    else:
        yield Check(
            "listen",
            lambda: ports.check_listen(wishes.listen, has_tls=has_tls, has_tokens=has_tokens),
        )
    if wishes.metrics is not None and own is None:
        metrics = wishes.metrics
        yield Check("metrics", lambda: _metrics(metrics, wishes))
    if wishes.redis is not None:
        url = wishes.redis
        yield Check(
            "Redis", lambda: redis.check_redis(url, wishes.redis_password_file, wishes.redis_ca)
        )
    if wishes.tls_cert or wishes.tls_key or wishes.tls_ca:
        yield Check(
            "TLS files",
            lambda: security.check_tls(
                wishes.tls_cert, wishes.tls_key, wishes.tls_ca, wishes.listen, datetime.now(UTC)
            ),
        )
    if wishes.tokens is not None:
        tokens = wishes.tokens
        yield Check("tokens", lambda: security.check_tokens(tokens))


def _devices(wishes: Wishes) -> tuple[str, ...]:
    """As `up` would choose them; that there is no GPU for a worker is another check's finding."""
    if wishes.device == "cuda" and not visible_gpu_count():
        return ("cuda:0",) * (wishes.workers or 1)
    return choose_devices(wishes.device, wishes.workers)


def _cpu_workers(wishes: Wishes) -> int:
    return _devices(wishes).count("cpu")


def _instance(wishes: Wishes) -> str:
    return config.check_instance(wishes.instance or instance_of(wishes.listen))


def _arena(wishes: Wishes) -> Path:
    """As `config.arena_path`, below the folder of shared memory that is looked at."""
    return wishes.places.shm / f"splitpoint-{os.getuid()}-{_instance(wishes)}" / "arena"


def _arena_bytes(arena: Path) -> int:
    """Of an arena that an earlier stack left; 0: none."""
    try:
        return arena.stat().st_size
    except FileNotFoundError:
        return 0


def _limit(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)
