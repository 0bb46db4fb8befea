"""The batch with the most tokens per second while weights cross the link in every step.

A step reads each weight on the host once for all sequences of its batch. That is the loop over
batches of KVPR's Algorithm 1, as one step: there the sequences of a layer are computed in groups
that fit the device; here their caches pass through staging memory of a fixed size.

With C cache pages and N places, r resident sequences of P pages and q streamed ones of t pages
yield (r + q) / step(r, q) tokens/s. The residents either take all the memory that they can, or
leave t pages for every other place:

    r = C / P, q = (C - r P) / t          r = (C - N t) / (P - t), q = N - r

Between the two, where the link is the limit, the rate only rises or only falls with r. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.planning.weight_placement import residents_beside_others, tokens_per_second
from splitpoint.residency.seconds import PieceSeconds

# Streaming must be predicted to take at most this share of the time without it: once streamed, a
# request stays so, and how long the others run is a guess.
WORTH_IT = 0.75


@dataclass(frozen=True, slots=True)
class BatchRoom:
    """What a worker has for sequences of one length.

    Attributes:
        pages, places: of its cache (C), and of its batch (N).
        resident_pages, streamed_pages: of a sequence with its cache on the device (P), and of one
            that is streamed (t).
        most_streamed: streamed sequences that the store has room for; None: any number.
    """

    pages: int
    places: int
    resident_pages: int
    streamed_pages: int
    most_streamed: int | None = None

    @property
    def most_resident(self) -> int:
        """Resident sequences of a batch that takes all the memory for them."""
        return min(self.places, self.pages // self.resident_pages)

    @property
    def residents_beside_others(self) -> int:
        """Resident sequences that leave pages for every other place of the batch."""
        if self.resident_pages <= self.streamed_pages:
            return self.most_resident
        sizes = (self.resident_pages, self.streamed_pages)
        residents = residents_beside_others(self.pages, self.places, *sizes)
        return min(self.most_resident, int(residents))

    def streamed_beside(self, resident: int) -> int:
        """Return how many sequences can be streamed beside this many residents."""
        free = self.pages - resident * self.resident_pages
        count = min(self.places - resident, free // self.streamed_pages)
        return count if self.most_streamed is None else min(count, self.most_streamed)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Resident and streamed sequences that decode together, and the seconds of their step."""

    resident: int
    streamed: int
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """0 for an empty batch."""
        return tokens_per_second(self.resident + self.streamed, self.step_seconds)

    def is_worth_streaming(self, residents: MixedBatch) -> bool:
        """Return True if this batch is so much better than residents alone."""
        return residents.tokens_per_second <= WORTH_IT * self.tokens_per_second


def residents_alone(pieces: PieceSeconds, room: BatchRoom, length: int) -> MixedBatch:
    """Return the batch of as many resident sequences of this length as fit."""
    return _mixed(pieces, length, room.most_resident, 0)


def full_batch(pieces: PieceSeconds, room: BatchRoom, length: int) -> MixedBatch:
    """Return the better of the batches with streamed sequences; of equal ones more residents."""
    return max(
        (
            _mixed(pieces, length, resident, room.streamed_beside(resident))
            for resident in (room.most_resident, room.residents_beside_others)
        ),
        key=lambda batch: batch.tokens_per_second,
    )


def _mixed(pieces: PieceSeconds, length: int, resident: int, streamed: int) -> MixedBatch:
    if streamed:
        seconds = pieces.streamed_step(streamed, length, resident_count=resident)
    else:
        seconds = pieces.step(resident, length)
    return MixedBatch(resident, streamed, seconds)
