"""Batches whose weights cross the link in every step: every mixture, by brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.residency.full_batch import (
    BatchRoom,
    MixedBatch,
    full_batch,
    residents_alone,
)
from splitpoint.residency.seconds import DeviceRoom, PieceSeconds
from splitpoint.shapes import BUILT_IN_SHAPES

OPT = BUILT_IN_SHAPES["opt-6.7b"]
SIZES = WeightSizes.of(OPT)
A100 = BUILT_IN_PROFILES["a100-40"]
ON_HOST = replace(
    A100,
    host_weight_bytes=OPT.layer_count * SIZES.layer,
    host_kv_weight_bytes=OPT.layer_count * SIZES.pieces[WeightPiece.KEY_VALUE],
)
PIECES = PieceSeconds(OPT, ON_HOST, DeviceRoom(has_activations=True, staging_tokens=1024))


def mixed(resident: int, streamed: int, length: int) -> MixedBatch:
    seconds = (
        PIECES.streamed_step(streamed, length, resident_count=resident)
        if streamed
        else PIECES.step(resident, length)
    )
    return MixedBatch(resident, streamed, seconds)


def test_no_mixture_has_more_tokens_per_second() -> None:
    rng, filled = random.Random(3), 0
    for _ in range(60):
        chunks = rng.randrange(2, 20)
        room = BatchRoom(rng.randrange(4, 120), rng.randrange(2, 24), chunks, 1)
        length = chunks * 64
        mixtures = [
            mixed(resident, room.streamed_beside(resident), length)
            for resident in range(room.most_resident + 1)
        ]
        found, alone = full_batch(PIECES, room, length), residents_alone(PIECES, room, length)
        assert found.tokens_per_second >= 0.97 * max(each.tokens_per_second for each in mixtures)
        filled += found.resident < room.most_resident
        assert (alone.resident, alone.streamed) == (room.most_resident, 0)
    assert 15 < filled < 60


def test_every_place_is_taken_if_there_are_pages_for_it() -> None:
    """40 pages, 16 places, 9 pages each: three residents leave 13 pages for 13 others."""
    room = BatchRoom(pages=40, places=16, resident_pages=9, streamed_pages=1)
    full = full_batch(PIECES, room, 512)
    assert (full.resident, full.streamed) == (3, 13)
    alone = residents_alone(PIECES, room, 512)
    assert (alone.resident, alone.streamed) == (4, 0)
    assert full.tokens_per_second > 1.3 * alone.tokens_per_second
    few = full_batch(PIECES, replace(room, pages=10), 512)
    assert (few.resident, few.streamed) == (0, 10)
    # The store's slots are a limit, too.
    small = full_batch(PIECES, replace(room, most_streamed=8), 512)
    assert (small.resident, small.streamed) == (3, 8)
    assert full_batch(PIECES, replace(room, resident_pages=1), 64).streamed == 0


def test_a_step_has_its_weights_on_the_link_once_and_not_as_computing() -> None:
    """Each more streamed sequence adds its cache alone; half of it, rebuilt beside the rest."""
    steps = [PIECES.streamed_step(count, 512) for count in (1, 2, 16)]
    cache = 512 * OPT.kv_bytes_per_token / A100.link_bytes_per_second
    assert steps[0] == pytest.approx(ON_HOST.weight_seconds + cache, rel=0.05)
    assert steps[1] - steps[0] <= 1.02 * cache
    assert steps[2] < ON_HOST.weight_seconds + 0.9 * 16 * cache
    assert PIECES.step(16, 512) == ON_HOST.weight_seconds
    # While they cross, a device of a quarter of the rate has time to rebuild everything.
    rate = A100.rebuild_flops_per_second / 4
    slow = replace(PIECES, profile=replace(ON_HOST, rebuild_flops_per_second=rate))
    assert slow.streamed_step(16, 512) < ON_HOST.weight_seconds + 0.6 * 16 * cache
