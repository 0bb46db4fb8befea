"""`splitpoint compose`: an override of docker-compose.yml for a node of several GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from splitpoint.config import parse_size
from splitpoint.errors import AlreadyExists
from splitpoint.host.files import replace_file
from splitpoint.options import worker
from splitpoint.options.option import Option
from splitpoint_cli.compose.file import MARK, Node, override_file, targets_file
from splitpoint_cli.files import check_output
from splitpoint_cli.options import of, takes_options
from splitpoint_cli.output import out
from splitpoint_cli.stack.options import HOST_MEMORY

_READABLE = 0o644


_GPUS: Option[int] = Option(
    "gpus", int, 0, "Number of GPUs of this node, with one worker each.", unit="N", is_required=True
)
_HOST_MEMORY: Option[str | None] = replace(
    HOST_MEMORY,
    help="Size of the arena in bytes; absent: $SPLITPOINT_HOST_MEMORY of the environment or .env.",
)
_MAX_BATCH: Option[int | None] = Option(
    "max-batch",
    int,
    None,
    f"{worker.MAX_BATCH.help[:-1]}; absent: {worker.MAX_BATCH.default}.",
    unit="N",
    least=1,
)


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """Values of the options of `splitpoint compose`."""

    gpus: int = of(_GPUS)
    host_memory: str | None = of(_HOST_MEMORY)
    device_memory: str | None = of(worker.DEVICE_MEMORY)
    max_batch: int | None = of(_MAX_BATCH)


@takes_options
def compose(
    options: ComposeOptions,
    output: Annotated[
        Path,
        typer.Option(
            help="File for the services; FILE.targets.yml beside it lists the workers' metrics."
        ),
    ] = Path("docker-compose.gpu.yml"),
) -> None:
    """Write the services of a node with several GPUs, for Docker Compose (docs/deployment.md).

    The same options write the same files. Files of other origin are left alone.
    """
    host, device = options.host_memory, options.device_memory
    node = Node(
        options.gpus,
        None if host is None else parse_size(host, field="host-memory"),
        None if device is None else parse_size(device, field="device-memory"),
        options.max_batch,
    )
    check_output(output, "output")
    targets = output.with_suffix(".targets.yml")
    # Compose reads relative paths as relative to its first file.
    there = Path(targets.name) if output.parent == Path() else targets.absolute()
    shown = f"./{there}" if not there.is_absolute() else str(there)
    files = {targets: targets_file(node), output: override_file(node, shown)}
    for path in files:
        if path.exists() and not path.read_text(errors="replace").startswith(MARK):
            raise AlreadyExists(f"{path} was not written by this command; give another --output")
    for path, text in files.items():
        replace_file(path, text.encode(), _READABLE)
        out.print(str(path), markup=False)
    out.print(
        f"\n  docker-compose -f docker-compose.yml -f {output} --profile gpu up -d", markup=False
    )
