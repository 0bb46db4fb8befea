"""Where the two ends of a prefix meet: a front that is computed, and a back that is loaded.

As in KVPR, the device recomputes one end while the link, or a tier of the store, brings the other.
The front is prefilled from token ids, all layers of a block at a time; whole chunks of the back are
loaded from the last one on. No activations are needed, so this works for every architecture.
`splitpoint.planning.bidirectional` decides which side gets which chunks. This module knows no
requests, no lanes and no store.
"""

from __future__ import annotations

import threading

from splitpoint.planning.bidirectional import BidirectionalQueue, piece_sizes
from splitpoint.shapes import chunks_of


class TwoEnds:
    """The progress of both ends. Any thread may call any method; one thread uses each end.

    What is divided are the chunks from `first_chunk` on, up to `cached_tokens`.
    """

    def __init__(
        self,
        queue: BidirectionalQueue,
        *,
        first_chunk: int,
        cached_tokens: int,
        chunk_tokens: int,
        in_turn: bool = False,
    ) -> None:
        """`queue`: of all chunks; chunk 0 of it is `first_chunk`.

        `in_turn`: the back ends at the expected point, and nothing is computed before.
        """
        self._queue = queue
        self._first_chunk = first_chunk
        self._cached_tokens = cached_tokens
        self._chunk_tokens = chunk_tokens
        self._in_turn = in_turn
        self._lock = threading.Lock()
        self._chunk_count = queue.back
        # The end of the tokens that the front has claimed.
        self._claimed = first_chunk * chunk_tokens
        self._loading: set[range] = set()
        self._back_ended = not queue.back

    @classmethod
    def over_link(
        cls,
        *,
        first_chunk: int,
        cached_tokens: int,
        chunk_tokens: int,
        block_tokens: int,
        expected_tokens: int,
        in_turn: bool,
    ) -> TwoEnds:
        """Return the ends of a prefix whose back the link brings.

        At most `block_tokens` are computed at once. The ends are expected to meet at
        `expected_tokens`, which decides how much each begins with.
        """
        count = chunks_of(cached_tokens, chunk_tokens) - first_chunk
        front, back = piece_sizes(chunk_tokens, block_tokens)
        share = 1.0
        if count and expected_tokens < cached_tokens:
            share = max(0, expected_tokens - first_chunk * chunk_tokens) / (count * chunk_tokens)
        return cls(
            BidirectionalQueue(count, front=front, back=back, expected_share=share),
            first_chunk=first_chunk,
            cached_tokens=cached_tokens,
            chunk_tokens=chunk_tokens,
            in_turn=in_turn,
        )

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
                end = (self._first_chunk + chunks.stop) * self._chunk_tokens
                self._claimed = min(end, self._cached_tokens)
            return self._claimed - computed

    def has_met(self, computed: int) -> bool:
        """Return True if every chunk is loaded, or among the first `computed` tokens."""
        with self._lock:
            if not self._back_ended or self._loading:
                return False
            begin = (self._first_chunk + self._queue.back) * self._chunk_tokens
            return computed >= min(begin, self._cached_tokens)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the front has claimed."""
        with self._lock:
            return self._claimed - self._first_chunk * self._chunk_tokens

    # -- the back -----------------------------------------------------------------------

    @property
    def left_tokens(self) -> int:
        """Tokens, in whole chunks, that neither side has claimed."""
        with self._lock:
            return (self._queue.back - self._queue.front) * self._chunk_tokens

    @property
    def back_ended(self) -> bool:
        """True if nothing more of the back can be claimed."""
        with self._lock:
            return self._back_ended

    @property
    def first_loaded_chunk(self) -> int:
        """The chunk from which on all are loaded, once no piece is under way."""
        with self._lock:
            return self._first_chunk + self._queue.back

    def claim_back(self) -> range | None:
        """Return the chunks to load next, as indices in the sequence; None: there are no more.

        Several pieces may be under way.
        """
        with self._lock:
            queue, first = self._queue, self._first_chunk
            chunks = queue.pop_back_in_turn() if self._in_turn else queue.pop_back()
            if chunks is None:
                self._back_ended = True
                return None
            chunks = range(first + chunks.start, first + chunks.stop)
            self._loading.add(chunks)
            return chunks

    def loaded(self, chunks: range, begin: int) -> None:
        """Note that claimed chunks are loaded from index `begin` on.

        If that is not all of them, nothing more is claimed: the front computes the rest and all
        before it, also what is or will be loaded of that.
        """
        with self._lock:
            self._loading.remove(chunks)
            if begin > chunks.start:
                begin -= self._first_chunk
                self._queue.give_back(range(self._queue.back, max(begin, self._queue.back)))
                self._back_ended = True

    def give_back(self) -> None:
        """Let the front compute all chunks; no piece is under way."""
        with self._lock:
            self._queue.give_back(range(self._chunk_count, self._chunk_count))
            self._back_ended = True

    def end_back(self) -> None:
        """Claim nothing more of the back; no piece is under way."""
        with self._lock:
            self._queue.give_back(range(self._queue.back, self._queue.back))
            self._back_ended = True
