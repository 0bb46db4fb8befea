"""Who takes which chunks when a prefix comes back from both ends at once.

One side computes K and V from token ids, front first; the other loads chunks, back
first. Each asks for its next piece when it is about to have nothing to do, and the
pieces shrink towards the meeting point, which nobody has to know beforehand: how far
both have come says how fast they are. No clock, no tensors, no lock: asking is for
one caller at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.errors import InvalidArgument
from splitpoint.shapes import chunks_of

# What the plan expects counts as much as the first chunks that were seen to be done.
_EXPECTED_CHUNKS = 2.0
# A plan may be wrong about a side, but not so sure that the side is never tried at
# all when there is a lot to do.
_LEAST_SHARE = 0.02


# Rows that products need to run at nearly full speed: on an AVX-512 core, in fp32 with
# layers of 768, a token in a block of 64 takes a tenth more than in one of 256, in one
# of 16 twice as much.
LEAST_BLOCK_TOKENS = 64
# A piece on the link has a copy for each layer's K and V: with this many chunks in a
# run, what the host spends on starting copies does not count.
MOST_CHUNKS_LOADED = 16


@dataclass(frozen=True, slots=True)
class PieceSize:
    """Chunks of one piece: the fewest that are worth an operation, and the most."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError("a piece has at least one chunk, and no fewer than its least")


def piece_sizes(chunk_tokens: int, block_tokens: int) -> tuple[PieceSize, PieceSize]:
    """What the front computes at once, at most `block_tokens`, and what the back loads."""
    most = max(1, block_tokens // chunk_tokens)
    least = min(chunks_of(LEAST_BLOCK_TOKENS, chunk_tokens), most)
    return PieceSize(least, most), PieceSize(1, MOST_CHUNKS_LOADED)


@dataclass(slots=True)
class _Side:
    stride: PieceSize
    expected: float  # its share of the work
    pieces: list[int] = field(default_factory=list)
    taken: int = 0
    retired: bool = False

    def pending(self, under_way: int, begun: float = 0.0) -> float:
        """Chunks not done of its last `under_way` pieces, the first of which is `begun` so far."""
        last = self.pieces[-under_way:] if under_way else []
        return sum(last) - (begun * last[0] if last else 0.0)

    def speed(self, pending: float) -> float:
        """Chunks it got done since both began; only the ratio of two speeds means anything."""
        return self.taken - pending + _EXPECTED_CHUNKS * self.expected


class BidirectionalQueue:
    """Hands out `[0, chunk_count)` from both ends, each chunk once.

    Attributes:
        front, back: chunks [0, front) and [back, chunk_count) are taken.
    """

    def __init__(
        self,
        chunk_count: int,
        *,
        front: PieceSize,
        back: PieceSize,
        expected_share: float = 0.5,
        ahead: int = 0,
    ) -> None:
        """`expected_share`: of the front; `ahead`: pieces that are still under way when a
        side asks for its next one. Raises InvalidArgument for a share outside [0, 1].
        """
        if not 0 <= expected_share <= 1:
            raise InvalidArgument("a share must be in [0, 1]", field="expected_share")
        share = min(max(expected_share, _LEAST_SHARE), 1 - _LEAST_SHARE)
        self.front = 0
        self.back = chunk_count
        self._expected = round(expected_share * chunk_count)
        self._ahead = ahead
        self._computes = _Side(front, share)
        self._loads = _Side(back, 1 - share)

    def pop_front(self) -> range | None:
        """The chunks to compute next; None: no more, ever."""
        count = self._take(self._computes, self._loads)
        self.front += count
        return range(self.front - count, self.front) if count else None

    def pop_back(self) -> range | None:
        """The chunks to load next; None: no more, ever."""
        count = self._take(self._loads, self._computes)
        self.back -= count
        return range(self.back, self.back + count) if count else None

    def pop_back_in_turn(self) -> range | None:
        """`pop_back` of a serial twin, where the back is done before the front begins.

        How far the other side has come says nothing then, so it ends where the two were
        expected to meet, and the front gets all the rest.
        """
        count = min(self.back - self._expected, self._loads.stride.most)
        if self._loads.retired or not count:
            self._loads.retired = True
            return None
        self.back -= count
        return range(self.back, self.back + count)

    def close(self) -> None:
        """Nobody gets anything more."""
        self._computes.retired = self._loads.retired = True

    def _take(self, mine: _Side, other: _Side) -> int:
        """How many chunks the asking side gets.

        Half of its share of what is left, as guided self-scheduling does, so that
        both find their last pieces small; and no more than it has done so far, so
        that a side that turns out to be slow holds little when that shows.
        """
        left = self.back - self.front
        if mine.retired or not left:
            mine.retired = True
            return 0
        count = min(left, mine.stride.most)
        if not other.retired:
            pending = mine.pending(self._ahead)
            # Nobody knows how far the other side's running piece is: half, on average.
            others = other.pending(self._ahead + 1, begun=0.5)
            speed, other_speed = mine.speed(pending), other.speed(others)
            least = min(mine.stride.least, left)
            # By the time one more piece was done here, the other side has done everything.
            if (left + others) * speed < (least + pending) * other_speed:
                mine.retired = True
                return 0
            guided = int(left * speed / (speed + other_speed) / 2)
            count = min(count, max(least, min(guided, mine.taken + least)))
        mine.pieces.append(count)
        mine.taken += count
        return count
