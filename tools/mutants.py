"""Breaks the papers' mechanisms one by one in a copy of the tree, and sees whether a test notices.

`make mutants` runs `tools/mutants.toml`: named changes of one place each, with the tests that must
fail. A mutant that no test notices, a change that no longer fits its file, and tests that fail
without any change are errors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
# What pytest ends with.
_PASSED, _FAILED = 0, 1
# A change that makes tests hang is noticed, too.
_MOST_SECONDS = 600.0


class MutantError(Exception):
    """A change does not fit its file, or its tests do not run."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `old`, which stands once in `file`, becomes `new`. One of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the changed text. Raises MutantError if `old` does not stand there once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise MutantError(f"{self.name}: {self.file} has {count} places like {self.old!r}")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Return the list, in order."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in entries]


def run_tests(
    root: Path, tests: Sequence[str], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run tests of a tree until one fails. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def is_killed(root: Path, mutant: Mutant) -> bool:
    """Return whether a test fails, or hangs, with the change, which is undone again.

    Raises MutantError if the tests do not even run.
    """
    path = root / mutant.file
    before, after = path.read_text(), mutant.applied(root)
    path.write_text(after)
    try:
        code = run_tests(root, mutant.tests, _MOST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(before)
    if code not in (_PASSED, _FAILED):
        raise MutantError(f"{mutant.name}: pytest ended with {code}, so nothing was tried")
    return code == _FAILED


@contextmanager
def _copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Make copies of what git tracks, and of the generated stubs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = listed.stdout.rstrip("\0").split("\0")
    names += [str(each.relative_to(ROOT)) for each in (ROOT / "splitpoint/v1").glob("*.py")]
    with tempfile.TemporaryDirectory(prefix="splitpoint-mutants-") as folder:
        queue: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            root = Path(folder) / str(number)
            for name in names:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
            queue.put(root)
        yield queue


def main() -> None:
    try:
        _main()
    except MutantError as error:
        sys.exit(str(error))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time")
    parser.add_argument("--only", default="", help="try only those whose name has this text")
    options = parser.parse_args()
    mutants = [each for each in read_mutants() if options.only in each.name]
    survivors = []
    with _copies(options.jobs) as roots, ThreadPoolExecutor(options.jobs) as pool:

        def tried(mutant: Mutant) -> bool:
            root = roots.get()
            try:
                return is_killed(root, mutant)
            finally:
                roots.put(root)

        every_test = sorted({test for each in mutants for test in each.tests})
        root = roots.get()
        done = run_tests(root, every_test)
        if done.returncode != _PASSED:
            sys.exit(f"{done.stdout}\nthe tests fail without any change")
        roots.put(root)
        for mutant, killed in zip(mutants, pool.map(tried, mutants), strict=True):
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.name}", flush=True)
            survivors += [] if killed else [mutant.name]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed")
    if survivors:
        sys.exit(f"no test notices: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
