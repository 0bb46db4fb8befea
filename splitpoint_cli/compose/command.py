"""`splitpoint compose`: an override of docker-compose.yml for a node of several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint.config import parse_size
from splitpoint.errors import AlreadyExists
from splitpoint_cli.compose.file import MARK, Node, override_file, targets_file
from splitpoint_cli.files import check_output, replace_file
from splitpoint_cli.output import out

_READABLE = 0o644


def compose(
    gpus: Annotated[int, typer.Option(help="Of this node: one worker each.", metavar="N")],
    output: Annotated[
        Path, typer.Option(help="And the workers' metrics beside it, in FILE.targets.yml.")
    ] = Path("docker-compose.gpu.yml"),
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the arena; absent: $SPLITPOINT_HOST_MEMORY of the environment or .env.",
            metavar="SIZE",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Of each GPU, weights and cache together.", metavar="SIZE"),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Sequences that run at once on a GPU.", metavar="N")
    ] = None,
) -> None:
    """Write the services of a node with several GPUs, for Docker Compose (docs/deployment.md).

    The same options write the same files. Files that it has not written are left alone.
    """
    node = Node(
        gpus,
        None if host_memory is None else parse_size(host_memory, field="host-memory"),
        None if device_memory is None else parse_size(device_memory, field="device-memory"),
        max_batch,
    )
    check_output(output, "output")
    targets = output.with_suffix(".targets.yml")
    # Compose reads relative paths as relative to its first file.
    there = Path(targets.name) if output.parent == Path() else targets.absolute()
    shown = f"./{there}" if not there.is_absolute() else str(there)
    files = {targets: targets_file(node), output: override_file(node, shown)}
    for path in files:
        if path.exists() and not path.read_text(errors="replace").startswith(MARK):
            raise AlreadyExists(f"{path} is not of this command; give another --output")
    for path, text in files.items():
        replace_file(path, text.encode(), _READABLE)
        out.print(str(path), markup=False)
    out.print(
        f"\n  docker-compose -f docker-compose.yml -f {output} --profile gpu up -d", markup=False
    )
