"""Options that several benchmarks have; each benchmark has its own defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape

RandomShape = Annotated[
    str, typer.Option(help="A built-in shape; its weights are random.", metavar="SHAPE")
]
ElementType = Annotated[str, typer.Option(help="Element type.", metavar="float32|bfloat16|float16")]
Batch = Annotated[int, typer.Option(help="Sequences at once.", min=1)]
PromptTokens = Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)]
NewTokens = Annotated[int, typer.Option(help="New tokens of each.", min=2)]
Repeats = Annotated[int, typer.Option(help="Timed runs of each contender.", min=1)]
LinkRate = Annotated[
    str | None,
    typer.Option(
        help="Emulate a link of this rate on a CPU: 184MB is 184 MB per second.",
        metavar="RATE",
    ),
]
ContendersDevice = Annotated[
    str, typer.Option(help="Where all contenders run.", metavar="cpu|cuda|cuda:N")
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one per core.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of weights and prompts.")]


def thread_count(threads: int) -> int:
    """Return the value of `--threads`, or the number of cores for 0."""
    return threads or len(os.sched_getaffinity(0))


def built_in_shape(name: str) -> ModelShape:
    """Return the shape of that name. Raises InvalidArgument with the names that exist."""
    if name not in BUILT_IN_SHAPES:
        raise InvalidArgument(
            f"no shape is called {name!r}: there are {', '.join(BUILT_IN_SHAPES)}", field="shape"
        )
    return BUILT_IN_SHAPES[name]


def check_data_type(name: str) -> None:
    """Raise InvalidArgument with the names that exist if this is none of them."""
    names = [known.value for known in DataType]
    if name not in names:
        raise InvalidArgument(
            f"no data type is called {name!r}: there are {', '.join(names)}", field="dtype"
        )


@contextmanager
def importing_peer() -> Iterator[None]:
    """Raise FailedPrecondition if a module that the block imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the benchmark needs {error.name}: install splitpoint[dev]", reason="NO_PEER"
        ) from error
