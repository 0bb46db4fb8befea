"""Build hook: generates the gRPC stubs in splitpoint/v1/ from proto/.

The stubs are never committed; `pip install .`, an editable install and
`make proto` all go through `generate` below.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:  # absent when this file runs as a plain script (`make proto`)
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> list[Path]:
    """Write `splitpoint/v1/*_pb2*.py[i]`; returns the files written."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted((root / "proto").rglob("*.proto"))
    out = root / "splitpoint" / "v1"
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*_pb2*"):
        stale.unlink()
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{root / 'proto'}",
            f"-I{well_known}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            *(str(path) for path in protos),
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    (out / "__init__.py").write_text('"""Generated stubs of the wire contract; see proto/."""\n')
    return sorted(out.iterdir())


class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Runs `generate` before every wheel and editable build."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))
        build_data["artifacts"].append("splitpoint/v1/*")


if __name__ == "__main__":
    for path in generate():
        print(path.relative_to(ROOT), file=sys.stderr)
