"""Which kernels are fastest on this host: measured once, then read from a file by all its workers.

No processor's kind decides alone: what wins on one kind loses on another. A file keeps the first
measurement, so that equal workers compute equal bits, also after a restart. It belongs to all that
the measurement depends on: one processor, one torch, one version of the kernels, and whether C++
kernels can be had; anything else is measured again, and has another file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from splitpoint.host.processor import AMX_BF16, AVX512, instruction_sets, processor_name
from splitpoint.shapes import Numerics
from worker_service.kernels import paged_attention, panel_gemm
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, by_flags, use
from worker_service.kernels.compiled import NoKernels, cache_folder, locked, source_digest
from worker_service.model import attention
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.linear import Linear
from worker_service.weights.packing import Matrix

log = logging.getLogger(__name__)


Facts = Mapping[str, object]
Kept = TypeVar("Kept")


def host_facts(file_format: int, dtype: torch.dtype, **others: object) -> Facts:
    """Return the facts of a measurement with this type on this host."""
    return {
        "format": file_format,
        "processor": processor_name(),
        "flags": sorted(instruction_sets()),
        "torch": torch.__version__,
        "type": str(dtype),
        **others,
    }


def path_of(name: str, facts: Facts) -> Path:
    """Return the file of a measurement of this name with these facts. Raises NoKernels."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    return cache_folder() / f"{name}-{digest}.json"


def kept(path: Path, facts: Facts, parsed: Callable[[dict[str, Any]], Kept]) -> Kept | None:
    """Return what `parsed` makes of a file of these facts; None if there is none, or it is damaged.

    Any error of `parsed` means that the file is damaged.
    """
    try:
        record = json.loads(path.read_text())
        return parsed(record) if record["facts"] == facts else None
    except FileNotFoundError:
        return None
    except Exception as error:
        log.warning("%s is damaged (%s): measured again", path, error)
        return None


def keep(path: Path, facts: Facts, **measured: object) -> None:
    """Write the file of these facts, whole or not at all.

    A disk that is full costs the file and not what was measured: others measure it again.
    """
    working = path.with_suffix(f".{os.getpid()}")
    try:
        working.write_text(json.dumps({"facts": facts, **measured}, indent=1))
        working.rename(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path, error)
    finally:
        with suppress(OSError):
            working.unlink(missing_ok=True)


FORMAT = 3
AUTO = "auto"
BY_FLAGS = "flags"

# A batch of a small model: what it reads does not stay in caches.
_SEQUENCES, _TOKENS, _HEADS, _HEAD_DIM, _CHUNK = 8, 512, 12, 64, 64
_PROMPT = 512
_SIDE, _MATRICES, _ROWS = 2048, 4, 8
# Layouts of weights are weighed by 8 answers of 128 tokens to prompts of 512.
_STEPS, _PROMPTS = 128, 8
# A round calls each kernel once; the least seconds count, which other load disturbs least.
_ROUNDS = 5
_SECONDS = 0.3
# Share of the time that another kernel than the usual one must save.
_GAIN = 0.1

_CPU = torch.device("cpu")
Seconds = Mapping[str, float]


def prefers_one_order(wish: str) -> bool:
    """Return whether a worker with this `--numerics` uses the kernels of one order.

    Where they are the fastest by far, a calibration on a busy host must not decide for others.
    Elsewhere it has to say.
    """
    return wish == Numerics.INVARIANT or (wish != Numerics.FAST and _wins_by_flags())


def _wins_by_flags() -> bool:
    """Return True if C++ kernels are faster than torch's on this processor, whatever is measured.

    They were with vectors of 512 bits. torch's may have tiles to multiply with, and with shorter
    vectors oneDNN's products of many rows are about as fast.
    """
    flags = instruction_sets()
    return AVX512 in flags and AMX_BF16 not in flags


