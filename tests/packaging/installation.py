"""A virtual environment with what one extra brings and nothing else, made without a network.

The distributions are those of the interpreter that runs the tests: their files are linked
into the environment, for the closure of the requirements in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["packages"]


def requirements_of(extra: str) -> Iterator[Requirement]:
    """What an extra of this project adds, its own extras resolved; "" is the base."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            for inner in sorted(requirement.extras):
                yield from requirements_of(inner)
        else:
            yield requirement


def closure(extra: str) -> set[str]:
    """Canonical names of every distribution that `pip install splitpoint[extra]` brings."""
    pending = [*requirements_of(""), *(requirements_of(extra) if extra else ())]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        wanted = pending.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        for text in metadata.requires(wanted.name) or ():
            inner = Requirement(text)
            environments = [{"extra": each} for each in (wanted.extras or {""})]
            if inner.marker is None or any(map(inner.marker.evaluate, environments)):
                pending.append(inner)
    return found


class Installation:
    """A virtual environment with this project's packages and the closure of one extra."""

    def __init__(self, folder: Path, extra: str) -> None:
        self.python = folder / "bin" / "python"
        venv.create(folder, with_pip=False, symlinks=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        for package in PACKAGES:
            (site / package).symlink_to(ROOT / package)
        (site / "models").symlink_to(ROOT / "models")
        for name in closure(extra):
            _link(metadata.distribution(name), site)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python with these arguments, away from the source tree."""
        inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={**inherited, **environment},
            cwd=self.python.parent,
        )


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Link each package or file; folders without `__init__.py` belong to several, and are made."""
    files = distribution.files or ()
    linked: set[Path] = set()
    for file in files:
        if ".." in file.parts or file.is_absolute():
            continue  # scripts
        part = _own_part(file.parts, Path(str(distribution.locate_file(""))))
        if part in linked:
            continue
        linked.add(part)
        (site / part).parent.mkdir(parents=True, exist_ok=True)
        (site / part).symlink_to(Path(str(distribution.locate_file(""))) / part)


def _own_part(parts: Sequence[str], root: Path) -> Path:
    for count in range(1, len(parts)):
        folder = Path(*parts[:count])
        if (root / folder / "__init__.py").exists() or re.search(
            r"\.(dist-info|libs)$", str(folder)
        ):
            return folder
    return Path(*parts)
