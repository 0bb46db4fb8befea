"""The options by which commands reach a scheduler and prove who they are."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[
    str,
    typer.Option(
        help="Address of the scheduler: host:port or unix:/path; several with commas.",
        envvar="SPLITPOINT_ADDRESS",
    ),
]
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
