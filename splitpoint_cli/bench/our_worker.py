"""Our side of `bench decode`: the engine, plain or with drafts, without gRPC or a store."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.options.cpu_kernels import AUTO, with_panels
from splitpoint.shapes import ArenaLayout, DataType, WeightFormat
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from splitpoint_cli.bench.decode_report import Parts, Run, Workload
from splitpoint_cli.bench.engine import (
    admission_of,
    exact_memory,
    outputs_until_idle,
    use_worker_kernels,
)
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS
from splitpoint_cli.bench.texts import Prompts
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.choice import choose_device
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.suffix import SuffixDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.sequence import Sequence
from worker_service.graphs.support import MOST_GRAPH_BYTES, graph_obstacle, graphs_of
from worker_service.model.decoder import Decoder
from worker_service.model.model import Attend, CarryOut, Enter, Model, at_once
from worker_service.speculation.model_draft import DraftModel

# A draft model's memory is divided from this; it takes what it needs.
_DRAFT_BUDGET_BYTES = 1 << 32


def load_decoder(
    folder: Path, workload: Workload, weights: WeightFormat = WeightFormat.NATIVE
) -> Decoder:
    """Return the checkpoint's model in the workload's element type, on its device.

    Raises FailedPrecondition if there is no kernel for weights in this format.
    """
    data_type, device = DataType(workload.dtype), choose_device(workload.device)
    folders = [folder, *([Path(workload.draft_model)] if workload.draft_model else [])]
    head_dims = [read_decoder(each, data_type).shape.head_dim for each in folders]
    # int8 weights only change where the weights lie, which a model keeps from its start.
    wish = with_panels(AUTO) if weights.is_lossy else AUTO
    use_worker_kernels(device, data_type, head_dims, wish=wish)
    return Decoder.load(folder, device, TORCH_TYPES[data_type], weights=weights)


Result = TypeVar("Result")


@dataclass(slots=True)
class TimedStep:
    """A decode step of all sequences: when its model began, and seconds in two of its parts."""

    began: float
    products: float = 0.0
    attention: float = 0.0


class TimedModel:
    """A model that notes how long the parts of its decode steps take, while it is told to.

    Attributes:
        steps: so far, in order; None: a step with other rows. Nothing is noted while it is None.
    """

    def __init__(self, model: Model, rows: int) -> None:
        """`rows`: of a decode step."""
        self._model, self._rows = model, rows
        self.steps: list[TimedStep | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _timed(self, part: str, call: Callable[..., Result], *args: Any) -> Result:
        step = self.steps[-1] if self.steps else None
        if step is None:
            return call(*args)
        began = time.perf_counter()
        result = call(*args)
        setattr(step, part, getattr(step, part) + time.perf_counter() - began)
        return result

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        carry_out: CarryOut = at_once,
        enter: Enter | None = None,
    ) -> torch.Tensor:
        """See `Model`."""
        if self.steps is None:
            return self._model.run(token_ids, positions, attend, carry_out, enter)
        is_decode = len(token_ids) == self._rows
        self.steps.append(TimedStep(time.perf_counter()) if is_decode else None)

        def timed(name: str, index: int, call: Callable[[], Result]) -> Result:
            return carry_out(name, index, partial(self._timed, "products", call))

        attend = partial(self._timed, "attention", attend)
        return self._model.run(token_ids, positions, attend, timed, enter)

    def head(self, final: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._timed("products", self._model.head, final)


def parts_of(steps: Iterable[TimedStep | None]) -> Parts | None:
    """Return medians over the steps that another decode step follows; None: there are none."""
    found = [
        (step.products, step.attention, following.began - step.began)
        for step, following in pairwise(steps)
        if step is not None and following is not None
    ]
    if not found:
        return None
    products, attention, rest = (
        statistics.median(each)
        for each in zip(*((one, two, whole - one - two) for one, two, whole in found), strict=True)
    )
    return Parts(products, attention, rest)


class OurWorker:
    """The engine with the settings it has by default, and with drafts of one method."""

    def __init__(
        self,
        model: Model,
        workload: Workload,
        method: DraftMethod = DraftMethod.OFF,
        folder: Path | None = None,
    ) -> None:
        """`folder`: the checkpoint of `model`; drafts need it."""
        self._speculation = PLAIN
        drafters: Mapping[DraftMethod, Drafter[Sequence]] = {}
        if method is not DraftMethod.OFF and folder is not None:
            self._speculation = Speculation(method, workload.speculative_tokens)
            drafters = _drafters(model, workload, folder)
        dtype = TORCH_TYPES[DataType(workload.dtype)]
        layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK_TOKENS, has_activations=False)
        # A page more of each sequence than its tokens fill.
        memory = exact_memory(
            model.shape,
            layout,
            weight_bytes=model.weight_bytes,
            batch=workload.batch,
            tokens=workload.prompt + workload.new + CHUNK_TOKENS,
            graph_bytes=0
            if graph_obstacle(model.device, dtype, model.shape.head_dim)
            else MOST_GRAPH_BYTES,
            draft_tokens=STEP_DRAFT_TOKENS if drafters else 0,
        )
        cache = DeviceCache(layout, memory, model.device)
        self._batch = workload.batch
        self._timed = TimedModel(model, workload.batch)
        windows = [layer.window for layer in model.layers]
        self._engine = Engine(
            cast(Model, self._timed),
            cache,
            graphs=graphs_of(cache, windows, max_batch_size=workload.batch),
            max_batch_size=workload.batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            # Each run computes its prompts.
            shares_prefixes=False,
            drafters=drafters,
        )
        self._tenants = itertools.count()
        self._temperature = workload.temperature

    def parts(self, prompts: Prompts, new_tokens: int) -> Parts | None:
        """Return the parts of a decode step, of a run of its own.

        None: too few steps, or a GPU, which computes later and replays graphs.
        """
        if self._timed.device.type != "cpu":
            return None
        self._timed.steps = []
        try:
            self.run(prompts, new_tokens)
            return parts_of(self._timed.steps)
        finally:
            self._timed.steps = None

    def run(self, prompts: Prompts, new_tokens: int) -> Run:
        engine = self._engine
        # Drafts must not come from the same answers of an earlier run.
        tenant = str(next(self._tenants)).encode()
        tokens: dict[str, list[int]] = {}
        first_seconds, before, drafted, accepted = 0.0, 0, 0, 0
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            admission = admission_of(str(index), prompt, new_tokens)
            sampling = replace(admission.sampling, temperature=self._temperature, seed=index)
            engine.admit(
                replace(admission, sampling=sampling, speculation=self._speculation, salt=tenant)
            )
        for output in outputs_until_idle(engine):
            for event in output.tokens:
                tokens.setdefault(event.key[0], []).append(event.choice.token_id)
            drafted += sum(each.drafted for each in output.drafts)
            accepted += sum(each.accepted for each in output.drafts)
            if not before and len(tokens) == len(prompts):
                first_seconds = time.perf_counter() - started
                before = sum(len(each) for each in tokens.values())
        seconds = time.perf_counter() - started
        ordered = tuple(tuple(tokens[str(index)]) for index in range(len(prompts)))
        return Run(seconds, first_seconds, before, ordered, drafted, accepted)


def _drafters(
    model: Model, workload: Workload, folder: Path
) -> dict[DraftMethod, Drafter[Sequence]]:
    """Return the drafters of a resident engine: suffixes, and the draft model if one is named."""
    drafters: dict[DraftMethod, Drafter[Sequence]] = {DraftMethod.SUFFIX: SuffixDrafter()}
    if workload.draft_model:
        plan = DraftModel.plan(
            Path(workload.draft_model),
            Path(workload.model) if workload.model else folder,
            model.shape,
            model.device,
            chunk_tokens=CHUNK_TOKENS,
            budget_bytes=_DRAFT_BUDGET_BYTES,
            max_batch_size=workload.batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        drafters[DraftMethod.MODEL] = plan.load()
    return drafters
