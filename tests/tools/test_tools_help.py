"""Programs that rewrite files say so when they are asked for help, and write nothing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tools import lock, pages, render_chart
from tools.monitoring import dashboards


@pytest.mark.parametrize(
    "program", [lock, pages, render_chart, dashboards], ids=lambda program: program.__name__
)
@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--no-such-option", 2)])
def test_help_is_printed_and_nothing_is_done(
    program: ModuleType,
    word: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", word])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == status
    said = capsys.readouterr()
    assert f"usage: python -m {program.__name__}" in said.out + said.err
