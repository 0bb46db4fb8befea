"""A host of `bench offload`: one model, one cache on the host, engines that decode from it.

Prompts are prefilled and stored once; every run then leases them and decodes, so that
what is timed is decoding and nothing else. The contenders share weights, device pages
and the store, and differ in their lanes, their split and where the cache lies.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.planning.weight_schedule import WeightOrder
from splitpoint.selection import FULL, UNUSED, Selection, SelectionUsage
from splitpoint.shapes import ArenaLayout, Encoding, ModelShape, chunks_of
from splitpoint.speculation import PLAIN, STEP_DRAFT_TOKENS, DraftMethod, Speculation
from splitpoint_cli.bench.engine import (
    admission_of,
    exact_memory,
    outputs_until_idle,
)
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS
from splitpoint_cli.bench.local_store import LocalStore
from splitpoint_cli.bench.offload_costs import BatchCosts
from splitpoint_cli.bench.offload_report import OffloadSample, OffloadWorkload, Step, StepPart
from splitpoint_cli.bench.texts import Prompts
from worker_service.device.cache import DeviceCache
from worker_service.device.choice import describe_device
from worker_service.device.memory import (
    STAGING_PAGES,
    MemoryPlan,
    draft_window_pages,
    staging_pages_on_gpu,
)
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.suffix import SuffixDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.lanes.lanes import EmulatedLink, Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import Span, StepTimes, Trace
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure
from worker_service.retrieval.selector import ScreensOf
from worker_service.speculation.self_draft import SelfDrafter
from worker_service.store.write_back import BATCH_CHUNKS


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: the order of a step, its split, and where cache and weights lie.

    Attributes:
        weights: the order of weights on the host, if there are any.
        selection: which of the stored tokens are read, or drafted by.
    """

    schedule: Schedule = Schedule.PIPELINED
    residency: Residency = Residency.STREAMED
    split_tokens: int = 0
    weights: WeightOrder = WeightOrder.FINE
    selection: Selection = FULL


STREAMED = Way()
ON_DEVICE = Way(residency=Residency.RESIDENT)


