"""How many tokens to draft: by how often drafts were right, and by what rows and drafts cost.

The rate of a step is the tokens that it is expected to yield over its time. Times are in units
of a plain step of the same sequences, so they hold while contexts grow. This module is pure: it
knows no clock, no drafter and no request.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from splitpoint.speculation import DraftMethod

# Drafts are tried until measurements speak against them.
_FIRST_CHANCE = 0.7
_FIRST_TRIES = 2.0
# What a draft's result weighs after the next one.
_DECAY = 0.85
# The next token of a draft is not worth to be considered below this chance.
_LEAST_CHANCE = 0.02
# Until it is measured: what one row more costs, and one drafted token of a model, as shares of
# a plain step.
_ROW_SHARE = 0.05
_TOKEN_SHARE = 0.25
# Plain steps are measured again after this many others, and this many at first.
_PLAIN_INTERVAL = 64
_FIRST_PLAIN_STEPS = 2
# Mixes of sequences, and kinds of drafts, whose costs are kept: those that were met last.
_MOST_MIXES = 64
_MOST_KINDS = 64
# A request that does not draft tries again after this many drafts that were possible; twice as
# many after each failure, but more seldom if its trials would take more than this share of time.
LEAST_WAIT = 16
MOST_WAIT = 256
PROBE_TOKENS = 2
TRIAL_SHARE = 0.015
# What the next request learns from the ones before: it waits at most so long for its first trial.
_MOST_FIRST_WAIT = 64


@dataclass(slots=True)
class Acceptance:
    """The chance that the next drafted token is right, of one request and method."""

    _right: float = _FIRST_CHANCE * _FIRST_TRIES
    _tried: float = _FIRST_TRIES

    @classmethod
    def of(cls, chance: float) -> Acceptance:
        """Return the chance, as a first supposition."""
        return cls(chance * _FIRST_TRIES)

    @property
    def chance(self) -> float:
        return self._right / self._tried

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a draft: what follows its first wrong token says nothing."""
        self._right = _DECAY * self._right + accepted
        self._tried = _DECAY * self._tried + min(accepted + 1, drafted)


@dataclass(slots=True)
class Patience:
    """When a request that does not draft by a method, since it did not pay, tries again."""

    wait: int = LEAST_WAIT
    passed: int = 0
    is_probing: bool = False

    def pays(self) -> None:
        """Note that drafts pay at present."""
        self.wait, self.passed, self.is_probing = LEAST_WAIT, 0, False

    def is_due(self, cost: float) -> bool:
        """Note a draft that would not pay; return True if one is tried all the same.

        `cost` is what the trial takes, in plain steps.
        """
        self.passed += 1
        has_failed = self.wait > LEAST_WAIT
        least = min(MOST_WAIT, cost / TRIAL_SHARE) if has_failed else 0
        self.is_probing = self.passed >= max(self.wait, least)
        if self.is_probing:
            self.passed = 0
        return self.is_probing

    def probed(self, *, is_right: bool) -> None:
        """Learn from a trial: whether all that it drafted was right."""
        if self.is_probing:
            self.wait = LEAST_WAIT if is_right else min(MOST_WAIT, 2 * self.wait)
            self.is_probing = False

    def handed_on(self) -> Patience:
        """Return what the next request begins with."""
        wait = min(self.wait, _MOST_FIRST_WAIT)
        return Patience(wait, min(self.passed, wait))


