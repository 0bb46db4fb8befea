"""The ways to bring one prefix back, their predicted seconds, and the best of them.

Each way is a Candidate: loading everything, the best split, token ids from the front. Two
objectives compare them. LATENCY: the seconds of this restore, or of a decode step when the
cache is streamed. THROUGHPUT: the seconds for which the request occupies the busier of link
and device,

    max(link seconds, rebuild or recompute seconds + seconds of its own prefill)

for when many requests follow one another and copies of one overlap with the computing of
another: delays vanish then, and a second of rebuilding is a second less of prefill for
another request. Decode is left out: it reads the weights once for the whole batch. Where
nothing overlaps between requests (every schedule but PIPELINED) a restore occupies both,
and the objectives agree.

A way that saves less than 2 % of loading is not worth its work: the plan loads.

A token of a streamed prefix is resident, rebuilt or loaded. With spare device memory either K
and V of the front stay there, and the best split divides the rest; or X of the front stays
there (schedule ROW), and is rebuilt from in every step. K and V take 1 / rho times the bytes of
X, so for rho >= 1 they always serve more tokens, and without any work. For rho < 1 X serves more
tokens, which wins where the device would wait for the link. Knows no requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import RECOMPUTED, Objective, PlanInput, RestoreMethod, SplitLine
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts, tiles_of
from splitpoint.planning.split_search import best_pipeline_options, best_split
from splitpoint.planning.token_recompute import TokenRecompute
from splitpoint.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A step over `length` tokens: resident, [resident, split) rebuilt, the rest loaded.

    With schedule ROW, X of [0, resident) stays on the device and is rebuilt from; `split`
    is equal.

    Attributes:
        split: 0 if nothing is rebuilt.
        seconds: predicted, of a decode step.
    """

    length: int
    resident: int
    split: int
    schedule: Schedule
    seconds: float

    @property
    def ready(self) -> int:
        """Tokens whose K and V stay on the device."""
        return 0 if self.schedule is Schedule.ROW else self.resident

    @property
    def rebuilt(self) -> int:
        """Tokens rebuilt in each step."""
        return max(self.split - self.ready, 0)

    @property
    def restored(self) -> int:
        """Tokens rebuilt or loaded in each step."""
        return self.length - self.ready