class OffloadHost:
    """Device pages, arena and engines of one model, and its store's encoding. Close it.

    Attributes:
        prompts: token ids of each sequence; stored once `prefill` ran.
        link: the emulated link, whose rate may be changed; None: the device's own.
        memory: how device memory is divided.
        profile: measured over the lanes that are used.
        trace: spans of every run.
    """

    def __init__(
        self,
        model: Decoder,
        workload: OffloadWorkload,
        encoding: Encoding = Encoding.NATIVE,
        link: EmulatedLink | None = None,
        prompts: Prompts | None = None,
        drafts: DraftMethod = DraftMethod.OFF,
        screens_of: ScreensOf | None = None,
        stores_inputs: bool = False,
    ) -> None:
        """See the class.

        Args:
            link: another host's, which both then use in turn; None: as the workload says.
            prompts: any number of them, of the workload's length; None: a batch of random ones.
            drafts: the method of the engine's drafter; with SELF streamed sequences keep a
                window on the device.
            screens_of: makes the screens of selections; None: of those without factors.
            stores_inputs: keep X, also where sending it can never pay.
        """
        _check_workload(model.shape, workload)
        self.device, self.shape, self._model = model.device, model.shape, model
        if link is None and workload.link_rate is not None:
            link = EmulatedLink(workload.link_rate)
        self.link = link
        self.prompts = _drawn_prompts(self.shape, workload) if prompts is None else prompts
        self._drafts, self._screens_of = drafts, screens_of
        self.trace = Trace({"device": str(self.device), "model": self.shape.name})
        self._workload = workload
        layout = ArenaLayout.of(
            self.shape,
            chunk_tokens=CHUNK_TOKENS,
            # The store's own choice: what can never pay is not kept.
            has_activations=stores_inputs or self.shape.activations_can_pay,
            encoding=encoding,
        )
        self.memory = self._divide(layout)
        _check_device(self.memory, self.device)
        self._cache = DeviceCache(layout, self.memory, self.device)
        ours = self._make_engine(Schedule.PIPELINED)
        self._engines = {Schedule.PIPELINED: ours}
        description = describe_device(self.device)
        self.profile: Profile = measure(model, self.device, description, lanes=ours.lanes)
        ours.watch_costs(self.profile)
        self.store = LocalStore(layout, self._slot_count(), self.device)
        self._run_count = 0

    @property
    def has_activations(self) -> bool:
        """True if layer inputs are stored, so that a split above zero is possible."""
        return self.store.layout.has_activations

    @property
    def refitted_profile(self) -> Profile:
        """The profile as the pipelined runs until now have changed it."""
        return self._engines[Schedule.PIPELINED].profile

    def close(self) -> None:
        for engine in self._engines.values():
            engine.lanes.close()
        self.store.close()

    def costs(self, cached: int, compute_seconds: float) -> BatchCosts:
        """Return the costs of a step with `cached` tokens in each sequence; see BatchCosts.

        By the refitted profile: steps read memory that no processor cache holds.
        """
        return BatchCosts(
            shape=self.shape,
            profile=self.refitted_profile,
            batch=len(self.prompts),
            cached=cached,
            has_activations=self.has_activations,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=self.memory.staging_pages * CHUNK_TOKENS,
            compute_seconds=compute_seconds,
        )

    def prefill(self) -> None:
        """Compute and store every prompt."""
        self.decode(1, ON_DEVICE)

    def decode(
        self,
        new_tokens: int,
        way: Way = STREAMED,
        *,
        prompts: Prompts | None = None,
        speculation: Speculation = PLAIN,
    ) -> OffloadSample:
        """Decode stored prompts together; None: all of them.

        Raises FailedPrecondition if a selection that reads less, or drafts, was not used.
        """
        engine, names = self._admit(prompts or self.prompts, new_tokens, way, speculation)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        steps: list[Step] = []
        times: list[StepTimes] = []
        parts: dict[str, float] = {}
        run = engine.trace = Trace()
        selected = UNUSED
        begun: float | None = None
        reached = used_bytes = counted = before = pulls = drafted = accepted = 0
        for output in outputs_until_idle(engine, self.store):
            now = time.perf_counter()
            used_bytes = max(used_bytes, output.cache_used_bytes)
            for finish in output.finishes:
                if finish.selection_off_reason and not way.selection.reads_all:
                    raise FailedPrecondition(
                        f"nothing was selected: {finish.selection_off_reason}", reason="NO_GAIN"
                    )
            for event in output.tokens:
                tokens[event.key[0]].append(event.choice.token_id)
            if begun is not None:
                counted += len(output.tokens)
                pulls += len({event.key for event in output.tokens})
                drafted += sum(each.drafted for each in output.drafts)
                accepted += sum(each.accepted for each in output.drafts)
            for each in output.selections:
                selected += each.usage
            if output.ran and engine.last_step is not None:
                times.append(engine.last_step)
            spans = run.take()
            self.trace.extend(spans)
            _add_parts(parts, spans)
            least = min(len(each) for each in tokens.values())
            # If a sequence had to wait for a page, the engine's next step is a part of this one.
            is_over = least > reached
            if is_over and begun is not None:
                steps.append(_step(now - begun, times, counted - before, selected, parts))
                before = counted
            if is_over:
                begun, reached, times, parts, selected = now, least, [], {}, UNUSED
        plan = engine.memory_plan
        return OffloadSample(
            steps=tuple(steps),
            tokens=tuple(tuple(tokens[name]) for name in names),
            device_bytes=plan.weight_bytes + plan.workspace_bytes + used_bytes,
            token_count=counted,
            pull_count=pulls,
            drafted=drafted,
            accepted=accepted,
        )

    def engine(self, schedule: Schedule) -> Engine:
        """Return the engine whose steps have this order; its staging exists from then on."""
        if schedule not in self._engines:
            self._engines[schedule] = self._make_engine(schedule)
            self._engines[schedule].watch_costs(self.profile)
        return self._engines[schedule]

    # -- below ---------------------------------------------------------------------------

    def _admit(
        self, prompts: Prompts, new_tokens: int, way: Way, speculation: Speculation
    ) -> tuple[Engine, list[str]]:
        """Admit a request for each prompt; return the engine to step, and the requests' names."""
        engine = self.engine(way.schedule)
        self._model.use_lanes(engine.lanes)
        if self._model.layer_weights is not None:
            self._model.layer_weights.portions = way.weights.portions
        self._run_count += 1
        names = [f"{self._run_count}.{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            admission = admission_of(
                name,
                prompt,
                new_tokens,
                residency=way.residency,
                split_tokens=way.split_tokens,
                speculation=speculation,
                selection=way.selection,
            )
            engine.admit(admission, self.store.match(admission.key, prompt))
        return engine, names

    def _make_engine(self, schedule: Schedule) -> Engine:
        workload, cache = self._workload, self._cache
        if schedule is Schedule.COLUMN:
            # KVPR holds a layer of a batch at once, one after the other: X, K and V of such a tile.
            at_once = workload.micro_batch or workload.batch
            tile = at_once * chunks_of(workload.prompt + workload.new, CHUNK_TOKENS)
            cache = copy.copy(cache)
            cache.plan = self._divide(cache.layout, 3 * tile)
        lanes = lanes_of(self.device, overlapped=schedule is not Schedule.SERIAL, link=self.link)
        lanes.schedule = schedule
        return Engine(
            self._model,
            cache,
            max_batch_size=workload.batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            lanes=lanes,
            # Each run computes or reads its prompts; the engines' pages are the same.
            shares_prefixes=False,
            drafters=self._drafters(cache, lanes),
            screens_of=self._screens_of,
        )

    def _drafters(
        self, cache: DeviceCache, lanes: Lanes
    ) -> Mapping[DraftMethod, Drafter[EngineSequence]]:
        """Return the drafter of the host's method; none if that is OFF."""
        match self._drafts:
            case DraftMethod.OFF:
                return {}
            case DraftMethod.SELF:
                return {DraftMethod.SELF: SelfDrafter(self._model, cache, lanes)}
            case DraftMethod.SUFFIX:
                return {DraftMethod.SUFFIX: SuffixDrafter()}
            case _:
                raise InvalidArgument(
                    f"this benchmark has no drafter {self._drafts.value!r}", field="speculate"
                )

    def _divide(self, layout: ArenaLayout, staging_pages: int = 0) -> MemoryPlan:
        """Return a division with exactly the pages that the resident reference needs.

        `staging_pages`: 0: as many as a worker has.
        """
        staging = staging_pages or STAGING_PAGES
        if not staging_pages and self.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self.device)
            staging = staging_pages_on_gpu(self.shape, layout, total)
        drafts = self._drafts is not DraftMethod.OFF
        is_self = self._drafts is DraftMethod.SELF
        return exact_memory(
            self.shape,
            layout,
            weight_bytes=self._model.weight_bytes,
            batch=self._workload.batch,
            tokens=self._workload.prompt + self._workload.new,
            staging_pages=staging,
            draft_tokens=STEP_DRAFT_TOKENS if drafts else 0,
            window_pages=draft_window_pages(self.shape, CHUNK_TOKENS) if is_self else 0,
        )

    def _slot_count(self) -> int:
        """Return room for the prompts and one run's chunks; those of earlier runs are evicted."""
        workload = self._workload
        prompt = chunks_of(workload.prompt, CHUNK_TOKENS)
        new = chunks_of(workload.new, CHUNK_TOKENS) + 1
        return len(self.prompts) * prompt + workload.batch * new + BATCH_CHUNKS


