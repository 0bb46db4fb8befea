"""`splitpoint store`: a store of pages without workers or scheduler, for engines such as vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from splitpoint import config
from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint.extras import need
from splitpoint.host.memory import memory_facts
from splitpoint.options import service
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.option import Option
from splitpoint.options.store import KEEP_ARENA, SECTIONS
from splitpoint.options.store import PAGE_SIZE as SERVICE_PAGE_SIZE
from splitpoint_cli.checks import disk, memory, ports
from splitpoint_cli.checks.finding import Places
from splitpoint_cli.options import arguments_of, configurable, each_of, of
from splitpoint_cli.output import err, out
from splitpoint_cli.spool import spooled_output
from splitpoint_cli.stack.options import HOST_MEMORY, INSTANCE
from splitpoint_cli.stack.places import arena_bytes, host_memory_bytes, instance_of
from splitpoint_cli.stack.preflight import judge

if TYPE_CHECKING:
    import argparse

LISTEN: Option[str] = replace(
    service.LISTEN,
    default=config.DEFAULT_STORE_ADDRESS,
    is_required=False,
    help="Address for engines: a loopback port or unix:/path; any interface with TLS and tokens.",
)
PAGE_SIZE: Option[str | None] = replace(
    SERVICE_PAGE_SIZE,
    default=AUTO,
    help="Largest size of a page in bytes; auto: that of the first engine that attaches.",
)
_INSTANCE: Option[str | None] = replace(
    INSTANCE, help="Name of this store's arena; absent: derived from the port."
)
# Options of the store that this command decides, or that are about chunks of tokens.
_OTHERS = frozenset(
    {
        *("parent_fd", "host_memory", "listen", "arena", "keep_arena", "replace_arena"),
        *("layout", "model", "dtype", "weights", "activations", "kv_encoding", "chunk_tokens"),
        *("page_reason", "page_size"),
    }
)
_PASSED: Mapping[str, tuple[str, Option[Any]]] = {
    option.field: (f"{section.title[0].upper()}{section.title[1:]}", option)
    for section in SECTIONS
    for option in section.options
    if option.field not in _OTHERS
}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Values of the options of `splitpoint store`.

    Attributes:
        passed: the store's other options, by their fields; this command only passes them on.
    """

    listen: str = of(LISTEN)
    host_memory: str | None = of(HOST_MEMORY)
    page_size: str | None = of(PAGE_SIZE)
    keep_arena: bool = of(KEEP_ARENA)
    instance: str | None = of(_INSTANCE)
    passed: Mapping[str, Any] = each_of(
        {name: option for name, (_, option) in _PASSED.items()},
        {name: panel for name, (panel, _) in _PASSED.items()},
    )


@configurable
def store(options: StoreOptions) -> None:
    """Start a store of pages on this host, for engines such as vLLM; Ctrl-C stops it.

    Engines of this host attach to it, in whatever order they start, and go on without it while
    it is away. The first one decides the size of a page, and the arena is made then.
    Nothing is left behind; an arena of --keep-arena and files of --tier-disk are for the next
    start.
    Exit codes: 2 wrong input, 3 a port is taken, 5 memory or another resource is short, 1
    anything else.
    """
    need("a store", "store")
    arena = config.arena_path(instance_of(options.listen, options.instance))
    size = host_memory_bytes(options.host_memory, arena)
    # Loads the store's modules, which no other command needs.
    from kvstore_service.__main__ import check_arguments, parse_arguments, run
    from splitpoint.service import run_service, set_up

    arguments = parse_arguments(_arguments_of(options, arena, size))
    check_arguments(arguments)
    _check_machine(arguments, size)

    async def serve(arguments: argparse.Namespace) -> None:
        await run(arguments, set_up(arguments), lambda at: _print_summary(at, arguments, size))

    with spooled_output():
        code = run_service("kvstore", serve, arguments, SECTIONS)
    if code:
        raise typer.Exit(code)


def _arguments_of(options: StoreOptions, arena: Path, size: int) -> list[str]:
    """Return the command line of the store's program."""
    return [
        *("--listen", options.listen),
        *("--host-memory", str(size)),
        *("--page-size", str(options.page_size)),
        *("--arena", str(arena)),
        # A user who keeps an arena wants to know if it does not fit; one that a killed store
        # left is replaced.
        "--keep-arena" if options.keep_arena else "--replace-arena",
        *arguments_of([option for _, option in _PASSED.values()], options.passed),
    ]


def _check_machine(arguments: argparse.Namespace, size: int) -> None:
    """Check ports, memory and the disk tier's folder; warnings go to stderr.

    Raises Unavailable, ResourceExhausted, InvalidArgument.
    """

    def say(name: str, text: str) -> None:
        err.print(f"{name}: {text}", markup=False)

    config.check_listen_address(
        arguments.listen,
        has_tls=arguments.tls_cert is not None,
        has_tokens=arguments.tokens is not None,
    )
    judge(ports.check_free("listen", arguments.listen, "--listen"), Unavailable, say)
    if arguments.metrics is not None:
        metrics = ports.check_free("metrics", arguments.metrics, "--metrics")
        judge(metrics, Unavailable, say, reason="METRICS_PORT")
    if arguments.tier_disk is not None:
        tier = disk.check_tier_disk(arguments.tier_disk, arguments.tier_disk_size, Places())
        judge(tier, InvalidArgument, say)
    there = arena_bytes(arguments.arena)
    room = memory.check_shared_memory(
        config.SHARED_MEMORY, size, is_chosen=False, there_bytes=there
    )
    judge(room, ResourceExhausted, say)
    judge(memory.check_memory(memory_facts(), max(0, size - there), 0), ResourceExhausted, say)


def _print_summary(address: str, arguments: argparse.Namespace, size: int) -> None:
    """Print where the store is, and the commands to type next, on stdout."""
    reachable = config.reachable_address(address)
    kept = " (kept on exit)" if arguments.keep_arena else ""
    out.print("Splitpoint stores pages:")
    out.print(f"  store      {address}")
    out.print(f"  arena      {arguments.arena}, {config.format_size(size)}{kept}")
    if arguments.tier_disk is not None:
        bound = config.format_size(
            config.parse_size(arguments.tier_disk_size, field="tier_disk_size")
        )
        out.print(f"  disk tier  {escape(str(arguments.tier_disk))}, at most {bound}")
    if arguments.metrics is not None:
        scheme = "https" if arguments.tls_cert is not None else "http"
        out.print(f"  metrics    {scheme}://{config.reachable_address(arguments.metrics)}/metrics")
    where = "" if reachable == config.DEFAULT_STORE_ADDRESS else f" --store {reachable}"
    tls = " --tls-ca CA.pem" if arguments.tls_cert is not None else ""
    out.print("Next, in another terminal (docs/vllm.md):")
    out.print(
        f'  vllm serve MODEL --kv-transfer-config "$(splitpoint vllm-config{where}{tls})"',
        markup=False,
    )
    out.print(f"  splitpoint status --store {reachable}")
    out.print("Ctrl-C stops the store.")
    out.file.flush()
