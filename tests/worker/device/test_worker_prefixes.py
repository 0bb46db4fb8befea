"""The index of chunks on the device: what it finds, in what order it forgets (2 seconds)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from splitpoint.keys import MARK_BYTES, chunk_keys
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout
from worker_service.device.cache import PageAllocator
from worker_service.device.prefixes import MOST_MARKS, DevicePrefixes

CHUNK = 8
LAYOUT = ArenaLayout.of(BUILT_IN_SHAPES["opt-125m"], chunk_tokens=CHUNK, has_activations=False)


class Device:
    """An index over some pages, and the pages of sequences."""

    def __init__(self, page_count: int) -> None:
        self.pages = PageAllocator(page_count)
        self.prefixes = DevicePrefixes(self.pages, LAYOUT)

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        return list(chunk_keys(LAYOUT.layout_hash, salt, tokens, CHUNK))

    def put(
        self, tokens: Sequence[int], *, salt: bytes = b"", unsure: frozenset[int] = frozenset()
    ) -> list[int]:
        """Hold the full chunks of a sequence: what is here is taken, the rest registered."""
        keys = self.keys(tokens, salt)
        held = self.prefixes.held_count(keys, vouched=0)
        pages = self.prefixes.pages_of(keys[:held])
        for page in pages:
            self.pages.share(page)
        for index in range(held, len(keys)):
            pages.append(
                self.prefixes.register(
                    salt,
                    keys[index - 1] if index else b"",
                    keys[index],
                    tokens[index * CHUNK : (index + 1) * CHUNK],
                    self.pages.allocate(),
                    is_sure=index not in unsure,
                )
            )
        return pages

    def free(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.pages.free(page)


def test_equal_prefixes_are_found_within_a_tenant_only() -> None:
    device, tokens = Device(8), list(range(4 * CHUNK))
    pages = device.put(tokens, salt=b"a")
    keys = device.keys(tokens, b"a")
    assert device.prefixes.held_count(keys, vouched=0) == 4
    assert device.prefixes.pages_of(keys) == pages
    other = [*tokens[: 2 * CHUNK], *range(100, 100 + 2 * CHUNK)]
    assert device.prefixes.held_count(device.keys(other, b"a"), vouched=0) == 2
    assert device.prefixes.held_count(device.keys(tokens, b"b"), vouched=4) == 0
    assert device.prefixes.beginning_of(b"b", b"", tokens[:CHUNK]) is None
    begins = device.prefixes.beginning_of(b"a", b"", [*tokens[: CHUNK - 2], 77])
    assert begins is not None
    assert (begins.page, begins.token_count) == (pages[0], CHUNK - 2)


def test_a_second_page_of_a_chunk_is_freed_and_an_unsure_one_replaced() -> None:
    device, tokens = Device(8), list(range(2 * CHUNK))
    first = device.put(tokens, unsure=frozenset([1]))
    keys = device.keys(tokens)
    assert device.prefixes.held_count(keys, vouched=0) == 1
    assert device.prefixes.held_count(keys, vouched=2) == 2
    second = device.put(tokens)
    assert second[0] == first[0]
    assert second[1] != first[1], "the unsure page could not be taken, and is not kept"
    assert device.prefixes.held_count(keys, vouched=0) == 2
    own = device.pages.allocate()
    kept = device.prefixes.register(b"", keys[0], keys[1], tokens[CHUNK:], own, is_sure=True)
    assert kept == second[1]
    assert (device.pages.references(kept), device.pages.references(own)) == (2, 0)
    # What follows an unsure chunk is unsure, too.
    third = device.put(list(range(50, 50 + 3 * CHUNK)), unsure=frozenset([0]))
    keys = device.keys(list(range(50, 50 + 3 * CHUNK)))
    assert device.prefixes.held_count(keys, vouched=0) == 0
    assert device.prefixes.held_count(keys, vouched=2) == 2
    device.free([*first, *second[1:], *third])
    device.prefixes.check_integrity()


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    device = Device(6)
    old, new = list(range(3 * CHUNK)), list(range(200, 200 + 3 * CHUNK))
    device.free(device.put(old))
    device.free(device.put(new))
    for left in (2, 1, 0):
        device.pages.allocate()
        device.prefixes.check_integrity()
        assert device.prefixes.held_count(device.keys(old), vouched=0) == left
    assert device.prefixes.held_count(device.keys(new), vouched=0) == 3


def test_a_dropped_chunk_takes_all_that_follow_it() -> None:
    device, tokens = Device(8), list(range(4 * CHUNK))
    fork = [*tokens[: 3 * CHUNK], *range(100, 100 + CHUNK)]
    pages, others = device.put(tokens), device.put(fork)
    device.free(others)
    dropped = device.prefixes.drop([device.keys(tokens)[1]])
    assert dropped == {*pages[1:], others[3]}
    device.prefixes.check_integrity()
    assert device.prefixes.held_count(device.keys(tokens), vouched=0) == 1
    assert device.pages.references(pages[2]) == 1, "its holder still has it"
    # Without its parent a chunk is not registered: nothing could find it.
    page = device.pages.allocate()
    keys = device.keys(tokens)
    same = device.prefixes.register(b"", keys[1], keys[2], tokens[:CHUNK], page, is_sure=True)
    assert same == page
    assert len(device.prefixes) == 1


def test_marks_are_the_newest_keys_first() -> None:
    device = Device(MOST_MARKS + 10)
    version = device.prefixes.version
    for number in range(MOST_MARKS + 10):
        device.put([number] * CHUNK)
    assert device.prefixes.version > version
    first, last = device.keys([0] * CHUNK)[0], device.keys([MOST_MARKS + 9] * CHUNK)[0]
    marks = device.prefixes.marks()
    assert len(marks) == MOST_MARKS * MARK_BYTES
    assert marks.startswith(last[:MARK_BYTES])
    assert first[:MARK_BYTES] not in marks
    device.put([0] * CHUNK)
    assert device.prefixes.marks().startswith(first[:MARK_BYTES]), "what is used is the newest"


@pytest.mark.parametrize("seed", range(10))
def test_any_history_conserves_pages_and_never_finds_a_wrong_one(seed: int) -> None:
    """`content` says which tokens each page really holds."""
    rng = random.Random(seed)
    device = Device(24)
    held: list[list[int]] = []
    content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    for _ in range(300):
        if held and (rng.random() < 0.5 or device.pages.available_count < 6):
            device.free(held.pop(rng.randrange(len(held))))
        elif rng.random() < 0.05 and len(device.prefixes):
            tokens = [rng.randrange(2) for _ in range(CHUNK)]
            device.prefixes.drop(device.keys(tokens))
        elif device.pages.available_count >= 6:
            salt = rng.choice([b"", b"s"])
            # Few distinct chunks, so that most sequences share a beginning.
            tokens = [
                value for _ in range(rng.randrange(1, 6)) for value in [rng.randrange(2)] * CHUNK
            ]
            keys = device.keys(tokens, salt)
            count = device.prefixes.held_count(keys, vouched=0)
            for index, page in enumerate(device.prefixes.pages_of(keys[:count])):
                assert content[page] == (salt, tuple(tokens[: (index + 1) * CHUNK]))
            pages = device.put(tokens, salt=salt)
            for index, page in enumerate(pages):
                content[page] = (salt, tuple(tokens[: (index + 1) * CHUNK]))
            held.append(pages)
        device.prefixes.check_integrity()
    for pages in held:
        device.free(pages)
    assert device.pages.available_count == 24
