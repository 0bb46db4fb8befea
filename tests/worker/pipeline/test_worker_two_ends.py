"""Where a computed front meets a loaded back: each chunk is done once, whatever fails."""

from __future__ import annotations

import random

import pytest

from worker_service.fetching.tier_loader import tier_ends
from worker_service.pipeline.two_ends import TwoEnds

CHUNK = 16


def ends_of(
    first: int = 0,
    count: int = 40,
    expected: int = 20,
    spare: int = 0,
    *,
    in_turn: bool = False,
) -> TwoEnds:
    """Chunks of a MiB each; of the last one, `spare` tokens are prefilled anyway."""
    return tier_ends(
        first_chunk=first,
        chunk_count=count,
        cached_tokens=count * CHUNK - spare,
        chunk_tokens=CHUNK,
        chunk_bytes=1 << 20,
        expected_tokens=expected * CHUNK,
        block_tokens=128,
        in_turn=in_turn,
    )


def play(ends: TwoEnds, rng: random.Random, first: int, fails_at: int | None = None) -> set[int]:
    """Let both sides work in random turns until they have met; return the loaded chunks.

    Two pieces of the back are under way at a time, and end in any order.
    """
    computed, loaded, pieces = first * CHUNK, set[int](), 0
    under_way: list[range] = []
    back_ended = False
    for _ in range(10_000):
        if ends.has_met(computed):
            assert not under_way
            return {index for index in loaded if index >= ends.first_loaded_chunk}
        if rng.random() < 0.5:
            # A step may compute a part of what it may.
            computed += min(ends.front_tokens(computed), rng.randint(1, 128))
        elif under_way and (back_ended or len(under_way) == 2 or rng.random() < 0.5):
            chunks = under_way.pop(rng.randrange(len(under_way)))
            begin = chunks.start
            if pieces == fails_at:
                begin = rng.randint(chunks.start, chunks.stop)
            loaded |= set(range(begin, chunks.stop))
            ends.loaded(chunks, begin)
            pieces += 1
        elif not back_ended:
            claimed = ends.claim_back()
            back_ended = claimed is None
            under_way += [] if claimed is None else [claimed]
    raise AssertionError("they did not meet")


@pytest.mark.parametrize("seed", range(40))
def test_every_chunk_is_computed_or_loaded(seed: int) -> None:
    rng = random.Random(seed)
    first, count = rng.choice([(0, 1), (0, 2), (0, 40), (7, 40), (39, 40)])
    spare = rng.choice([0, 1])
    ends = ends_of(first, count, rng.randint(0, count), spare)
    fails_at = rng.choice([None, None, 0, 1, 3])
    loaded = play(ends, rng, first, fails_at)
    begin = ends.first_loaded_chunk
    assert loaded == set(range(begin, count))
    # The front ended exactly there.
    assert ends.front_tokens(begin * CHUNK) == 0


def test_the_front_computes_what_was_claimed_and_not_loaded() -> None:
    ends = ends_of()
    first = ends.claim_back()
    assert first is not None
    ends.loaded(first, first.start)
    second = ends.claim_back()
    assert second is not None
    assert second.stop == first.start
    ends.loaded(second, second.stop)
    assert ends.claim_back() is None
    computed = 0
    while count := ends.front_tokens(computed):
        assert not ends.has_met(computed)
        computed += count
    assert computed == first.start * CHUNK
    assert ends.has_met(computed)


def test_a_front_that_ended_goes_on_when_the_load_fails() -> None:
    ends = ends_of(count=2, expected=1)
    claimed = ends.claim_back()
    assert claimed == range(1, 2)
    assert ends.front_tokens(0) == CHUNK
    assert ends.front_tokens(CHUNK) == 0
    assert not ends.has_met(CHUNK)
    ends.loaded(claimed, claimed.stop)
    assert ends.front_tokens(CHUNK) == CHUNK
    assert ends.has_met(2 * CHUNK)


def test_in_turn_the_back_ends_at_the_expected_point_before_the_front_begins() -> None:
    ends = ends_of(expected=13, in_turn=True)
    begin = 40
    while chunks := ends.claim_back():
        assert ends.front_tokens(0) == 0
        assert chunks.stop == begin
        ends.loaded(chunks, chunks.start)
        begin = chunks.start
    assert begin == 13
    computed = 0
    while count := ends.front_tokens(computed):
        computed += count
    assert computed == 13 * CHUNK
    assert ends.has_met(computed)


def test_what_the_device_holds_already_is_not_computed() -> None:
    ends = ends_of(first=2)
    held = 30 * CHUNK
    assert 0 < ends.front_tokens(held) <= 10 * CHUNK
