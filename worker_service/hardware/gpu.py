"""Reads one GPU through its driver, again and again, and reconnects after it was lost.

One thread calls `GpuWatch.step`, which may take as long as the driver does. The result is
`sample`, which is replaced as a whole, so that readers never wait. A field that the driver
does not report is absent, with the reason; no field is derived from another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from splitpoint.costs.pcie import LATEST_GENERATION, MOST_LANES, link_ceiling
from splitpoint.observe.meters import Reading
from splitpoint.observe.metrics import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_FIELD_SUPPORTED,
    GPU_MEMORY_BYTES,
    GPU_PCIE_BYTES,
    GPU_PCIE_GENERATION,
    GPU_PCIE_LANES,
    GPU_POWER_DEFAULT_LIMIT_WATTS,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_TEMPERATURE,
    GPU_UP,
    GPU_UTILIZATION,
    LINK_CEILING,
    Kind,
)
from worker_service.hardware.counters import NARROW_BITS, CounterTotal
from worker_service.hardware.nvml import Count, FieldFailed, FieldUnsupported, Gpu, GpuGone

log = logging.getLogger(__name__)

# Between two readings of all fields.
PERIOD_SECONDS = 1.0
# A sample older than this is stale: the driver hangs.
STALE_SECONDS = 5.0
# Pause before the driver is tried again; it doubles up to the longest.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# Above any card's power, so that only impossible readings are dropped.
_MOST_MILLIWATTS = 1e7
# Drivers refresh some values only now and then: a reading may be this old.
_PCIE_SLACK_SECONDS = 0.025
_ENERGY_SLACK_SECONDS = 0.2
_PCIE = "pcie_bytes"
_CEILING = "link_ceiling"

# A field's readings, or the reason why there are none.
FieldResult: TypeAlias = "tuple[Reading, ...] | str"


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The state of a GPU at `taken_at`; `fields` has every field by name.

    Attributes:
        reason: why the GPU does not answer; empty if it does.
        note: a remark about all fields; may be empty.
    """

    taken_at: float
    reason: str
    note: str = ""
    fields: Mapping[str, FieldResult] = field(default_factory=dict)

    def message_at(self, now: float) -> str:
        """Return in one line why fields are absent; empty if none is."""
        if self.reason:
            return self.reason
        if self._is_stale(now):
            return f"the GPU's driver has not answered for {now - self.taken_at:.0f} s"
        absent = [
            f"{name}: {result}" for name, result in self.fields.items() if isinstance(result, str)
        ]
        return "; ".join(([self.note] if self.note else []) + absent)

    def readings(self, now: float) -> Iterator[Reading]:
        """Yield the readings at `now`; of a GPU that is gone only its totals."""
        is_up = not self.reason and not self._is_stale(now)
        yield Reading(GPU_UP, float(is_up))
        for name, result in self.fields.items():
            yield Reading(GPU_FIELD_SUPPORTED, float(not isinstance(result, str)), (name,))
            if not isinstance(result, str):
                yield from (reading for reading in result if is_up or _outlives(reading))

    def _is_stale(self, now: float) -> bool:
        return now - self.taken_at > STALE_SECONDS


def _outlives(reading: Reading) -> bool:
    """Return True for totals and the ceiling of the slot, which stay true without the GPU."""
    return reading.metric.kind is Kind.COUNTER or reading.metric is LINK_CEILING


