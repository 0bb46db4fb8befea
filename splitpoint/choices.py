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

from splitpoint.costs import Profile
from splitpoint.plan import Objective, PlanInput, Residency, RestoreMethod
from splitpoint.resident_share import Pull, best_pull, pull_of
from splitpoint.schedule import Schedule
from splitpoint.shapes import ModelShape
from splitpoint.split_costs import Manner, SplitCosts, Use, best_manner, best_split, tiles_of
from splitpoint.token_recompute import TokenRecompute, load_piece

# Of what loading everything takes, what another way may take at most.
WORTH_IT = 0.98


@dataclass(frozen=True, slots=True)
class Choice:
    """One way. Seconds: of the restore (streamed: of one pass over the prefix)."""

    method: RestoreMethod
    schedule: Schedule
    seconds: float
    link_seconds: float
    compute_seconds: float
    # What the objective compares, in seconds; smaller is better.
    score: float
    split: int = 0
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

    `manner`: how a restore runs, with its tiles; it says nothing of the objective.
    """

    shape: ModelShape
    profile: Profile
    costs: SplitCosts
    request: PlanInput
    manner: Manner

    @classmethod
    def of(cls, shape: ModelShape, profile: Profile, request: PlanInput) -> Chooser:
        costs = SplitCosts.of(shape, profile, request.encoding)
        manner = best_manner(
            costs,
            request.cached_tokens,
            request.schedule,
            chunk_tokens=request.chunk_tokens,
            staging_tokens=request.staging_tokens,
        )
        return cls(shape, profile, costs, request, manner)

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
        elif request.forced_method is RestoreMethod.TOKENS:
            best = self.by_tokens()
        else:
            best = _least(load, split, tokens)
        return Choices(best, load, split, tokens)

    @property
    def prefill_seconds(self) -> float:
        """Of the new tokens, after the cached ones."""
        request = self.request
        flops = self.shape.prefill_flops(request.new_tokens, request.cached_tokens)
        pieces = tiles_of(request.new_tokens, request.prefill_tokens)
        return self.profile.prefill_seconds(flops, pieces)

    @property
    def beside_seconds(self) -> float:
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
    def _compared(self) -> Manner:
        """What the objective compares."""
        if self._is_shared:
            return replace(self.manner, use=Use.SHARED, beside=self.beside_seconds)
        if self.request.residency is Residency.STREAMED:
            return replace(self.manner, use=Use.STEP, beside=self.beside_seconds)
        return self.manner

    # -- resident ----------------------------------------------------------------

    def split_at(self, split: int) -> Choice:
        """Rebuild [0, split) from activations, load the rest."""
        request, costs, manner = self.request, self.costs, self.manner
        cached, tile = request.cached_tokens, manner.tile_tokens
        is_sent = request.schedule is not Schedule.ROW
        return Choice(
            RestoreMethod.of(split, cached),
            request.schedule,
            costs.seconds(split, cached, manner),
            costs.link_seconds(split, cached, tile, sends=is_sent),
            costs.rebuild_seconds(split, tile),
            costs.seconds(split, cached, self._compared),
            split=split,
            tile=tile,
        )

    def by_tokens(self) -> Choice:
        """Prefill the front while the back is loaded."""
        request = self.request
        piece = load_piece(self.costs, request.cached_tokens, request.chunk_tokens)
        recompute = TokenRecompute(
            self.shape,
            self.profile,
            self.costs,
            request.cached_tokens,
            piece,
            request.prefill_tokens,
        )
        recomputed = recompute.meeting_point(request.chunk_tokens)
        link = recompute.load_seconds(recomputed)
        compute = recompute.prefill_seconds(recomputed)
        is_overlapped = request.schedule is Schedule.PIPELINED
        seconds = recompute.seconds(recomputed, overlapped=is_overlapped)
        return Choice(
            RestoreMethod.TOKENS,
            request.schedule,
            seconds,
            link,
            compute,
            max(link, compute + self.beside_seconds) if self._is_shared else seconds,
            recomputed=recomputed,
            tile=piece,
        )

    def _best_split(self) -> int:
        request = self.request
        return best_split(
            self.costs, request.cached_tokens, self._compared, quantum=request.chunk_tokens
        )

    # -- streamed ----------------------------------------------------------------

    def _choose_streamed(self) -> Choices:
        request, cached, manner = self.request, self.request.cached_tokens, self._compared

        def pull(*, has_activations: bool) -> Pull:
            return best_pull(
                self.shape,
                self.costs,
                cached,
                manner,
                chunk_tokens=request.chunk_tokens,
                spare_bytes=request.spare_bytes,
                has_activations=has_activations,
            )

        plain = pull(has_activations=False)
        load = self._pulled(plain)
        split = self._pulled(pull(has_activations=True)) if request.has_activations else None
        if request.forced_split_tokens is None and request.forced_method is None:
            return Choices(_least(load, split), load, split, None)
        wanted = min(request.forced_split_tokens or 0, cached)
        wanted = wanted if wanted > plain.resident else 0
        forced = pull_of(self.costs, cached, manner, plain.resident, wanted)
        return Choices(self._pulled(forced), load, split, None)

    def _pulled(self, pull: Pull) -> Choice:
        """A pull as a choice: the step decides, a pass over the prefix is its restore."""
        costs, cached, tile = self.costs, self.request.cached_tokens, self.manner.tile_tokens
        is_row = pull.schedule is Schedule.ROW
        held = 0 if is_row else pull.resident
        rebuilt, pulled = max(pull.split - held, 0), cached - held
        once = replace(self.manner, schedule=pull.schedule)
        step = replace(once, use=Use.STEP, beside=self.beside_seconds)
        return Choice(
            RestoreMethod.of(pull.split, cached),
            pull.schedule,
            costs.seconds(rebuilt, pulled, once),
            costs.link_seconds(rebuilt, pulled, tile, sends=not is_row),
            costs.rebuild_seconds(rebuilt, tile),
            pull.seconds,
            split=pull.split,
            resident=pull.resident,
            tile=tile,
            step_seconds=costs.seconds(rebuilt, pulled, step),
        )


def _least(load: Choice, *others: Choice | None) -> Choice:
    """The best of the others if it is worth it, else loading."""
    best = min((other for other in others if other is not None), key=_score, default=load)
    return best if best.score < WORTH_IT * load.score else load


def _score(choice: Choice) -> float:
    return choice.score
