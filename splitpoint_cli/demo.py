"""`make demo`: two CPU workers on one store, shown in one table.

Worker 0 completes a piece of Python. Worker 1 then gets a longer prompt with
the same beginning and finds that beginning in the shared store. For an honest
comparison the longer prompt also runs cold on worker 1, under a salt of its
own that hides the store's chunks, and both workers are warmed up before.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.errors import DeadlineExceeded, Internal, SplitpointError
from splitpoint.transport.tls import PLAIN
from splitpoint_cli.output import out, print_error, print_table, seconds_text
from splitpoint_cli.request.observed import read_store
from splitpoint_cli.stack.child import ServiceExited, ServiceNotReady
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.output import StackOutput, end_of
from splitpoint_cli.stack.plan import Stack, plan_stack
from splitpoint_cli.stack.runner import StackRunner

# Exactness is promised in float32; in bfloat16 another batch shape may round
# another way.
_OPTIONS = StackOptions(
    workers=2,
    device="cpu",
    dtype="float32",
    device_memory="512MiB",
    host_memory="512MiB",
    listen="127.0.0.1:0",
)
_SHORT_CHARACTERS = 3500
_LONG_CHARACTERS = 4500
_MAX_TOKENS = 32
_SEAL_SECONDS = 10.0


def prompts() -> tuple[str, str]:
    """Return two beginnings of a file that the bundled model has not seen, the shorter first."""
    source = inspect.getsource(asyncio.queues)
    return _cut(source, _SHORT_CHARACTERS), _cut(source, _LONG_CHARACTERS)


def _cut(source: str, characters: int) -> str:
    """Return the beginning, up to the end of a line, without its line break."""
    return source[: source.rindex("\n", 0, characters)].rstrip()


async def demonstrate(client: AsyncClient, store_address: str) -> None:
    """Print three completions and the table. Raises Internal if warm and cold text differ."""
    short, long = prompts()
    for worker in ("0", "1"):
        await client.generate(
            "import this", max_tokens=2, worker=worker, cache_salt=secrets.token_bytes(8)
        ).complete()

    first = await client.generate(short, max_tokens=_MAX_TOKENS, worker="0").complete()
    await _wait_sealed(store_address)
    cold = await client.generate(
        long, max_tokens=_MAX_TOKENS, worker="1", cache_salt=secrets.token_bytes(8)
    ).complete()
    warm = await client.generate(long, max_tokens=_MAX_TOKENS, worker="1").complete()

    _show_text("worker 0 completes", short, first)
    _show_text("worker 1 completes a longer prompt with the same beginning", long, warm)
    table = Table(title="Time to the first token", box=None, header_style="bold")
    for column in ("request", "worker", "prompt", "cached", "TTFT"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for name, completion in (
        ("short prompt, cold", first),
        ("long prompt, cold (salted)", cold),
        ("long prompt, warm", warm),
    ):
        table.add_row(
            name,
            completion.worker,
            f"{completion.usage.prompt_tokens:,}",
            f"{completion.usage.cached_tokens:,}",
            seconds_text(completion.ttft_seconds),
        )
    print_table(table)
    out.print(f"warm / cold on worker 1: {warm.ttft_seconds / cold.ttft_seconds:.2f}")
    if warm.plan is not None:
        out.print(f"plan: {escape(warm.plan.reason)}")
    if warm.usage.cached_tokens == 0:
        raise Internal("worker 1 found nothing of worker 0's work in the store")
    if warm.token_ids != cold.token_ids:
        raise Internal("the restored cache gave another text than a plain prefill")
    out.print("worker 1's two texts are equal, token by token")


async def _wait_sealed(store_address: str) -> None:
    """Wait until no write-back is under way."""
    deadline = time.monotonic() + _SEAL_SECONDS
    while True:
        store = await asyncio.to_thread(read_store, store_address)
        if (
            store.stats is not None
            and store.stats.sealed_slot_count
            and not store.stats.writing_slot_count
        ):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the store sealed nothing in time {store.message}")
        await asyncio.sleep(0.05)


def _show_text(title: str, prompt: str, completion: Completion) -> None:
    last_lines = "\n".join(prompt.splitlines()[-4:])
    text = f"[dim]...\n{escape(last_lines)}[/dim][bold]{escape(completion.text)}[/bold]"
    out.print(Panel(text, title=title, title_align="left"))


def leftovers(stack: Stack) -> list[str]:
    """Return what the stopped stack left on this machine; empty if all is well."""
    found = [str(path) for path in (stack.arena.parent, stack.runtime) if path.exists()]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The command may contain anything; the fields after its last `)` do not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.append(f"process {entry.name}")
    return found


async def run() -> None:
    task = asyncio.current_task()
    if task is not None:  # Ctrl-C cancels by itself
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    stack = plan_stack(_OPTIONS)
    runner = StackRunner(stack)
    async with (
        runner.running(asyncio.Event()),
        AsyncClient(runner.addresses[0], identity=PLAIN) as client,
    ):
        await demonstrate(client, stack.store_address)
    left = leftovers(stack)
    if left:
        raise Internal(f"left behind: {', '.join(left)}")
    out.print("stopped: no process, no socket and no shared memory is left")


def main() -> int:
    began = time.monotonic()
    try:
        asyncio.run(run())
    except (ServiceExited, ServiceNotReady) as error:
        StackOutput().failure(error)
        return end_of(error)
    except SplitpointError as error:
        print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    out.print(f"the whole demonstration took {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
