"""The tenant whose bytes each slot holds, by salt tag.

The store zeroes slots with bytes of another tenant before it grants them.
"""

from __future__ import annotations

from collections.abc import Iterable

# Tag of slots whose tenant is unknown. No salt has it.
_UNKNOWN = b""


class TenantTags:
    """The tags of one arena. A slot without a tag was never written, and is all zeros.

    Args:
        written_slots: slots that an unknown tenant may have written.
    """

    def __init__(self, written_slots: Iterable[int]) -> None:
        self._tags = dict.fromkeys(written_slots, _UNKNOWN)

    def set(self, slot: int, tag: bytes) -> None:
        self._tags[slot] = tag

    def of(self, slot: int) -> bytes:
        """Return the salt tag of the tenant that a slot was granted for."""
        return self._tags[slot]

    def foreign(self, slots: Iterable[int], tag: bytes) -> tuple[int, ...]:
        """Return the slots that hold bytes of another or an unknown tenant."""
        return tuple(slot for slot in slots if self._tags.get(slot, tag) != tag)
