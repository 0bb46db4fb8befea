"""Where the two ends of a prefix meet: a front that is computed, and a back that a tier brings.

The engine asks for the next tokens of the front, a loader on the event loop for the next chunks of
the back; `splitpoint.planning.bidirectional` divides them. Knows no requests and no store.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from splitpoint.planning.bidirectional import BidirectionalQueue, PieceSize, piece_sizes
from splitpoint.shapes import chunks_of

# Bytes of one piece that a tier loads. A piece costs two calls of the store, some milliseconds;
# the front may have to wait for one piece at the end.
LEAST_PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 16 << 20
# The tier reads one while the slots of the next are reserved, and the last one is checked.
PIECES_UNDER_WAY = 2
# Chunks of the smallest piece at most: the sides of a short prefix meet somewhere, too.
LEAST_PIECE_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Ends:
    """What is divided: chunks [first_chunk, chunk_count) of a sequence.

    Attributes:
        cached_tokens: tokens of these chunks and those before them that need not be prefilled.
        expected_tokens: where the plan lets the ends meet.
        block_tokens: most tokens of one step.
    """

    first_chunk: int
    chunk_count: int
    cached_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    expected_tokens: int
    block_tokens: int

    def queue(self) -> BidirectionalQueue:
        count = self.chunk_count - self.first_chunk
        front, _ = piece_sizes(self.chunk_tokens, self.block_tokens)
        least = min(chunks_of(LEAST_PIECE_BYTES, self.chunk_bytes), LEAST_PIECE_CHUNKS)
        back = PieceSize(least, max(least, MOST_PIECE_BYTES // self.chunk_bytes))
        expected = chunks_of(self.expected_tokens, self.chunk_tokens) - self.first_chunk
        share = min(max(expected / count, 0.0), 1.0)
        return BidirectionalQueue(
            count,
            front=front,
            back=back,
            expected_share=share,
            back_ahead=PIECES_UNDER_WAY - 1,
        )


class Meeting:
    """The progress of both ends. Any thread may call any method; one thread uses each end."""

    def __init__(self, ends: Ends, *, in_turn: bool = False) -> None:
        """`in_turn`: the back ends at the expected point, and nothing is computed before."""
        self._ends = ends
        self._in_turn = in_turn
        self._lock = threading.Lock()
        self._queue = ends.queue()
        # The end of the tokens that the front has claimed.
        self._claimed = ends.first_chunk * ends.chunk_tokens
        self._loading: set[range] = set()
        self._back_ended = False

    # -- the front ----------------------------------------------------------------------

    def front_tokens(self, computed: int) -> int:
        """Return how many tokens to compute next, after the first `computed`; 0: none now."""
        with self._lock:
            if self._in_turn and not self._back_ended:
                return 0
            while computed >= self._claimed:
                chunks = self._queue.pop_front()
                if chunks is None:
                    return 0
                end = (self._ends.first_chunk + chunks.stop) * self._ends.chunk_tokens
                self._claimed = min(end, self._ends.cached_tokens)
            return self._claimed - computed

    def has_met(self, computed: int) -> bool:
        """Return True if every chunk is loaded, or among the first `computed` tokens."""
        with self._lock:
            if not self._back_ended or self._loading:
                return False
            begin = (self._ends.first_chunk + self._queue.back) * self._ends.chunk_tokens
            return computed >= min(begin, self._ends.cached_tokens)

    # -- the back -----------------------------------------------------------------------

    @property
    def first_loaded_chunk(self) -> int:
        """The chunk from which on all are loaded, once no piece is under way."""
        with self._lock:
            return self._ends.first_chunk + self._queue.back

    def claim_back(self) -> range | None:
        """Return the chunks to load next, as indices in the sequence; None: there are no more.

        Several pieces may be under way.
        """
        with self._lock:
            queue, first = self._queue, self._ends.first_chunk
            chunks = queue.pop_back_in_turn() if self._in_turn else queue.pop_back()
            if chunks is None:
                self._back_ended = True
                return None
            chunks = range(first + chunks.start, first + chunks.stop)
            self._loading.add(chunks)
            return chunks

    def loaded(self, chunks: range, begin: int) -> None:
        """Of claimed chunks, those from index `begin` on are loaded.

        If that is not all of them, nothing more is claimed: the front computes the rest and all
        before it, also what is or will be loaded of that.
        """
        with self._lock:
            self._loading.remove(chunks)
            if begin > chunks.start:
                begin -= self._ends.first_chunk
                self._queue.give_back(range(self._queue.back, max(begin, self._queue.back)))
                self._back_ended = True

    def give_back(self) -> None:
        """Let the front compute all chunks; no piece is under way."""
        with self._lock:
            count = self._ends.chunk_count - self._ends.first_chunk
            self._queue.give_back(range(count, count))
            self._back_ended = True

    def end_back(self) -> None:
        """Claim nothing more of the back; no piece is under way."""
        with self._lock:
            self._queue.give_back(range(self._queue.back, self._queue.back))
            self._back_ended = True
