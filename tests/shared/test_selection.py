"""Selections as text: what is read is what was written, and mistakes are named."""

from __future__ import annotations

import math

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.selection import FULL, Selection, SelectionMethod


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("full", FULL),
        ("columns:0.1", Selection(method=SelectionMethod.COLUMNS, ratio=0.1)),
        (
            "infinigen:alpha=4,cap=0.2",
            Selection(method=SelectionMethod.INFINIGEN, alpha=4.0, cap=0.2),
        ),
        (
            "lowrank:alpha=inf,cap=1",
            Selection(method=SelectionMethod.LOWRANK, alpha=math.inf, cap=1.0),
        ),
        ("quest:budget_tokens=64", Selection(method=SelectionMethod.QUEST, budget_tokens=64)),
        (
            "maple:0.05,columns=16,int8=no,sinks=0,recent=8,full_layers=1,estimate",
            Selection(
                method=SelectionMethod.MAPLE,
                ratio=0.05,
                columns=16,
                int8=False,
                sinks=0,
                recent=8,
                full_layers=1,
                estimate=True,
            ),
        ),
    ],
)
def test_text_and_selection_are_the_same(text: str, selection: Selection) -> None:
    assert Selection.parsed(text) == selection
    assert Selection.parsed(str(selection)) == selection


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("best:0.1", "method"),
        ("columns", "ratio"),
        ("columns:0", "ratio"),
        ("columns:1.5", "ratio"),
        ("columns:nan", "ratio"),
        ("columns:0.1,alpha=4", "ratio"),
        ("quest:alpha=4", "alpha"),
        ("full:0.5", "ratio"),
        ("columns:0.1,0.2", "ratio"),
        ("columns:0.1,columns=0", "columns"),
        ("columns:0.1,columns=many", "columns"),
        ("columns:0.1,colour=1", "colour"),
        ("columns:0.1,int8=maybe", "int8"),
        ("columns:0.1,recent=0", "recent"),
        ("infinigen:alpha=-1", "alpha"),
        ("infinigen:alpha=4,cap=0", "cap"),
        ("columns:budget_tokens=0", "budget_tokens"),
    ],
)
def test_mistakes_are_named(text: str, named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Selection.parsed(text)
    assert caught.value.field == f"selection.{named}"
    assert named in caught.value.message


def test_a_screen_keeps_three_tenths_of_the_columns_by_itself() -> None:
    assert Selection.parsed("columns:0.1").kept_columns(64) == 19
    assert Selection.parsed("columns:0.1,columns=80").kept_columns(64) == 64