def _check_workload(shape: ModelShape, workload: OffloadWorkload) -> None:
    """Raise InvalidArgument if the sequences are longer than the context."""
    if workload.prompt + workload.new > shape.context_length:
        raise InvalidArgument(
            f"{workload.prompt} prompt and {workload.new} new tokens are more than the context "
            f"of {shape.name}, {shape.context_length}",
            field="prompt",
        )


def _check_device(plan: MemoryPlan, device: torch.device) -> None:
    """Raise ResourceExhausted if the reference's cache does not fit beside the loaded weights."""
    if device.type != "cuda":
        return
    needed = plan.budget_bytes - plan.weight_bytes
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ResourceExhausted(
            f"the resident reference needs {format_size(needed)} of device memory, "
            f"{format_size(free)} are free: take a smaller batch or prompt",
            reason="DEVICE_MEMORY",
        )


def _drawn_prompts(shape: ModelShape, workload: OffloadWorkload) -> Prompts:
    """Return prompts of equal length, drawn from the seed."""
    generator = torch.Generator().manual_seed(workload.seed)
    size = (workload.batch, workload.prompt)
    drawn = torch.randint(shape.vocabulary_size, size, generator=generator)
    return tuple(tuple(row) for row in drawn.tolist())


# What spans of the compute lane are part of; others are left out.
_COMPUTING = {
    "rebuild": StepPart.REBUILD,
    "embed": StepPart.REBUILD,
    "attend": StepPart.ATTENTION,
    "write": StepPart.ATTENTION,
    "project": StepPart.PRODUCTS,
    "output": StepPart.PRODUCTS,
    "finish": StepPart.PRODUCTS,
}
_COPYING = {"load K,V": StepPart.LINK_KEYS, "send X": StepPart.LINK_INPUTS}


def _add_parts(parts: dict[str, float], spans: Sequence[Span]) -> None:
    """Add the seconds of each part of a step."""
    for span in spans:
        part = (_COMPUTING if span.lane is Lane.COMPUTE else _COPYING).get(span.name)
        if span.lane is Lane.WEIGHTS_IN:
            part = StepPart.LINK_WEIGHTS
        if part is not None:
            parts[part] = parts.get(part, 0.0) + span.seconds


def _step(
    seconds: float,
    times: Sequence[StepTimes],
    token_count: int,
    selected: SelectionUsage,
    parts: Mapping[str, float],
) -> Step:
    """Return a step of the batch: one of the engine, or more if a sequence waited."""
    predicted = [each.predicted_seconds for each in times]
    known = [each for each in predicted if each is not None]
    return Step(
        seconds=seconds,
        predicted_seconds=sum(known) if known and len(known) == len(predicted) else None,
        link_bytes=sum(each.link_bytes for each in times),
        link_seconds=sum(each.link_busy for each in times),
        token_count=token_count,
        selected=selected,
        parts=parts,
    )