@dataclass(slots=True)
class _Mix:
    """Measured steps of one mix of sequences.

    Attributes:
        plain: seconds of steps without drafts.
        ratios: by drafted tokens, seconds over those of a plain step; and their medians, ordered.
        since_plain: steps since one without drafts was asked for.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=7))
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    measured: list[tuple[int, float]] = field(default_factory=list)
    since_plain: int = 0
    plain_asked: int = 0


class StepCosts:
    """What steps with drafted rows cost against plain ones, by the mix of their sequences."""

    def __init__(self) -> None:
        # The longest unused first.
        self._mixes: OrderedDict[Hashable, _Mix] = OrderedDict()

    def observe(self, mix: Hashable, draft_tokens: int, seconds: float) -> None:
        """Learn from a step that verified this many drafted tokens."""
        known = self._mix(mix)
        if not draft_tokens:
            known.plain.append(seconds)
            known.since_plain = 0
        elif known.plain:
            ratios = known.ratios.setdefault(draft_tokens, deque(maxlen=5))
            ratios.append(seconds / median(known.plain))
            known.measured = [each for each in known.measured if each[0] != draft_tokens]
            insort(known.measured, (draft_tokens, median(ratios)))

    def wants_plain(self, mix: Hashable) -> bool:
        """Return True if the next step of the mix is to be a plain one, to be measured."""
        known = self._mix(mix)
        known.since_plain += 1
        is_due = known.plain_asked < _FIRST_PLAIN_STEPS or known.since_plain > _PLAIN_INTERVAL
        if is_due:
            known.plain_asked += 1
            known.since_plain = 0
        return is_due

    def plain_seconds(self, mix: Hashable) -> float | None:
        """Return the time of a plain step; None before one was measured."""
        plain = self._mix(mix).plain
        return median(plain) if plain else None

    def ratio(self, mix: Hashable, draft_tokens: int) -> float:
        """Return the time of a step with this many drafted tokens, over that of a plain one.

        Between measurements it is linear, and beyond them as steep as up to the last one.
        """
        measured = self._mix(mix).measured
        place = bisect_left(measured, (draft_tokens, 0.0))
        if not measured:
            return 1 + _ROW_SHARE * draft_tokens
        if place == len(measured):
            count, ratio = measured[-1]
            slope = max(_ROW_SHARE / 4, (ratio - 1) / count)
            return ratio + slope * (draft_tokens - count)
        after, high = measured[place]
        before, low = measured[place - 1] if place else (0, 1.0)
        return low + (high - low) * (draft_tokens - before) / (after - before)

    def _mix(self, mix: Hashable) -> _Mix:
        known = self._mixes.get(mix)
        if known is None:
            known = self._mixes[mix] = _Mix()
            if len(self._mixes) > _MOST_MIXES:
                self._mixes.popitem(last=False)
        else:
            self._mixes.move_to_end(mix)
        return known


class TokenCosts:
    """Seconds of one drafted token, by the kind of draft: drafts of one call grow side by side."""

    def __init__(self) -> None:
        # The longest unused first.
        self._seconds: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def observe(self, kind: Hashable, longest: int, seconds: float) -> None:
        """Learn from a call whose longest draft has this many tokens."""
        if longest:
            self._seconds.setdefault(kind, deque(maxlen=7)).append(seconds / longest)
            self._seconds.move_to_end(kind)
            if len(self._seconds) > _MOST_KINDS:
                self._seconds.popitem(last=False)

    def share(self, kind: Hashable, plain_seconds: float | None) -> float:
        """Return what a drafted token costs, as a share of a plain step."""
        seconds = self._seconds.get(kind)
        if seconds is None or plain_seconds is None:
            return _TOKEN_SHARE
        return median(seconds) / plain_seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may draft.

    Attributes:
        chance: that its next drafted token is right.
        most: tokens that it may draft.
        method: what drafts; calls of one method are shared by its candidates.
        token_share: what a token of the draft costs; 0 if it is there already.
    """

    chance: float
    most: int
    method: DraftMethod
    token_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens to draft for each candidate, and the rate in plain steps' tokens per time."""

    counts: list[int]
    rate: float


def even_shares(wanted: Sequence[int], budget: int, turn: int = 0) -> list[int]:
    """Share a budget: none gets less than another, unless it wanted no more.

    What cannot be divided goes to others in each `turn`, so that of more takers than the budget
    each one gets something in its turn.
    """
    shares = [0] * len(wanted)
    order = sorted(
        range(len(wanted)), key=lambda place: (wanted[place], (place - turn) % len(wanted))
    )
    for done, place in enumerate(order):
        shares[place] = min(wanted[place], budget // (len(order) - done))
        budget -= shares[place]
    return shares


def best_lengths(
    candidates: Sequence[Candidate],
    sequence_count: int,
    ratio: Callable[[int], float],
    budget: int,
) -> Lengths:
    """Return the lengths with the highest rate; 0 for all if nothing pays.

    A step of n sequences yields `n + sum(chance^1 + ... + chance^k)` tokens in the time
    `ratio(sum(k)) + sum over methods of token_share * longest k`. Tokens are added in the order
    of their chance, and the best of these steps is taken.

    Args:
        sequence_count: all that the step decodes, those that do not draft included.
        ratio: time of a step with this many drafted tokens over that of a plain one.
        budget: drafted tokens at most.
    """
    counts = [0] * len(candidates)
    best, rate = list(counts), sequence_count / ratio(0)
    longest: dict[DraftMethod, int] = {}
    tokens, drafting = float(sequence_count), 0.0
    # The likeliest next token first.
    heap = [(-each.chance, place) for place, each in enumerate(candidates) if each.most > 0]
    heapq.heapify(heap)
    for total in range(1, budget + 1):
        if not heap or -heap[0][0] < _LEAST_CHANCE:
            break
        negative, place = heapq.heappop(heap)
        candidate = candidates[place]
        counts[place] += 1
        tokens -= negative
        if counts[place] > longest.get(candidate.method, 0):
            longest[candidate.method] = counts[place]
            drafting += candidate.token_share
        present = tokens / (ratio(total) + drafting)
        if present > rate:
            best, rate = list(counts), present
        if counts[place] < candidate.most:
            heapq.heappush(heap, (negative * candidate.chance, place))
    return Lengths(best, rate)
