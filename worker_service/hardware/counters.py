"""Totals of counters that others keep: they wrap, they are reset, and they are read now and then.

Pure policy. A total never shrinks and never jumps: what cannot be explained by a wrap
within what the time allows is a new beginning, of which nothing is counted.
"""

from __future__ import annotations

# A driver's counter that has never shown more than this many bits may have no more,
# whatever type it is given as.
NARROW_BITS = 32


def growth(before: int, now: int, modulus: int, most: float) -> int | None:
    """What a counter of [0, modulus) gained between two readings; None: it began anew.

    `most`: what it could gain in between. Where that is above `modulus` the answer is the
    least that explains both readings.
    """
    gained = now - before if now >= before else now - before + modulus
    return gained if 0 <= gained <= most else None


class CounterTotal:
    """Sums one counter. `total` counts from the first reading on, in the counter's unit.

    Attributes:
        is_narrow: it may wrap at 32 bits: until it has shown more, whatever its type.
        resets: readings that were taken for a new beginning.
        gaps: readings that came so late that a wrap may be missing: the total is the
            least that it can be.
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
        """A reading at `now` seconds of a counter that goes from modulus - 1 to 0.

        It gains at most `most_per_second` times the seconds since the reading before,
        plus `slack`, for readings whose times are not exact.
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
        """The same of a counter that has a type of `bits` bits, and perhaps fewer that count."""
        if bits > NARROW_BITS and value >> NARROW_BITS:
            self.is_narrow = False
        modulus = 1 << (NARROW_BITS if self.is_narrow else bits)
        self.see(value, modulus, now, most_per_second, slack)

    def forget(self) -> None:
        """The next reading is a new beginning: nobody knows what happened before it."""
        self._before = None
