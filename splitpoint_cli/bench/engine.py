"""The one way in which benchmarks make models and ask engines, in this process and without gRPC.

Kernels are those that a worker on this host would choose, and the device's memory is exactly what
the sequences need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.worker import NUMERICS
from splitpoint.planning.plan import Residency
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import ArenaLayout, DataType, ModelShape, Numerics, chunks_of
from splitpoint.speculation import PLAIN, Speculation
from splitpoint_cli.bench.harness import MAX_BATCHED_TOKENS
from splitpoint_cli.bench.local_store import LocalStore
from worker_service.checkpoint.tensors import RandomTensors, TensorSource
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.memory import STAGING_PAGES, MemoryPlan, divide
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.kernels.choice import use_one_order
from worker_service.model.decoder import Decoder
from worker_service.profiling.calibration import prefers_one_order, use_kernels

# The longest sleep while a restore is under way: the store may have an answer, too.
_PAUSE_SECONDS = 1e-3


def use_worker_kernels(
    device: torch.device,
    data_type: DataType,
    head_dims: Collection[int],
    *,
    wish: str = AUTO,
    numerics: str = NUMERICS.default,
) -> str:
    """Choose as a worker does, before a model is made; return the choice for the report.

    `wish`: the worker's `--cpu-kernels`; `numerics`: its `--numerics`.
    Empty on a GPU, unless its kernels are those of one order.
    """
    if device.type != "cpu":
        is_invariant = numerics == Numerics.INVARIANT
        use_one_order(is_invariant)
        return "kernels of one order" if is_invariant else ""
    is_invariant = prefers_one_order(numerics)
    return str(
        use_kernels(TORCH_TYPES[data_type], wish, head_dims=head_dims, is_invariant=is_invariant)
    )


def make_model(
    shape: ModelShape,
    seed: int,
    device: torch.device,
    *,
    weights: TensorSource | None = None,
    on_host: OnHost = NOTHING_ON_HOST,
) -> Decoder:
    """Return a model in the shape's element type: with these weights, or random ones."""
    config, dtype = DecoderConfig.of_shape(shape), TORCH_TYPES[shape.data_type]
    source = weights or RandomTensors(config, seed, device, dtype)
    return Decoder(config, source, device, dtype, on_host)


def exact_memory(
    shape: ModelShape,
    layout: ArenaLayout,
    *,
    weight_bytes: int,
    batch: int,
    tokens: int,
    staging_pages: int = STAGING_PAGES,
    graph_bytes: int = 0,
    draft_tokens: int = 0,
    window_pages: int = 0,
) -> MemoryPlan:
    """Return a division with pages for `batch` resident sequences of `tokens` tokens."""

    def plan(budget: int) -> MemoryPlan:
        return divide(
            shape,
            layout,
            budget_bytes=budget,
            weight_bytes=weight_bytes,
            max_batch_size=batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            staging_pages=staging_pages,
            graph_bytes=graph_bytes,
            draft_tokens=draft_tokens,
            window_pages=window_pages,
        )

    # Any large budget tells what is fixed.
    roomy = plan(1 << 60)
    pages = max(batch * chunks_of(tokens, layout.chunk_tokens), roomy.streamed_page_count)
    return plan(roomy.weight_bytes + roomy.workspace_bytes + pages * roomy.page_bytes)


def admission_of(
    name: str,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    residency: Residency = Residency.RESIDENT,
    split_tokens: int = 0,
    speculation: Speculation = PLAIN,
    selection: Selection = FULL,
) -> Admission:
    """Return a greedy request for exactly `new_tokens` tokens, whose split stays."""
    return Admission(
        request_id=name,
        attempt=0,
        prompt=tuple(prompt),
        delivered=(),
        sampling=Sampling(max_tokens=new_tokens, ignore_eos=True),
        residency=residency,
        split_tokens=split_tokens,
        salt=b"",
        speculation=speculation,
        selection=selection,
    )


def outputs_until_idle(
    engine: Engine, store: LocalStore | None = None, *, in_turn: bool = False
) -> Iterator[StepOutput]:
    """Step until no request is left; yield what each step gave. Raises a request's error.

    Args:
        store: carries out what the engine asks of its store; None: the engine has none.
        in_turn: each step begins with what the store was asked before it. Otherwise a busy machine
            decides from which step on new chunks are in the store.
    """
    while True:
        output = engine.step()
        for finish in output.finishes:
            if finish.error is not None:
                raise finish.error
        yield output
        if store is not None:
            store.handle(output, engine.cache)
        if engine.is_idle:
            return
        if store is not None:
            waits = not output.ran and not engine.is_restoring
            for answer in store.all_answers() if in_turn else store.answers(wait=waits):
                engine.post(answer)
        if not engine.can_go_on(output):
            engine.wait(_PAUSE_SECONDS)
