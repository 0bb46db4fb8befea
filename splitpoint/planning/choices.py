"""The ways to bring one prefix back, what each would take, and which one is best.

Loading everything, the best split, token ids from the front: each a Choice with its
seconds. Two objectives compare them. LATENCY: the seconds of this restore, or of a
decode step when the cache is streamed. THROUGHPUT: how long the request occupies
whichever of link and device it occupies longer,

    max(link seconds, rebuild or recompute seconds + seconds of its own prefill)

for when many requests follow one another, one request's copies run beside another's
computing: then fills vanish, and a second of rebuilding is a second less of prefill
for somebody. Decode is left out: it reads the weights once for the whole batch.
Where nothing overlaps between requests (every schedule but PIPELINED) a restore
occupies both, and the objectives agree.

A way that saves less than 2 % of loading is not worth its work: the plan loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective, PlanInput, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts, tiles_of
from splitpoint.planning.split_line import SplitLine
from splitpoint.planning.split_search import best_pipeline_options, best_split
from splitpoint.planning.stream_plan import StreamPlan, best_stream_plan, stream_plan_at
from splitpoint.planning.token_recompute import TokenRecompute
from splitpoint.shapes import ModelShape

# Of what loading everything takes, what another way may take at most.
WORTH_IT = 0.98


NO_SPLIT = SplitLine.fixed(0)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way. Seconds: of the restore; link and device: of a step when streamed.

    `split` and `resident` are those at `Chooser.length`, `now` is the split of what is
    cached at present, `line` follows a growing prefix.
    """

    method: RestoreMethod
    schedule: Schedule
    seconds: float
    link_seconds: float
    compute_seconds: float
    # What the objective compares, in seconds; smaller is better.
    score: float
    split: int = 0
    now: int = 0
    line: SplitLine = NO_SPLIT
    recomputed: int = 0
    resident: int = 0
    tile: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Choices:
    """The best way, and what it was compared with. None: it was not possible."""

    best: Choice
    load: Choice
    split: Choice | None
    tokens: Choice | None


