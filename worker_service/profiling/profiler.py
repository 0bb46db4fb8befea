"""Measures a worker's own costs: the link, the rebuild, a prefill, a decode step.

The link is measured as restores use it, through the lanes: the profile describes an
emulated link, or a GPU's copy stream. Runs on the engine's thread between steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.costs.profile import Line, Profile, fit_line
from splitpoint.planning.schedule import Lane
from splitpoint.planning.weight_placement import StepRates
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import ModelShape
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.copies import copy
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.work import Work
from worker_service.model.decoder import Decoder
from worker_service.model.model import Layer, Model
from worker_service.pipeline.transfer import put_rows

COPY_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
# Sizes that suffice for a line if the last one took SLOW_COPY_SECONDS: noise is little of that.
ENOUGH_SIZES = 2
SLOW_COPY_SECONDS = 0.05
REBUILD_TOKENS = (64, 256, 512, 1024)
PREFILL_TOKENS = (32, 128, 256)
REPEATS = 5
# Seconds after which a measurement is not repeated.
MOST_SECONDS = 1.0
# Tokens of the pages that rebuilt rows are written into.
PAGE_TOKENS = 64
PROBE_VOCABULARY = 16


@torch.inference_mode()
def measure(
    model: Model, device: torch.device, description: str, *, lanes: Lanes | None = None
) -> Profile:
    """Measure a new profile; takes one or two seconds on a CPU.

    `lanes` must be idle; their link lane is measured. None measures the device's own link,
    without an emulated rate.
    """
    link = measure_link(device, lanes)
    rebuild = _measure_rebuild(model, device)
    prefill = _measure_prefill(model, device)
    return Profile(
        link_bytes_per_second=link.rate,
        link_overhead_seconds=link.overhead,
        rebuild_flops_per_second=rebuild.rate,
        rebuild_overhead_seconds=rebuild.overhead,
        prefill_flops_per_second=prefill.rate,
        prefill_overhead_seconds=prefill.overhead,
        step_compute_seconds=_measure_step(model, device),
        description=description,
        model=model.shape.name,
        device_type=device.type,
        host_weight_bytes=model.host_weight_bytes(),
        host_kv_weight_bytes=model.host_weight_bytes(WeightPiece.KEY_VALUE),
    )


@torch.inference_mode()
def measure_rates(shape: ModelShape, lanes: Lanes) -> StepRates:
    """Measure link and compute by one random layer, before the model is loaded."""
    one = replace(shape, layer_count=1, vocabulary_size=PROBE_VOCABULARY)
    dtype = TORCH_TYPES[shape.data_type]
    model = Decoder.random(DecoderConfig.of_shape(one), 0, lanes.device, dtype)
    prefill = _measure_prefill(model, lanes.device)
    return StepRates(
        link=measure_link(lanes.device, lanes).rate,
        base=prefill.overhead * shape.layer_count,
        token=shape.prefill_flops(1) / prefill.rate,
        # Its products are such as those of a prefill.
        rebuild=shape.layer_count * shape.rebuild_flops_per_token_layer / prefill.rate,
    )


def measure_link(device: torch.device, lanes: Lanes | None = None) -> Line:
    """Measure copies to the device on the link lane; from pinned memory on a GPU."""
    if lanes is None:
        own = lanes_of(device)
        try:
            return measure_link(device, own)
        finally:
            own.close()
    lanes.finish()  # weights may still have been on their way
    largest = COPY_BYTES[-1]
    # Written, because zeros that were never written are one page of the kernel, which no read of
    # memory takes part in.
    source = torch.ones(4 * largest, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(largest, dtype=torch.uint8, device=device)
    sizes: list[int] = []
    seconds: list[float] = []
    for size in COPY_BYTES:
        if len(sizes) >= ENOUGH_SIZES and seconds[-1] > SLOW_COPY_SECONDS:
            break
        for repeat in range(REPEATS + 1):
            # Another part of the source each time: a restore reads cold memory.
            first = repeat * size % (3 * largest)
            piece = source[first : first + size]
            call = partial(copy, target[:size], piece)
            lanes.run(Lane.LINK_IN, Work("measure", call, size, size))
        # The first one of each size warms up.
        timed = lanes.finish()[1:]
        sizes.append(size)
        seconds.append(statistics.median(span.seconds for span in timed))
    return fit_line(sizes, seconds)


def _measure_rebuild(model: Model, device: torch.device) -> Line:
    """Fit the GEMM `[l, h] x [h, 2 d_kv]` with norm, rotation, and writing into pages."""
    shape = model.shape
    counts = _counts(model, REBUILD_TOKENS)
    pages = range(-(-counts[-1] // PAGE_TOKENS))
    plane = torch.zeros(
        (len(pages), shape.kv_head_count, PAGE_TOKENS, shape.head_dim),
        dtype=TORCH_TYPES[shape.data_type],
        device=device,
    )
    seconds = [_rebuild_seconds(model, count, plane, pages) for count in counts]
    return _line([count * shape.rebuild_flops_per_token_layer for count in counts], seconds)


def _rebuild_seconds(model: Model, count: int, plane: torch.Tensor, pages: range) -> float:
    """Return the seconds to rebuild K and V of `count` tokens of one layer into pages."""
    inputs = torch.randn(count, model.shape.hidden_size, device=plane.device).to(plane.dtype)
    rotary = model.rotary(torch.arange(count, device=plane.device))
    with _usual_layer(model) as layer:

        def run() -> None:
            for rows in layer.project_kv(inputs, rotary):
                put_rows(plane, pages, rows)

        return _median_seconds(run, plane.device)


def _measure_prefill(model: Model, device: torch.device) -> Line:
    """Fit a piece of a prefill by one layer's linear work, without attention."""
    shape = model.shape
    counts = _counts(model, PREFILL_TOKENS)
    seconds = [_layer_seconds(model, count, device) * shape.layer_count for count in counts]
    return _line([shape.prefill_flops(count) for count in counts], seconds)


