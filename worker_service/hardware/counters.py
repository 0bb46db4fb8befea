"""Totals of foreign counters, which wrap, are reset, and are read only now and then.

Pure policy. A total never shrinks and never jumps: a change that no wrap explains in the
time that passed is a reset, and adds nothing.
"""

from __future__ import annotations

# A driver's counter may wrap at this many bits, whatever its type, until it exceeds them.
NARROW_BITS = 32


def growth(before: int, now: int, modulus: int, most: float) -> int | None:
    """Return the growth of a counter of [0, modulus) between two readings; None: a reset.

    `most` is the largest possible growth in between. If it exceeds `modulus`, the result
    is the least growth that explains both readings.
    """
    gained = now - before if now >= before else now - before + modulus
    return gained if 0 <= gained <= most else None


class CounterTotal:
    """Sums one counter, in its unit, from the first reading on.

    Attributes:
        is_narrow: the counter may wrap at 32 bits: it has not exceeded them yet.
        resets: readings that were treated as resets.
        gaps: readings so late that a wrap may be missing: the total is a lower bound.
    """

    def __init__(self) -> None:
        self.total = 0
        self.is_narrow = True
        self.resets = 0
        self.gaps = 0
        self._before: int | None = None
        self._read_at = 0.0

    def see(
        self, value: int, modulus: int, now: float, most_per_second: float, slack: float = 0.0
    ) -> None:
        """Add a reading at `now` seconds of a counter that wraps from modulus - 1 to 0.

        It grows at most by `most_per_second` times the seconds since the last reading,
        plus `slack`, because the times of readings are not exact.
        """
        if self._before is not None:
            most = most_per_second * (now - self._read_at) + slack
            gained = growth(self._before, value, modulus, most)
            if gained is None:
                self.resets += 1
            else:
                self.total += gained
                self.gaps += most_per_second * (now - self._read_at) >= modulus
        self._before, self._read_at = value, now

    def see_bits(
        self, value: int, bits: int, now: float, most_per_second: float, slack: float = 0.0
    ) -> None:
        """Add a reading of a counter whose type has `bits` bits, but which may wrap earlier."""
        if bits > NARROW_BITS and value >> NARROW_BITS:
            self.is_narrow = False
        modulus = 1 << (NARROW_BITS if self.is_narrow else bits)
        self.see(value, modulus, now, most_per_second, slack)

    def forget(self) -> None:
        """Treat the next reading as the first: the growth until then is unknown."""
        self._before = None
