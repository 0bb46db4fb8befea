"""Pages of the documentation hold what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages import pages, updated


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_is_up_to_date(path: Path) -> None:
    assert path.read_text() == updated(path.read_text()), "run: python -m tools.pages"


def test_pages_with_output_of_commands_are_found() -> None:
    assert [path.stem for path in pages()] == [
        *("sizing", "monitoring", "openai-api", "bottlenecks", "kvpr", "maple")
    ]
