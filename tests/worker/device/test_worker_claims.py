"""Promises of device pages: never broken, and conserved after each of many random steps.

Takes about 2 seconds.
"""

from __future__ import annotations

import random

import pytest

from worker_service.device.cache import PageAllocator
from worker_service.device.claims import Claim, Claims


def test_a_streamed_claim_grows_into_the_room_only() -> None:
    claims = Claims(PageAllocator(5), room_page_count=2)
    tail = Claim()
    assert claims.spare_count == 3
    assert claims.promise(tail, 1, uses_room=True)
    pages = [claims.allocate(tail) for _ in range(4)]
    assert pages == [0, 1, 2, None]
    assert (claims.room_used, claims.spare_count) == (2, 2)
    # The room's pages count from the end: what is freed first is the room.
    claims.free(tail, 0)
    assert (tail.held, claims.room_used, claims.spare_count) == (2, 1, 2)


def test_a_resident_claim_grows_into_spare_pages_and_leaves_promised_ones() -> None:
    claims = Claims(PageAllocator(4), room_page_count=1)
    first, second = Claim(), Claim()
    assert claims.promise(first, 1, uses_room=False)
    assert claims.promise(second, 1, uses_room=False)
    assert not claims.promise(Claim(), 2, uses_room=False)
    assert [claims.allocate(first) for _ in range(3)] == [0, 1, None]
    assert claims.allocate(second) == 2
    assert claims.spare_count == 0
    with pytest.raises(ValueError, match="holds 2 pages"):
        claims.end(first)


def test_a_shared_page_in_use_takes_no_spare_page_and_no_promised_one() -> None:
    pages = PageAllocator(3)
    claims, first, second = Claims(pages, 0), Claim(), Claim()
    assert claims.promise(first, 2, uses_room=False)
    shared = claims.allocate(first)
    assert shared is not None
    assert claims.promise(second, 1, uses_room=False)
    assert claims.spare_count == 0
    claims.share(second, shared)
    assert (second.promised, second.open_count, claims.spare_count) == (2, 1, 0)
    claims.free(first, shared)
    assert pages.references(shared) == 1
    # Each still gets the page that it was promised: the first one's share is its own again.
    assert claims.allocate(second) is not None
    assert claims.allocate(first) is not None


def test_a_cached_page_fulfils_a_promise() -> None:
    pages = PageAllocator(2)
    claims, first, second = Claims(pages, 0), Claim(), Claim()
    assert claims.promise(first, 1, uses_room=False)
    cached = claims.allocate(first)
    assert cached is not None
    pages.keep(cached)
    claims.free(first, cached)
    claims.end(first)
    assert claims.promise(second, 1, uses_room=False)
    assert claims.spare_count == 1
    claims.share(second, cached)
    assert (second.promised, second.open_count, claims.spare_count) == (1, 0, 1)


def test_2000_random_histories_keep_every_promise() -> None:
    """Allocate what was promised whenever asked for, whatever the other claims do."""
    for seed in range(2000):
        rng = random.Random(seed)
        room = rng.randrange(4)
        allocator = PageAllocator(rng.randrange(4, 20) + room)
        claims = Claims(allocator, room)
        live: list[tuple[Claim, list[int]]] = []
        for _ in range(40):
            action = rng.random()
            if action < 0.3:
                claim = Claim()
                streamed = room > 0 and rng.random() < 0.5
                spare, wanted = claims.spare_count, rng.randrange(1, 6)
                assert claims.promise(claim, wanted, uses_room=streamed) == (wanted <= spare)
                if claim.promised:
                    live.append((claim, []))
            elif live and action < 0.75:
                claim, held = rng.choice(live)
                promised = claim.held < claim.promised
                page = claims.allocate(claim)
                assert page is not None or not promised, seed
                if page is not None:
                    held.append(page)
                    if rng.random() < 0.3:
                        allocator.keep(page)
            elif live and action < 0.9:
                claim, held = rng.choice(live)
                if held:
                    claims.free(claim, held.pop(rng.randrange(len(held))))
            elif live:
                claim, held = live.pop(rng.randrange(len(live)))
                for page in held:
                    claims.free(claim, page)
                claims.end(claim)
            assert claims.promised_count == sum(claim.promised for claim, _ in live)
            assert claims.room_used == sum(claim.room_count for claim, _ in live) <= room
            assert all(claim.held == len(held) for claim, held in live)
            assert claims.spare_count >= 0
        allocator.check_integrity()
