"""Engines whose weights exceed their device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_runner import CPU, make_engine

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.shapes import ArenaLayout
from worker_service.device.memory import place
from worker_service.engine.engine import Engine
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Trace
from worker_service.model.decoder import Decoder
from worker_service.weights.matrices import weight_sizes

# Enough of them for two slots to be little.
LAYERS = 16
CHUNK_TOKENS = 2
LIMITS: Any = {"max_batch_size": 4, "max_batched_tokens": 4, "has_store": False}


def total_bytes(folder: Path, device: torch.device = CPU) -> int:
    """Return the bytes of the weights, as a worker holds them."""
    return weight_sizes(read_decoder(folder), device, torch.float32).total


def small_engine(folder: Path, lanes: Lanes, share: float = 4.0) -> Engine:
    """With a budget that the weights exceed `share` times, and a trace."""
    device, config = lanes.device, read_decoder(folder)
    budget = int(total_bytes(folder, device) / share)
    layout = ArenaLayout.of(config.shape, chunk_tokens=CHUNK_TOKENS, has_activations=False)
    sizes = weight_sizes(config, device, torch.float32)
    placement = place(config.shape, layout, sizes, budget_bytes=budget, **LIMITS)
    engine = make_engine(
        Decoder.load(folder, device, torch.float32, placement.on_host),
        chunk_tokens=CHUNK_TOKENS,
        device_memory_bytes=budget,
        device=device,
        lanes=lanes,
        **LIMITS,
    )
    engine.trace = Trace()
    return engine
