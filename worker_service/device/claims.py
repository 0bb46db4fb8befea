"""Promises of device pages: what each sequence can still allocate, and what is spare.

A claim promises pages before they are allocated. A resident sequence may grow beyond its
claim with spare pages. A streamed one grows beyond it only into the room: pages that all
streamed sequences share, for chunks that are computed or written back. The spare pages are
neither in use, nor promised, nor part of the room. This module knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pages(Protocol):
    """The allocator of a device's pages."""

    @property
    def available_count(self) -> int: ...

    def allocate(self) -> int: ...

    def references(self, page: int) -> int: ...

    def share(self, page: int) -> None: ...

    def free(self, page: int) -> None: ...


@dataclass(slots=True, eq=False)
class Claim:
    """The pages of one sequence. `Claims` changes it.

    Attributes:
        promised: pages that the sequence can hold at any time.
        held: references to pages that it has now.
        uses_room: pages beyond the promise are in the room; otherwise they are spare ones.
    """

    promised: int = 0
    held: int = 0
    uses_room: bool = False

    @property
    def open_count(self) -> int:
        """Promised pages that are not allocated."""
        return max(0, self.promised - self.held)

    @property
    def room_count(self) -> int:
        """Pages that it holds in the room."""
        return max(0, self.held - self.promised) if self.uses_room else 0


class Claims:
    """Allocates pages to claims. Constant time, whatever the number of claims."""

    def __init__(self, pages: Pages, room_page_count: int) -> None:
        self._pages = pages
        self._room_page_count = room_page_count
        self._promised = self._open = self._room_used = 0

    @property
    def promised_count(self) -> int:
        """Pages promised to all claims."""
        return self._promised

    @property
    def room_used(self) -> int:
        """Pages of the room in use."""
        return self._room_used

    @property
    def spare_count(self) -> int:
        """Pages that nothing was promised, and that are not part of the room."""
        room_free = self._room_page_count - self._room_used
        return self._pages.available_count - self._open - room_free

    def promise(self, claim: Claim, page_count: int, *, uses_room: bool) -> bool:
        """Promise pages to a claim that has none; return False if too few are spare."""
        if claim.promised or claim.held:
            raise ValueError(f"a claim with {claim.promised} promised, {claim.held} held pages")
        if page_count > self.spare_count:
            return False
        claim.promised, claim.uses_room = page_count, uses_room
        self._promised += page_count
        self._open += page_count
        return True

    def allocate(self, claim: Claim) -> int | None:
        """Return a page; None if the claim must wait for the room, or for a spare page."""
        if claim.held >= claim.promised:
            if claim.uses_room and self._room_used >= self._room_page_count:
                return None
            if not claim.uses_room and self.spare_count < 1:
                return None
        page = self._pages.allocate()
        self._change(claim, held=1)
        return page

    def share(self, claim: Claim, page: int) -> None:
        """Add the claim's reference to a page in use or cached.

        A page in use is none of those that were promised: it takes no spare page. A cached
        one is, or takes a spare page.
        """
        extra = int(self._pages.references(page) > 0 or claim.held >= claim.promised)
        self._pages.share(page)
        self._promised += extra
        self._change(claim, held=1, promised=extra)

    def settle(self, claim: Claim, page_count: int) -> None:
        """Promise this many pages in all, from now on."""
        extra = max(page_count, claim.held) - claim.promised
        if extra > self.spare_count:
            raise ValueError(f"{extra} pages are promised, {self.spare_count} are spare")
        self._promised += extra
        self._change(claim, held=0, promised=extra)

    def free(self, claim: Claim, page: int) -> None:
        """Take away one reference of the claim to a page."""
        self._pages.free(page)
        self._change(claim, held=-1)

    def give_up(self, claim: Claim, page: int) -> None:
        """Free a page that the claim holds, and promise one page less."""
        if not claim.promised:
            raise ValueError("a claim without a promise gives up a page of it")
        self._pages.free(page)
        self._promised -= 1
        self._change(claim, held=-1, promised=-1)

    def end(self, claim: Claim) -> None:
        """End a promise; the claim holds no pages any more."""
        if claim.held:
            raise ValueError(f"a claim ends that holds {claim.held} pages")
        self._promised -= claim.promised
        self._open -= claim.promised
        claim.promised, claim.uses_room = 0, False

    def _change(self, claim: Claim, *, held: int, promised: int = 0) -> None:
        self._open -= claim.open_count
        self._room_used -= claim.room_count
        claim.held += held
        claim.promised += promised
        self._open += claim.open_count
        self._room_used += claim.room_count
