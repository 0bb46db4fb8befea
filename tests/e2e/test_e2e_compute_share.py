"""A saturated worker's share of compute, as `top` and `trace` show it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack, prompt_of
from tiny_models import VOCABULARY, write_tiny

from splitpoint.client.telemetry import Telemetry
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Lane
from splitpoint_cli.top import rates
from splitpoint_cli.trace.lane_use import Window, lane_uses
from worker_service.lanes.timeline import Trace

# Laying a batch out and handing tokens over are no compute, and large beside a tiny model.
LEAST_SHARE_OF_STEPS = 0.3


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
async def test_prefill_and_decode_are_compute(tmp_path: Path, residency: Residency) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    (tmp_path / "s").mkdir()
    async with local_stack(folder, tmp_path / "s", StackShape(workers=1)) as stack:
        engine = stack.workers[0].engine
        engine.trace = Trace()
        tellings = await _tellings_under_load(stack, residency)
        spans = engine.trace.spans
        before, after = tellings[0], tellings[-1]
        computed = after.compute_busy_seconds - before.compute_busy_seconds
        stepped = after.step_seconds - before.step_seconds
        assert computed > LEAST_SHARE_OF_STEPS * stepped > 0
        for first, second in itertools.pairwise(tellings):
            # Not the share that `top` cuts at 100 %, but what it is made of.
            passed = second.uptime_seconds - first.uptime_seconds
            share = (second.compute_busy_seconds - first.compute_busy_seconds) / passed
            # What streams is counted as its steps end, so one may reach into the next interval.
            assert 0 <= share <= (1.001 if residency is Residency.RESIDENT else 2.0)
        shown = rates.worker_rates(rates.Window(after, before)).compute_share
        assert shown is not None
        assert 0 < shown <= 1
        rows = {row.lane: row for row in lane_uses(spans, Window.around(spans))}
        assert 0 < rows[Lane.COMPUTE].busy_share <= 1


async def _tellings_under_load(stack: LocalStack, residency: Residency) -> list[Telemetry]:
    """Four different tellings of the worker while requests follow each other."""

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
            while len(tellings) < 4:
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
