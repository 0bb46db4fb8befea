"""Finds pages of the device cache by chunk key, so that equal prefixes share their pages.

Only full chunks are here whose K and V are finite and were checked. Keys are those of the
store (`splitpoint.keys`): they contain the tenant's salt, so no tenant finds the pages of
another. A chunk is here only as long as its parent is. This module knows no requests and
copies nothing. Used by the engine's thread only, except `marks`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from splitpoint.keys import MARK_BYTES, chunk_keys
from splitpoint.shapes import ArenaLayout
from worker_service.device.cache import PageAllocator

# Chunks after one parent that are compared to find an equal beginning; the newest ones.
COMPARED_CHUNKS = 64
# A shorter equal beginning of a chunk, as a share of it, is computed and not copied: most
# prompts begin with the same few tokens.
LEAST_COPIED_SHARE = 1 / 8
# Keys in a worker's report of what its device holds.
MOST_MARKS = 4096


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk on the device. `is_sure`: see `DevicePrefixes.register`."""

    page: int
    parent: bytes
    tokens: array[int]
    is_sure: bool


@dataclass(frozen=True, slots=True)
class Beginning:
    """A page of which the first `token_count` rows are those of a wanted chunk."""

    page: int
    token_count: int


class DevicePrefixes:
    """The pages of chunks by key, over the counts of a `PageAllocator`.

    Attributes:
        version: grows whenever the set of chunks changes.
    """

    def __init__(self, pages: PageAllocator, layout: ArenaLayout) -> None:
        self.version = 0
        self._pages = pages
        self._layout_hash = layout.layout_hash
        self._chunk_tokens = layout.chunk_tokens
        # Most recently registered or taken last.
        self._chunks: dict[bytes, _Chunk] = {}
        self._key_of: dict[int, bytes] = {}
        # The chunks after each parent, newest last; first chunks under their tenant's salt.
        self._children: dict[bytes, dict[bytes, None]] = {}
        pages.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._chunks)

    def extend_keys(
        self, keys: list[bytes], salt: bytes, token_ids: Sequence[int], chunk_count: int
    ) -> None:
        """Append to `keys`, those of a sequence's first chunks, until there are `chunk_count`."""
        size = self._chunk_tokens
        tokens = token_ids[len(keys) * size : chunk_count * size]
        parent = keys[-1] if keys else b""
        keys += chunk_keys(self._layout_hash, salt, tokens, size, parent=parent)

    # -- find -------------------------------------------------------------------------

    def held_count(self, keys: Sequence[bytes], *, vouched: int) -> int:
        """Return how many leading chunks can be taken.

        The store holds the first `vouched` of them now; chunks behind these must be sure.
        """
        for index, key in enumerate(keys):
            chunk = self._chunks.get(key)
            if chunk is None or (index >= vouched and not chunk.is_sure):
                return index
        return len(keys)

    def listed(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of chunks that are here."""
        return [self._chunks[key].page for key in keys]

    def pages_of(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of chunks that are here, which become the newest.

        The caller shares them before anything else allocates a page.
        """
        found = []
        for key in keys:
            chunk = self._chunks[key] = self._chunks.pop(key)
            found.append(chunk.page)
        return found

    def beginning_of(
        self, salt: bytes, parent: bytes, token_ids: Sequence[int]
    ) -> Beginning | None:
        """Return the page after `parent` that begins with most of the tokens.

        `parent` is empty for first chunks. None if no sure chunk begins with enough of them.
        """
        children = self._children.get(parent or _root(salt), {})
        wanted = array("i", token_ids)
        best = None
        most = max(1, int(LEAST_COPIED_SHARE * self._chunk_tokens)) - 1
        for key in islice(reversed(children), COMPARED_CHUNKS):
            chunk = self._chunks[key]
            count = _equal_count(chunk.tokens, wanted)
            if count > most and chunk.is_sure:
                best, most = Beginning(chunk.page, count), count
        return best

    def marks(self) -> bytes:
        """Return the first bytes of the newest chunks' keys, newest first; from any thread."""
        keys = list(self._chunks)  # atomic: the engine changes it meanwhile
        return b"".join(key[:MARK_BYTES] for key in keys[: -MOST_MARKS - 1 : -1])

    # -- change -----------------------------------------------------------------------

    def register(
        self,
        salt: bytes,
        parent: bytes,
        key: bytes,
        token_ids: Sequence[int],
        page: int,
        *,
        is_sure: bool,
    ) -> int:
        """Make a full chunk findable; return the page that holds it from now on.

        If another page holds it already and is sure, the caller's reference moves to that
        page; one that is not sure was not taken, and is replaced. Without its parent the
        chunk is not registered. `is_sure`: its bytes were computed, or compared with their
        checksum when they were read; a chunk is sure only if its parent is, too.
        """
        before = self._chunks.get(parent)
        if parent and before is None:
            return page
        is_sure = is_sure and (before is None or before.is_sure)
        present = self._chunks.get(key)
        if present is not None and present.page == page:
            return page
        if present is not None and present.is_sure:
            self._pages.share(present.page)
            self._pages.free(page)
            return present.page
        self.drop([key])
        above = parent or _root(salt)
        self._pages.keep(page)
        self._chunks[key] = _Chunk(page, above, array("i", token_ids), is_sure)
        self._key_of[page] = key
        self._children.setdefault(above, {})[key] = None
        self.version += 1
        return page

    def drop(self, keys: Iterable[bytes]) -> set[int]:
        """Forget chunks and all that follow them; return their pages."""
        dropped: set[int] = set()
        waiting = [key for key in keys if key in self._chunks]
        while waiting:
            key = waiting.pop()
            if key in self._chunks:
                waiting += self._children.get(key, {})
                page = self._forget(key)
                self._pages.drop(page)
                dropped.add(page)
        return dropped

    def check_integrity(self) -> None:
        """Raise RuntimeError unless chunks, pages and parents agree."""
        self._pages.check_integrity()
        if {chunk.page: key for key, chunk in self._chunks.items()} != self._key_of:
            raise RuntimeError("pages and chunks of the prefix index differ")
        if set(self._key_of) != self._pages.kept_pages:
            raise RuntimeError("the pages that are kept are not those of the prefix index")
        children = {key: chunk.parent for key, chunk in self._chunks.items()}
        listed = {key: above for above, keys in self._children.items() for key in keys}
        if children != listed:
            raise RuntimeError("the prefix index lists other children than its chunks name")

    def _evicted(self, page: int) -> None:
        """Forget an evicted page's chunk, with all that follow it.

        A sequence that holds a chunk holds its parent, too, and releases it later. So the
        chunks that follow were usually evicted before.
        """
        key = self._key_of[page]
        followers = list(self._children.get(key, {}))
        self._forget(key)
        self.drop(followers)

    def _forget(self, key: bytes) -> int:
        chunk = self._chunks.pop(key)
        del self._key_of[chunk.page]
        siblings = self._children[chunk.parent]
        del siblings[key]
        if not siblings:
            del self._children[chunk.parent]
        self.version += 1
        return chunk.page


def _root(salt: bytes) -> bytes:
    """Return what stands for the parent of a tenant's first chunks; no key begins like it."""
    return b"root\0" + salt


def _equal_count(first: array[int], second: array[int]) -> int:
    """Return how many leading elements are equal."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
