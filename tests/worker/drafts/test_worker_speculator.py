"""Test how requests share the drafts of a step; pure, below 1 s."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from draft_targets import TargetDouble

from splitpoint.selection import FULL, Selection
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.drafts.draft_length import even_shares
from worker_service.drafts.drafter import DraftTarget, TargetKey
from worker_service.drafts.speculator import Speculator

SUFFIX, MODEL, SELF = DraftMethod.SUFFIX, DraftMethod.MODEL, DraftMethod.SELF


class Finds:
    """Drafts as much as is wanted, but nothing for the requests in `silent`."""

    def __init__(self, method: DraftMethod, silent: str = "") -> None:
        self.method = method
        self._silent = silent
        self.forgotten: list[tuple[str, bool]] = []

    def propose(self, wanted: Sequence[tuple[DraftTarget, int]]) -> list[list[int]]:
        return [[] if target.key[0] in self._silent else [7] * count for target, count in wanted]

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        self.forgotten.append((key[0], has_ended))


def fixed(name: str, method: DraftMethod, count: int = 32) -> TargetDouble:
    return TargetDouble((name, 0, 0), [1, 2, 3], speculation=Speculation(method, count))


def drafted(
    speculator: Speculator[TargetDouble], targets: Sequence[TargetDouble]
) -> dict[str, int]:
    """Return the tokens drafted in one step, by request."""
    found = speculator.propose(
        [(target, 40) for target in targets], mix=0, sequence_count=len(targets), budget=2048
    )
    return {each.target.key[0]: len(each.tokens) for each in found}


@pytest.mark.parametrize("method", [SUFFIX, MODEL, SELF])
def test_requests_that_draft_nothing_take_nothing_from_others(method: DraftMethod) -> None:
    """Nothing is found for a and b, or they have no drafter: c gets all that it asks for."""
    drafters = {SUFFIX: Finds(SUFFIX, silent="ab"), SELF: Finds(SELF)}
    speculator: Speculator[TargetDouble] = Speculator(drafters, step_tokens=64)
    targets = [fixed("a", method), fixed("b", method), fixed("c", SUFFIX)]
    assert drafted(speculator, targets) == {"c": 32}


def test_a_step_drafts_no_more_than_its_memory_was_planned_for() -> None:
    speculator: Speculator[TargetDouble] = Speculator({MODEL: Finds(MODEL)}, step_tokens=64)
    counts = drafted(speculator, [fixed(name, MODEL) for name in "abc"])
    assert sum(counts.values()) == 64
    assert sorted(counts.values()) == [21, 21, 22]


@pytest.mark.parametrize("count", [6, 100])
def test_no_request_starves_behind_others(count: int) -> None:
    speculator: Speculator[TargetDouble] = Speculator({SUFFIX: Finds(SUFFIX)}, step_tokens=64)
    targets = [fixed(str(number), SUFFIX) for number in range(count)]
    total: Counter[str] = Counter()
    for _ in range(count):
        step = drafted(speculator, targets)
        assert sum(step.values()) == 64
        total.update(step)
    assert set(total.values()) == {64}


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_even_and_use_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [rng.randrange(33) for _ in range(rng.randrange(12))]
    budget = rng.randrange(130)
    shares = even_shares(wanted, budget, turn=rng.randrange(9))
    assert sum(shares) == min(budget, sum(wanted))
    for share, want in zip(shares, wanted, strict=True):
        assert 0 <= share <= want
        assert share == want or share >= max(shares) - 1


def test_requests_begin_with_what_others_that_select_alike_have_found() -> None:
    """Self drafts of what is on the device are always wrong here, those of a selection right."""
    speculator: Speculator[TargetDouble] = Speculator({SELF: Finds(SELF)}, step_tokens=64)
    select = Selection.parsed("columns:0.05")

    def drafts(name: str, selection: Selection) -> int:
        """Return how many of 12 steps of a new request had drafts."""
        target = TargetDouble((name, 0, 0), [1], is_streamed=True, selection=selection)
        target.speculation = Speculation(SELF)
        count = 0
        for _ in range(12):
            length = drafted(speculator, [target]).get(name, 0)
            if length:
                accepted = length if selection is select else 0
                speculator.observe_draft(target.key, SELF, length, accepted)
                count += 1
            speculator.observe_step(0, length, 0.01 * (1 + 0.05 * length))
        speculator.keep([], away=[])
        return count

    for number in range(5):
        drafts(f"wrong {number}", FULL)
    assert drafts("wrong", FULL) <= 1
    assert drafts("right", select) == 12
    assert drafts("still wrong", FULL) <= 1


def test_drafters_learn_once_that_a_sequence_left_and_that_it_ended() -> None:
    drafter = Finds(MODEL)
    speculator: Speculator[TargetDouble] = Speculator({MODEL: drafter}, step_tokens=64)
    a, b = fixed("a", MODEL), fixed("b", MODEL)
    drafted(speculator, [a, b])
    for _ in range(3):
        speculator.keep([b.key], away=[a.key])
    assert drafter.forgotten == [("a", False)]
    drafted(speculator, [a])
    speculator.keep([b.key], away=[a.key])
    speculator.keep([], away=[])
    assert drafter.forgotten[1] == ("a", False)
    assert sorted(drafter.forgotten[2:]) == [("a", True), ("b", True)]
    assert speculator.is_idle
