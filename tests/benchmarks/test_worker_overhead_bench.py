"""The benchmark of what measuring costs, on the bundled model, for a moment."""

from __future__ import annotations

from benchmarks.metrics_overhead import BATCH, compare, subject, table_of
from splitpoint.shapes import DataType
from splitpoint_cli.bench.shared.progress import Progress


async def test_both_sides_decode_and_only_one_is_counted() -> None:
    async with subject("bundled", DataType.FLOAT32, seed=0) as measured:
        await measured.decode(3, watched=True)
        assert measured.worker.runtime.account.generated_tokens == 3 * BATCH
        await measured.decode(3, watched=False)
        assert measured.worker.runtime.account.generated_tokens == 0
        case = await compare(measured, rounds=1, seconds=0.05, progress=Progress())
    assert min(float(str(case[f"step_seconds_{side}"])) for side in ("watched", "unwatched")) > 0
    # Some microseconds. Only a bound that no busy machine breaks: figures are the benchmark's.
    assert 0 < float(str(case["step_us"])) < 10_000
    assert "bundled" in table_of([case])
