"""Asks the drafters for guesses before a step, and remembers who is drafted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from splitpoint.speculation import MOST_SPECULATIVE_TOKENS, DraftMethod
from worker_service.drafts.drafter import Drafter, DraftTarget, TargetKey

Target = TypeVar("Target", bound=DraftTarget)

# The order in which AUTO asks: the cheapest first.
_AUTO = (DraftMethod.SUFFIX, DraftMethod.SELF, DraftMethod.MODEL)


@dataclass(frozen=True, slots=True)
class Drafted(Generic[Target]):
    """Guessed tokens for a sequence, at least one, and who guessed them."""

    target: Target
    method: DraftMethod
    tokens: list[int]


class Speculator(Generic[Target]):
    """Drafts for the sequences of one engine. Used by the engine's thread only."""

    def __init__(
        self, drafters: Mapping[DraftMethod, Drafter[Target]], *, step_tokens: int
    ) -> None:
        """`step_tokens`: guesses that one step verifies at most."""
        self._drafters = drafters
        self._step_tokens = step_tokens
        self._known: dict[TargetKey, Target] = {}

    def propose(self, spare: Sequence[tuple[Target, int]], budget: int) -> list[Drafted[Target]]:
        """Return guesses for sequences that have room for so many of them.

        `budget`: guesses that the step has room for, at most.
        """
        budget = min(budget, self._step_tokens)
        drafted: list[Drafted[Target]] = []
        by_method: dict[DraftMethod, list[tuple[Target, int]]] = {}
        for target, room in spare:
            self._known[target.key] = target
            speculation = target.speculation
            most = speculation.num_speculative_tokens
            count = min(room, budget, MOST_SPECULATIVE_TOKENS if most is None else most)
            method = speculation.method
            if method is DraftMethod.AUTO:
                method = next((each for each in _AUTO if each in self._drafters), DraftMethod.OFF)
            if count > 0 and method in self._drafters:
                by_method.setdefault(method, []).append((target, count))
                budget -= count
        for method, wanted in by_method.items():
            guesses = self._drafters[method].propose(wanted)
            for (target, count), tokens in zip(wanted, guesses, strict=True):
                if tokens:
                    drafted.append(Drafted(target, method, tokens[:count]))
        return drafted

    def keep(self, running: Iterable[TargetKey]) -> None:
        """Forget all sequences that do not run any more."""
        if self._known:
            for key in self._known.keys() - set(running):
                del self._known[key]
                for drafter in self._drafters.values():
                    drafter.forget(key)
