"""`splitpoint arena`: look at an arena file, check every byte of it, remove it.

Looking works on an arena that a store is using; removing never does. What maps
the file (and needs numpy) is imported only once a command runs.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from splitpoint import config
from splitpoint.arena.format import ArenaFormatError
from splitpoint.config import counted
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
WhichOrTier = Annotated[
    str,
    typer.Argument(
        help="The file, the instance of `splitpoint up` (port-50050 unless told otherwise), or the "
        "folder of a disk tier.",
        metavar="PATH|INSTANCE|DIR",
    ),
]


@app.callback()
def arena() -> None:
    """Inspect, verify or remove the shared-memory file of a store; look at its disk tier."""


@app.command()
def inspect(which: WhichOrTier, as_json: AsJson = False, output: OutputFile = None) -> None:
    """Show what an arena is and what its slots hold; exit code 1 when anything is damaged.

    Reads superblocks, records and tokens, no payload. Of the folder of a disk tier: its layouts,
    segments and chunks, by the headers of all records.
    """
    from splitpoint.arena.mapping import Arena
    from splitpoint_cli.arena.check import Damage, read_contents, read_superblocks
    from splitpoint_cli.arena.report import (
        describe_arena,
        describe_contents,
        describe_file,
        lines_of,
    )

    path = find(which)
    if path.is_dir():
        _look_at_tier(path, with_payload=False, as_json=as_json, output=output)
        return
    copies = read_superblocks(path)
    report = describe_file(path, copies)
    is_whole = not any(isinstance(copy, Damage) for copy in copies)
    try:
        mapped = Arena.attach_read_only(path)
    except ArenaFormatError as error:
        report["unusable"] = f"{type(error).__name__}: {error.message}"
        is_whole = False
    else:
        try:
            contents = read_contents(mapped)
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
def verify(which: WhichOrTier, as_json: AsJson = False, output: OutputFile = None) -> None:
    """Check every record and the payload of every sealed chunk against its checksum.

    Names each damaged slot and the invariant of docs/arena-format.md that it
    violates; exit code 1 when there is one. Changes nothing. Slots that a
    running store changes meanwhile are looked at again, and no damage. Of the
    folder of a disk tier: every record and payload (docs/arena-format.md).
    """
    from splitpoint.arena.mapping import Arena
    from splitpoint_cli.arena.check import Damage, read_contents, read_superblocks

    path = find(which)
    if path.is_dir():
        _look_at_tier(path, with_payload=True, as_json=as_json, output=output)
        return
    copies = read_superblocks(path)
    mapped = Arena.attach_read_only(path)
    try:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
            task = progress.add_task("slots", total=mapped.slot_count)
            contents = read_contents(mapped, with_payload=True, done=lambda: progress.advance(task))
        payload_bytes = contents.chunk_count * mapped.layout.chunk_bytes
        slot_count = mapped.slot_count
    finally:
        mapped.close()
    damages = [*(copy for copy in copies if isinstance(copy, Damage)), *contents.damages]
    report = {
        "path": str(path),
        "slot_count": slot_count,
        "whole_chunk_count": contents.chunk_count,
        "whole_payload_bytes": payload_bytes,
        "changing_slot_count": contents.changing_count,
        "damages": [asdict(damage) for damage in damages],
    }

    def show() -> None:
        for damage in damages:
            out.print(f"{damage.place}: {damage.invariant}: {escape(damage.message)}")
        changing = (
            f", {contents.changing_count} changed all the time" if contents.changing_count else ""
        )
        out.print(
            f"{counted(slot_count, 'slot')}: {counted(contents.chunk_count, 'chunk')} whole "
            f"({config.format_size(payload_bytes)} compared), "
            f"{counted(len(damages), 'damage')}{changing}"
        )

    hand_over(report, show, as_json=as_json, output=output)
    if damages:
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


def _look_at_tier(path: Path, *, with_payload: bool, as_json: bool, output: Path | None) -> None:
    """Show the folder of a disk tier; exit code 1 when anything in it is damaged."""
    from splitpoint_cli.arena.disk_tier import describe_folder, folder_bytes, folder_lines

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("segments", total=folder_bytes(path))
        report = describe_folder(
            path, with_payload=with_payload, done=lambda size: progress.advance(task, size)
        )

    def show() -> None:
        for line in folder_lines(report):
            out.print(escape(line))

    hand_over(report, show, as_json=as_json, output=output)
    if report["damages"]:
        raise typer.Exit(1)


def find(which: str) -> Path:
    """Return the arena's path. Raises NotFound with the arenas that exist."""
    path = Path(which).absolute() if "/" in which else config.arena_path(which)
    if not os.path.lexists(path):
        known = sorted(
            found.parent.name.removeprefix(_folder_prefix())
            for found in config.SHARED_MEMORY.glob(f"{_folder_prefix()}*/{path.name}")
        )
        there = f"; instances with one: {', '.join(known)}" if known else ""
        if "/" not in which and Path(which).exists():
            there += f"; of the disk tier in the folder {which}, write ./{which}"
        raise NotFound(f"there is no arena at {path}{there}")
    return path


def _folder_prefix() -> str:
    return f"splitpoint-{os.getuid()}-"


def _is_of_an_instance(path: Path) -> bool:
    folder = path.parent
    return folder.parent == config.SHARED_MEMORY and folder.name.startswith(_folder_prefix())
