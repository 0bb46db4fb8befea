"""The capacity of a PCIe link, against published figures."""

from __future__ import annotations

import pytest

from splitpoint.costs.pcie import LATEST_GENERATION, link_ceiling


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [
        (1, 16, 4.0),
        (2, 16, 8.0),
        (3, 16, 15.754),
        (4, 16, 31.508),
        (5, 16, 63.015),
        (6, 16, 121.0),
        (4, 8, 15.754),
        (3, 1, 0.985),
    ],
)
def test_of_each_generation(generation: int, lanes: int, gigabytes: float) -> None:
    assert link_ceiling(generation, lanes) / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_lanes_add_up_and_generations_grow() -> None:
    for generation in range(1, LATEST_GENERATION + 1):
        assert link_ceiling(generation, 16) == pytest.approx(16 * link_ceiling(generation, 1))
        if generation > 1:
            assert link_ceiling(generation, 8) > 1.8 * link_ceiling(generation - 1, 8)


@pytest.mark.parametrize(("generation", "lanes"), [(0, 16), (LATEST_GENERATION + 1, 16), (5, 0)])
def test_what_is_no_link_is_refused(generation: int, lanes: int) -> None:
    with pytest.raises(ValueError, match=r"generation|lane"):
        link_ceiling(generation, lanes)
