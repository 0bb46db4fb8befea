"""When to evict before anybody asks for room, and how much. Pure: counts in, a count out."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.errors import InvalidArgument

# Between two batches the event loop answers calls; evicting one chunk takes microseconds.
BATCH_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Eviction begins when more than `above` of all slots are in use, and ends at `to`.

    In use is every slot that is not free. Both are fractions, 0 <= to < above <= 1.

    Raises InvalidArgument for others.
    """

    above: float
    to: float

    def __post_init__(self) -> None:
        if not 0.0 < self.above <= 1.0:  # NaN, too
            raise InvalidArgument(
                "--evict-above is a fraction in (0, 1]", field="evict-above", value=self.above
            )
        if not 0.0 <= self.to < self.above:
            raise InvalidArgument(
                "--evict-to is a fraction below --evict-above", field="evict-to", value=self.to
            )

    def chunks_to_evict(self, slot_count: int, free_count: int, *, is_evicting: bool) -> int:
        """How many chunks should go now, at most a batch; 0: none.

        `is_evicting`: the last answer was not 0, so the lower mark is not reached.
        """
        used = slot_count - free_count
        if used <= (self.to if is_evicting else self.above) * slot_count:
            return 0
        excess = used - int(self.to * slot_count)
        return min(excess, BATCH_CHUNKS)
