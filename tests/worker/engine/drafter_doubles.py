"""A drafter that knows the right texts, and engines that draft for themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine_runner import make_engine

from splitpoint.shapes import Encoding
from splitpoint.speculation import DraftMethod
from worker_service.drafts.drafter import DraftTarget, TargetKey
from worker_service.engine.engine import Engine
from worker_service.engine.sequence import Sequence as EngineSequence
from worker_service.lanes.lanes import Lanes
from worker_service.model.model import Model
from worker_service.speculation.self_draft import SelfDrafter

# Changes a right draft: of how many tokens, and the tokens.
Change = Callable[[Sequence[int]], list[int]]


@dataclass
class KnowingDrafter:
    """Drafts what follows in `texts`, by request id, after `change`.

    Attributes:
        texts: what plain decoding answers.
        forgotten: sequences that it was told to forget.
        asked: how many tokens each call wanted at most.
    """

    texts: Mapping[str, Sequence[int]]
    change: Change = list
    method: DraftMethod = DraftMethod.MODEL
    forgotten: list[TargetKey] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)

    def propose(self, wanted: Sequence[tuple[DraftTarget, int]]) -> list[list[int]]:
        self.asked.append([count for _, count in wanted])
        drafts = []
        for target, count in wanted:
            done = len(target.tokens) - target.prompt_length
            drafts.append(self.change(self.texts[target.key[0]][done : done + count]))
        return drafts

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        self.forgotten.append(key)


def wrong(vocabulary: int) -> Change:
    """Return a change after which every token is wrong."""
    return lambda tokens: [(token + 1) % vocabulary for token in tokens]


def sometimes_wrong(vocabulary: int, seed: int) -> Change:
    """Return a change after which one token in four is wrong, and some are missing."""
    rng = random.Random(seed)

    def change(tokens: Sequence[int]) -> list[int]:
        kept = tokens[: rng.randrange(len(tokens) + 1)] if rng.random() < 0.3 else tokens
        return [rng.randrange(vocabulary) if rng.random() < 0.25 else token for token in kept]

    return change


class _LateDrafter:
    """Drafts by a drafter that is made after its engine."""

    method = DraftMethod.SELF

    def __init__(self) -> None:
        self.drafter: SelfDrafter | None = None

    def propose(self, wanted: Sequence[tuple[EngineSequence, int]]) -> list[list[int]]:
        assert self.drafter is not None
        return self.drafter.propose(wanted)

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        assert self.drafter is not None
        self.drafter.forget(key, has_ended=has_ended)


def self_drafting(
    model: Model,
    chunk_tokens: int,
    window: int,
    lanes: Lanes,
    encoding: Encoding = Encoding.NATIVE,
) -> Engine:
    """Return an engine that drafts with its own model; `window` pages stay on its device."""
    late = _LateDrafter()
    engine = make_engine(
        model,
        chunk_tokens=chunk_tokens,
        has_activations=True,
        encoding=encoding,
        window_pages=window,
        lanes=lanes,
        drafters={DraftMethod.SELF: late},
    )
    late.drafter = SelfDrafter(engine.model, engine.cache, engine.lanes)
    return engine
