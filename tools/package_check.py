"""Builds the wheel and installs it with each extra into a clean environment: `make package-test`.

    python -m tools.package_check [--extra-index-url URL]

pip is asked for everything, as for a user; constraints.txt pins torch. Each environment must
hold consistent packages, run what its extra is for, and say in one line which extra is
missing for the rest. tests/packaging tries the same without an index, and lets the services
serve.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {
    "store": "kvstore_service",
    "scheduler": "scheduler_service",
    "worker": "worker_service",
    "gateway": "gateway_service",
}
# A client has none of it.
HEAVY = ("torch", "redis", "tokenizers", "numpy")
# Nothing of the source tree may be found in place of the wheel.
ENVIRONMENT = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


class Failed(Exception):
    """The wheel or an installation of it is not as it should be."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra-index-url", metavar="URL", help="of a build of torch")
    index = parser.parse_args().extra_index_url
    options = ["--extra-index-url", index] if index else []
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(Path(folder))
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
            for extra in ("", *EXTRAS):
                count = check(Path(folder) / (extra or "base"), wheel, extra, options)
                print(
                    f"{time.monotonic() - start:7.1f} s  splitpoint[{extra}]: "
                    f"{count} distributions",
                    flush=True,
                )
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print("passed")
    return 0


def build(folder: Path) -> Path:
    """Build the wheel of this source tree. Raises Failed."""
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("splitpoint-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "splitpoint/bundled/stdlib-llama/model.safetensors",
        "splitpoint/py.typed",
        "splitpoint_vllm/connector.py",
        "gateway_service/endpoints/page_files/index.html",
    ):
        expect(wanted in names, f"{wanted} is missing from the wheel")
    expect(any(name.endswith("worker_pb2_grpc.py") for name in names), "the wheel has no stubs")
    strange = {name.split("/")[0] for name in names} & {"tests", "tools", "benchmarks", "deploy"}
    expect(not strange, f"the wheel carries {sorted(strange)}")
    return wheel


def check(folder: Path, wheel: Path, extra: str, options: Sequence[str]) -> int:
    """Install the wheel with one extra, try it; how many distributions it took. Raises Failed."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    target = f"{wheel}[{extra}]" if extra else str(wheel)
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run([*pip, "install", "--quiet", *constraints, *options, target], folder)
    run([*pip, "check"], folder)
    installed = run([*pip, "list", "--format=freeze"], folder).splitlines()
    names = {line.partition("==")[0].lower() for line in installed}
    if not extra:
        expect(not names & set(HEAVY), f"a client gets {sorted(names & set(HEAVY))}")
    run([python, "-c", "from splitpoint.client import Client"], folder)
    command = str(folder / "bin" / "splitpoint")
    run([command, "size"], folder)
    for subcommand in ("generate", "status", "top", "up"):
        run([command, subcommand, "--help"], folder)
    for service, module in EXTRAS.items():
        if service == extra:
            run([python, "-m", module, "--help"], folder)
        elif not extra:
            refused(python, module, service, folder)
    return len(names - {"pip", "setuptools", "splitpoint"})


def refused(python: str, module: str, extra: str, folder: Path) -> None:
    command = [python, "-m", module]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    expect(
        done.returncode == 2
        and len(done.stderr.splitlines()) == 1
        and f"pip install 'splitpoint[{extra}]'" in done.stderr,
        f"{module} without its extra: {done.returncode}, {done.stderr}",
    )


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Return a command's output. Raises Failed with its error output."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    expect(done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


def expect(is_true: bool, what: str) -> None:
    if not is_true:
        raise Failed(what)


if __name__ == "__main__":
    sys.exit(main())
