"""Divides the chunks of a prefix between recomputing from the front and loading from the back.

One side computes K and V from token ids, front first; the other loads chunks, back first.
Each asks for its next piece before it runs out of work. Pieces shrink towards the meeting
point, which need not be known beforehand: the progress of both sides tells their speeds. No
clock, no tensors and no lock: one caller at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.errors import InvalidArgument
from splitpoint.shapes import chunks_of

# Weight of the plan's expectation, in chunks that were seen to be done.
_EXPECTED_CHUNKS = 2.0
# Least share expected of a side: a plan may be wrong, so both sides are tried.
_LEAST_SHARE = 0.02
# Rows that products need to run at nearly full speed: on an AVX-512 core, in fp32 with
# layers of 768, a token in a block of 64 takes a tenth more than in one of 256, in one
# of 16 twice as much.
LEAST_BLOCK_TOKENS = 64
# A piece on the link has a copy for each layer's K and V: in runs of this many chunks, the
# host's time for starting copies does not count.
MOST_CHUNKS_LOADED = 16


@dataclass(frozen=True, slots=True)
class PieceSize:
    """Bounds of one piece in chunks: the fewest worth an operation, and the most."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError("a piece has at least 1 chunk, and `most` is at least `least`")


def piece_sizes(chunk_tokens: int, block_tokens: int) -> tuple[PieceSize, PieceSize]:
    """Return the sizes of pieces to compute, of at most `block_tokens`, and of pieces to load."""
    most = max(1, block_tokens // chunk_tokens)
    least = min(chunks_of(LEAST_BLOCK_TOKENS, chunk_tokens), most)
    return PieceSize(least, most), PieceSize(1, MOST_CHUNKS_LOADED)


@dataclass(slots=True)
class _Side:
    piece_size: PieceSize
    expected: float  # share of the work
    ahead: int = 0  # pieces that are still under way when it asks for its next one
    pieces: list[int] = field(default_factory=list)
    popped: int = 0
    ended: bool = False

    def pending(self, under_way: int, begun: float = 0.0) -> float:
        """Return the chunks not done in the last `under_way` pieces.

        `begun`: the part of the first of them that is done.
        """
        last = self.pieces[-under_way:] if under_way else []
        return sum(last) - (begun * last[0] if last else 0.0)

    def speed(self, pending: float) -> float:
        """Return the chunks done since both sides began; only the ratio of two speeds counts."""
        return self.popped - pending + _EXPECTED_CHUNKS * self.expected


class BidirectionalQueue:
    """A queue of chunks `[0, chunk_count)` that is popped from both ends, each chunk once.

    Attributes:
        front, back: chunks [0, front) and [back, chunk_count) have been popped.
    """

    def __init__(
        self,
        chunk_count: int,
        *,
        front: PieceSize,
        back: PieceSize,
        expected_share: float = 0.5,
        ahead: int = 0,
        back_ahead: int | None = None,
    ) -> None:
        """Prepare the queue.

        Args:
            expected_share: of the front, in [0, 1]; InvalidArgument otherwise.
            ahead: pieces that are still under way when a side asks for its next one.
            back_ahead: those of the back, if there are more of them.
        """
        if not 0 <= expected_share <= 1:
            raise InvalidArgument("a share must be in [0, 1]", field="expected_share")
        share = min(max(expected_share, _LEAST_SHARE), 1 - _LEAST_SHARE)
        self.front = 0
        self.back = chunk_count
        self._expected = round(expected_share * chunk_count)
        self._computes = _Side(front, share, ahead)
        self._loads = _Side(back, 1 - share, ahead if back_ahead is None else back_ahead)

    def pop_front(self) -> range | None:
        """Return the chunks to compute next; None: there are no more."""
        count = self._pop(self._computes, self._loads)
        self.front += count
        return range(self.front - count, self.front) if count else None

    def pop_back(self) -> range | None:
        """Return the chunks to load next; None: there are no more."""
        count = self._pop(self._loads, self._computes)
        self.back -= count
        return range(self.back, self.back + count) if count else None

    def pop_back_in_turn(self) -> range | None:
        """Return the chunks to load next in a serial twin, where loading ends before computing.

        The front's progress tells nothing then, so loading ends at the expected meeting
        point, and the front gets the rest.
        """
        count = min(self.back - self._expected, self._loads.piece_size.most)
        if self._loads.ended or not count:
            self._loads.ended = True
            return None
        self.back -= count
        return range(self.back, self.back + count)

    def give_back(self, chunks: range) -> None:
        """Take back chunks that were popped from the back and cannot be loaded.

        The front computes all that lies before their end, and nothing more is loaded.
        """
        self.back = chunks.stop
        self._loads.ended, self._computes.ended = True, False

    def close(self) -> None:
        """Return None from now on, from both ends."""
        self._computes.ended = self._loads.ended = True

    def _pop(self, mine: _Side, other: _Side) -> int:
        """Return how many chunks the asking side gets.

        Half of its share of the remaining chunks, as in guided self-scheduling, so that the
        last pieces of both sides are small; and no more than it has done so far, so that a
        slow side holds few chunks when that becomes known.
        """
        left = self.back - self.front
        if mine.ended or not left:
            mine.ended = True
            return 0
        count = min(left, mine.piece_size.most)
        if not other.ended:
            pending = mine.pending(mine.ahead)
            # The progress of the other side's running piece is unknown: half, on average.
            others = other.pending(other.ahead + 1, begun=0.5)
            speed, other_speed = mine.speed(pending), other.speed(others)
            least = min(mine.piece_size.least, left)
            # The other side would finish everything before one more piece ends here.
            if (left + others) * speed < (least + pending) * other_speed:
                mine.ended = True
                return 0
            guided = int(left * speed / (speed + other_speed) / 2)
            count = min(count, max(least, min(guided, mine.popped + least)))
        mine.pieces.append(count)
        mine.popped += count
        return count