def best_stream_plan(
    shape: ModelShape,
    costs: SplitCosts,
    length: int,
    options: PipelineOptions,
    *,
    chunk_tokens: int = 1,
    spare_bytes: int = 0,
    has_activations: bool = True,
    keeps_activations: bool = True,
) -> StreamPlan:
    """Return the plan with the least seconds a step; the plainest of equal ones.

    Args:
        options: of a decode step.
        spare_bytes: device memory for what stays.
        keeps_activations: X may be what stays there.
    """
    resident = _whole_chunks(spare_bytes // shape.kv_bytes_per_token, chunk_tokens, length)
    split = 0
    if has_activations:
        split = best_split(costs, length - resident, options, quantum=chunk_tokens)
    best = stream_plan_at(costs, length, options, resident, resident + split if split else 0)
    is_serial = options.schedule is Schedule.SERIAL
    if is_serial or not (has_activations and keeps_activations and shape.activations_can_pay):
        return best
    # X lies in pages that are made for K and V.
    pages = spare_bytes // shape.page_bytes(chunk_tokens)
    most = pages * shape.activations_per_page * chunk_tokens
    row = replace(options, schedule=Schedule.ROW)
    front = best_split(
        costs, length, row, quantum=chunk_tokens, cap=_whole_chunks(most, chunk_tokens, length)
    )
    seconds = costs.seconds(front, length, row)
    if front and seconds < best.seconds:
        return StreamPlan(length, front, front, Schedule.ROW, seconds)
    return best


def stream_plan_at(
    costs: SplitCosts, length: int, options: PipelineOptions, resident: int, split: int
) -> StreamPlan:
    """Return the plan with K,V of [0, resident) on the device and this split."""
    seconds = costs.seconds(max(split - resident, 0), length - resident, options)
    return StreamPlan(length, resident, split, options.schedule, seconds)


def _whole_chunks(tokens: int, chunk_tokens: int, length: int) -> int:
    if tokens >= length:
        return length
    return tokens // chunk_tokens * chunk_tokens


# Largest share of a full load's time at which another way is chosen.
WORTH_IT = 0.98
NO_SPLIT = SplitLine.fixed(0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to bring the prefix back.

    Attributes:
        seconds: of the restore.
        link_seconds, compute_seconds: busy seconds of link and device, of the restore or,
            when streamed, of a step.
        score: seconds that the objective compares; smaller is better.
        split, resident: at `Chooser.length`.
        now: the split of the tokens that are cached at present.
        line: the split of a growing prefix.
        recomputed: tokens computed from their ids.
        step_seconds: of a decode step when streamed.
    """

    method: RestoreMethod
    schedule: Schedule
    seconds: float
    link_seconds: float
    compute_seconds: float
    score: float
    split: int = 0
    now: int = 0
    line: SplitLine = NO_SPLIT
    recomputed: int = 0
    resident: int = 0
    tile: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best candidate and the compared ones. None: that way is not possible."""

    best: Candidate
    load: Candidate
    split: Candidate | None
    tokens: Candidate | None


@dataclass(frozen=True, slots=True)
class Chooser:
    """Everything that a choice depends on.

    `options`: how a restore runs, whatever the objective.
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
        if has_tail and not request.is_streamed:
            # X of the partial chunk comes, too: the chunk will be sealed anew.
            options = replace(options, extra_operations=shape.layer_count)
        return cls(shape, profile, costs, request, options)

    def choose(self) -> Comparison:
        """Return the best way for this request, or the one that the client asked for."""
        return self._choose_streamed() if self.request.is_streamed else self._choose_resident()

    @property
    def length(self) -> int:
        """Tokens that come back: the cached ones of a restore; all tokens of a decode step,
        since the new ones will be stored by then."""
        return _length(self.request)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of the new tokens' prefill, after the cached ones."""
        request = self.request
        flops = self.shape.prefill_flops(request.new_tokens, request.cached_tokens)
        pieces = tiles_of(request.new_tokens, request.prefill_tokens)
        return self.profile.prefill_seconds(flops, pieces)

    @property
    def token_recompute(self) -> TokenRecompute:
        request = self.request
        return TokenRecompute(
            self.shape,
            self.profile,
            self.costs,
            request.cached_tokens,
            request.chunk_tokens,
            request.prefill_tokens,
            self.options.extra_operations,
        )

    @property
    def recompute_seconds(self) -> float:
        """Seconds of computing all cached tokens from their ids; 0 if there are none."""
        return self.token_recompute.alone_seconds() if self.request.cached_tokens else 0.0

    @property
    def compute_seconds(self) -> float:
        """The request's other work on the device: in each step if streamed, else in total."""
        if self.request.is_streamed:
            given = self.request.step_compute_seconds
            return self.profile.step_compute_seconds if given is None else given
        return self.prefill_seconds if self._is_shared else 0.0

    @property
    def _is_shared(self) -> bool:
        request = self.request
        return request.objective is Objective.THROUGHPUT and request.schedule is Schedule.PIPELINED

    @property
    def _compared(self) -> PipelineOptions:
        """The options whose seconds the objective compares."""
        if self._is_shared:
            return replace(
                self.options, scenario=Scenario.SHARED_RESTORE, compute_seconds=self.compute_seconds
            )
        return (
            self._step_options(self.options.schedule) if self.request.is_streamed else self.options
        )

    # -- resident ----------------------------------------------------------------

    def _choose_resident(self) -> Comparison:
        request, cached = self.request, self.request.cached_tokens
        load = self._split_at(0)
        split = tokens = None
        if request.has_activations:
            quantum = request.chunk_tokens
            split = self._split_at(best_split(self.costs, cached, self._compared, quantum=quantum))
        # Recomputing while loading pays only where the two overlap.
        if request.schedule is Schedule.PIPELINED and cached:
            tokens = self._recompute_tokens()
        if request.forced is None:
            # Recomputing nothing is loading everything.
            best = _least(load, split, tokens if tokens and tokens.recomputed else None)
        elif request.forced == RECOMPUTED and cached:
            best = tokens or self._recompute_tokens()
        else:
            best = self._split_at(min(request.forced.split_tokens or 0, cached))
        return Comparison(best, load, split, tokens)

    def _split_at(self, split: int) -> Candidate:
        """Return the restore that rebuilds [0, split) from activations and loads the rest."""
        request, costs, options = self.request, self.costs, self.options
        cached, tile = request.cached_tokens, options.tile_tokens
        sends = request.schedule is not Schedule.ROW
        return Candidate(
            RestoreMethod.of(split, cached),
            request.schedule,
            seconds=costs.seconds(split, cached, options),
            link_seconds=costs.link_seconds(
                split, split + options.loaded_tokens(split, cached), tile, sends=sends
            ),
            compute_seconds=costs.rebuild_seconds(split, tile),
            score=costs.seconds(split, cached, self._compared),
            split=split,
            now=split,
            line=self._line(request.schedule, split),
            tile=tile,
        )

    def _recompute_tokens(self) -> Candidate:
        """Return the restore that prefills the front while the back is loaded."""
        request = self.request
        overlapped = request.schedule is Schedule.PIPELINED
        estimate = self.token_recompute.estimate(overlapped=overlapped)
        busier = max(estimate.link_seconds, estimate.compute_seconds + self.compute_seconds)
        return Candidate(
            RestoreMethod.TOKENS,
            request.schedule,
            seconds=estimate.seconds,
            link_seconds=estimate.link_seconds,
            compute_seconds=estimate.compute_seconds,
            score=busier if self._is_shared else estimate.seconds,
            recomputed=estimate.recomputed,
        )

    # -- streamed ----------------------------------------------------------------

    def _choose_streamed(self) -> Comparison:
        request, length, options = self.request, self.length, self._compared
        without_x = self._best_stream_plan(has_activations=False)
        load = self._streamed(without_x)
        split = None
        if request.has_activations:
            split = self._streamed(self._best_stream_plan(has_activations=True))
        if request.forced is None:
            return Comparison(_least(load, split), load, split, None)
        wanted = min(request.forced.split_tokens or 0, length)
        wanted = wanted if wanted > without_x.resident else 0
        forced = stream_plan_at(self.costs, length, options, without_x.resident, wanted)
        return Comparison(self._streamed(forced), load, split, None)

    def _best_stream_plan(self, *, has_activations: bool) -> StreamPlan:
        return best_stream_plan(
            self.shape,
            self.costs,
            self.length,
            self._compared,
            chunk_tokens=self.request.chunk_tokens,
            spare_bytes=self.request.spare_bytes,
            has_activations=has_activations,
            keeps_activations=self.request.keeps_activations,
        )

    def _streamed(self, plan: StreamPlan) -> Candidate:
        """Return the candidate that decodes by `plan`.

        Its steps are compared; its restore is one pass over the tokens cached at present.
        """
        costs, cached, tile = self.costs, self.request.cached_tokens, self.options.tile_tokens
        sends = plan.schedule is not Schedule.ROW
        line = self._line(plan.schedule, plan.split)
        # A split that was asked for is taken as it is.
        is_forced = self.request.forced is not None
        now = line.at(cached, 1 if is_forced else self.request.chunk_tokens)
        now = now if now > plan.ready else 0
        ready = min(plan.ready, cached)
        restore = replace(self.options, schedule=plan.schedule)
        step = self._step_options(plan.schedule)
        return Candidate(
            RestoreMethod.of(now, cached),
            plan.schedule,
            seconds=costs.seconds(max(now - ready, 0), cached - ready, restore),
            link_seconds=costs.link_seconds(plan.rebuilt, plan.restored, tile, sends=sends),
            compute_seconds=costs.rebuild_seconds(plan.rebuilt, tile),
            score=plan.seconds,
            split=plan.split,
            now=now,
            line=line,
            resident=plan.resident,
            tile=tile,
            step_seconds=costs.seconds(plan.rebuilt, plan.restored, step),
        )

    def _step_options(self, schedule: Schedule) -> PipelineOptions:
        """Return the options of a decode step that streams the prefix."""
        staging = self.request.staging_tokens
        return replace(
            self.options,
            schedule=schedule,
            scenario=Scenario.DECODE_STEP,
            compute_seconds=self.compute_seconds,
            ahead=min(1.0, staging / self.length) if staging else 1.0,
        )

    def _line(self, schedule: Schedule, split: int) -> SplitLine:
        """Return the line where rebuilding and the link take equally long, through the split.

        A resident prefix does not grow. A split that was asked for does not follow a growing
        prefix, nor does X that stays on the device.
        """
        request, length = self.request, self.length
        if not split:
            return NO_SPLIT
        is_row = request.is_streamed and schedule is Schedule.ROW
        if request.forced is not None or is_row:
            return SplitLine.fixed(split)
        cap = self.shape.context_length if request.is_streamed else length
        if split == length or schedule is Schedule.SERIAL:
            return SplitLine(1.0, float(split - length), cap)
        slope = self.costs.slope(schedule, self.options.tile_tokens)
        return SplitLine(slope, split - slope * length, cap)


def _length(request: PlanInput) -> int:
    return request.cached_tokens + (request.new_tokens if request.is_streamed else 0)


def _least(load: Candidate, *others: Candidate | None) -> Candidate:
    """Return the best of the others if it is worth it, else `load`."""
    possible = [other for other in others if other is not None]
    best = min(possible, key=lambda candidate: candidate.score, default=load)
    return best if best.score < WORTH_IT * load.score else load