@dataclass(frozen=True, slots=True)
class Chooser:
    """Everything that a choice depends on.

    `options`: how a restore runs, with its tiles; it says nothing of the objective.
    """

    shape: ModelShape
    profile: Profile
    costs: SplitCosts
    request: PlanInput
    options: PipelineOptions

    @classmethod
    def of(cls, shape: ModelShape, profile: Profile, request: PlanInput) -> Chooser:
        costs = SplitCosts.of(shape, profile, request.encoding)
        options = best_pipeline_options(
            costs,
            _length(request),
            request.schedule,
            chunk_tokens=request.chunk_tokens,
            staging_tokens=request.staging_tokens,
        )
        has_tail = request.has_activations and request.cached_tokens % request.chunk_tokens
        if has_tail and request.residency is Residency.RESIDENT:
            # X of the partial chunk comes, too: the chunk will be sealed anew.
            options = replace(options, extra_operations=shape.layer_count)
        return cls(shape, profile, costs, request, options)

    def choose(self) -> Choices:
        """The best way for this request, or the one that was asked for."""
        if self.request.residency is Residency.STREAMED:
            return self._choose_streamed()
        request = self.request
        load = self.split_at(0)
        split = self.split_at(self._best_split()) if request.has_activations else None
        tokens = self.by_tokens() if self._may_recompute else None
        if request.forced_split_tokens is not None:
            best = self.split_at(min(request.forced_split_tokens, request.cached_tokens))
        elif request.forced_method is RestoreMethod.LOAD:
            best = load
        elif request.forced_method is RestoreMethod.TOKENS and request.cached_tokens:
            best = self.by_tokens()
        else:
            # Recomputing nothing is loading everything.
            recomputing = tokens if tokens is not None and tokens.recomputed else None
            best = _least(load, split, recomputing)
        return Choices(best, load, split, tokens)

    @property
    def length(self) -> int:
        """Tokens that come back: of a restore what is cached; of a decode step all tokens,
        since what is computed now will have been stored by then."""
        return _length(self.request)

    @property
    def prefill_seconds(self) -> float:
        """Of the new tokens, after the cached ones."""
        request = self.request
        flops = self.shape.prefill_flops(request.new_tokens, request.cached_tokens)
        pieces = tiles_of(request.new_tokens, request.prefill_tokens)
        return self.profile.prefill_seconds(flops, pieces)

    @property
    def compute_seconds(self) -> float:
        """What the device has to do for this request beside: in each step, or in all."""
        if self.request.residency is Residency.STREAMED:
            given = self.request.step_compute_seconds
            return self.profile.step_compute_seconds if given is None else given
        return self.prefill_seconds if self._is_shared else 0.0

    @property
    def _is_shared(self) -> bool:
        request = self.request
        return request.objective is Objective.THROUGHPUT and request.schedule is Schedule.PIPELINED

    @property
    def _may_recompute(self) -> bool:
        """Recomputing beside loading pays only where the two overlap."""
        return self.request.schedule is Schedule.PIPELINED and self.request.cached_tokens > 0

    @property
    def _compared(self) -> PipelineOptions:
        """What the objective compares."""
        if self._is_shared:
            return replace(
                self.options, scenario=Scenario.SHARED_RESTORE, compute_seconds=self.compute_seconds
            )
        if self.request.residency is Residency.STREAMED:
            return self._step_of(self.options)
        return self.options

    def _step_of(self, options: PipelineOptions) -> PipelineOptions:
        """A decode step that pulls the prefix in this options."""
        staging = self.request.staging_tokens
        ahead = min(1.0, staging / self.length) if staging else 1.0
        return replace(
            options,
            scenario=Scenario.DECODE_STEP,
            compute_seconds=self.compute_seconds,
            ahead=ahead,
        )

    # -- resident ----------------------------------------------------------------

    def split_at(self, split: int) -> Choice:
        """Rebuild [0, split) from activations, load the rest."""
        request, costs, options = self.request, self.costs, self.options
        cached, tile = request.cached_tokens, options.tile_tokens
        is_sent = request.schedule is not Schedule.ROW
        return Choice(
            RestoreMethod.of(split, cached),
            request.schedule,
            costs.seconds(split, cached, options),
            costs.link_seconds(split, cached, tile, sends=is_sent),
            costs.rebuild_seconds(split, tile),
            costs.seconds(split, cached, self._compared),
            split=split,
            now=split,
            line=self._line(request.schedule, split),
            tile=tile,
        )

    def by_tokens(self) -> Choice:
        """Prefill the front while the back is loaded."""
        request = self.request
        estimate = TokenRecompute(
            self.shape,
            self.profile,
            self.costs,
            request.cached_tokens,
            request.chunk_tokens,
            request.prefill_tokens,
            self.options.extra_operations,
        ).estimate(overlapped=request.schedule is Schedule.PIPELINED)
        busier = max(estimate.link_seconds, estimate.compute_seconds + self.compute_seconds)
        return Choice(
            RestoreMethod.TOKENS,
            request.schedule,
            estimate.seconds,
            estimate.link_seconds,
            estimate.compute_seconds,
            busier if self._is_shared else estimate.seconds,
            recomputed=estimate.recomputed,
        )

    def _best_split(self) -> int:
        request = self.request
        return best_split(
            self.costs, request.cached_tokens, self._compared, quantum=request.chunk_tokens
        )

    # -- streamed ----------------------------------------------------------------

    def _choose_streamed(self) -> Choices:
        request, length, options = self.request, self.length, self._compared

        def pull(*, has_activations: bool) -> StreamPlan:
            return best_stream_plan(
                self.shape,
                self.costs,
                length,
                options,
                chunk_tokens=request.chunk_tokens,
                spare_bytes=request.spare_bytes,
                has_activations=has_activations,
                keeps_activations=request.keeps_activations,
            )

        plain = pull(has_activations=False)
        load = self._pulled(plain)
        split = self._pulled(pull(has_activations=True)) if request.has_activations else None
        if request.forced_split_tokens is None and request.forced_method is None:
            return Choices(_least(load, split), load, split, None)
        wanted = min(request.forced_split_tokens or 0, length)
        wanted = wanted if wanted > plain.resident else 0
        forced = stream_plan_at(self.costs, length, options, plain.resident, wanted)
        return Choices(self._pulled(forced), load, split, None)

    def _pulled(self, pull: StreamPlan) -> Choice:
        """A pull as a choice: the step decides, a pass over what is cached is its restore."""
        costs, cached, tile = self.costs, self.request.cached_tokens, self.options.tile_tokens
        is_row = pull.schedule is Schedule.ROW
        held = 0 if is_row else pull.resident
        rebuilt, pulled = max(pull.split - held, 0), self.length - held
        line = self._line(pull.schedule, pull.split)
        now = line.at(cached, self._quantum)
        if now <= held:
            now = 0
        once = replace(self.options, schedule=pull.schedule)
        held_now = min(held, cached)
        return Choice(
            RestoreMethod.of(now, cached),
            pull.schedule,
            costs.seconds(max(now - held_now, 0), cached - held_now, once),
            costs.link_seconds(rebuilt, pulled, tile, sends=not is_row),
            costs.rebuild_seconds(rebuilt, tile),
            pull.seconds,
            split=pull.split,
            now=now,
            line=line,
            resident=pull.resident,
            tile=tile,
            step_seconds=costs.seconds(rebuilt, pulled, self._step_of(once)),
        )

    @property
    def _quantum(self) -> int:
        """What a split is a multiple of: one that was asked for is taken as it is."""
        return 1 if self.request.forced_split_tokens is not None else self.request.chunk_tokens

    def _line(self, schedule: Schedule, split: int) -> SplitLine:
        """Where rebuilding and the link take equally long, moved to go through the split.

        A resident prefix does not grow, and neither does a split that was asked for, nor
        the X that stays on the device.
        """
        request, length = self.request, self.length
        if not split:
            return NO_SPLIT
        is_row = request.residency is Residency.STREAMED and schedule is Schedule.ROW
        if request.forced_split_tokens is not None or is_row:
            return SplitLine.fixed(split)
        cap = self.shape.context_length if request.residency is Residency.STREAMED else length
        if split == length or schedule is Schedule.SERIAL:
            return SplitLine(1.0, float(split - length), cap)
        slope = self.costs.slope(schedule, self.options.tile_tokens)
        return SplitLine(slope, split - slope * length, cap)


def _length(request: PlanInput) -> int:
    if request.residency is Residency.STREAMED:
        return request.cached_tokens + request.new_tokens
    return request.cached_tokens


def _least(load: Choice, *others: Choice | None) -> Choice:
    """The best of the others if it is worth it, else loading."""
    best = min((other for other in others if other is not None), key=_score, default=load)
    return best if best.score < WORTH_IT * load.score else load


def _score(choice: Choice) -> float:
    return choice.score
