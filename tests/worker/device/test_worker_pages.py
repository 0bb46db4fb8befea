"""Pages of the device cache: references, cached pages, and their order of eviction."""

from __future__ import annotations

import random

import pytest

from splitpoint.errors import ResourceExhausted
from worker_service.device.cache import PageAllocator


def test_a_shared_page_is_free_after_its_last_reference() -> None:
    pages = PageAllocator(2)
    page = pages.allocate()
    pages.share(page)
    pages.free(page)
    assert (pages.used_count, pages.free_count, pages.references(page)) == (1, 1, 1)
    pages.free(page)
    assert (pages.used_count, pages.free_count, pages.references(page)) == (0, 2, 0)
    with pytest.raises(ValueError, match="not in use"):
        pages.free(page)
    with pytest.raises(ValueError, match="is free"):
        pages.share(page)


def test_free_pages_go_first_then_the_least_recently_used_cached_one() -> None:
    pages = PageAllocator(4)
    evicted: list[int] = []
    pages.on_evict = evicted.append
    a, b, c, d = (pages.allocate() for _ in range(4))
    for page in (a, b, c):
        pages.keep(page)
    for page in (c, a, b, d):
        pages.free(page)
    assert (pages.free_count, pages.cached_count, pages.available_count) == (1, 3, 4)
    pages.share(c)  # used again, so it is the newest
    pages.free(c)
    assert [pages.allocate() for _ in range(4)] == [d, a, b, c]
    assert evicted == [a, b, c]
    with pytest.raises(ResourceExhausted):
        pages.allocate()
    pages.free(a)
    assert pages.free_count == 1, "an evicted page is not kept any more"


def test_a_dropped_page_is_free_at_once_or_after_its_last_reference() -> None:
    pages = PageAllocator(2)
    a, b = pages.allocate(), pages.allocate()
    pages.keep(a)
    pages.keep(b)
    pages.free(a)
    pages.drop(a)
    pages.drop(b)
    assert (pages.free_count, pages.cached_count, pages.used_count) == (1, 0, 1)
    pages.free(b)
    assert pages.free_count == 2
    for call in (pages.keep, pages.drop):
        with pytest.raises(ValueError, match="page 0 is not"):
            call(0)


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_conserved_by_any_history(seed: int) -> None:
    """A model in plain dicts: references by page, and kept pages in order of their release."""
    chance = random.Random(seed)
    pages = PageAllocator(8)
    references: dict[int, int] = {}
    kept: set[int] = set()
    cached: list[int] = []

    def evict(page: int) -> None:
        assert page == cached.pop(0)
        kept.remove(page)

    pages.on_evict = evict
    for _ in range(500):
        action = chance.choice(["allocate", "share", "free", "free", "keep", "drop"])
        used = sorted(references)
        if action == "allocate" and len(references) < 8:
            free = set(range(8)) - set(references) - set(cached)
            oldest = cached[0] if cached else None
            page = pages.allocate()
            assert page == (min(free) if free else oldest)
            references[page] = 1
        elif action == "share" and (used or cached):
            page = chance.choice([*used, *cached])
            pages.share(page)
            if page in cached:
                cached.remove(page)
            references[page] = references.get(page, 0) + 1
        elif action == "free" and used:
            page = chance.choice(used)
            pages.free(page)
            references[page] -= 1
            if not references[page]:
                del references[page]
                if page in kept:
                    cached.append(page)
        elif action == "keep" and used:
            page = chance.choice(used)
            pages.keep(page)
            kept.add(page)
        elif action == "drop" and kept:
            page = chance.choice(sorted(kept))
            pages.drop(page)
            kept.remove(page)
            if page in cached:
                cached.remove(page)
        pages.check_integrity()
        assert {page: pages.references(page) for page in references} == references
        assert (pages.used_count, pages.cached_count) == (len(references), len(cached))
        assert pages.available_count == 8 - len(references)
