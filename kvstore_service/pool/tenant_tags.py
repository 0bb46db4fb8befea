"""Whose bytes each slot holds, so that no tenant is granted another one's.

By the tag of the salt that a slot was last granted for. Zeroing what differs is the
store's business.
"""

from __future__ import annotations

from collections.abc import Iterable

# Of slots whose last writer's tenant is not known; no salt has it.
_UNKNOWN = b""


class TenantTags:
    """The tags of one arena; a slot without one was never written, and is all zeros.

    Args:
        written_slots: slots that were granted before now, to nobody knows whom.
    """

    def __init__(self, written_slots: Iterable[int]) -> None:
        self._tags = dict.fromkeys(written_slots, _UNKNOWN)

    def set(self, slot: int, tag: bytes) -> None:
        self._tags[slot] = tag

    def of(self, slot: int) -> bytes:
        """Salt tag of the tenant that a slot was granted for."""
        return self._tags[slot]

    def foreign(self, slots: Iterable[int], tag: bytes) -> tuple[int, ...]:
        """Those of the slots that hold bytes of another tenant, or of nobody knows whom."""
        return tuple(slot for slot in slots if self._tags.get(slot, tag) != tag)
