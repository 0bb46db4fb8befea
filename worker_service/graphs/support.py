"""Whether a worker's decoding steps can be CUDA graphs, why not, and the memory of graphs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import torch

from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost
from worker_service.device.cache import DeviceCache
from worker_service.graphs.decode_graphs import DecodeGraphs
from worker_service.graphs.recorder import GraphRecorder, Recorder
from worker_service.model.library_attention import library_of
from worker_service.model.span_attention import kernels_of


class EagerReason(StrEnum):
    """One reason; its value is a label. The text of an exception is in the log alone."""

    NOT_ASKED = "not_asked"
    NO_GPU = "no_gpu"
    WEIGHTS_ON_HOST = "weights_on_host"
    ATTENTION_GATHERS = "attention_gathers"
    ATTENTION_PLANS = "attention_plans"
    TRANSFORMERS = "transformers"
    NO_MEMORY = "no_memory"
    RECORDING_FAILED = "recording_failed"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    EagerReason.NOT_ASKED: "graphs were not asked for (--enforce-eager)",
    EagerReason.NO_GPU: "the device is no GPU",
    EagerReason.WEIGHTS_ON_HOST: "weights come from the host in each step",
    EagerReason.ATTENTION_GATHERS: "decode attention gathers pages",
    EagerReason.ATTENTION_PLANS: "FlashInfer plans each step on the host",
    EagerReason.TRANSFORMERS: "transformers' code computes the model",
    EagerReason.NO_MEMORY: "the device memory has no room for graphs",
    EagerReason.RECORDING_FAILED: "a recording failed (see the log)",
}


# Share of the device-memory budget, and at most.
GRAPH_SHARE = 0.02
MOST_GRAPH_BYTES = 1 << 30


def graph_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    on_host: OnHost = NOTHING_ON_HOST,
    *,
    is_asked: bool = True,
) -> EagerReason | None:
    """Return why a model's decoding steps are not recorded; None: they are.

    On a GPU the first call compiles a kernel, which takes a second or two.
    """
    if device.type != "cuda":
        return EagerReason.NO_GPU
    if not is_asked:
        return EagerReason.NOT_ASKED
    if on_host != NOTHING_ON_HOST:
        return EagerReason.WEIGHTS_ON_HOST
    if kernels_of(device) is None:
        return EagerReason.ATTENTION_GATHERS
    library = library_of(device)
    if library is not None and library.has_kernel(dtype, head_dim):
        # Its plan fixes grids and splits for the lengths of one step.
        return EagerReason.ATTENTION_PLANS
    return None


def graph_bytes(budget_bytes: int) -> int:
    """Return the bytes of a device-memory budget that graphs may take."""
    return min(int(GRAPH_SHARE * budget_bytes), MOST_GRAPH_BYTES)


def graphs_of(
    cache: DeviceCache,
    windows: Iterable[int | None],
    *,
    max_batch_size: int,
    recorder: Recorder | None = None,
) -> DecodeGraphs | None:
    """Return the graphs of an engine with layers of these windows; None if its plan has none.

    `recorder`: None: the one of the cache's GPU.
    """
    if not cache.plan.graph_bytes:
        return None
    return DecodeGraphs(
        cache,
        windows,
        GraphRecorder(cache.device) if recorder is None else recorder,
        most_rows=max_batch_size + cache.plan.draft_tokens,
    )
