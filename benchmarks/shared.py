"""Parts that the benchmarks of this folder share: options, results, a stack under test."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from splitpoint.client import AsyncClient
from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import commit, hardware
from splitpoint_cli.files import check_output
from splitpoint_cli.report import FILE_HELP, FLAG_HELP, hand_over
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan.stack import Stack, plan_stack
from splitpoint_cli.stack.runner import StackRunner

# Of the bundled model, for random token ids.
VOCABULARY = 4096


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json` and `--output`, described by a module's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help=FLAG_HELP)
    parser.add_argument("--output", type=_place, metavar="FILE", help=FILE_HELP)
    return parser


def _place(text: str) -> Path:
    try:
        check_output(Path(text), "output")
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return Path(text)


def finish(
    arguments: argparse.Namespace,
    result: Mapping[str, Any],
    show: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write the result, commit and hardware to `--output`, then print it as JSON or `show` it."""
    hand_over(
        {"commit": commit(), "hardware": hardware(), **result},
        lambda: show(result),
        as_json=arguments.json,
        output=arguments.output,
        indent=None,
    )


def run_in_rounds(
    doc: str | None,
    measure: Callable[[int, str, Progress], Coroutine[Any, Any, Mapping[str, Any]]],
    show: Callable[[Mapping[str, Any]], None],
) -> int:
    """Run `measure` with the rounds and the element type of the command line; return 0.

    A signal ends it once its stack is stopped.
    """
    parser = parser_of(doc)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments.rounds, arguments.dtype, Progress()))
    finish(arguments, result, show)
    return 0


@asynccontextmanager
async def serving(
    name: str, *, token: str | None = None, **options: Any
) -> AsyncIterator[tuple[Stack, AsyncClient]]:
    """Run a stack on the CPU, with these StackOptions, and a client of it with this token."""
    stack = plan_stack(
        StackOptions(
            device="cpu", listen="127.0.0.1:0", instance=f"{name}-{os.getpid()}", **options
        )
    )
    runner = StackRunner(stack, quiet=True)
    running = runner.running(asyncio.Event())
    async with running, AsyncClient(runner.addresses[0], token=token) as client:
        yield stack, client


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return token ids without the special ones."""
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]
