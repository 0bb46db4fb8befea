"""Measures a worker's own costs: copies, the rebuild GEMM, a prefill.

KVPR profiles once at start (Section 4.2 there); so does this. Runs on the
engine's thread between steps, since it uses the same device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from splitpoint.costs import Line, Profile, fit_line
from worker_service.device_cache import TORCH_TYPES
from worker_service.model.decoder import Decoder

COPY_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
REBUILD_TOKENS = (64, 256, 512, 1024)
PREFILL_TOKENS = 256
REPEATS = 5


@torch.inference_mode()
def measure(model: Decoder, device: torch.device, description: str) -> Profile:
    """A fresh profile; takes about a second on a CPU."""
    link = _measure_link(device)
    rebuild = _measure_rebuild(model, device)
    return Profile(
        link_bytes_per_second=link.rate,
        link_overhead_seconds=link.overhead,
        rebuild_flops_per_second=rebuild.rate,
        rebuild_overhead_seconds=rebuild.overhead,
        prefill_flops_per_second=_measure_prefill(model, device),
        description=description,
    )


def _measure_link(device: torch.device) -> Line:
    """Host-to-device copies at several sizes; from pinned memory on a GPU."""
    largest = COPY_BYTES[-1]
    source = torch.zeros(4 * largest, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(largest, dtype=torch.uint8, device=device)
    seconds = []
    for size in COPY_BYTES:
        offset = 0

        def copy(size: int = size) -> None:
            nonlocal offset
            # Another part of the source each time: a restore reads cold memory.
            offset = (offset + size) % (3 * largest)
            target[:size].copy_(source[offset : offset + size])

        seconds.append(_median_seconds(copy, device))
    return fit_line(COPY_BYTES, seconds)


def _measure_rebuild(model: Decoder, device: torch.device) -> Line:
    """The GEMM `[l, h] x [h, 2 d_kv]` with norm and rotation, at several l."""
    shape = model.shape
    counts = [count for count in REBUILD_TOKENS if count <= shape.context_length]
    seconds = []
    for count in counts:
        inputs = torch.randn(count, shape.hidden_size, device=device).to(
            TORCH_TYPES[shape.data_type]
        )
        rotary = model.rotary(torch.arange(count, device=device))
        layer = model.layers[0]
        rebuild = partial(layer.project_kv, inputs, rotary)
        seconds.append(_median_seconds(rebuild, device))
    flops = [count * shape.rebuild_flops_per_token_layer for count in counts]
    if len(counts) < 2:
        return Line(0.0, flops[0] / seconds[0])
    return fit_line(flops, seconds)


def _measure_prefill(model: Decoder, device: torch.device) -> float:
    """FLOP/s of a layer's linear work at a prefill's width, attention left out."""
    shape = model.shape
    count = min(PREFILL_TOKENS, shape.context_length)
    hidden = torch.randn(count, shape.hidden_size, device=device).to(TORCH_TYPES[shape.data_type])
    rotary = model.rotary(torch.arange(count, device=device))
    layer = model.layers[0]

    def run() -> None:
        queries, _, _ = layer.project(layer.attention_input(hidden), rotary)
        layer.finish(hidden, queries.reshape(count, -1))

    seconds = _median_seconds(run, device) * shape.layer_count
    return shape.prefill_flops(count) / seconds


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()
    samples = []
    for _ in range(REPEATS):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
