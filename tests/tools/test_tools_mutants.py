"""The list of breakages fits the tree, and a breakage that no test notices is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, MutantError, is_killed, read_mutants

MUTANTS = read_mutants()
LEAST = 40


def test_every_change_fits_its_file_and_has_its_tests() -> None:
    assert len(MUTANTS) >= LEAST
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)
    for each in MUTANTS:
        compile(each.applied(ROOT), each.file, "exec")
        assert all((ROOT / test.partition("::")[0]).exists() for test in each.tests)


def test_a_change_is_killed_survives_or_breaks_the_tests_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loading the plugins of all packages takes nine tenths of such a run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "sums.py").write_text("def two(): return 1 + 1\n")
    (tmp_path / "test_sums.py").write_text(
        "import sums\ndef test_two(): assert sums.two() == 2\ndef test_none(): pass\n"
    )
    mutant = Mutant("one", "sums.py", "1 + 1", "1", ("test_sums.py::test_two",))
    assert is_killed(tmp_path, mutant)
    assert not is_killed(tmp_path, replace(mutant, tests=("test_sums.py::test_none",)))
    for broken in (
        replace(mutant, new="("),
        replace(mutant, tests=("test_sums.py::test_gone",)),
        replace(mutant, old="2 + 2"),
    ):
        with pytest.raises(MutantError, match="one: "):
            is_killed(tmp_path, broken)
    assert (tmp_path / "sums.py").read_text() == "def two(): return 1 + 1\n"
