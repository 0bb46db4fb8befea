"""Options that several benchmarks have, said once; their defaults are each one's own."""

from __future__ import annotations

from typing import Annotated

import typer

RandomShape = Annotated[
    str, typer.Option(help="A built-in shape; its weights are random.", metavar="SHAPE")
]
ElementType = Annotated[str, typer.Option(help="Element type.", metavar="float32|bfloat16|float16")]
Batch = Annotated[int, typer.Option(help="Sequences at once.", min=1)]
PromptTokens = Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)]
NewTokens = Annotated[int, typer.Option(help="New tokens of each.", min=2)]
LinkRate = Annotated[
    str | None,
    typer.Option(
        help="Emulate a link of this rate on a CPU: 184MB is 184 MB per second.",
        metavar="RATE",
    ),
]
EverybodysDevice = Annotated[
    str, typer.Option(help="Where all contenders run.", metavar="cpu|cuda|cuda:N")
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one per core.", min=0)]
