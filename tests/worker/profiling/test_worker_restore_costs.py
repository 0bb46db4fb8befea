"""Test the overhead of restores: measured at the start, then learned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import make_engine

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes import cost_watch
from worker_service.lanes.cost_watch import CostWatch
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.profiling import restore_costs
from worker_service.profiling.restore_costs import measure_overheads

CPU = torch.device("cpu")
PROFILE = BUILT_IN_PROFILES["a100-80"]


@pytest.mark.parametrize("kind", [ThreadLanes, SerialLanes])
@pytest.mark.parametrize("has_activations", [True, False])
def test_a_worker_measures_on_chunks_of_its_own(
    folder: Path, kind: type[Lanes], has_activations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine every restore may take long: each one counts here.
    monkeypatch.setattr(cost_watch, "_TELLING_SECONDS", math.inf)
    monkeypatch.setattr(restore_costs, "MOST_SECONDS", math.inf)
    lanes = kind(CPU)
    engine = make_engine(folder, has_activations=has_activations, lanes=lanes, cache_pages=12)
    profile = measure_overheads(engine, PROFILE)
    assert profile.restore_overhead_seconds + profile.operation_overhead_seconds > 0
    # Copies of zeros from the processor's caches do not show the link's rate.
    assert profile.link_bytes_per_second == PROFILE.link_bytes_per_second
    assert profile.prefill_flops_per_second != PROFILE.prefill_flops_per_second
    # Pages hold finite values, none is taken, and the copies are no request's traffic.
    assert engine.cache.pages.used_count == 0
    assert all(bool(plane.isfinite().all()) for plane in engine.cache.keys + engine.cache.values)
    assert engine.lanes.pop_totals() is None
    lanes.close()


def test_pages_that_are_in_use_are_left_alone(folder: Path) -> None:
    engine = make_engine(folder, cache_pages=12)
    engine.cache.pages.allocate()
    assert measure_overheads(engine, PROFILE) == PROFILE


def spans_of(count: int, seconds: float) -> list[Span]:
    return [Span(Lane.LINK_IN, "load K,V", 0.0, seconds, amount=1.0) for _ in range(count)]


@pytest.mark.parametrize("schedule", [Schedule.PIPELINED, Schedule.SERIAL])
def test_a_short_restore_teaches_and_a_long_one_does_not(schedule: Schedule) -> None:
    start = replace(PROFILE, operation_overhead_seconds=1e-5)
    watch = CostWatch(start)
    watch.took(3.0, spans_of(8, 0.1), schedule)
    assert watch.fits.operation_overhead_seconds == pytest.approx(1e-5)
    for _ in range(30):
        for count in (8, 24):
            busy = count * 1e-5
            watch.took(busy + 2e-4 + count * 5e-5, spans_of(count, 1e-5), schedule)
    assert watch.fits.restore_overhead_seconds == pytest.approx(2e-4, rel=0.02)
    assert watch.fits.operation_overhead_seconds == pytest.approx(5e-5, rel=0.02)
