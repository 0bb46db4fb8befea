"""Selections as text: what is read is what was written, and mistakes are named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.residency.selecting import pool_chunks
from splitpoint.selection import (
    FULL,
    SERVED_METHODS,
    UNUSED,
    PoolPolicy,
    Selection,
    SelectionMethod,
    SelectionUsage,
    check_served,
    check_speculation,
    speculation_beside,
)
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.transport.convert import (
    known_draft_methods,
    selection_from_proto,
    selection_methods,
    selection_supports_from_proto,
    selection_to_proto,
    selection_usage_from_proto,
    selection_usage_to_proto,
)
from splitpoint.v1 import types_pb2


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
        (
            "columns:0.05,verify",
            Selection(method=SelectionMethod.COLUMNS, ratio=0.05, verify=True),
        ),
        ("window:budget_tokens=64", Selection(method=SelectionMethod.WINDOW, budget_tokens=64)),
        (
            "oracle:0.1,pool=0.8,policy=lru",
            Selection(method=SelectionMethod.ORACLE, ratio=0.1, pool=0.8, policy=PoolPolicy.LRU),
        ),
        (
            "maple:0.05,columns=16,int8=no,sinks=0,recent=8,full_layers=1",
            Selection(
                method=SelectionMethod.MAPLE,
                ratio=0.05,
                columns=16,
                int8=False,
                sinks=0,
                recent=8,
                full_layers=1,
            ),
        ),
    ],
)
def test_text_and_selection_are_the_same(text: str, selection: Selection) -> None:
    assert Selection.parsed(text) == selection
    assert Selection.parsed(str(selection)) == selection
    if selection.pool is None and selection.method in (*SERVED_METHODS, SelectionMethod.FULL):
        assert selection_from_proto(selection_to_proto(selection)) == selection


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("best:0.1", "method"),
        ("columns", "ratio"),
        ("columns:0", "ratio"),
        ("columns:1.5", "ratio"),
        ("columns:nan", "ratio"),
        ("columns:0.1,alpha=4", "ratio"),
        ("window:alpha=4", "alpha"),
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
        ("columns:0.1,pool=0", "pool"),
        ("columns:0.1,pool=1.1", "pool"),
        ("full,pool=0.8", "pool"),
        ("h2o:0.1,pool=0.8", "pool"),
        ("columns:0.1,policy=lru", "policy"),
        ("columns:0.1,pool=0.8,policy=mru", "policy"),
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


@pytest.mark.parametrize(
    ("text", "reads_all", "is_approximate"),
    [
        ("full", True, False),
        ("columns:1", True, False),
        ("infinigen:alpha=inf,cap=1", True, False),
        ("infinigen:alpha=inf", False, True),
        ("columns:0.999", False, True),
        ("columns:1,pool=1", True, False),
        ("columns:1,pool=0.8", False, True),
        ("columns:0.05,verify", False, False),
    ],
)
def test_what_is_exact_says_so(text: str, reads_all: bool, is_approximate: bool) -> None:
    selection = Selection.parsed(text)
    assert (selection.reads_all, selection.is_approximate) == (reads_all, is_approximate)


def test_drafts_select_in_every_layer() -> None:
    assert Selection.parsed("columns:0.05").exact_layers == 2
    assert Selection.parsed("columns:0.05,full_layers=3,verify").exact_layers == 0


def test_a_message_without_a_method_or_a_rule_is_refused() -> None:
    assert selection_from_proto(None) == FULL
    for message, field in (
        (types_pb2.SelectionParams(ratio=0.1), "selection.method"),
        (types_pb2.SelectionParams(method=99, ratio=0.1), "selection.method"),  # type: ignore[arg-type]
        (types_pb2.SelectionParams(method=types_pb2.SELECTION_METHOD_COLUMNS), "selection.ratio"),
        (
            types_pb2.SelectionParams(method=types_pb2.SELECTION_METHOD_COLUMNS, ratio=0),
            "selection.ratio",
        ),
        (types_pb2.SelectionParams(method_name="newest", ratio=0.1), "selection.method_name"),
        (
            types_pb2.SelectionParams(
                method=types_pb2.SELECTION_METHOD_WINDOW, method_name="columns", ratio=0.1
            ),
            "selection.method_name",
        ),
    ):
        with pytest.raises(InvalidArgument) as caught:
            selection_from_proto(message)
        assert caught.value.field == field


def test_a_method_is_known_by_its_name_or_by_its_number() -> None:
    """Old clients and workers know numbers alone; new methods have no number."""
    number, columns = types_pb2.SELECTION_METHOD_COLUMNS, Selection.parsed("columns:0.1")
    sent = selection_to_proto(columns)
    assert (sent.method, sent.method_name) == (number, "columns")
    for fields in ({"method": number}, {"method_name": "columns"}):
        assert selection_from_proto(types_pb2.SelectionParams(**fields, ratio=0.1)) == columns
        support = types_pb2.SelectionSupport(**fields, columns=7)
        assert selection_supports_from_proto([support]) == {SelectionMethod.COLUMNS: 7}
    assert selection_methods([], [number]) == selection_methods(["columns"], [])
    with pytest.raises(InvalidArgument, match="unknown selection method 'newest'"):
        selection_from_proto(types_pb2.SelectionParams(method_name="newest", ratio=0.1))


def test_what_a_newer_peer_lists_is_left_out_if_it_is_unknown() -> None:
    number, columns = types_pb2.SELECTION_METHOD_COLUMNS, SelectionMethod.COLUMNS
    newest: Any = 99
    assert selection_methods(["newest", "columns"], [number]) == (columns,)
    assert selection_methods(["newest"], []) == ()
    assert selection_methods([], [newest, number]) == (columns,)
    supports = [
        types_pb2.SelectionSupport(method_name="newest", columns=3),
        types_pb2.SelectionSupport(method=newest, columns=4),
        # A name that has got a number since.
        types_pb2.SelectionSupport(method_name="columns", method=newest, columns=7),
    ]
    assert selection_supports_from_proto(supports) == {columns: 7}
    assert list(known_draft_methods([newest, types_pb2.DRAFT_METHOD_SELF])) == [DraftMethod.SELF]


def test_what_is_only_measured_is_not_served() -> None:
    for text, field in (("oracle:0.1", "method"), ("h2o:0.1", "method"), ("maple:0.1", "")):
        selection = Selection.parsed(text)
        if not field:
            check_served(selection)
            continue
        with pytest.raises(InvalidArgument, match="is measured, not served; served are") as caught:
            check_served(selection)
        assert caught.value.field == f"selection.{field}"
    with pytest.raises(InvalidArgument, match="alpha maple has no scores"):
        check_served(Selection.parsed("maple:alpha=4"))
    check_served(FULL)
    assert SelectionMethod.FULL not in SERVED_METHODS


def test_pools_are_served_where_every_layer_gives_tokens_up() -> None:
    for policy in PoolPolicy:
        selection = Selection.parsed(f"columns:0.1,full_layers=0,pool=0.8,policy={policy}")
        check_served(selection)
        sent = selection_to_proto(selection)
        assert (sent.pool, sent.policy) == (0.8, policy)
        assert selection_from_proto(sent) == selection
    assert not selection_to_proto(Selection.parsed("columns:0.1")).policy
    for text, words in (
        ("columns:0.1,pool=0.8", "full_layers=0"),
        ("maple:0.1,full_layers=0,pool=0.8", "served: infinigen, columns, lowrank$"),
        ("window:0.1,full_layers=0,pool=0.8", "pool of window"),
        ("columns:0.1,full_layers=0,pool=0.8,verify", "verify exclude"),
    ):
        with pytest.raises(InvalidArgument, match=words) as caught:
            check_served(Selection.parsed(text))
        assert caught.value.field == "selection.pool"
    sent.policy = "mru"
    with pytest.raises(InvalidArgument, match="not one of fifo, lru, counter") as refused:
        selection_from_proto(sent)
    assert refused.value.field == "selection.policy"


def test_a_pool_keeps_whole_chunks_within_its_fraction() -> None:
    pool = Selection.parsed("columns:0.1,pool=0.8,sinks=4,recent=16")
    assert [pool_chunks(pool, count, 64) for count in (1, 2, 3, 4, 5, 10, 11)] == [
        *(1, 2, 2, 3, 4, 8, 8)
    ]
    # What must stay, and a chunk that is written over others.
    assert [pool_chunks(pool, count, 16) for count in (2, 3, 4)] == [2, 3, 3]
    assert pool_chunks(Selection.parsed("columns:0.1"), 7, 16) == 7


def test_drafts_beside_a_selection() -> None:
    approximate, verified = Selection.parsed("columns:0.1"), Selection.parsed("columns:0.1,verify")
    suffix, by_self = Speculation(DraftMethod.SUFFIX, 3), Speculation(DraftMethod.SELF, 3)
    assert speculation_beside(FULL, suffix) == suffix
    assert speculation_beside(approximate, suffix) == PLAIN
    assert speculation_beside(verified, suffix) == by_self
    for selection, asked in (
        (approximate, None),
        (approximate, PLAIN),
        (approximate, Speculation(DraftMethod.SUFFIX, 0)),
        (verified, by_self),
        (Selection.parsed("columns:1"), suffix),
    ):
        check_speculation(selection, asked)
    for selection, asked in ((approximate, suffix), (verified, suffix), (verified, PLAIN)):
        with pytest.raises(InvalidArgument) as caught:
            check_speculation(selection, asked)
        assert caught.value.field == "speculation.method"


def test_usage_is_summed_and_keeps_the_newest_reason() -> None:
    step = SelectionUsage(
        step_count=1,
        visible_token_count=1000,
        read_token_count=100,
        fetched_row_count=40,
        reused_row_count=60,
        link_bytes=40 * 128,
    )
    step = replace(step, evicted_token_count=3, pool_bytes=1 << 20)
    total = step + SelectionUsage(off_reason="it is short") + step
    assert (total.evicted_token_count, total.pool_bytes) == (6, 1 << 20)
    assert total.off_reason == "it is short"
    assert (total.step_count, total.link_bytes) == (2, 80 * 128)
    assert total.read_ratio == 0.1
    assert total.skipped_token_count == 1800
    assert total.mean_read_tokens == 100
    assert UNUSED.mean_read_tokens == 0
    assert UNUSED.read_ratio == 1
    assert selection_usage_from_proto(selection_usage_to_proto(total)) == total
