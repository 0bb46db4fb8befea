"""A saturated worker's share of compute, as `top` and `trace` show it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack, prompt_of
from tiny_models import VOCABULARY, write_tiny

from splitpoint.client.answers import Telemetry
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Lane
from splitpoint_cli.top import rates
from worker_service.lanes.timeline import Trace


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
async def test_prefill_and_decode_are_compute(tmp_path: Path, residency: Residency) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    (tmp_path / "s").mkdir()
    async with local_stack(folder, tmp_path / "s", StackShape(workers=1)) as stack:
        engine = stack.workers[0].engine
        engine.trace = Trace()
        tellings = await _tellings_under_load(stack, residency)
        last = await _last_telling(stack)
        spans = engine.trace.spans
        computed = [span for span in spans if span.lane is Lane.COMPUTE]
        # Every step is in the trace: as one span, or with the last part of each layer.
        names = Counter(span.name for span in computed)
        whole = sum(count for name, count in names.items() if name.endswith(" step"))
        streamed, rest = divmod(names["finish"], len(engine.model.layers))
        assert (whole + streamed, rest) == (last.step_count, 0)
        assert (streamed > 0) is (residency is Residency.STREAMED)
        # What the worker tells are these spans. No two overlap, so they never exceed the time.
        assert last.compute_busy_seconds == pytest.approx(sum(span.seconds for span in computed))
        computed.sort(key=lambda span: span.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(computed))
        for first, second in itertools.pairwise([*tellings, last]):
            assert 0 <= first.compute_busy_seconds <= second.compute_busy_seconds
            assert second.compute_busy_seconds <= second.uptime_seconds
        shown = rates.worker_rates(rates.Window(last, tellings[0])).compute_share
        assert shown is not None
        assert 0 < shown <= 1
        elapsed = max(span.end for span in spans) - min(span.start for span in spans)
        assert 0 < sum(span.seconds for span in computed) <= elapsed


async def _last_telling(stack: LocalStack) -> Telemetry:
    """Return what the worker tells once it is idle and has counted all of its steps."""
    [worker] = stack.workers
    async with asyncio.timeout(60):
        while True:
            [status] = await stack.client.list_workers()
            told, steps = status.telemetry, sum(worker.runtime.counters.steps.values())
            if worker.engine.is_idle and told is not None and told.step_count == steps:
                return told
            await asyncio.sleep(0.1)


async def _tellings_under_load(stack: LocalStack, residency: Residency) -> list[Telemetry]:
    """Two different tellings of the worker while requests follow each other."""

    async def load(seed: int) -> None:
        while True:
            prompt = prompt_of(150, seed, VOCABULARY)
            generation = stack.client.generate(
                prompt, max_tokens=60, ignore_eos=True, residency=residency
            )
            await generation.complete()

    clients = [asyncio.create_task(load(seed)) for seed in range(4)]
    tellings: list[Telemetry] = []
    try:
        async with asyncio.timeout(60):
            while len(tellings) < 2:
                await asyncio.sleep(0.1)
                [worker] = await stack.client.list_workers()
                told = worker.telemetry
                if told is None or not told.step_count:
                    continue
                if not tellings or told.uptime_seconds > tellings[-1].uptime_seconds:
                    tellings.append(told)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return tellings
