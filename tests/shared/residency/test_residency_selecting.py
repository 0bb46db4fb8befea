"""Pages of a selection, and whether it gains."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import PlanInput, Residency, SplitLine
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.selecting import (
    SelectionPages,
    StepSplit,
    expected_rows,
    kept_bytes,
    pages_at_last,
    predict_step,
    selection_pages,
    wanted_rows,
    why_not_selected,
)
from splitpoint.selection import Selection
from splitpoint.shapes import DataType, Encoding, ModelShape

SHAPE = ModelShape(
    name="test",
    family="llama",
    layer_count=16,
    hidden_size=512,
    query_head_count=8,
    kv_head_count=2,
    head_dim=64,
    intermediate_size=1024,
    vocabulary_size=1000,
    context_length=8192,
    data_type=DataType.FLOAT32,
)
PROFILE = Profile(
    link_bytes_per_second=1e9,
    link_overhead_seconds=1e-5,
    rebuild_flops_per_second=1e10,
    rebuild_overhead_seconds=0.0,
    prefill_flops_per_second=1e10,
    step_compute_seconds=0.005,
    memory_seconds_per_byte=1e-10,
)


def test_rows_round_up_and_never_exceed_the_tokens() -> None:
    assert wanted_rows(Selection.parsed("columns:0.1"), 200) == 20
    assert wanted_rows(Selection.parsed("columns:0.1"), 201) == 21
    assert wanted_rows(Selection.parsed("columns:0.0001,sinks=0,recent=1"), 10) == 1
    assert wanted_rows(Selection.parsed("columns:budget_tokens=50"), 30) == 30
    # The cap is the room; alpha says what is fetched.
    assert wanted_rows(Selection.parsed("infinigen:alpha=4,cap=0.25"), 400) == 100


def test_those_that_are_always_read_have_rows() -> None:
    for rule in ("0.01", "budget_tokens=5", "alpha=4,cap=0.01"):
        assert wanted_rows(Selection.parsed(f"columns:{rule}"), 400) == 4 + 16
        assert wanted_rows(Selection.parsed(f"columns:{rule}"), 12) == 12
        assert wanted_rows(Selection.parsed(f"columns:{rule},sinks=0,recent=7"), 400) == 7


def test_alpha_is_expected_to_read_less_than_it_has_room_for() -> None:
    for text, rows in (
        ("columns:0.15", 60),
        ("columns:alpha=4", 40),
        ("columns:alpha=4,cap=0.06", 24),
        ("columns:alpha=4,sinks=30,recent=20", 50),
        ("columns:alpha=inf,cap=0.9", 360),
    ):
        assert expected_rows(Selection.parsed(text), 400) == rows
    steps = [
        predict_step(SHAPE, PROFILE, Selection.parsed(text), 6400)
        for text in ("columns:0.1", "columns:alpha=4", "columns:0.2")
    ]
    assert steps[0] == steps[1]
    assert steps[1].selected_seconds < steps[2].selected_seconds


def test_a_short_prompt_says_that_it_never_leaves_the_device() -> None:
    reason = why_not_selected(SHAPE, Selection.parsed("columns:0.1"), 0, 64)
    assert reason == "the prompt is short: its whole cache stays on the device"


def test_pages_hold_what_the_bytes_say() -> None:
    """19 of 64 dimensions: 0.297 of K in each layer, which is half of a page."""
    assert selection_pages(SHAPE, Selection.parsed("columns:0.1"), 4096, 64) == SelectionPages(
        rows=7, screens=10
    )
    # 28 bytes and a scale, of 512: 0.0586.
    int8 = Selection.parsed("columns:0.1,columns=28,int8")
    assert kept_bytes(SHAPE, int8) == 2 * 30
    assert selection_pages(SHAPE, int8, 4096, 64) == SelectionPages(rows=7, screens=4)
    window = Selection.parsed("window:0.1")
    assert selection_pages(SHAPE, window, 4096, 64) == SelectionPages(rows=7, screens=0)
    assert selection_pages(SHAPE, window, 0, 64).count == 0


def test_records_larger_than_a_page_are_not_kept() -> None:
    """A column in int8 and its scale are larger than one element of K in two bytes."""
    shape = replace(SHAPE, head_dim=1, data_type=DataType.BFLOAT16)
    int8 = Selection.parsed("columns:0.1,columns=1,int8")
    assert pages_at_last(shape, int8, 100, 1) == SelectionPages(0, 0)
    assert "rows and screens take" in why_not_selected(shape, int8, 99, 1)
    assert pages_at_last(shape, int8, 10_000, 16).count


def test_pages_suffice_for_any_sizes() -> None:
    """Drawn shapes: the planes have room for every record."""
    rng = random.Random(0)
    for _ in range(300):
        shape = replace(
            SHAPE,
            kv_head_count=rng.choice([1, 2, 4, 8]),
            head_dim=rng.choice([20, 64, 128]),
            data_type=rng.choice(list(DataType)),
        )
        chunk, tokens = rng.choice([8, 16, 64]), rng.randint(1, 5000)
        method = rng.choice(["columns:0.1", "maple:0.2", "columns:0.1,int8"])
        pages = selection_pages(shape, Selection.parsed(method), tokens, chunk)
        size = kept_bytes(shape, Selection.parsed(method))
        in_plane = chunk * shape.kv_width * shape.data_type.size // size
        assert (pages.screens - 1) * 2 * in_plane < tokens <= pages.screens * 2 * in_plane


def test_it_gains_where_the_link_is_the_limit() -> None:
    columns = Selection.parsed("columns:0.1")
    step = predict_step(SHAPE, PROFILE, columns, 4096)
    # K and V of 4,096 tokens in 16 layers at 1 GB/s; the last layer computes behind them.
    assert step.full_seconds == pytest.approx(16 * (1e-5 + 4096 * 1024 / 1e9) + 0.005 / 16)
    # Two whole layers and fourteen of 410 rows.
    linked = 16 * 1e-5 + (2 * 4096 + 14 * 410) * 1024 / 1e9
    assert step.selected_seconds == pytest.approx(linked + 0.005 / 16)
    assert why_not_selected(SHAPE, columns, 4096, 64, profile=PROFILE) == ""
    assert why_not_selected(SHAPE, columns, 4096, 64) == ""


def test_rows_and_chunks_of_an_encoded_store_are_fewer_bytes() -> None:
    """A scale and 64 codes of int8 for 256 bytes; an emulated link carries nothing else."""
    columns = Selection.parsed("columns:0.1")
    slow = replace(PROFILE, link_bytes_per_second=1e8)
    step = predict_step(SHAPE, slow, columns, 4096, encoding=Encoding.INT8)
    linked = 16 * 1e-5 + (2 * 4096 + 14 * 410) * (2 * 2 * 66) / 1e8
    assert step.selected_seconds == pytest.approx(linked + 0.005 / 16)
    assert step.full_seconds == pytest.approx(16 * (1e-5 + 4096 * 264 / 1e8) + 0.005 / 16)
    # At this rate rows of native stores gain, those of int4 stores have nothing to gain.
    fast = replace(PROFILE, link_bytes_per_second=4e9, memory_seconds_per_byte=5e-10)
    for encoding, gains in ((Encoding.NATIVE, True), (Encoding.INT4, False)):
        said = why_not_selected(SHAPE, columns, 4096, 64, profile=fast, encoding=encoding)
        assert (said == "") == gains, (encoding, said)


@pytest.mark.parametrize(
    ("text", "tokens", "profile", "encoding", "reason"),
    [
        ("columns:1", 4096, None, Encoding.NATIVE, "columns:1.0 reads every token"),
        ("columns:0.1,full_layers=16", 4096, None, Encoding.NATIVE, "all 16 layers read"),
        ("columns:0.1", 64, None, Encoding.NATIVE, "rows and screens take 2 pages, all of its 64"),
        # A page on the device is native, whatever the store keeps.
        ("columns:0.9", 4096, None, Encoding.INT8, "rows and screens take 68 pages"),
        ("columns:budget_tokens=5000", 4096, None, Encoding.NATIVE, "rows and screens take 74"),
        ("columns:0.1", 4096, replace(PROFILE, link_bytes_per_second=1e13), None, "a step is"),
        (
            *("columns:0.8,full_layers=8", 4096, replace(PROFILE, memory_seconds_per_byte=1e-6)),
            *(None, "a step is predicted"),
        ),
    ],
)
def test_it_says_why_it_does_not_gain(
    text: str, tokens: int, profile: Profile | None, encoding: Encoding | None, reason: str
) -> None:
    said = why_not_selected(
        SHAPE,
        Selection.parsed(text),
        tokens,
        64,
        profile=profile,
        encoding=encoding or Encoding.NATIVE,
    )
    assert said.startswith(reason)


def test_the_exact_step_is_the_planned_one() -> None:
    """Drawn requests: its seconds are those that the planner gives to its own split."""
    rng = random.Random(3)
    columns = Selection.parsed("columns:0.1")
    rebuilding = 0
    for _ in range(100):
        profile = replace(
            PROFILE,
            link_bytes_per_second=10 ** rng.uniform(7.5, 10),
            rebuild_flops_per_second=10 ** rng.uniform(10, 13),
            step_compute_seconds=rng.choice([0.001, 0.02]),
            host_weight_bytes=rng.choice([0, 10**7]),
            host_kv_weight_bytes=rng.choice([0, 10**5]),
        )
        tokens, kept = rng.randint(10, 60) * 64, rng.randint(0, 9) * 64
        # More KV heads: X is smaller than K and V.
        shape = replace(SHAPE, kv_head_count=rng.choice([2, 8]))
        request = PlanInput(
            cached_tokens=tokens - 1,
            new_tokens=1,
            has_activations=rng.random() < 0.8,
            schedule=Schedule.PIPELINED,
            residency=Residency.STREAMED,
            chunk_tokens=64,
            staging_tokens=rng.choice([0, 512]),
            spare_bytes=kept * shape.kv_bytes_per_token,
        )
        plan = plan_request(shape, profile, request)
        line = SplitLine(plan.split_slope, plan.split_intercept, plan.split_cap)
        split = StepSplit(line, plan.schedule, plan.resident_tokens, request.staging_tokens)
        step = predict_step(shape, profile, columns, tokens, split, 64)
        assert step.full_seconds == pytest.approx(plan.predicted_step_seconds, rel=1e-6)
        rebuilding += line.at(tokens, 64) > kept
    assert 20 < rebuilding < 80


def test_it_does_not_gain_where_rebuilding_is_faster() -> None:
    """A slow link and a fast device: half of each layer's K and V is worth less than its X."""
    shape = replace(SHAPE, kv_head_count=8)
    profile = replace(PROFILE, link_bytes_per_second=5e7, rebuild_flops_per_second=1e13)
    half = Selection.parsed("columns:0.6")
    rebuilt = StepSplit(SplitLine.fixed(4096))
    assert why_not_selected(shape, half, 4096, 64, profile=profile) == ""
    said = why_not_selected(shape, half, 4096, 64, profile=profile, split=rebuilt)
    assert said.startswith("a step is predicted to take")
    tenth = Selection.parsed("columns:0.1")
    assert why_not_selected(shape, tenth, 4096, 64, profile=profile, split=rebuilt) == ""


def test_weights_on_the_host_cross_the_link_in_both_steps() -> None:
    columns = Selection.parsed("columns:0.1")
    weights = replace(PROFILE, host_weight_bytes=10**8)
    step, loaded = (predict_step(SHAPE, each, columns, 4096) for each in (weights, PROFILE))
    assert step.full_seconds == pytest.approx(loaded.full_seconds + 0.1)
    assert step.selected_seconds == pytest.approx(loaded.selected_seconds + 0.1)


def test_exact_layers_wait_for_the_staging_memory() -> None:
    """With every layer but one exact, a step that the device limits saves at most that layer."""
    profile = replace(PROFILE, step_compute_seconds=1.0, memory_seconds_per_byte=0.0)
    most = Selection.parsed("columns:0.01,full_layers=15")
    split = StepSplit(staging_tokens=1024)
    step = predict_step(SHAPE, profile, most, 4096, split)
    layer = 1e-5 + 4096 * 1024 / 1e9
    assert step.full_seconds == pytest.approx(1 + layer * (1 + 15 * 0.75))
    assert step.full_seconds - step.selected_seconds < 0.75 * layer
