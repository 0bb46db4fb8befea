"""Where a chat is typed and shown: a terminal, or a pipe. The only place that knows which."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rich.markup import escape
from rich.table import Table

from splitpoint.client import Generation
from splitpoint.client.answers import Completion
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Plan, RestoreMethod
from splitpoint_cli.chat.conversation import HELP, Turn, totals
from splitpoint_cli.output import err, print_table, seconds_text, show_reason
from splitpoint_cli.request.generate import approximation, summary
from splitpoint_cli.signals import handled_by

_PROMPT, _INSIDE = "> ", ". "
# Escape sequences of an answer could change the terminal; a pipe gets them as they are.
_CONTROLS = dict.fromkeys(
    [*range(9), 11, *range(13, 32), 127, *range(0x80, 0xA0)], "\N{REPLACEMENT CHARACTER}"
)


def is_interactive() -> bool:
    """Return True if a person types."""
    return sys.stdin.isatty()


def is_told_figures() -> bool:
    """Return True if figures on stderr meet a person's eyes."""
    return sys.stderr.isatty()


def read_line(inside: bool) -> str | None:
    """Return the next line; None at the end. Raises InvalidArgument if it is not UTF-8.

    A terminal gets a prompt and the keys of readline. Ctrl-C there drops the line.
    """
    if is_interactive():
        return _typed_line(inside)
    line = sys.stdin.buffer.readline()
    try:
        return line.decode().rstrip("\r\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"a message on stdin is not UTF-8 text: byte {error.start:,} of its line is none of it",
            field="messages",
        ) from None


def _typed_line(inside: bool) -> str | None:
    with contextlib.suppress(ImportError):  # a Python without it edits no lines
        import readline  # noqa: F401  input() uses it once it is imported
    try:
        return input(_INSIDE if inside else _PROMPT)
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        err.print("\n[dim]/quit or Ctrl-D leaves[/dim]")
        return ""


@contextlib.contextmanager
def closed_by_ctrl_c(generation: Generation) -> Iterator[list[int]]:
    """Let SIGINT end this generation and nothing else; the list is not empty once it came."""
    seen: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        seen.append(number)
        generation.close()

    with handled_by(stop, signal.SIGINT):
        yield seen


def show_text(text: str) -> None:
    """Write a part of an answer at once."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def show_figures(completion: Completion) -> None:
    """Print what an answer took and why, on stderr."""
    if (remark := approximation(completion)) is not None:
        err.print(escape(remark))
    err.print(f"[dim]{escape(summary(completion))}[/dim]")
    if completion.plan is not None:
        show_reason(completion.plan)


def say(text: str) -> None:
    """Print a remark on stderr."""
    err.print(f"[dim]{escape(text)}[/dim]")


def show_help() -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for line, meaning in HELP:
        table.add_row(escape(line), escape(meaning))
    print_table(table, err)


def show_stats(turns: list[Turn]) -> None:
    """Print a row for each turn, and the sums."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("turn", "prompt", "cached", "share", "split", "answer", "first token", "worker"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, turn in enumerate(turns, 1):
        table.add_row(str(number), *_cells(turn.completion))
    print_table(table, err)
    sums = totals(turns)
    prompts = counted(sums.prompt_tokens, "prompt token")
    generated = counted(sums.completion_tokens, "token")
    say(
        f"{sums.cached_tokens:,} of {prompts} cached ({sums.cached_share:.0%}), "
        f"{generated} generated"
    )


def _cells(completion: Completion | None) -> tuple[str, ...]:
    if completion is None:
        return ("stopped",)
    usage, plan = completion.usage, completion.plan
    return (
        f"{usage.prompt_tokens:,}",
        f"{usage.cached_tokens:,}",
        f"{usage.cached_tokens / max(1, usage.prompt_tokens):.0%}",
        "" if plan is None else f"{_split_of(plan):,} ({plan.method.value})",
        f"{usage.completion_tokens:,}",
        seconds_text(completion.ttft_seconds),
        completion.worker,
    )


def _split_of(plan: Plan) -> int:
    """Return how many cached tokens were rebuilt, by either way."""
    is_from_ids = plan.method is RestoreMethod.TOKENS
    return plan.recomputed_tokens if is_from_ids else plan.split_tokens