class GpuWatch:
    """Reads one GPU through `connect`, which raises GpuGone while there is none.

    Attributes:
        sample: the latest state; `step` replaces it, any thread may read it.
    """

    def __init__(self, connect: Callable[[], Gpu], clock: Callable[[], float]) -> None:
        self.sample = GpuSample(clock(), "the GPU was not asked yet")
        self._connect = connect
        self._clock = clock
        self._gpu: Gpu | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._all_due = 0.0
        self._fields: dict[str, FieldResult] = {}
        # Not asked again on this connection.
        self._unsupported: set[str] = set()
        self._said: set[str] = set()
        self._received, self._sent, self._energy = CounterTotal(), CounterTotal(), CounterTotal()
        self._ceiling = link_ceiling(LATEST_GENERATION, MOST_LANES)
        self._questions: Mapping[str, Callable[[Gpu], tuple[Reading, ...]]] = {
            "pcie_link": self._link,  # first: it bounds what the byte counters can gain
            _PCIE: self._pcie_bytes,
            "power": lambda gpu: (Reading(GPU_POWER_WATTS, gpu.power_watts()),),
            "power_limit": lambda gpu: (Reading(GPU_POWER_LIMIT_WATTS, gpu.power_limit_watts()),),
            "power_default_limit": lambda gpu: (
                Reading(GPU_POWER_DEFAULT_LIMIT_WATTS, gpu.power_default_limit_watts()),
            ),
            "energy": self._energy_joules,
            "utilization": lambda gpu: (Reading(GPU_UTILIZATION, gpu.utilization()),),
            "memory": _memory,
            "clocks": _clocks,
            "temperature": lambda gpu: (Reading(GPU_TEMPERATURE, gpu.temperature()),),
        }

    def step(self) -> float:
        """Read the fields that are due; return the seconds until the next call."""
        started = self._clock()
        try:
            if self._gpu is None:
                self._gpu = self._connect()
                self._begin()
            if started >= self._all_due:
                self._ask_all()
                self._all_due = started + PERIOD_SECONDS
            else:
                self._ask(_PCIE)
        except GpuGone as error:
            return self._lose(str(error))
        except Exception as error:
            # The service goes on without a GPU whose binding is broken.
            reason = f"asking the GPU's driver failed: {type(error).__name__}"
            if reason not in self._said:
                self._said.add(reason)
                log.exception("%s", reason)
            return self._lose(reason)
        if self._pause != FIRST_PAUSE_SECONDS:
            log.info("the GPU's driver answers again")
            self._pause = FIRST_PAUSE_SECONDS
        note = ""
        if self._gpu.is_slice:
            note = "a slice of a card (MIG): power, energy and PCIe traffic are the whole card's"
        self.sample = GpuSample(self._clock(), "", note, dict(self._fields))
        return max(0.0, started + self._period() - self._clock())

    def close(self) -> None:
        """Disconnect; to be called in the thread of `step`."""
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            gpu.close()

    def _begin(self) -> None:
        self._all_due = 0.0
        self._unsupported.clear()
        for total in (self._received, self._sent, self._energy):
            total.forget()

    def _lose(self, reason: str) -> float:
        if self.sample.reason != reason:
            log.warning("no metrics of the GPU for now: %s", reason)
        try:
            self.close()
        except Exception:  # the driver broke before; nothing else can be done
            log.exception("letting go of the GPU's driver failed")
        self.sample = replace(self.sample, taken_at=self._clock(), reason=reason)
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause

    def _period(self) -> float:
        """Return the period that reads counters twice before a full link can wrap them."""
        if _PCIE in self._unsupported or not self._received.is_narrow:
            return PERIOD_SECONDS
        return min(PERIOD_SECONDS, (1 << NARROW_BITS) / self._ceiling / 2)

    def _ask_all(self) -> None:
        failures = [self._ask(name) for name in self._questions if name not in self._unsupported]
        reasons = [reason for reason in failures if reason]
        if reasons and len(reasons) == len(failures):
            raise GpuGone(reasons[0])

    def _ask(self, name: str) -> str:
        """Read one field; return why it failed this time, or an empty string."""
        gpu = self._gpu
        if gpu is None or name in self._unsupported:
            return ""
        try:
            self._fields[name] = self._questions[name](gpu)
        except FieldUnsupported as error:
            self._unsupported.add(name)
            self._leave_out(name, str(error))
        except FieldFailed as error:
            self._leave_out(name, str(error))
            return str(error)
        return ""

    def _leave_out(self, name: str, reason: str) -> None:
        self._fields[name] = reason
        self._say(f"not reported by the GPU's driver: {name}: {reason}")

    def _say(self, text: str) -> None:
        """Log a text once."""
        if text not in self._said:
            self._said.add(text)
            log.info("%s", text)

    # -- fields --------------------------------------------------------------------

    def _link(self, gpu: Gpu) -> tuple[Reading, ...]:
        link = gpu.link()
        try:
            # An idle link runs at a lower generation; its maximum is what it can reach.
            self._ceiling = link_ceiling(link.max_generation, link.max_lanes)
        except ValueError as error:
            self._leave_out(_CEILING, str(error))
        else:
            self._fields[_CEILING] = (Reading(LINK_CEILING, self._ceiling),)
        return (
            Reading(GPU_PCIE_GENERATION, link.generation, ("current",)),
            Reading(GPU_PCIE_GENERATION, link.max_generation, ("max",)),
            Reading(GPU_PCIE_LANES, link.lanes, ("current",)),
            Reading(GPU_PCIE_LANES, link.max_lanes, ("max",)),
        )

    def _pcie_bytes(self, gpu: Gpu) -> tuple[Reading, ...]:
        received, sent = gpu.pcie_bytes()
        now = self._clock()
        self._count(self._received, received, now)
        self._count(self._sent, sent, now)
        # Both are of the same kind: if one exceeds 32 bits, so can the other.
        if not (self._received.is_narrow and self._sent.is_narrow):
            self._received.is_narrow = self._sent.is_narrow = False
        return (
            Reading(GPU_PCIE_BYTES, self._received.total, ("rx",)),
            Reading(GPU_PCIE_BYTES, self._sent.total, ("tx",)),
        )

    def _count(self, total: CounterTotal, count: Count, now: float) -> None:
        slack = _PCIE_SLACK_SECONDS * self._ceiling
        total.see_bits(count.value, count.bits, now, self._ceiling, slack)
        if total.resets:
            self._say("a PCIe counter of the GPU began anew; its total goes on from there")
        if total.gaps:
            self._say(
                "a PCIe counter of 32 bits was read too late to see each of its wraps: "
                "the total is the least that it can be"
            )

    def _energy_joules(self, gpu: Gpu) -> tuple[Reading, ...]:
        slack = _ENERGY_SLACK_SECONDS * _MOST_MILLIWATTS
        energy = gpu.energy_millijoules()
        self._energy.see(energy, 1 << 64, self._clock(), _MOST_MILLIWATTS, slack)
        return (Reading(GPU_ENERGY_JOULES, self._energy.total / 1e3),)


def _memory(gpu: Gpu) -> tuple[Reading, ...]:
    used, total = gpu.memory()
    return Reading(GPU_MEMORY_BYTES, used, ("used",)), Reading(GPU_MEMORY_BYTES, total, ("total",))


def _clocks(gpu: Gpu) -> tuple[Reading, ...]:
    sm, memory = gpu.clocks()
    return Reading(GPU_CLOCK_HERTZ, sm, ("sm",)), Reading(GPU_CLOCK_HERTZ, memory, ("memory",))
