"""Where a computed front meets a loaded back: each chunk is done once, whatever fails."""

from __future__ import annotations

import random

import pytest

from worker_service.fetching.meeting import Ends, Meeting

CHUNK = 16


def ends(first: int = 0, count: int = 40, expected: int = 20, spare: int = 0) -> Ends:
    """Chunks of a MiB each; of the last one, `spare` tokens are prefilled anyway."""
    cached = count * CHUNK - spare
    return Ends(first, count, cached, CHUNK, 1 << 20, expected * CHUNK, 128)


def play(meeting: Meeting, rng: random.Random, first: int, fails_at: int | None = None) -> set[int]:
    """Let both sides work in random turns until they have met; return the loaded chunks.

    Two pieces of the back are under way at a time, and end in any order.
    """
    computed, loaded, pieces = first * CHUNK, set[int](), 0
    under_way: list[range] = []
    back_ended = False
    for _ in range(10_000):
        if meeting.has_met(computed):
            assert not under_way
            return {index for index in loaded if index >= meeting.first_loaded_chunk}
        if rng.random() < 0.5:
            # A step may compute a part of what it may.
            computed += min(meeting.front_tokens(computed), rng.randint(1, 128))
        elif under_way and (back_ended or len(under_way) == 2 or rng.random() < 0.5):
            chunks = under_way.pop(rng.randrange(len(under_way)))
            begin = chunks.start
            if pieces == fails_at:
                begin = rng.randint(chunks.start, chunks.stop)
            loaded |= set(range(begin, chunks.stop))
            meeting.loaded(chunks, begin)
            pieces += 1
        elif not back_ended:
            claimed = meeting.claim_back()
            back_ended = claimed is None
            under_way += [] if claimed is None else [claimed]
    raise AssertionError("they did not meet")


@pytest.mark.parametrize("seed", range(40))
def test_every_chunk_is_computed_or_loaded(seed: int) -> None:
    rng = random.Random(seed)
    first, count = rng.choice([(0, 1), (0, 2), (0, 40), (7, 40), (39, 40)])
    spare = rng.choice([0, 1])
    given = ends(first, count, rng.randint(0, count), spare)
    meeting = Meeting(given)
    fails_at = rng.choice([None, None, 0, 1, 3])
    loaded = play(meeting, rng, first, fails_at)
    begin = meeting.first_loaded_chunk
    assert loaded == set(range(begin, count))
    # The front ended exactly there.
    assert meeting.front_tokens(begin * CHUNK) == 0


def test_the_front_computes_what_was_claimed_and_not_loaded() -> None:
    meeting = Meeting(ends())
    first = meeting.claim_back()
    assert first is not None
    meeting.loaded(first, first.start)
    second = meeting.claim_back()
    assert second is not None
    assert second.stop == first.start
    meeting.loaded(second, second.stop)
    assert meeting.claim_back() is None
    computed = 0
    while count := meeting.front_tokens(computed):
        assert not meeting.has_met(computed)
        computed += count
    assert computed == first.start * CHUNK
    assert meeting.has_met(computed)


def test_a_front_that_ended_goes_on_when_the_load_fails() -> None:
    meeting = Meeting(ends(count=2, expected=1))
    claimed = meeting.claim_back()
    assert claimed == range(1, 2)
    assert meeting.front_tokens(0) == CHUNK
    assert meeting.front_tokens(CHUNK) == 0
    assert not meeting.has_met(CHUNK)
    meeting.loaded(claimed, claimed.stop)
    assert meeting.front_tokens(CHUNK) == CHUNK
    assert meeting.has_met(2 * CHUNK)


def test_in_turn_the_back_ends_at_the_expected_point_before_the_front_begins() -> None:
    meeting = Meeting(ends(expected=13), in_turn=True)
    begin = 40
    while chunks := meeting.claim_back():
        assert meeting.front_tokens(0) == 0
        assert chunks.stop == begin
        meeting.loaded(chunks, chunks.start)
        begin = chunks.start
    assert begin == 13
    computed = 0
    while count := meeting.front_tokens(computed):
        computed += count
    assert computed == 13 * CHUNK
    assert meeting.has_met(computed)


def test_what_the_device_holds_already_is_not_computed() -> None:
    meeting = Meeting(ends(first=2))
    held = 30 * CHUNK
    assert 0 < meeting.front_tokens(held) <= 10 * CHUNK
