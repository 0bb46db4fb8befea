"""Test that the profiler measures the link of restores, and every cost of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from worker_service.lanes.lanes import EmulatedLink
from worker_service.lanes.select import lanes_of
from worker_service.lanes.work import Work
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import COPY_BYTES, ENOUGH_SIZES, measure, measure_link

CPU = torch.device("cpu")


class ExactLink(EmulatedLink):
    """A link whose transfers take no time, and say that they took what their bytes take."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(bytes_per_second)
        self.copied: list[int] = []

    def transfer(self, work: Work, resource: str, ready: float) -> tuple[float, float]:
        self.copied.append(work.size_bytes)
        work.call()
        return ready, ready + work.size_bytes / self.bytes_per_second


@pytest.mark.parametrize("overlapped", [True, False])
def test_the_emulated_link_is_the_one_measured(overlapped: bool) -> None:
    link = ExactLink(200e6)
    lanes = lanes_of(CPU, overlapped=overlapped, link=link)
    try:
        assert measure_link(CPU, lanes).rate == pytest.approx(200e6)
        link.bytes_per_second = 800e6
        assert measure_link(CPU, lanes).rate == pytest.approx(800e6)
    finally:
        lanes.close()
    assert set(link.copied) >= set(COPY_BYTES[:ENOUGH_SIZES])


@pytest.mark.parametrize(("rate", "sizes"), [(60e6, 4), (2e6, ENOUGH_SIZES)])
def test_a_slow_link_is_spared_its_largest_copies(rate: float, sizes: int) -> None:
    link = ExactLink(rate)
    lanes = lanes_of(CPU, link=link)
    try:
        found = measure_link(CPU, lanes)
    finally:
        lanes.close()
    assert sorted(set(link.copied)) == list(COPY_BYTES[:sizes])
    assert found.rate == pytest.approx(rate)


@pytest.mark.parametrize("case", ["opt", "qwen3"])
def test_every_cost_is_measured(case: str, tmp_path: Path) -> None:
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    profile = measure(model, CPU, "a test")
    assert profile.description == "a test"
    assert profile.model == model.shape.name == tmp_path.name
    assert profile.step_compute_seconds > 0
    assert profile.rebuild_flops_per_second > 0
    assert profile.prefill_flops_per_second > 0
    assert profile.prefill_overhead_seconds >= 0
    assert profile.rebuild_overhead_seconds >= 0
