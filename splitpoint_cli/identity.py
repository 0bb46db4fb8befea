"""The options by which commands say who they are to a scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca",
        help="Authority (PEM) of the scheduler's certificate; turns TLS on. Or SPLITPOINT_CA.",
        metavar="PATH",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        help="File of mode 0600 with the token. Or SPLITPOINT_TOKEN_FILE, SPLITPOINT_TOKEN.",
        metavar="PATH",
    ),
]
