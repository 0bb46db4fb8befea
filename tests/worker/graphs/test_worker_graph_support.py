"""Which workers have graphs, what they may take, and what metrics say of them; 1 s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitpoint.observe import metrics
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost
from worker_service.graphs import support
from worker_service.graphs.decode_graphs import GraphCounts
from worker_service.graphs.support import EagerReason, graph_bytes, graph_obstacle
from worker_service.metrics import graph_readings
from worker_service.model.library_attention import Library

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let there be a GPU with Triton's kernels and without FlashInfer."""
    monkeypatch.setattr(support, "kernels_of", lambda _: object())
    monkeypatch.setattr(support, "library_of", lambda _: None)
    return monkeypatch


def test_a_gpu_with_all_weights_records_its_steps(gpu: pytest.MonkeyPatch) -> None:
    assert graph_obstacle(GPU, torch.bfloat16, 128) is None
    assert graph_obstacle(GPU, torch.bfloat16, 128, is_asked=False) is EagerReason.NOT_ASKED
    for is_asked in (True, False):
        found = graph_obstacle(CPU, torch.bfloat16, 128, is_asked=is_asked)
        assert found is EagerReason.NO_GPU


@pytest.mark.parametrize("on_host", [OnHost(layers=(3,)), OnHost(table=True), OnHost(head=True)])
def test_weights_on_the_host_make_steps_eager(gpu: pytest.MonkeyPatch, on_host: OnHost) -> None:
    assert graph_obstacle(GPU, torch.bfloat16, 128, NOTHING_ON_HOST) is None
    assert graph_obstacle(GPU, torch.bfloat16, 128, on_host) is EagerReason.WEIGHTS_ON_HOST


def test_attention_that_depends_on_its_pages_makes_steps_eager(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(support, "kernels_of", lambda _: None)
    assert graph_obstacle(GPU, torch.bfloat16, 128) is EagerReason.ATTENTION_GATHERS


def test_the_library_makes_only_those_steps_eager_that_it_attends(gpu: pytest.MonkeyPatch) -> None:
    library = Library(CPU, object())
    gpu.setattr(support, "library_of", lambda _: library)
    assert graph_obstacle(GPU, torch.bfloat16, 128) is EagerReason.ATTENTION_PLANS
    assert graph_obstacle(GPU, torch.float32, 128) is None
    assert graph_obstacle(GPU, torch.bfloat16, 80) is None
    library.is_usable = False
    assert graph_obstacle(GPU, torch.bfloat16, 128) is None


def test_graphs_get_a_small_share_of_the_budget() -> None:
    assert graph_bytes(10 << 30) == int(0.02 * (10 << 30))
    assert graph_bytes(140 << 30) == 1 << 30


def test_metrics_say_how_steps_are_computed_and_why() -> None:
    def values(graphs: Any, reason: EagerReason | None) -> dict[tuple[str, tuple[str, ...]], float]:
        return {
            (each.metric.name, tuple(each.labels)): each.value
            for each in graph_readings(graphs, reason)
        }

    for reason in EagerReason:  # each label is a word
        assert reason.value.replace("_", "").isalpha()
        assert values(None, reason) == {(metrics.WORKER_GRAPHS.name, (reason.value,)): 0}
    graphs = SimpleNamespace(
        graph_count=3, size_bytes=7, counts=GraphCounts(replayed=20, eager=4, recorded=3)
    )
    assert values(graphs, None) == {
        (metrics.WORKER_GRAPHS.name, ("none",)): 3,
        (metrics.WORKER_GRAPH_BYTES.name, ()): 7,
        (metrics.WORKER_GRAPH_STEPS.name, ("replayed",)): 20,
        (metrics.WORKER_GRAPH_STEPS.name, ("eager",)): 4,
    }
