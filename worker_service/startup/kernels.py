"""Chooses the kernels of a worker, and checks what the bits of its results depend on."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import AttentionConfig, read_decoder
from splitpoint.checkpoint.quantized import Quantization, panels_for
from splitpoint.config import format_rate
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.host.processor import spins_long
from splitpoint.options.cpu_kernels import with_panels
from splitpoint.shapes import ArenaLayout, ModelShape, Numerics
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.choice import describe_device
from worker_service.hardware.streams import make_current
from worker_service.kernels import panel_gemm
from worker_service.kernels.choice import Choice, use_one_order
from worker_service.kernels.compiled import NoKernels
from worker_service.lanes.lanes import Lanes
from worker_service.model.model import Model
from worker_service.model.span_attention import Variant, try_kernels
from worker_service.numerics.digest import facts_of, numerics_digest
from worker_service.numerics.self_check import dependence
from worker_service.numerics.verdict import WorkerNumerics, decide, obstacle
from worker_service.profiling.agreeing_rows import use_agreeing_rows
from worker_service.profiling.calibration import prefers_one_order, use_kernels
from worker_service.startup.drafting import head_dims
from worker_service.startup.options import WorkerOptions
from worker_service.weights.packing import kinds_of

log = logging.getLogger(__name__)


def kernel_wish(
    options: WorkerOptions, device: torch.device, quantization: Quantization | None
) -> str:
    """Return `--cpu-kernels`, as int8 weights and codes need them. Raises InvalidArgument."""
    what = panels_for(options.weights, quantization)
    if what is None:
        return options.cpu_kernels
    if device.type != "cpu":
        raise InvalidArgument(f"{what} is for CPU workers", field="weights")
    return with_panels(options.cpu_kernels, what)


def choose_kernels(
    options: WorkerOptions, shape: ModelShape, wish: str, quantization: Quantization | None
) -> Choice:
    """Choose the kernels of a CPU worker, and compile those it needs. Raises FailedPrecondition."""
    dtype = TORCH_TYPES[shape.data_type]
    kernels = use_kernels(
        dtype,
        wish,
        head_dims=head_dims(options.speculation, shape),
        is_invariant=prefers_one_order(options.numerics),
    )
    what = panels_for(options.weights, quantization)
    if what is not None:
        try:
            for kind in kinds_of(options.weights, quantization):
                panel_gemm.prepare(dtype, kind)
        except NoKernels as error:
            raise FailedPrecondition(f"{what}: {error}", reason="NO_INT8_KERNEL") from error
    return kernels


def obstacle_of(
    options: WorkerOptions,
    device: torch.device,
    config: AttentionConfig,
    layout: ArenaLayout,
    kernels: Choice | None,
) -> str | None:
    """Choose a GPU's kernels, and return what excludes invariant numerics before the check.

    `kernels`: a CPU's; None on a GPU.
    """
    is_gpu = kernels is None
    make_current(device)
    # Kernels of one order are variants of their own.
    use_one_order(is_gpu and options.numerics == Numerics.INVARIANT)
    return obstacle(
        options.numerics,
        is_gpu=is_gpu,
        encoding=layout.encoding,
        kernels=kernels,
        has_triton=is_gpu
        and try_kernels(device, attention_variants(options, config, layout)) is not None,
    )


def attention_variants(
    options: WorkerOptions, config: AttentionConfig, layout: ArenaLayout
) -> list[Variant]:
    """Return the attention kernels of the served model, and of the draft model if there is one.

    Raises InvalidArgument (the draft model's folder).
    """
    configs = [config]
    if options.speculation is not None and options.speculation.model is not None:
        configs.append(read_decoder(Path(options.speculation.model), layout.data_type))
    return [Variant.of(config, layout.chunk_tokens) for config in configs]


def agree_on_rows(products: set[tuple[int, int]], shape: ModelShape) -> None:
    """Let products `(out, in)` depend on no other rows, also where the kernels are torch's."""
    use_agreeing_rows(products, TORCH_TYPES[shape.data_type])


def numerics_of(wish: str, against: str | None, model: Model, page_tokens: int) -> WorkerNumerics:
    """Check the numerics. Those that are invariant have a digest."""
    make_current(model.device)
    check = partial(dependence, model, page_tokens)
    found = decide(wish, obstacle=against, check=check)
    log.info("numerics are %s: %s", found.numerics.value, found.reason)
    if found.numerics is not Numerics.INVARIANT:
        return found
    facts = facts_of(model, page_tokens)
    found = replace(found, digest=numerics_digest(facts))
    log.info("numerics digest %s", found.digest)
    # The logs show what differs between two workers that should be alike.
    log.debug("numerics digest %s is of %s", found.digest, facts)
    return found


def describe(lanes: Lanes, kernels: Choice | None = None) -> str:
    """Return the device, its kernels, and its emulated link if it has one."""
    description = describe_device(lanes.device)
    if kernels is not None:
        description += f", {kernels.text}, {_waiting()}"
    if lanes.link is not None:
        description += f", link emulated at {format_rate(lanes.link.bytes_per_second)}"
    return description


def _waiting() -> str:
    """Return how compute threads wait for each other (splitpoint/host/processor.py)."""
    spins = spins_long()
    if spins is None:
        return "threads wait as the user set"
    return "threads spin while they wait" if spins else "threads wait briefly, then sleep"
