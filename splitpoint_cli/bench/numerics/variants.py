"""What a prompt's answer may not depend on: each variant is one way to compute it.

The reference computes a prompt alone, with nothing cached. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.harness import MAX_BATCHED_TOKENS

# Sequences at once where a prompt is not alone, and prompt tokens of a step in small pieces.
BATCH = 16
SMALL_BUDGET = 64
DRAFT_TOKENS = (1, 4, 8)


class Split(Enum):
    """The split l: cached tokens `[0, l)` are rebuilt from X, the others loaded."""

    NONE = "0"
    ONE = "1"
    MIDDLE = "middle"
    ALL = "all"

    def tokens(self, cached: int) -> int:
        """Return l for a prefix of `cached` tokens."""
        return {Split.NONE: 0, Split.ONE: 1, Split.MIDDLE: cached // 2, Split.ALL: cached}[self]


class Cached(Enum):
    """Where the prefix is when a request comes: nowhere, in the store, or on the device."""

    NOTHING = "nothing"
    STORED = "stored"
    ON_DEVICE = "on the device"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an answer. The defaults are the reference's.

    Attributes:
        budget: prompt tokens that a step computes at most.
        is_alone: False: 15 other prompts are computed meanwhile.
        method: TOKENS computes the prefix from both ends; any other follows the split.
        front_share: share of a streamed sequence's prompt that stays on the device.
        schedule: ROW: X of that front stays instead of K and V.
        draft_tokens: most drafts of a step; 0: none.
        delivered_share: share of the answer that another worker delivered before it ended.
    """

    name: str
    cached: Cached = Cached.NOTHING
    residency: Residency = Residency.RESIDENT
    budget: int = MAX_BATCHED_TOKENS
    is_alone: bool = True
    split: Split = Split.NONE
    method: RestoreMethod = RestoreMethod.LOAD
    front_share: float = 0.0
    schedule: Schedule = Schedule.PIPELINED
    drafts: DraftMethod = DraftMethod.OFF
    draft_tokens: int = 0
    delivered_share: float = 0.0

    @property
    def is_streamed(self) -> bool:
        return self.residency is Residency.STREAMED

    @property
    def is_warm(self) -> bool:
        """True if the prefix comes from the store."""
        return self.cached is Cached.STORED


REFERENCE = Variant("cold, alone")


def variants(*, has_activations: bool) -> tuple[Variant, ...]:
    """Return all variants but the reference, those that read its chunks first.

    `has_activations`: the store has X, so that splits above 0 are possible.
    """
    return (*_warm(has_activations=has_activations), *_cold())


def _warm(*, has_activations: bool) -> Iterator[Variant]:
    warm = Variant("warm", cached=Cached.STORED)
    splits = tuple(Split) if has_activations else (Split.NONE,)
    for split in splits:
        yield replace(warm, name=f"warm, l = {split.value}", split=split)
    # Small pieces, so that both ends get some.
    yield replace(
        warm, name="warm, from both ends", method=RestoreMethod.TOKENS, budget=SMALL_BUDGET
    )
    yield replace(warm, name="warm, with 15 others", is_alone=False)
    if has_activations:
        yield replace(
            warm,
            name="warm, l = middle, with 15 others",
            is_alone=False,
            split=Split.MIDDLE,
            budget=SMALL_BUDGET,
        )
    yield replace(warm, name="continued by another worker, warm", delivered_share=0.5)
    streamed = replace(warm, residency=Residency.STREAMED)
    for split in splits:
        yield replace(streamed, name=f"streamed, l = {split.value}", split=split)
    yield replace(streamed, name="streamed, front on the device", front_share=0.5)
    if has_activations:
        yield replace(
            streamed,
            name="streamed, X of the front on the device",
            front_share=0.5,
            schedule=Schedule.ROW,
        )
    yield replace(streamed, name="streamed, with 15 others", is_alone=False)
    for count in DRAFT_TOKENS:
        yield replace(
            streamed,
            name=f"streamed, self drafts, k = {count}",
            drafts=DraftMethod.SELF,
            draft_tokens=count,
        )


def _cold() -> Iterator[Variant]:
    yield replace(REFERENCE, name="prefix on the device", cached=Cached.ON_DEVICE)
    yield replace(REFERENCE, name=f"prefill budget {SMALL_BUDGET}", budget=SMALL_BUDGET)
    for budget in (SMALL_BUDGET, MAX_BATCHED_TOKENS):
        name = f"with 15 others, budget {budget}"
        yield replace(REFERENCE, name=name, budget=budget, is_alone=False)
    yield replace(REFERENCE, name="continued by another worker, cold", delivered_share=0.5)
    streamed = replace(REFERENCE, residency=Residency.STREAMED)
    yield replace(streamed, name="streamed, cold")
    yield replace(
        streamed,
        name=f"streamed, cold, with 15 others, budget {SMALL_BUDGET}",
        is_alone=False,
        budget=SMALL_BUDGET,
    )
    for count in DRAFT_TOKENS:
        yield replace(
            REFERENCE,
            name=f"suffix drafts, k = {count}",
            drafts=DraftMethod.SUFFIX,
            draft_tokens=count,
        )
    yield replace(
        REFERENCE,
        name="suffix drafts, k = 4, with 15 others",
        drafts=DraftMethod.SUFFIX,
        draft_tokens=4,
        is_alone=False,
    )
