"""Addresses and files of a stack."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from splitpoint import config
from splitpoint.host.memory import default_host_memory
from splitpoint_cli.checks.ports import (
    check_http_address,
    metrics_addresses,
    scheduler_addresses,
)
from splitpoint_cli.stack.options import StackOptions


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses and files of a stack.

    Attributes:
        key: file of the secret behind the chunk keys.
        other_keys: files that should have the same secret.
        listens: addresses of the schedulers.
        http: address of the gateway; None: there is none.
        metrics: addresses of the first scheduler, the store, each worker, the other schedulers
            and the gateway; empty: no metrics.
    """

    listens: tuple[str, ...]
    instance: str
    runtime: Path
    arena: Path
    key: Path
    other_keys: tuple[Path, ...]
    store: str
    workers: tuple[str, ...]
    http: str | None
    metrics: tuple[str, ...]


def places_of(options: StackOptions, worker_count: int, *, has_api_key: bool = False) -> Places:
    """Decide where the services listen. `has_api_key`: the gateway asks for one."""
    listens = scheduler_addresses(options.listen, options.schedulers)
    if options.http is not None:
        check_http_address(
            options.http,
            listens,
            has_tls=options.tls_cert is not None,
            has_tokens=options.tokens is not None or has_api_key,
        )
    metrics = metrics_addresses(options.metrics, listens, worker_count, http=options.http)
    instance = instance_of(options.listen, options.instance)
    runtime = config.runtime_path(instance)
    arena = config.arena_path(instance)
    # Socket names differ between two starts: a gRPC server unlinks its path as it ends, even
    # if the socket there is another server's by then.
    start = secrets.token_hex(3)
    return Places(
        listens=tuple(config.check_address(each) for each in listens),
        instance=instance,
        runtime=runtime,
        arena=arena,
        key=_key_file(options, arena, runtime),
        other_keys=_other_keys(options, arena),
        store=config.check_address(f"unix:{runtime}/store-{start}.sock"),
        workers=tuple(
            config.check_address(f"unix:{runtime}/worker-{i}-{start}.sock")
            for i in range(worker_count)
        ),
        http=options.http,
        metrics=metrics,
    )


def _key_file(options: StackOptions, arena: Path, runtime: Path) -> Path:
    """Return the file of the secret behind the chunk keys.

    It lives as long as the chunks whose keys it made: without it they are never found again.
    """
    if options.server_key_file is not None:
        return Path(options.server_key_file).absolute()
    if options.tier_disk is not None:
        return Path(options.tier_disk) / "server.key"
    beside = arena.parent / "key"
    return beside if options.keep_arena or beside.exists() else runtime / "key"


def _other_keys(options: StackOptions, arena: Path) -> tuple[Path, ...]:
    """Return the kept arena's own file beside a disk tier's.

    With the same secret in both, neither chunks of the arena nor those on the disk are lost when
    `--tier-disk` comes or goes.
    """
    beside = arena.parent / "key"
    has_two = options.tier_disk is not None and options.server_key_file is None
    return (beside,) if has_two and (options.keep_arena or beside.exists()) else ()


def arena_bytes(arena: Path) -> int:
    """Return the size of an arena that an earlier stack left; 0 if there is none."""
    try:
        return arena.stat().st_size
    except FileNotFoundError:
        return 0


def host_memory_bytes(given: str | None, arena: Path) -> int:
    """Return the bytes of the arena: as `--host-memory` says, else those of one that is there.

    An arena that exists is adopted with its size, whatever memory is free now.
    """
    if given is not None:
        return config.parse_size(given, field="host_memory")
    return arena_bytes(arena) or default_host_memory()


def trace_path(trace: str | None, worker: int) -> Path | None:
    """Return the file of one worker: `trace-0.json` of worker 0 for `trace.json`."""
    if trace is None:
        return None
    path = Path(trace).absolute()
    return path.with_stem(f"{path.stem}-{worker}")


def socket_path(address: str) -> Path | None:
    """Return the file of a `unix:` address; None for other addresses."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def instance_of(listen: str, name: str | None = None) -> str:
    """Return a stack's name: as given, else that of its port or socket, unique on a host.

    Raises InvalidArgument.
    """
    if name is not None:
        return config.check_instance(name)
    if listen.startswith("unix:"):
        return f"unix-{hashlib.sha256(os.fsencode(listen)).hexdigest()[:8]}"
    port = listen.rpartition(":")[2]
    if port == "0":
        return f"pid-{os.getpid()}"
    return f"port-{port}"
