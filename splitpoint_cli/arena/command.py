"""`splitpoint arena`: look at an arena file, check every byte of it, remove it.

Looking works on an arena that a store is using; removing never does. What maps
the file (and needs numpy) is imported only once a command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from splitpoint import config
from splitpoint.arena.format import ArenaFormatError
from splitpoint.errors import NotFound
from splitpoint_cli.output import AsJson, OutputFile, err, hand_over, out

app = typer.Typer(no_args_is_help=True)

Which = Annotated[
    str,
    typer.Argument(
        help="The file, or the instance of `splitpoint up` (port-50050 unless told otherwise).",
        metavar="PATH|INSTANCE",
    ),
]


@app.callback()
def arena() -> None:
    """Inspect, verify or remove the shared-memory file of a store."""


@app.command()
def inspect(which: Which, as_json: AsJson = False, output: OutputFile = None) -> None:
    """Show what an arena is and what its slots hold; exit code 1 when anything is damaged.

    Reads superblocks, records and tokens, no payload.
    """
    _look_at(which, with_payload=False, as_json=as_json, output=output)


@app.command()
def verify(which: Which, as_json: AsJson = False, output: OutputFile = None) -> None:
    """As `inspect`, and check the payload of every sealed chunk against its checksum.

    Names each damaged slot and the invariant of docs/arena-format.md that it
    violates; exit code 1 when there is one. Changes nothing. Slots that a
    running store changes meanwhile are looked at again, and no damage.
    """
    _look_at(which, with_payload=True, as_json=as_json, output=output)


def _look_at(which: str, *, with_payload: bool, as_json: bool, output: Path | None) -> None:
    from splitpoint.arena.mapping import Arena
    from splitpoint_cli.arena.check import Damage, read_contents, read_superblocks
    from splitpoint_cli.arena.report import (
        describe_arena,
        describe_contents,
        describe_file,
        lines_of,
    )

    path = find(which)
    copies = read_superblocks(path)
    report = describe_file(path, copies) | {"payload_compared": with_payload}
    is_whole = not any(isinstance(copy, Damage) for copy in copies)
    try:
        mapped = Arena.attach_read_only(path)
    except ArenaFormatError as error:
        report["unusable"] = f"{type(error).__name__}: {error.message}"
        is_whole = False
    else:
        try:
            hidden = not (with_payload and err.is_terminal)
            with Progress(console=err, transient=True, disable=hidden) as progress:
                task = progress.add_task("slots", total=mapped.slot_count)
                contents = read_contents(
                    mapped, with_payload=with_payload, done=lambda: progress.advance(task)
                )
            report |= describe_arena(mapped) | describe_contents(contents)
            is_whole = is_whole and not contents.damages
        finally:
            mapped.close()

    def show() -> None:
        for line in lines_of(report):
            out.print(escape(line))

    hand_over(report, show, as_json=as_json, output=output)
    if not is_whole:
        raise typer.Exit(1)


@app.command()
def rm(which: Which) -> None:
    """Remove an arena that no store uses, with its lock, its key and its empty folder.

    What is no arena of this user is left alone.
    """
    from splitpoint.arena.files import NotOurArena
    from splitpoint.arena.owner import ArenaOwner

    path = find(which)
    owner = ArenaOwner.lock(path)
    try:
        owner.remove_existing()
    except NotOurArena:
        owner.give_up()
        raise
    folder = path.parent
    # The secret of its chunk keys, where `splitpoint up` made it: of no use any more.
    if _is_of_an_instance(path):
        (folder / "key").unlink(missing_ok=True)
    owner.remove()
    err.print(f"removed {path}" + ("" if folder.exists() else " and its folder"))


def find(which: str) -> Path:
    """Return the arena's path. Raises NotFound with the arenas that exist."""
    path = Path(which).absolute() if "/" in which else config.arena_path(which)
    if not os.path.lexists(path):
        known = sorted(
            found.parent.name.removeprefix(_folder_prefix())
            for found in config.SHARED_MEMORY.glob(f"{_folder_prefix()}*/{path.name}")
        )
        there = f"; instances with one: {', '.join(known)}" if known else ""
        raise NotFound(f"there is no arena at {path}{there}")
    return path


def _folder_prefix() -> str:
    return f"splitpoint-{os.getuid()}-"


def _is_of_an_instance(path: Path) -> bool:
    folder = path.parent
    return folder.parent == config.SHARED_MEMORY and folder.name.startswith(_folder_prefix())