def use_kernels(
    dtype: torch.dtype,
    wish: str = AUTO,
    *,
    head_dims: Collection[int] = (_HEAD_DIM,),
    is_invariant: bool = False,
) -> Choice:
    """Choose the kernels of this process for weights and pages of this type; return them.

    Args:
        head_dims: of all models of the process; a kernel that cannot be had for each of them
            is not used.
        wish: `auto` (measured once per host), `flags` (by instruction sets, without a
            compiler), or kernels by name, such as `decode=products`, beside those of `auto`.
        is_invariant: numerics should be (`prefers_one_order`): where there is a compiler, kernels
            of one order are used instead of measured ones, unless others are wished for by name.
            So are weights in panels on processors with AVX-512 and without AMX.

    Raises InvalidArgument for another wish.
    """
    flags = by_flags(dtype, instruction_sets())
    if wish == BY_FLAGS:
        choice = flags
    else:
        if wish != AUTO:
            flags.parsed(wish)  # a typing error costs no measurement
        rule = _of_one_order(dtype, flags, head_dims) if is_invariant else None
        choice = rule or _calibrated(dtype, flags)
        if wish != AUTO:
            choice = choice.parsed(wish)
    choice = _available(choice, flags, dtype, head_dims)
    use(choice)
    log.info("kernels for %s: %s", str(dtype).removeprefix("torch."), choice)
    return choice


def _available(
    choice: Choice, flags: Choice, dtype: torch.dtype, head_dims: Collection[int]
) -> Choice:
    """Compile and load what was chosen; return torch's operators for what cannot be had."""
    if choice.decode is Decode.FUSED or choice.prefill is Prefill.FUSED:
        try:
            for head_dim in head_dims:
                paged_attention.prepare(head_dim, dtype)
        except NoKernels as error:
            log.warning("attention by torch's operators: %s", error)
            is_fused = choice.prefill is Prefill.FUSED
            prefill = flags.prefill if is_fused else choice.prefill
            choice = replace(choice, decode=Decode.PRODUCTS, prefill=prefill)
    if choice.linear is Layout.PANELS:
        try:
            panel_gemm.prepare(dtype)
        except NoKernels as error:
            log.warning("weights in oneDNN's blocks: %s", error)
            choice = replace(choice, linear=Layout.PACKED)
    return choice


def _of_one_order(dtype: torch.dtype, flags: Choice, head_dims: Collection[int]) -> Choice | None:
    """Return the kernels of invariant numerics; None if this host cannot have them.

    A measurement under load could give another layout on another host, or after a restart, so
    it decides only where the processor's flags cannot.
    """
    if not _has_compiled(dtype, head_dims):
        return None
    layout = Layout.PANELS if _wins_by_flags() else _calibrated(dtype, flags).linear
    return Choice(Decode.FUSED, Prefill.FUSED, layout)


def _calibrated(dtype: torch.dtype, usual: Choice) -> Choice:
    """Return the host's choice, from its file or measured now."""
    try:
        # A compiler that is installed later counts.
        has_compiled = _has_compiled(dtype, [_HEAD_DIM])
        kernels = source_digest()
        facts = host_facts(FORMAT, dtype, has_compiled=has_compiled, kernels=kernels)
        path = path_of("kernels", facts)
        with locked(path.parent, "calibrating"):
            choice = kept(path, facts, lambda record: usual.parsed(record["choice"]))
            if choice is None:
                log.info("measuring kernels, once for this host")
                choice = measured(dtype, usual, has_compiled=has_compiled)
                keep(path, facts, choice=str(choice))
        return choice
    except (NoKernels, OSError) as error:
        log.warning("kernels are chosen by the processor's flags: %s", error)
        return usual


def _has_compiled(dtype: torch.dtype, head_dims: Collection[int]) -> bool:
    """Return whether this host can have the C++ kernels; compiles them if they are not there."""
    try:
        for head_dim in head_dims:
            paged_attention.prepare(head_dim, dtype)
        panel_gemm.prepare(dtype)
    except NoKernels as error:
        log.warning("torch's operators alone: %s", error)
        return False
    return True


