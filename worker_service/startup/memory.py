"""Divides the device memory before anything is loaded: weights, drafts, pages and graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.checkpoint.support import read_decoder
from splitpoint.host.memory import memory_facts
from splitpoint.options.worker import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from splitpoint.planning.weight_placement import WeightPlacement, WeightSizes
from splitpoint.shapes import ArenaLayout, ModelShape
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.memory import (
    STAGING_PAGES,
    MemoryPlan,
    divide,
    grown_prefill,
    place,
    staging_pages_on_gpu,
)
from worker_service.graphs.eager_reason import EagerReason
from worker_service.graphs.support import graph_bytes, graph_obstacle
from worker_service.lanes.lanes import Lanes
from worker_service.profiling.profiler import measure_rates
from worker_service.startup.drafting import DraftSetup
from worker_service.startup.options import WorkerOptions
from worker_service.weights.matrices import weight_sizes


@dataclass(frozen=True, slots=True)
class DividedMemory:
    """The device memory, divided.

    Attributes:
        plan: without what the draft model needs.
        eager_reason: why decoding steps are not recorded as graphs.
    """

    placement: WeightPlacement
    plan: MemoryPlan
    drafts: DraftSetup
    max_batched_tokens: int
    eager_reason: EagerReason


def divide_memory(
    options: WorkerOptions,
    shape: ModelShape,
    layout: ArenaLayout,
    lanes: Lanes,
    artifact_bytes: int,
) -> DividedMemory:
    """Place the weights, and divide what they and artefacts leave. Raises ResourceExhausted."""
    device, folder = lanes.device, options.model_folder
    dtype = TORCH_TYPES[shape.data_type]
    config = read_decoder(folder, shape.data_type)
    sizes = weight_sizes(config, device, dtype, options.weights)
    budget = _budget(options, sizes, device) - artifact_bytes
    is_gpu = device.type == "cuda"
    drafts = DraftSetup.plan(
        options.speculation,
        folder,
        shape,
        layout,
        device,
        budget_bytes=budget,
        max_batch_size=options.max_batch_size,
        max_batched_tokens=options.max_batched_tokens,
        has_store=options.kvstore_address is not None,
    )
    budget -= drafts.model_bytes
    limits: dict[str, Any] = {
        "budget_bytes": budget,
        "draft_tokens": drafts.draft_tokens,
        "max_batch_size": options.max_batch_size,
        "max_batched_tokens": options.max_batched_tokens,
        "staging_pages": staging_pages_on_gpu(shape, layout, budget) if is_gpu else STAGING_PAGES,
        "has_store": options.kvstore_address is not None,
    }
    placement = place(shape, layout, sizes, **limits)
    if placement.streamed_bytes:
        rates = measure_rates(shape, lanes)
        placement = place(
            shape, layout, sizes, **limits, rates=rates, objective=options.weight_objective
        )
        limits["max_batched_tokens"] = grown_prefill(shape, layout, placement, rates, **limits)
    obstacle = graph_obstacle(
        device, dtype, shape.head_dim, placement.on_host, is_asked=not options.is_eager
    )
    plan = divide(
        shape,
        layout,
        weight_bytes=placement.device_bytes,
        graph_bytes=0 if obstacle else graph_bytes(budget),
        window_pages=drafts.window_pages(shape, layout),
        **limits,
    )
    return DividedMemory(
        placement, plan, drafts, limits["max_batched_tokens"], obstacle or EagerReason.NO_MEMORY
    )


def _budget(options: WorkerOptions, sizes: WeightSizes, device: torch.device) -> int:
    if options.device_memory_bytes is not None:
        return options.device_memory_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(GPU_MEMORY_SHARE * free)
    return sizes.total + int(CPU_MEMORY_SHARE * memory_facts().usable_bytes)
