"""`benchmarks.growth`: its caches, its figures, and a small run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.growth import (
    BucketCache,
    Contender,
    Drawn,
    Generation,
    Point,
    best_of,
    bucket_costs,
    is_settled,
    main,
    read_points,
    time_rounds,
)
from splitpoint.costs.page_choice import Rows
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.harness import Progress

PROMPT, NEW, BATCH = 9, 30, 2
MULTI_HEAD = replace(BUILT_IN_SHAPES["opt-125m"], layer_count=2, data_type=DataType.FLOAT32)
GROUPED = replace(MULTI_HEAD, query_head_count=6, kv_head_count=2, head_dim=16)
SIZES = (1, 7, 64, NEW)
PLAIN = Rows(PROMPT, NEW)
# Steps of 5 drafts that yield 4 tokens; the last ones have fewer.
DRAFTED = Rows(PROMPT, NEW, drafts=5, step_tokens=4)


def drawn_of(shape: ModelShape) -> Drawn:
    return Drawn.of(shape, batch=BATCH, prompt=PROMPT, new=NEW, seed=5)


def attended(cache: BucketCache, drawn: Drawn, rows: Rows = PLAIN) -> torch.Tensor:
    """What each step gave for the tokens that it keeps, `[N, B, n_q, d]`."""
    return torch.cat([cache.step(*step)[: step[3]] for step in drawn.steps(rows)])


def expected(shape: ModelShape, drawn: Drawn) -> torch.Tensor:
    """The same in double precision, from all rows concatenated."""
    group = shape.query_head_count // shape.kv_head_count
    keys, values = (
        torch.cat((prompt, rows.permute(1, 2, 0, 3)), dim=2).double().repeat_interleave(group, 1)
        for prompt, rows in ((drawn.prompt_keys, drawn.keys), (drawn.prompt_values, drawn.values))
    )
    steps = []
    for step, queries in enumerate(drawn.queries.double()):
        seen = PROMPT + step + 1
        scores = (keys[:, :, :seen] * queries.unsqueeze(2)).sum(-1) / shape.head_dim**0.5
        steps.append((scores.softmax(-1).unsqueeze(-1) * values[:, :, :seen]).sum(2))
    return torch.stack(steps)


@pytest.mark.parametrize("rows", [PLAIN, DRAFTED], ids=["plain", "drafts"])
@pytest.mark.parametrize("shape", [MULTI_HEAD, GROUPED], ids=["multi-head", "grouped"])
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_every_bucket_attends_to_the_same(size: int, shape: ModelShape, rows: Rows) -> None:
    drawn = drawn_of(shape)
    found = attended(BucketCache(shape, drawn, size), drawn, rows)
    torch.testing.assert_close(found.double(), expected(shape, drawn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_large_values_in_spare_rows_change_nothing(size: int, data_type: DataType) -> None:
    shape = replace(GROUPED, data_type=data_type)
    drawn = drawn_of(shape)
    for rows in (PLAIN, DRAFTED):
        clean = attended(BucketCache(shape, drawn, size), drawn, rows)
        for poison in (1e4, -1e4):
            found = attended(BucketCache(shape, drawn, size, spare=poison), drawn, rows)
            assert torch.equal(found, clean)


@pytest.mark.parametrize(
    # With drafts a row at a time is as many as a step keeps: 6 rows at first, then 4 a step.
    ("rows", "size", "count", "grown"),
    [
        *((PLAIN, *each) for each in ((1, 30, 30), (7, 5, 35), (64, 1, 64), (NEW, 1, NEW))),
        *((DRAFTED, *each) for each in ((1, 7, 30), (7, 5, 35), (64, 1, 64), (NEW, 1, NEW))),
    ],
)
@torch.inference_mode()
def test_buckets_grow_as_often_as_they_must(rows: Rows, size: int, count: int, grown: int) -> None:
    drawn = drawn_of(GROUPED)
    cache = BucketCache(GROUPED, drawn, size)
    attended(cache, drawn, rows)
    assert cache.growths == count
    assert cache.capacity == PROMPT + grown


@torch.inference_mode()
def test_a_wrong_answer_has_no_time() -> None:
    drawn = drawn_of(GROUPED)

    class Forgetful(BucketCache):
        """Sees one row too few at its end."""

        def step(
            self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int
        ) -> torch.Tensor:
            self._mask[0] = -torch.inf
            return super().step(queries, keys, values, kept)

    right = Contender(8, lambda: BucketCache(GROUPED, drawn, 8), 0.0)
    wrong = Contender(64, lambda: Forgetful(GROUPED, drawn, 64), 0.0)

    def measure(contender: Contender) -> Generation:
        return Generation(attended(contender.make(), drawn)[-1], [1.0] * NEW, 0)

    with pytest.raises(Internal, match="64 rows: attention differs"):
        time_rounds([right, wrong], measure, "here", 1, 1e-5, Progress())


@torch.inference_mode()
def test_constants_are_measured() -> None:
    drawn = Drawn.of(GROUPED, batch=2, prompt=16, new=64, seed=0)
    costs = bucket_costs(GROUPED, drawn, Rows(16, 64, 3, 2), time.perf_counter)
    assert costs.row_seconds > 0
    assert costs.growth_seconds + costs.copy_seconds > 0
    assert costs.step_seconds > 0


def test_a_disturbance_of_other_steps_in_each_round_does_not_count() -> None:
    rounds = [[1.0, 90.0, 3.0], [1.0, 2.0, 3.0], [70.0, 2.0, 3.0]]
    contender = Contender(8, lambda: pytest.fail("not made"), 0.0, rounds)
    assert contender.typical == 6
    assert contender.report()["runs"] == [94, 6, 75]


def contender_of(size: int, *totals: float) -> Contender:
    """A contender with generations of one step each."""
    return Contender(size, lambda: pytest.fail("not made"), 0.0, [[total] for total in totals])


def test_rounds_go_on_while_what_may_be_the_best_is_uncertain() -> None:
    sure, slow = contender_of(8, *[1.0] * 6), contender_of(1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert sure.interval == (1.0, 1.0)
    low, high = slow.interval
    assert 2.0 <= low < slow.typical < high <= 7.0
    assert best_of([slow, sure]) == (sure, [sure])
    assert is_settled([slow, sure], 0.01)
    near = contender_of(16, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
    assert best_of([sure, near]) == (sure, [sure, near])
    assert not is_settled([sure, near], 0.01)
    assert is_settled([sure, near], 1.0)


def test_points_are_read() -> None:
    assert read_points("8x64, 1x1024@7:4") == (Point(8, 64), Point(1, 1024, 7, 4))
    assert str(Point(8, 64)) == "8x64"
    assert str(Point(1, 1024, 7, 4)) == "1x1024@7:4"


@pytest.mark.parametrize("text", ["", "8", "8x", "0x64", "8x15", "8x64x2", "8x64@3", "8x64@3:5"])
def test_other_points_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        read_points(text)


def test_a_small_run_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "growth.json"
    words = [*("--points", "1x16,1x32@3:2"), *("--layers", "1"), *("--repeats", "1")]
    words += ["--most-repeats", "2"]
    words += [*("--threads", "1"), *("--prompt", "3"), "--json", "--output", str(output)]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == report
    sizes = report["points"][1]["sizes"]
    assert [each["size"] for each in sizes] == [1, 2, 4, 8, 16, 32]
    assert all(each["predicted_seconds"] > 0 for each in sizes)
    assert all(low <= each["seconds"] <= high for each in sizes for low, high in [each["interval"]])
    assert sizes[0]["minor_faults"] >= 0
