"""Two ends that meet: each chunk once, and neither waits long, whatever their speeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.planning.bidirectional import BidirectionalQueue, PieceSize


@dataclass
class End:
    """One side on paper: takes `seconds` for each chunk, one piece after the other."""

    take: Callable[[], range | None]
    seconds: float
    ahead: int
    taken: list[range] = field(default_factory=list)
    ends: list[float] = field(default_factory=lambda: [0.0])
    is_done: bool = False

    @property
    def asks_at(self) -> float:
        """When all but the `ahead` last pieces are done."""
        return self.ends[-1 - self.ahead] if len(self.ends) > self.ahead else 0.0

    def ask(self) -> None:
        chunks = self.take()
        if chunks is None:
            self.is_done = True
            return
        self.taken.append(chunks)
        self.ends.append(max(self.asks_at, self.ends[-1]) + len(chunks) * self.seconds)


def meet(
    count: int,
    front_seconds: float,
    back_seconds: float,
    *,
    share: float | None = None,
    front: PieceSize | None = None,
    back: PieceSize | None = None,
    ahead: int = 0,
) -> tuple[float, int]:
    """(seconds until both are done, chunks computed); each chunk was taken once, in order."""
    if share is None:
        share = back_seconds / (front_seconds + back_seconds)
    queue = BidirectionalQueue(
        count,
        front=front or PieceSize(1, 8),
        back=back or PieceSize(1, 16),
        expected_share=share,
        ahead=ahead,
    )
    ends = (
        End(queue.pop_front, front_seconds, ahead),
        End(queue.pop_back, back_seconds, ahead),
    )
    while waiting := [end for end in ends if not end.is_done]:
        min(waiting, key=lambda end: end.asks_at).ask()
    computed, loaded = (end.taken for end in ends)
    in_order = [chunk for piece in (*computed, *reversed(loaded)) for chunk in piece]
    assert in_order == list(range(count))
    return max(end.ends[-1] for end in ends), sum(len(piece) for piece in computed)


def best(count: int, front_seconds: float, back_seconds: float) -> float:
    """The best meeting point of all, known beforehand."""
    return min(
        max(chunks * front_seconds, (count - chunks) * back_seconds) for chunks in range(count + 1)
    )


@pytest.mark.parametrize("ratio", [1 / 300, 0.1, 0.5, 0.9, 1.0, 1.3, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 128])
def test_with_a_right_expectation_neither_waits_for_more_than_one_chunk(
    count: int, ratio: float
) -> None:
    seconds, _ = meet(count, 1.0, ratio)
    assert seconds <= best(count, 1.0, ratio) + max(1.0, ratio)
    # Where both have much to do, one chunk is little.
    if count == 128 and 0.1 <= ratio <= 4:
        assert seconds <= 1.03 * best(count, 1.0, ratio)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_a_wrong_expectation_costs_little(share: float, ratio: float) -> None:
    """The progress of both sides soon counts more than the expectation."""
    seconds, _ = meet(31, 1.0, ratio, share=share)
    assert seconds <= best(31, 1.0, ratio) + 2 * max(1.0, ratio)


def test_work_that_is_given_ahead_costs_a_piece_more() -> None:
    for ratio in (0.1, 0.5, 1.0, 2.0, 10.0):
        seconds, _ = meet(31, 1.0, ratio, ahead=1)
        assert seconds <= best(31, 1.0, ratio) + 2 * max(1.0, ratio)


def test_who_could_only_be_late_begins_nothing() -> None:
    assert meet(31, 1.0, 1e-3)[1] == 0
    assert meet(31, 1e-3, 1.0)[1] == 31
    # The last chunk is left to the faster side, even if the slower one is free first.
    assert meet(4, 1.0, 10.0) == (4.0, 4)


def test_random_histories_hand_out_each_chunk_once() -> None:
    rng = random.Random(5)
    for _ in range(400):
        least, back_least = rng.randrange(1, 5), rng.randrange(1, 4)
        meet(
            rng.randrange(1, 80),
            rng.uniform(0.01, 3),
            rng.uniform(0.01, 3),
            share=rng.random(),
            front=PieceSize(least, least + rng.randrange(20)),
            back=PieceSize(back_least, back_least + rng.randrange(20)),
            ahead=rng.randrange(3),
        )


def test_the_serial_twin_meets_where_it_was_expected() -> None:
    queue = BidirectionalQueue(20, front=PieceSize(2, 6), back=PieceSize(1, 5), expected_share=0.4)
    loaded = list(iter(queue.pop_back_in_turn, None))
    computed = list(iter(queue.pop_front, None))
    assert loaded == [range(15, 20), range(10, 15), range(8, 10)]
    assert computed == [range(6), range(6, 8)]
    for share, chunks in ((0.0, 0), (1.0, 20)):
        queue = BidirectionalQueue(
            20, front=PieceSize(2, 6), back=PieceSize(1, 5), expected_share=share
        )
        while queue.pop_back_in_turn() is not None:
            pass
        while queue.pop_front() is not None:
            pass
        assert queue.front == queue.back == chunks


def test_nothing_is_handed_out_once_it_is_closed() -> None:
    queue = BidirectionalQueue(9, front=PieceSize(1, 4), back=PieceSize(1, 4))
    assert queue.pop_front() == range(1)
    assert queue.pop_back() == range(8, 9)
    queue.close()
    assert queue.pop_front() is queue.pop_back() is queue.pop_back_in_turn() is None
    assert (queue.front, queue.back) == (1, 8)


def test_impossible_sizes_and_shares_are_refused() -> None:
    for least, most in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="at least 1 chunk"):
            PieceSize(least, most)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidArgument, match="share"):
            BidirectionalQueue(3, front=PieceSize(1, 1), back=PieceSize(1, 1), expected_share=share)
