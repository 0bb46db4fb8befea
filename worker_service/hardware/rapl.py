"""Energy of the host's CPU packages: RAPL counters under /sys/class/powercap.

AMD's counters are in the same tree, under Intel's name. Since 2020 only root may read
them, unless an administrator allows more (docs/operations.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from splitpoint.observe.meters import Reading
from splitpoint.observe.metrics import CPU_ENERGY_JOULES
from worker_service.hardware.counters import CounterTotal

log = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
PERIOD_SECONDS = 1.0
# Neither parts of a package (intel-rapl:0:1) nor its duplicate (intel-rapl-mmio:0).
_ZONE = re.compile(r"intel-rapl:\d+")
# Above any package's. A counter wraps after some 260 kJ: minutes at full power.
_MOST_MICROWATTS = 1e10
_SLACK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Zone:
    """One package. `range_microjoules`: the largest value before its counter wraps to 0."""

    name: str
    counter: Path
    range_microjoules: int

    def read(self) -> int:
        """Microjoules. Raises OSError, ValueError."""
        return int(self.counter.read_text())


def packages(folder: Path = POWERCAP) -> list[Zone]:
    """Return the packages that this process may read; log why others cannot be read."""
    zones, hidden = [], []
    for entry in sorted(folder.glob("intel-rapl:*")):
        if _ZONE.fullmatch(entry.name) is None:
            continue
        try:
            name = (entry / "name").read_text().strip()
            if not name.startswith("package"):  # psys is the whole board, packages included
                continue
            largest = int((entry / "max_energy_range_uj").read_text())
            zone = Zone(name, entry / "energy_uj", largest)
            zone.read()
            zones.append(zone)
        except OSError as error:
            hidden.append(f"{entry.name}: {error.strerror}")
        except ValueError as error:
            hidden.append(f"{entry.name}: {error}")
    if hidden:
        log.info(
            "no energy of the CPU (%s): docs/operations.md, RAPL, says how to permit it",
            "; ".join(hidden),
        )
    return zones


class RaplWatch:
    """Totals of zones since the first reading. One thread calls `step`.

    Attributes:
        joules: by zone; replaced as a whole, so that any thread may read it.
    """

    def __init__(self, zones: list[Zone], clock: Callable[[], float]) -> None:
        self.joules: Mapping[str, float] = {}
        self._clock = clock
        self._totals = {zone: CounterTotal() for zone in zones}

    def step(self) -> float:
        """Read every zone; return the seconds until the next call."""
        for zone, total in list(self._totals.items()):
            try:
                value = zone.read()
            except (OSError, ValueError) as error:
                log.info("the energy of %s can no longer be read: %s", zone.name, error)
                del self._totals[zone]
                continue
            total.see(
                value,
                zone.range_microjoules + 1,
                self._clock(),
                _MOST_MICROWATTS,
                _SLACK_SECONDS * _MOST_MICROWATTS,
            )
        joules = {zone.name: total.total / 1e6 for zone, total in self._totals.items()}
        # The total of a zone that became unreadable stays: sums never shrink.
        self.joules = {**self.joules, **joules}
        return PERIOD_SECONDS

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def readings(self) -> Iterator[Reading]:
        return (Reading(CPU_ENERGY_JOULES, joules, (name,)) for name, joules in self.joules.items())
