"""Compares the prefix index with a naive search of the longest prefix."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_service.pool.prefix_index import Entry, PrefixIndex, common_tokens, sortable
from splitpoint.arena.records import salt_tag
from splitpoint.keys import chunk_key, fingerprint, pack_tokens

CHUNK = 3
HASH = b"h" * 16

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=11)


def packed(token_ids: list[int]) -> bytes:
    return sortable(pack_tokens(token_ids))


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f">{len(packed) // 4}i", packed))


def entry_of(salt: bytes, parent: Entry | None, piece: list[int], slot: int = 0) -> Entry:
    parent_key = parent.key if parent else b""
    return Entry(
        slot=slot,
        generation=1,
        key=chunk_key(HASH, salt, parent_key, piece),
        parent_key=parent_key,
        salt_tag=salt_tag(salt),
        packed=packed(piece),
        fingerprint=fingerprint(piece),
        checksum=0,
        chunk_index=parent.chunk_index + 1 if parent else 0,
    )


def store(index: PrefixIndex, salt: bytes, sequence: list[int]) -> list[Entry]:
    """Add the missing chunks of a sequence."""
    parent: Entry | None = None
    entries = []
    for start in range(0, len(sequence), CHUNK):
        entry = entry_of(salt, parent, sequence[start : start + CHUNK], slot=len(index))
        if index.get(entry.key) is None:
            index.add(entry)
        entries.append(entry)
        parent = entry
    return entries


def common(first: list[int], second: list[int]) -> int:
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    return same


@settings(max_examples=300)
@given(st.lists(tokens, max_size=12), tokens, st.integers(0, 3))
def test_finds_the_naive_longest_prefix(
    sequences: list[list[int]], query: list[int], cut: int
) -> None:
    index = PrefixIndex(HASH, CHUNK)
    for sequence in sequences:
        store(index, b"salt", sequence)
    if sequences and cut:
        query = sequences[cut % len(sequences)][: cut + 2] + query
    found = index.match(b"salt", query)
    assert found.cached_tokens == max((common(s, query) for s in sequences), default=0)
    covered = [token for entry in found.entries for token in unpack(entry.packed)]
    assert covered[: found.cached_tokens] == query[: found.cached_tokens]
    assert all(entry.token_count == CHUNK for entry in found.entries[:-1])
    if found.entries:
        # The last chunk is needed: without it less would be found.
        assert found.cached_tokens > CHUNK * (len(found.entries) - 1)
    assert index.match(b"other", query).entries == ()


@settings(max_examples=100)
@given(st.lists(tokens, min_size=1, max_size=8), st.data())
def test_removing_leaves_the_rest_findable(sequences: list[list[int]], data: st.DataObject) -> None:
    index = PrefixIndex(HASH, CHUNK)
    for sequence in sequences:
        store(index, b"", sequence)
    while len(index):
        leaves = sorted(e.key for e in index if not index.has_children(e.key))
        key = data.draw(st.sampled_from(leaves))
        assert index.remove(key).key == key
        assert index.get(key) is None
        for entry in index:
            held = unpack(entry.packed)
            above = index.get(entry.parent_key)
            while above is not None:
                held = [*unpack(above.packed), *held]
                above = index.get(above.parent_key)
            assert index.match(b"", held).cached_tokens == len(held)
    assert index.match(b"", sequences[0]).entries == ()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_packed_tokens(first: list[int], second: list[int]) -> None:
    assert unpack(packed(first)) == first
    assert common_tokens(packed(first), packed(second)) == common(first, second)
    assert (packed(first) < packed(second)) == (first < second)


def test_equal_beginnings_prefer_the_longest_match_among_full_and_partial_siblings() -> None:
    index = PrefixIndex(HASH, CHUNK)
    store(index, b"", [1, 2, 3, 4])
    store(index, b"", [1, 2, 3, 4, 5])
    store(index, b"", [1, 2, 3, 4, 6, 7])
    assert index.match(b"", [1, 2, 3, 4, 5, 9]).cached_tokens == 5
    assert index.match(b"", [1, 2, 3, 4, 6, 9]).cached_tokens == 5
    assert index.match(b"", [1, 2]).cached_tokens == 2


def test_a_key_that_collides_serves_nothing_foreign() -> None:
    """If two chunks have equal keys, only the stored one is found."""
    asked = [7, 8, 9]
    key = chunk_key(HASH, b"a", b"", asked)
    for stored, tag in (([1, 2, 3], salt_tag(b"a")), ([7, 8, 9], salt_tag(b"b"))):
        index = PrefixIndex(HASH, CHUNK)
        index.add(Entry(0, 1, key, b"", tag, packed(stored), fingerprint(stored), 0, 0))
        assert index.match(b"a", asked).entries == ()


def test_what_cannot_be_is_refused() -> None:
    index = PrefixIndex(HASH, CHUNK)
    first, second = store(index, b"", [1, 2, 3, 4])
    with pytest.raises(ValueError, match="in the index"):
        index.add(first)
    with pytest.raises(ValueError, match="children"):
        index.remove(first.key)
    index.remove(second.key)
    with pytest.raises(KeyError):
        index.remove(second.key)
    orphan = entry_of(b"", second, [1])
    with pytest.raises(ValueError, match="parent"):
        index.add(orphan)
