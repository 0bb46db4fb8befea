"""`splitpoint bench growth`: its caches, its arithmetic, and a small run. About six seconds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from splitpoint.costs.page_choice import BucketCosts, PageCosts, Rows
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.growth.caches import BucketCache, Cache, Drawn, PagedCache
from splitpoint_cli.bench.growth.picture import picture_of
from splitpoint_cli.bench.growth.report import Growth, PointResult, Run, report_of, table_of
from splitpoint_cli.bench.growth.runs import Contender, bucket_costs, time_rounds
from splitpoint_cli.bench.growth.workload import GrowthWorkload, Point, read_points
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.main import app
from worker_service.kernels.choice import in_use
from worker_service.profiling.calibration import prefers_one_order, use_kernels

PROMPT, NEW, BATCH = 9, 30, 2
MULTI_HEAD = replace(BUILT_IN_SHAPES["opt-125m"], layer_count=2, data_type=DataType.FLOAT32)
GROUPED = replace(MULTI_HEAD, query_head_count=6, kv_head_count=2, head_dim=16)
LARGE = 1e4
KERNELS = "decode=fused,prefill=sdpa,linear=packed"


def drawn_of(shape: ModelShape) -> Drawn:
    return Drawn.of(shape, batch=BATCH, prompt=PROMPT, new=NEW, seed=5)


def attended(cache: Cache, drawn: Drawn) -> torch.Tensor:
    """What each step gave, `[N, B, n_q, d]`."""
    rows = zip(drawn.queries, drawn.keys, drawn.values, strict=True)
    return torch.stack([cache.step(*row) for row in rows])


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


CASES = [
    *((Growth.MASKED, size) for size in (1, 7, 64, NEW)),
    *((Growth.SLICED, size) for size in (1, 7, NEW)),
    *((Growth.PAGES, size) for size in (1, 8, 64)),
]


def cache_of(kind: Growth, size: int, shape: ModelShape, drawn: Drawn, spare: float) -> Cache:
    if kind is Growth.PAGES:
        return PagedCache(shape, drawn, size, spare=spare)
    return BucketCache(shape, drawn, size, masks=kind is Growth.MASKED, spare=spare)


@pytest.mark.parametrize("shape", [MULTI_HEAD, GROUPED], ids=["multi-head", "grouped"])
@pytest.mark.parametrize(("kind", "size"), CASES)
@torch.inference_mode()
def test_every_growth_attends_to_the_same(kind: Growth, size: int, shape: ModelShape) -> None:
    drawn = drawn_of(shape)
    found = attended(cache_of(kind, size, shape, drawn, 0.0), drawn)
    torch.testing.assert_close(found.double(), expected(shape, drawn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize(("kind", "size"), CASES)
@torch.inference_mode()
def test_large_values_in_spare_rows_change_nothing(
    kind: Growth, size: int, data_type: DataType
) -> None:
    shape = replace(GROUPED, data_type=data_type)
    drawn = drawn_of(shape)
    clean = attended(cache_of(kind, size, shape, drawn, 0.0), drawn)
    for poison in (LARGE, -LARGE):
        assert torch.equal(attended(cache_of(kind, size, shape, drawn, poison), drawn), clean)


@pytest.mark.parametrize(("size", "count"), [(1, 30), (7, 5), (64, 1), (NEW, 1)])
@torch.inference_mode()
def test_buckets_grow_as_often_as_they_must(size: int, count: int) -> None:
    drawn = drawn_of(GROUPED)
    cache = BucketCache(GROUPED, drawn, size, masks=True)
    attended(cache, drawn)
    assert cache.growths == count
    assert cache.capacity == PROMPT + count * size


@torch.inference_mode()
def test_pages_grow_at_their_ends() -> None:
    drawn = drawn_of(GROUPED)
    cache = PagedCache(GROUPED, drawn, 8)  # the prompt has begun a second page: 16, 24, 32 follow
    attended(cache, drawn)
    assert cache.growths == 3


@torch.inference_mode()
def test_a_wrong_answer_has_no_time() -> None:
    drawn = drawn_of(GROUPED)

    class Forgetful(BucketCache):
        """Sees one row too few at its end."""

        def step(self, *row: torch.Tensor) -> torch.Tensor:
            self._mask[0] = -torch.inf
            return super().step(*row)

    right = Contender(Growth.MASKED, 8, lambda: BucketCache(GROUPED, drawn, 8, masks=True))
    wrong = Contender(Growth.MASKED, 64, lambda: Forgetful(GROUPED, drawn, 64, masks=True))

    def measure(contender: Contender) -> tuple[torch.Tensor, list[float]]:
        return attended(contender.make(), drawn)[-1], [1.0] * NEW

    with pytest.raises(Internal, match="masked, 64 rows: attention differs"):
        time_rounds([right, wrong], measure, "here", 1, 1e-5, Progress())


@torch.inference_mode()
def test_constants_are_measured() -> None:
    costs = bucket_costs(
        GROUPED, Drawn.of(GROUPED, batch=2, prompt=16, new=64, seed=0), time.perf_counter
    )
    assert costs.row_seconds > 0
    assert costs.growth_seconds + costs.copy_seconds > 0
    assert costs.step_seconds > 0


WORKLOAD = GrowthWorkload("opt-125m", "float32", 2, 0, (Point(8, 64), Point(8, 256)), 2, 3, 0)


def result(point: Point, masked: dict[int, float]) -> PointResult:
    """Measured masked buckets; cc is 2, so the model's best is sqrt(2 N)."""
    rows = Rows(0, point.new)
    runs = [
        Run.of_steps(Growth.MASKED, size, point.new // size, [[9.0], [seconds], [0.1]])
        for size, seconds in masked.items()
    ]
    runs += [Run.of_steps(Growth.SLICED, 64, 1, [[1.5]]), Run.of_steps(Growth.PAGES, 8, 8, [[2.5]])]
    return PointResult(
        point, rows, BucketCosts(0, 1e-3, 0, 2e-3, 0), PageCosts(0, 8e-3, 1e-3), tuple(runs)
    )


RESULTS = [
    result(WORKLOAD.points[0], {1: 4.0, 8: 2.0, 16: 3.0, 64: 5.0}),
    result(WORKLOAD.points[1], {1: 8.0, 16: 4.0, 32: 5.0, 256: 6.0}),
]


def test_the_report_is_json_a_table_and_a_picture() -> None:
    report = report_of(WORKLOAD, RESULTS, KERNELS)
    assert json.loads(json.dumps(report)) == report
    first, second = report["points"]
    masked = first["growth"]["masked"]
    assert (masked["best"], masked["best_seconds"]) == (8, 2.0)
    assert masked["model"] == pytest.approx(128**0.5, abs=0.01)
    assert masked["best_to_model"] == pytest.approx(8 / 128**0.5, abs=1e-3)
    assert first["copy_to_attend"] == 2
    assert second["growth"]["pages"]["model"] == pytest.approx((2 * 8 * 128) ** 0.5, abs=0.01)
    # Four times the tokens, twice the growths: 8 and 16.
    assert report["growths_exponents"] == {"8": {"measured": 0.5, "model": 0.5}}
    table = table_of(report)
    assert table.row_count == 2
    headings = [str(column.header) for column in table.columns]
    assert len(set(headings)) == len(headings)
    assert "attention of 1 layer after" in str(table_of({**report, "layers": 1}).title)
    assert [*table.columns[3].cells] == ["8: 2 s", "16: 4 s"]
    assert "batch 8: T ~ N^0.5 measured" in str(table.caption)
    *curves, growths = picture_of(report).axes
    assert len(curves) == 2
    measured, model = (np.asarray(line.get_xydata()) for line in curves[0].get_lines()[:2])
    assert measured.tolist() == [
        pytest.approx([size, 1e3 * seconds / 64])
        for size, seconds in ((1, 4.0), (8, 2.0), (16, 3.0), (64, 5.0))
    ]
    assert model[0, 1] == pytest.approx(1e3 * RESULTS[0].predicted(RESULTS[0].runs[0]) / 64)
    assert np.asarray(growths.get_lines()[0].get_xydata()).tolist() == [[64, 8], [256, 16]]


def test_a_disturbance_of_other_steps_in_each_round_does_not_count() -> None:
    run = Run.of_steps(Growth.MASKED, 8, 1, [[1.0, 90.0, 3.0], [1.0, 2.0, 3.0], [70.0, 2.0, 3.0]])
    assert run.typical == 6
    assert run.seconds == (94, 6, 75)


def test_one_point_has_no_exponent() -> None:
    report = report_of(replace(WORKLOAD, points=WORKLOAD.points[:1]), RESULTS[:1], KERNELS)
    assert report["growths_exponents"] == {}


def test_rows_that_cost_nothing_leave_a_report() -> None:
    """As few rows do by a fast kernel: then one page for all."""
    free = replace(RESULTS[0], pages=replace(RESULTS[0].pages, row_seconds=0.0))
    report = report_of(WORKLOAD, [free], KERNELS)
    assert report["points"][0]["page_to_row"] is None
    rows = free.rows
    assert report["points"][0]["growth"]["pages"]["model"] == rows.prompt + rows.new
    json.dumps(report, allow_nan=False)
    assert table_of(report).row_count == 1


def test_points_are_read() -> None:
    assert read_points("8x64, 1x1024") == (Point(8, 64), Point(1, 1024))
    assert str(Point(8, 64)) == "8x64"


@pytest.mark.parametrize("text", ["", "8", "8x", "0x64", "8x15", "8x64,8x64", "8x64x2"])
def test_other_points_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        read_points(text)


def test_more_layers_than_the_shape_has_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="12 layers"):
        replace(WORKLOAD, layers=13)


def test_a_small_run_in_full(tmp_path: Path) -> None:
    """It attends pages by what a worker would use."""
    png, output = tmp_path / "growth.png", tmp_path / "growth.json"
    words = [*("--points", "1x16,1x32"), *("--layers", "1"), *("--repeats", "1")]
    words += [*("--threads", "1"), *("--prompt", "3")]
    ran = CliRunner().invoke(
        app, ["bench", "growth", *words, "--json", "--png", str(png), "--output", str(output)]
    )
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert json.loads(output.read_text()) == report
    assert report["verified"]
    assert report["kernels"] == str(in_use())
    assert in_use() == use_kernels(torch.float32, is_invariant=prefers_one_order("auto"))
    sizes = [each["size"] for each in report["points"][1]["growth"]["masked"]["sizes"]]
    assert sizes == [1, 2, 4, 8, 16, 32]
    assert [each["size"] for each in report["points"][0]["growth"]["pages"]["sizes"]] == [8, 16]
    assert all(
        each["predicted_seconds"] > 0
        for point in report["points"]
        for kind in point["growth"].values()
        for each in kind["sizes"]
    )
    assert png.read_bytes().startswith(b"\x89PNG")