def _layer_seconds(model: Model, count: int, device: torch.device) -> float:
    """Return the seconds of `count` tokens in one layer's linear work, its weights present."""
    shape = model.shape
    hidden = torch.randn(count, shape.hidden_size, device=device)
    hidden = hidden.to(TORCH_TYPES[shape.data_type])
    rotary = model.rotary(torch.arange(count, device=device))
    with _usual_layer(model) as layer:

        def run() -> None:
            layer.work(hidden, rotary)

        return _median_seconds(run, device)


@contextmanager
def _usual_layer(model: Model) -> Iterator[Layer]:
    """Visit a layer like most others; weights on the host are copied first.

    The first layers of a mixture of experts may be dense.
    """
    kinds = [layer.structure for layer in model.layers]
    [(usual, _)] = Counter(kinds).most_common(1)
    with closing(model.visit()) as layers:
        yield next(islice(layers, kinds.index(usual), None))


def _measure_step(model: Model, device: torch.device) -> float:
    """Measure one token through all layers and the head: every weight once, no cache.

    With weights on the host, only the layers' compute is measured.
    """
    if not model.is_resident:
        return _layer_seconds(model, 1, device) * model.shape.layer_count
    token_ids = torch.zeros(1, dtype=torch.int64, device=device)

    def run() -> None:
        model.logits(model.run(token_ids, token_ids, _without_attention))

    return _median_seconds(run, device)


def _without_attention(
    _index: int,
    _layer: Layer,
    _inputs: torch.Tensor,
    queries: torch.Tensor,
    _keys: torch.Tensor,
    _values: torch.Tensor,
) -> torch.Tensor:
    """Let queries stand for what they attend; see `Attend`."""
    return queries.flatten(1)


def _counts(model: Model, wanted: tuple[int, ...]) -> list[int]:
    """Return the wanted counts that fit the context, or the context if none does."""
    context = model.shape.context_length
    return [count for count in wanted if count <= context] or [context]


def _line(amounts: list[int], seconds: list[float]) -> Line:
    if len(amounts) < 2:
        return Line(0.0, amounts[0] / seconds[0])
    return fit_line(amounts, seconds)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()
    samples: list[float] = []
    while len(samples) < REPEATS and sum(samples) < MOST_SECONDS:
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
