"""Asks drafters before a step, for as many tokens as pay, and learns from what was verified."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from splitpoint.selection import Selection
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.drafts.draft_length import (
    PROBE_TOKENS,
    Acceptance,
    Candidate,
    Patience,
    StepCosts,
    TokenCosts,
    best_lengths,
    even_shares,
)
from worker_service.drafts.drafter import Drafter, DraftTarget, TargetKey

Target = TypeVar("Target", bound=DraftTarget)

# Tokens of a draft at most where their number is left to measurements.
MOST_CHOSEN_TOKENS = 16
# Calls in a row that a drafter may answer with nothing, while it reads a long prompt.
_MOST_EMPTY = 64
# Selections of which new requests suppose what those before them found: the ones met last.
_MOST_SELECTIONS = 64


def most_tokens(speculation: Speculation) -> int:
    """Return how many tokens of a request one step drafts at most."""
    most = speculation.num_speculative_tokens
    return MOST_CHOSEN_TOKENS if most is None else most


@dataclass(frozen=True, slots=True)
class Drafted(Generic[Target]):
    """Drafted tokens of a sequence, at least one, and their method."""

    target: Target
    method: DraftMethod
    tokens: list[int]


@dataclass(slots=True)
class _History:
    """What was learnt of one sequence, or of those that select as it does."""

    selection: Selection
    # It left the device, and will come back.
    is_away: bool = False
    acceptance: dict[DraftMethod, Acceptance] = field(default_factory=dict)
    patience: dict[DraftMethod, Patience] = field(default_factory=dict)
    # By method, calls since its last draft, or in all before the first one.
    empty: dict[DraftMethod, int] = field(default_factory=dict)

    def of(self, method: DraftMethod) -> Acceptance:
        return self.acceptance.setdefault(method, Acceptance())

    def patience_with(self, method: DraftMethod) -> Patience:
        return self.patience.setdefault(method, Patience())

    def handed_on(self, before: _History) -> _History:
        """Return what a next request begins with, for methods whose drafts cost much.

        Those that cost nothing, or were not tried here, begin as in the history `before`.
        """
        costly = self.patience.keys() - {DraftMethod.SUFFIX}
        acceptance = {method: Acceptance.of(self.of(method).chance) for method in costly}
        patience = {method: self.patience[method].handed_on() for method in costly}
        return _History(
            self.selection,
            acceptance={**before.acceptance, **acceptance},
            patience={**before.patience, **patience},
        )

    def begun(self) -> _History:
        """Return a copy for a new request."""
        return _History(
            self.selection,
            acceptance={method: replace(each) for method, each in self.acceptance.items()},
            patience={method: replace(each) for method, each in self.patience.items()},
        )


@dataclass(slots=True)
class _Plan(Generic[Target]):
    """A sequence whose draft is being decided.

    Attributes:
        most: tokens that it may draft.
        methods: what may draft for it, besides SUFFIX, which was asked first.
        is_fixed: the request says how many tokens, and by which method.
        found: what SUFFIX drafts; None if it may not.
    """

    target: Target
    history: _History
    most: int
    methods: tuple[DraftMethod, ...]
    is_fixed: bool
    found: list[int] | None = None
    method: DraftMethod = DraftMethod.OFF
    count: int = 0

    @property
    def most_now(self) -> int:
        """Tokens that a plan with a number can use: none if no drafter is there."""
        if self.target.speculation.method is DraftMethod.SUFFIX:
            return len(self.found or ())
        return self.most if self.methods else 0


class Speculator(Generic[Target]):
    """Drafts for the sequences of one engine. Used by the engine's thread only.

    A request that names a method and a number gets that many tokens; else the lengths, and for
    AUTO the method, follow measured acceptance and costs.
    """

    def __init__(
        self,
        drafters: Mapping[DraftMethod, Drafter[Target]],
        *,
        step_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`step_tokens`: drafted tokens that one step verifies at most."""
        self._drafters = drafters
        self._step_tokens = step_tokens
        self._clock = clock
        self._known: dict[TargetKey, _History] = {}
        self._steps = StepCosts()
        self._tokens = TokenCosts()
        self._turn = 0
        # What a new request supposes of methods that cost much, from those that ended and
        # selected alike; the longest unused first.
        self._before: OrderedDict[Selection, _History] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """True if no sequence that has not ended was drafted for."""
        return not self._known

    def propose(
        self,
        spare: Sequence[tuple[Target, int]],
        *,
        mix: Hashable,
        sequence_count: int,
        budget: int,
    ) -> list[Drafted[Target]]:
        """Return drafts for sequences that have room for this many tokens.

        Args:
            mix: which other steps take as long as this one without drafts.
            sequence_count: sequences that the step decodes.
            budget: drafted tokens that the step has room for, at most.
        """
        plans = [self._plan(target, room) for target, room in spare]
        plans = [plan for plan in plans if plan.most > 0]
        budget = min(budget, self._step_tokens)
        self._find(plans)
        fixed = [plan for plan in plans if plan.is_fixed]
        shares = even_shares([plan.most_now for plan in fixed], budget, self._turn)
        self._turn += 1
        for plan, share in zip(fixed, shares, strict=True):
            plan.count = share
        budget -= sum(shares)
        open_plans = [plan for plan in plans if not plan.is_fixed and (plan.found or plan.methods)]
        if open_plans and not self._steps.wants_plain(mix):
            self._choose(open_plans, mix, sequence_count, budget)
        return self._ask([plan for plan in plans if plan.count > 0])

    def observe_draft(
        self, key: TargetKey, method: DraftMethod, drafted: int, accepted: int
    ) -> None:
        """Learn how many of a sequence's drafted tokens were right."""
        history = self._known.get(key)
        if history is not None:
            history.of(method).observe(drafted, accepted)
            history.patience_with(method).probed(is_right=accepted == drafted)

    def observe_step(self, mix: Hashable, draft_tokens: int, seconds: float) -> None:
        """Learn what a step took that only decoded, without its drafting."""
        self._steps.observe(mix, draft_tokens, seconds)

    def keep(self, running: Iterable[TargetKey], away: Iterable[TargetKey]) -> None:
        """Forget all sequences that have ended; those that are `away` come back.

        Drafters drop what they keep for either.
        """
        if not self._known:
            return
        to_return = set(away)
        for key in self._known.keys() - set(running):
            history = self._known[key]
            has_ended = key not in to_return
            if has_ended:
                self._hand_on(self._known.pop(key))
            elif history.is_away:
                continue
            history.is_away = True
            for drafter in self._drafters.values():
                drafter.forget(key, has_ended=has_ended)

    # -- below ----------------------------------------------------------------------------

    def _hand_on(self, history: _History) -> None:
        """Let requests that select alike begin with what one that ended has found."""
        selection = history.selection
        self._before[selection] = history.handed_on(self._found_before(selection))
        self._before.move_to_end(selection)
        if len(self._before) > _MOST_SELECTIONS:
            self._before.popitem(last=False)

    def _found_before(self, selection: Selection) -> _History:
        return self._before.get(selection) or _History(selection)

    def _plan(self, target: Target, room: int) -> _Plan[Target]:
        history = self._known.get(target.key)
        if history is None:
            history = self._found_before(target.selection).begun()
            self._known[target.key] = history
        history.is_away = False
        speculation = target.speculation
        wanted = speculation.method
        methods = [wanted]
        if wanted is DraftMethod.AUTO:
            methods = [DraftMethod.SELF, DraftMethod.MODEL]
        if not target.is_streamed and DraftMethod.SELF in methods:
            # It would cost what it saves.
            methods.remove(DraftMethod.SELF)
        has_suffix = wanted in (DraftMethod.AUTO, DraftMethod.SUFFIX)
        return _Plan(
            target,
            history,
            min(room, most_tokens(speculation)),
            tuple(
                each for each in methods if each in self._drafters and each != DraftMethod.SUFFIX
            ),
            is_fixed=speculation.num_speculative_tokens is not None
            and wanted is not DraftMethod.AUTO,
            found=[] if has_suffix and DraftMethod.SUFFIX in self._drafters else None,
        )

    def _find(self, plans: Sequence[_Plan[Target]]) -> None:
        """Ask SUFFIX, which costs next to nothing, whatever is decided then."""
        asked = [plan for plan in plans if plan.found is not None]
        if asked:
            drafter = self._drafters[DraftMethod.SUFFIX]
            drafts = drafter.propose([(plan.target, plan.most) for plan in asked])
            for plan, tokens in zip(asked, drafts, strict=True):
                plan.found = tokens[: plan.most]

    def _choose(
        self, plans: Sequence[_Plan[Target]], mix: Hashable, sequence_count: int, budget: int
    ) -> None:
        """Set the methods and lengths that promise the highest rate."""

        def ratio(count: int) -> float:
            return self._steps.ratio(mix, count)

        plain_seconds = self._steps.plain_seconds(mix)
        candidates = []
        offers = [self._offers(plan, plain_seconds) for plan in plans]
        for plan, offered in zip(plans, offers, strict=True):
            best = offered[0]
            if len(offered) > 1:
                best = max(
                    offered,
                    key=lambda each: best_lengths([each], sequence_count, ratio, budget).rate,
                )
            plan.method = best.method
            candidates.append(best)
        lengths = best_lengths(candidates, sequence_count, ratio, budget)
        left = budget - sum(lengths.counts)
        rows = ratio(PROBE_TOKENS) - 1
        for plan, offered, count in zip(plans, offers, lengths.counts, strict=True):
            plan.count = count
            if count:
                plan.history.patience_with(plan.method).pays()
                continue
            for each in offered:
                cost = rows + PROBE_TOKENS * each.token_share
                if left and plan.history.patience_with(each.method).is_due(cost):
                    plan.method, plan.count = each.method, min(PROBE_TOKENS, each.most, left)
                    left -= plan.count
                    break

    def _offers(self, plan: _Plan[Target], plain_seconds: float | None) -> list[Candidate]:
        """Return what each method would draft for a sequence; at least one can."""
        offers = []
        if plan.found:
            chance = plan.history.of(DraftMethod.SUFFIX).chance
            offers.append(Candidate(chance, len(plan.found), DraftMethod.SUFFIX))
        for method in plan.methods:
            share = self._tokens.share((method, plan.target.selection), plain_seconds)
            offers.append(Candidate(plan.history.of(method).chance, plan.most, method, share))
        return offers

    def _ask(self, plans: Sequence[_Plan[Target]]) -> list[Drafted[Target]]:
        """Return the drafts that were decided on, and measure what they take."""
        drafted: list[Drafted[Target]] = []
        by_method: dict[DraftMethod, list[_Plan[Target]]] = {}
        for plan in plans:
            if plan.is_fixed:
                plan.method = plan.target.speculation.method
            if plan.method is DraftMethod.SUFFIX and plan.found:
                drafted.append(Drafted(plan.target, plan.method, plan.found[: plan.count]))
            elif plan.method in plan.methods:
                by_method.setdefault(plan.method, []).append(plan)
        for method, asked in by_method.items():
            began = self._clock()
            drafts = self._drafters[method].propose([(plan.target, plan.count) for plan in asked])
            seconds = self._clock() - began
            # The first draft of a sequence may have read its prompt.
            if all(plan.history.empty.get(method) == 0 for plan in asked):
                for selection in {plan.target.selection for plan in asked}:
                    self._tokens.observe((method, selection), max(map(len, drafts)), seconds)
            for plan, tokens in zip(asked, drafts, strict=True):
                empty = plan.history.empty
                if tokens:
                    empty[method] = 0
                    drafted.append(Drafted(plan.target, method, tokens[: plan.count]))
                else:
                    empty[method] = empty.get(method, 0) + 1
                    if empty[method] > _MOST_EMPTY:
                        # A drafter that never has an answer does not pay either.
                        self.observe_draft(plan.target.key, method, 1, 0)
        return drafted
