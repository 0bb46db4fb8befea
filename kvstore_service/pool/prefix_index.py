"""The prefix index: finds the longest stored prefix of a token sequence. Pure: no clock.

The identity of a chunk is its tokens, the chunk before it, and the tenant's salt. A chunk's
children are sorted by their tokens. So one bisection finds the sibling that shares the longest
beginning with a query, however many sequences have the same prefix.

A page is a chunk with a page key in place of tokens: always a first and full one. It is found by
its key alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from splitpoint.arena.records import salt_tag
from splitpoint.keys import pack_tokens, packed_chunk_key, packed_fingerprint


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What makes two chunks the same chunk. `parent_key` is empty for a first chunk."""

    key: bytes
    parent_key: bytes
    salt_tag: bytes
    packed_tokens: bytes  # see keys.pack_tokens
    packed: bytes  # the same for the index, see prefix_index.sortable
    fingerprint: int

    @classmethod
    def of(
        cls, layout_hash: bytes, salt: bytes, parent_key: bytes, token_ids: Sequence[int]
    ) -> ChunkIdentity:
        packed_tokens = pack_tokens(token_ids)
        return cls(
            key=packed_chunk_key(layout_hash, salt, parent_key, packed_tokens),
            parent_key=parent_key,
            salt_tag=salt_tag(salt),
            packed_tokens=packed_tokens,
            packed=sortable(packed_tokens),
            fingerprint=packed_fingerprint(packed_tokens),
        )

    def is_that_of(self, entry: Entry) -> bool:
        """Compare everything but the key with an entry's: keys are hashes and may collide."""
        return (
            entry.parent_key == self.parent_key
            and entry.salt_tag == self.salt_tag
            and entry.fingerprint == self.fingerprint
            and entry.packed == self.packed
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A sealed chunk in the index. `packed` are its tokens, see `sortable`."""

    slot: int
    generation: int
    key: bytes
    parent_key: bytes  # empty for the first chunk of a sequence
    salt_tag: bytes
    packed: bytes
    fingerprint: int
    checksum: int
    chunk_index: int

    @property
    def token_count(self) -> int:
        return len(self.packed) // 4


@dataclass(frozen=True, slots=True)
class PageNames:
    """Pages of one salt: their page keys and, in the same order, the keys of their chunks."""

    salt: bytes
    page_keys: tuple[bytes, ...]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, layout_hash: bytes, salt: bytes, page_keys: Sequence[bytes]) -> PageNames:
        keys = (packed_chunk_key(layout_hash, salt, b"", page_key) for page_key in page_keys)
        return cls(salt, tuple(page_keys), tuple(keys))

    def __add__(self, behind: PageNames) -> PageNames:
        """Return these names and those behind them, of the same salt."""
        return PageNames(self.salt, self.page_keys + behind.page_keys, self.keys + behind.keys)

    def only(self, flags: Iterable[bool]) -> PageNames:
        """Return the names whose flag is set; there is one for each."""
        chosen = list(flags)
        page_keys, keys = compress(self.page_keys, chosen), compress(self.keys, chosen)
        return PageNames(self.salt, tuple(page_keys), tuple(keys))


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`entries`, in sequence order, hold `cached_tokens`; the last entry perhaps in part."""

    entries: tuple[Entry, ...]
    cached_tokens: int


def sortable(packed_tokens: bytes) -> bytes:
    """Convert tokens of `keys.pack_tokens` to big-endian int32, which sort as bytes like the
    (not negative) tokens themselves."""
    words = array("I", packed_tokens)
    words.byteswap()
    return words.tobytes()


def common_tokens(first: bytes, second: bytes) -> int:
    """Count the leading tokens that two packed sequences share."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """All sealed chunks of one arena, by key and by parent.

    Args:
        has_sequences: chunks can follow others, and be found in part. False: pages, by key only.
    """

    def __init__(
        self, layout_hash: bytes, chunk_tokens: int, *, has_sequences: bool = True
    ) -> None:
        self._has_sequences = has_sequences
        self._layout_hash = layout_hash
        self._chunk_tokens = chunk_tokens
        self._by_key: dict[bytes, Entry] = {}
        # Children of a chunk by its key, sorted by tokens. First chunks are under their
        # tenant's salt tag, which is shorter than any key.
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> Entry | None:
        return self._by_key.get(key)

    def has_children(self, key: bytes) -> bool:
        return key in self._children

    def children(self, key: bytes) -> Iterator[bytes]:
        """Yield the keys of a chunk's children."""
        return (child for _, child in self._children.get(key, ()))

    def add(self, entry: Entry) -> None:
        """Add a chunk. Raises ValueError if its key is in the index or its parent is not."""
        if entry.key in self._by_key:
            raise ValueError("a chunk with this key is in the index")
        if entry.parent_key and entry.parent_key not in self._by_key:
            raise ValueError("the parent is not in the index")
        self._by_key[entry.key] = entry
        if not self._has_sequences:
            return
        siblings = self._children.setdefault(entry.parent_key or entry.salt_tag, [])
        insort(siblings, (entry.packed, entry.key))

    def remove(self, key: bytes) -> Entry:
        """Remove a chunk. Raises KeyError if it is missing, ValueError if it has children."""
        if key in self._children:
            raise ValueError("a chunk with children cannot leave the index")
        entry = self._by_key.pop(key)
        if not self._has_sequences:
            return entry
        branch = entry.parent_key or entry.salt_tag
        siblings = self._children[branch]
        del siblings[bisect_left(siblings, (entry.packed, entry.key))]
        if not siblings:
            del self._children[branch]
        return entry

    def subtree(self, key: bytes) -> list[Entry]:
        """Return the chunk and all chunks below it, parents first. Raises KeyError."""
        found = [self._by_key[key]]
        for entry in found:  # grows as it goes
            found += [self._by_key[child] for _, child in self._children.get(entry.key, ())]
        return found

    def match(self, salt: bytes, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the longest prefix of `token_ids` (not negative) stored under this salt.

        Full chunks are found by key, and count only if parent, salt tag, token fingerprint and
        tokens are equal, too. The match ends with the next chunk that shares the most leading
        tokens, be it a partial tail or a full chunk.
        """
        tag = salt_tag(salt)
        packed_tokens = pack_tokens(token_ids)
        packed = sortable(packed_tokens)
        size = 4 * self._chunk_tokens
        found: list[Entry] = []
        parent = b""
        for start in range(0, len(packed) - size + 1, size):
            piece = packed_tokens[start : start + size]
            key = packed_chunk_key(self._layout_hash, salt, parent, piece)
            entry = self._by_key.get(key)
            if entry is None or not (
                entry.parent_key == parent
                and entry.salt_tag == tag
                and entry.fingerprint == packed_fingerprint(piece)
                and entry.packed == packed[start : start + size]
            ):
                break
            found.append(entry)
            parent = key
        cached_tokens = len(found) * self._chunk_tokens
        tail, common = self._closest(parent or tag, packed[4 * cached_tokens :])
        if tail is not None:
            found.append(tail)
        return PrefixMatch(tuple(found), cached_tokens + common)

    def pages(self, names: PageNames) -> list[Entry | None]:
        """Return the page of each name; None where there is none.

        A page counts only if salt tag and page key are equal, too.
        """
        tag = salt_tag(names.salt)
        found = [self._by_key.get(key) for key in names.keys]
        return [
            entry
            if entry is not None and entry.salt_tag == tag and entry.packed == sortable(page_key)
            else None
            for entry, page_key in zip(found, names.page_keys, strict=True)
        ]

    def missing_keys(
        self, salt: bytes, entries: Sequence[Entry], token_ids: Sequence[int]
    ) -> list[bytes]:
        """Return the keys of a sequence's chunks that follow its matched `entries`.

        The last chunk may be a partial tail. A chunk that the match covers in part counts as
        missing.
        """
        packed_tokens = pack_tokens(token_ids)
        size = 4 * self._chunk_tokens
        parent = b""
        start = 0
        for entry in entries:
            if entry.packed != sortable(packed_tokens[start : start + size]):
                break
            parent, start = entry.key, start + len(entry.packed)
        keys = []
        for place in range(start, len(packed_tokens), size):
            piece = packed_tokens[place : place + size]
            parent = packed_chunk_key(self._layout_hash, salt, parent, piece)
            keys.append(parent)
        return keys

    def _closest(self, branch: bytes, packed: bytes) -> tuple[Entry | None, int]:
        """Return the child that shares most leading tokens with `packed`, and their number."""
        siblings = self._children.get(branch)
        if not siblings or not packed:
            return None, 0
        place = bisect_left(siblings, (packed, b""))
        best, best_common = None, 0
        # If two share equally many, take the later one: it may continue like the query.
        for index in (place, place - 1):
            if 0 <= index < len(siblings):
                common = common_tokens(siblings[index][0], packed)
                if common > best_common:
                    best, best_common = self._by_key[siblings[index][1]], common
        return best, best_common
