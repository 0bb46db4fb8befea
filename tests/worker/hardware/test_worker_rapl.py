"""Energy of the CPU packages, read from a folder as the kernel lays it out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from splitpoint.observe.meters import Reading
from splitpoint.observe.metrics import CPU_ENERGY_JOULES
from worker_service.hardware.rapl import RaplWatch, Zone, packages

RANGE = 262_143_328_850


def write_zone(folder: Path, entry: str, name: str, energy: int | str) -> Path:
    (folder / entry).mkdir()
    (folder / entry / "name").write_text(f"{name}\n")
    (folder / entry / "max_energy_range_uj").write_text(f"{RANGE}\n")
    counter = folder / entry / "energy_uj"
    counter.write_text(f"{energy}\n")
    return counter


class Bench:
    def __init__(self, zones: list[Zone]) -> None:
        self.now = 50.0
        self.watch = RaplWatch(zones, lambda: self.now)

    def step(self) -> None:
        self.now += self.watch.step()


def test_packages_only(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    write_zone(tmp_path, "intel-rapl:0:0", "dram", 1)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 1)
    write_zone(tmp_path, "intel-rapl:2", "psys", 1)
    write_zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1)
    (tmp_path / "intel-rapl").mkdir()
    assert [zone.name for zone in packages(tmp_path)] == ["package-0", "package-1"]


def test_totals_of_two_packages_and_a_wrap(tmp_path: Path) -> None:
    first = write_zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 500_000)
    second = write_zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    bench = Bench(packages(tmp_path))
    bench.step()
    assert bench.watch.joules == {"package-0": 0, "package-1": 0}
    first.write_text("999999")
    second.write_text("157000000")
    bench.step()
    assert list(bench.watch.readings()) == [
        Reading(CPU_ENERGY_JOULES, 1.5, ("package-0",)),
        Reading(CPU_ENERGY_JOULES, 150, ("package-1",)),
    ]


def test_a_counter_that_begins_anew_counts_for_nothing(tmp_path: Path) -> None:
    counter = write_zone(tmp_path, "intel-rapl:0", "package-0", 200_000_000_000)
    bench = Bench(packages(tmp_path))
    bench.step()
    counter.write_text("5")
    bench.step()
    assert bench.watch.joules == {"package-0": 0}
    counter.write_text("2000005")
    bench.step()
    assert bench.watch.joules == {"package-0": 2}


def test_what_may_not_be_read_is_absent_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without root's rights: the folder can be listed, the counter cannot be read."""
    caplog.set_level(logging.INFO)
    for number in range(2):
        counter = write_zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 1)
        counter.unlink()
        counter.mkdir()  # root may read any file, but no folder
    assert packages(tmp_path) == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "docs/operations.md" in caplog.text


def test_where_there_is_none_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert packages(tmp_path / "none") == []
    assert packages(tmp_path) == []
    assert caplog.records == []


def test_a_zone_that_goes_away_leaves_its_total_and_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = write_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    second = write_zone(tmp_path, "intel-rapl:1", "package-1", 1)
    bench = Bench(packages(tmp_path))
    bench.step()
    first.write_text("2000001")
    bench.step()
    first.unlink()
    second.write_text("3000001")
    bench.step()
    bench.step()
    assert bench.watch.joules == {"package-0": 2, "package-1": 3}
    assert sum("package-0" in record.message for record in caplog.records) == 1