@torch.inference_mode()
def measured(dtype: torch.dtype, usual: Choice, *, has_compiled: bool) -> Choice:
    """Return the fastest kernels for this type, in about a second."""
    began = time.perf_counter()
    kernels = [kernel for kernel in Decode if has_compiled or kernel is not Decode.FUSED]
    decode = chosen(_timed("decode", _decodes(dtype, usual, kernels)), Decode.FUSED.value)
    ways = [kernel for kernel in Prefill if has_compiled or kernel is not Prefill.FUSED]
    prefill_usual = Prefill.FUSED if has_compiled else usual.prefill
    prefill = chosen(_timed("prefill", _prefills(dtype, usual, ways)), prefill_usual.value)
    layouts = [layout for layout in Layout if has_compiled or layout is not Layout.PANELS]
    by_step = _timed("linear, decode", _linears(dtype, usual, layouts, _ROWS, _MATRICES))
    # One matrix, since it takes long, as if there were as many.
    by_prompt = _timed("linear, prefill", _linears(dtype, usual, layouts, _PROMPT, 1))
    linear = chosen(
        {name: _STEPS * by_step[name] + _PROMPTS * _MATRICES * by_prompt[name] for name in by_step},
        Layout.PANELS.value,
    )
    use(None)
    log.info("kernels measured in %.2g s", time.perf_counter() - began)
    return Choice(Decode(decode), Prefill(prefill), Layout(linear))


def _timed(purpose: str, calls: Mapping[str, Callable[[], object]]) -> Seconds:
    """Return the least seconds of each call."""
    for call in calls.values():
        call()
    seconds = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + _SECONDS, 0
    while rounds < _ROUNDS or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    listed = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items())
    log.info("%s: %s", purpose, listed)
    return seconds


def chosen(seconds: Seconds, usual: str) -> str:
    """Return the fastest name; the usual one, if it is there and nearly as fast."""
    best = min(seconds, key=lambda name: seconds[name])
    if usual in seconds and seconds[best] > (1 - _GAIN) * seconds[usual]:
        return usual
    return best


def _decodes(
    dtype: torch.dtype, usual: Choice, kernels: Collection[Decode]
) -> dict[str, Callable[[], object]]:
    chunks = _TOKENS // _CHUNK
    shape = (_SEQUENCES * chunks, _HEADS, _CHUNK, _HEAD_DIM)
    keys, values = (torch.ones(shape, dtype=dtype) for _ in range(2))
    queries = torch.ones(_SEQUENCES, _HEADS, _HEAD_DIM, dtype=dtype)
    tables = [range(first, first + chunks) for first in range(0, shape[0], chunks)]

    def call_of(kernel: Decode) -> Callable[[], object]:
        use(usual.parsed(f"decode={kernel.value}"))
        plan = DecodePlan.of_sequences(
            tables, [_TOKENS] * _SEQUENCES, chunk_tokens=_CHUNK, windows=[None], device=_CPU
        )
        return lambda: attention.decode_partial(queries, keys, values, plan, window=None, scale=0.1)

    return {kernel.value: call_of(kernel) for kernel in kernels}


def _prefills(
    dtype: torch.dtype, usual: Choice, kernels: Collection[Prefill]
) -> dict[str, Callable[[], object]]:
    queries, keys, values = (torch.ones(_PROMPT, _HEADS, _HEAD_DIM, dtype=dtype) for _ in range(3))
    pages = 1 + _PROMPT // _CHUNK
    pool = torch.ones(pages, _HEADS, _CHUNK, _HEAD_DIM, dtype=dtype)

    def call_of(kernel: Prefill) -> Callable[[], object]:
        choice = usual.parsed(f"prefill={kernel.value}")
        use(choice)
        plan = PrefillPlan.of_prefix(
            range(pages), _CHUNK, _PROMPT, chunk_tokens=_CHUNK, windows=[None], device=_CPU
        )

        def call() -> torch.Tensor:
            use(choice)
            return attention.prefill(
                queries, keys, values, pool, pool, plan, window=None, scale=0.1
            )

        return call

    return {kernel.value: call_of(kernel) for kernel in kernels}


def _linears(
    dtype: torch.dtype, usual: Choice, layouts: Collection[Layout], row_count: int, matrices: int
) -> dict[str, Callable[[], object]]:
    rows = torch.ones(row_count, _SIDE, dtype=dtype)

    def call_of(layout: Layout) -> Callable[[], object]:
        use(usual.parsed(f"linear={layout.value}"))
        weights = torch.ones(_SIDE, _SIDE, dtype=dtype)
        layers = [Linear(Matrix(weights.clone())) for _ in range(matrices)]
        return lambda: [layer(rows) for layer in layers]

    return {layout.value: call_of(layout) for layout in layouts}
