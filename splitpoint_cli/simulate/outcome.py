"""What a simulation has measured, and the figures that follow from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from splitpoint.costs.profile import PREFILL_POWER, Machine
from splitpoint_cli.simulate.device import DeviceTotals

if TYPE_CHECKING:
    from splitpoint_cli.simulate.simulator import Cell
    from splitpoint_cli.simulate.workload import SimulatedRequest

# Part of a device's power limit that it draws while it only decodes: 20 to 40 % by the bottleneck
# paper, Section 2.4.
DECODE_POWER = 0.4


@dataclass(slots=True)
class TenantService:
    """Page-seconds of one tenant: what its requests held until the last arrival, and what they
    would have held if all had started at once."""

    weight: float = 1.0
    served: float = 0.0
    asked: float = 0.0
    count: int = 0
    ttft_seconds: float = 0.0


@dataclass(slots=True)
class KindUse:
    """All devices of one kind together."""

    device_count: int = 0
    page_count: int = 0
    totals: DeviceTotals = field(default_factory=DeviceTotals)


@dataclass(slots=True)
class Outcome:
    """Measurements of any number of cells, which can be added up.

    Attributes:
        ttft, tpot, latency, waited: seconds of each request, all in the same order; tpot is
            negative for an answer of one token.
        seconds: from the start of the trace to the last end.
    """

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    latency: array[float] = field(default_factory=lambda: array("d"))
    waited: array[float] = field(default_factory=lambda: array("d"))
    rejected_count: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    tenants: dict[str, TenantService] = field(default_factory=dict)
    kinds: dict[str, KindUse] = field(default_factory=dict)

    def add_cell(
        self, cell: Cell, requests: Iterable[SimulatedRequest], last_arrival: float
    ) -> None:
        """Add what a cell did with these requests."""
        self.rejected_count += len(cell.rejected)
        for request in requests:
            if request.started >= 0:
                self._add(request, last_arrival)
        for station in cell.stations.values():
            station.count_pages(cell.now)
            use = self.kinds.setdefault(station.worker.type.name, KindUse())
            use.device_count += 1
            use.page_count += station.account.page_count
            add_totals(use.totals, station.device.totals)

    def _add(self, request: SimulatedRequest, last_arrival: float) -> None:
        self.ttft.append(request.ttft)
        self.tpot.append(request.tpot if request.output_tokens > 1 else -1.0)
        self.latency.append(request.ended - request.arrived)
        self.waited.append(request.started - request.arrived)
        self.input_tokens += request.input_tokens
        self.output_tokens += request.output_tokens
        self.cached_tokens += request.restored_tokens
        self.seconds = max(self.seconds, request.ended)
        tenant = self.tenants.setdefault(request.tenant, TenantService(request.weight))
        tenant.count += 1
        tenant.ttft_seconds += request.ttft
        held = request.ended - request.started
        tenant.asked += request.pages * min(held, max(0.0, last_arrival - request.arrived))
        until = min(request.ended, last_arrival)
        tenant.served += request.pages * max(0.0, until - request.started)

    def add(self, other: Outcome) -> None:
        """Add the measurements of other cells."""
        for name in ("ttft", "tpot", "latency", "waited"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("rejected_count", "input_tokens", "output_tokens", "cached_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds = max(self.seconds, other.seconds)
        for name, theirs in other.tenants.items():
            ours = self.tenants.setdefault(name, TenantService(theirs.weight))
            for each in ("served", "asked", "count", "ttft_seconds"):
                setattr(ours, each, getattr(ours, each) + getattr(theirs, each))
        for name, use in other.kinds.items():
            known = self.kinds.setdefault(name, KindUse())
            known.device_count += use.device_count
            known.page_count += use.page_count
            add_totals(known.totals, use.totals)

    # -- figures -------------------------------------------------------------------

    @property
    def completed_count(self) -> int:
        return len(self.ttft)

    def good_count(self, objectives: Mapping[str, float]) -> int:
        """Return how many requests met all objectives: seconds by ttft, tpot, e2el."""
        limits = [
            (values, objectives[name])
            for name, values in (("ttft", self.ttft), ("tpot", self.tpot), ("e2el", self.latency))
            if name in objectives
        ]
        return sum(
            all(values[index] <= limit for values, limit in limits)
            for index in range(self.completed_count)
        )

    def good_share(self, objectives: Mapping[str, float]) -> float:
        """Return the part of all requests, refused ones included, that met all objectives."""
        count = self.completed_count + self.rejected_count
        return self.good_count(objectives) / count if count else 1.0

    def fairness(self) -> float:
        """Return Jain's index of what tenants got over what was fair; 1 is fair.

        Fair is the weighted max-min share of all page-seconds until the last arrival.
        """
        tenants = list(self.tenants.values())
        fair = water_filled(
            sum(each.served for each in tenants),
            [each.asked for each in tenants],
            [each.weight for each in tenants],
        )
        return jain([each.served / due for each, due in zip(tenants, fair, strict=True) if due])

    def joules(self, kinds: Mapping[str, Machine]) -> float | None:
        """Return the energy of all devices; None if the power of a kind is not known."""
        total = 0.0
        for name, use in self.kinds.items():
            idle, full = kinds[name].idle_watts, kinds[name].full_watts
            if idle is None or full is None:
                return None
            prefills = use.totals.prefill_seconds
            decodes = use.totals.step_seconds - prefills
            rest = max(0.0, use.device_count * self.seconds - use.totals.step_seconds)
            total += full * (PREFILL_POWER * prefills + DECODE_POWER * decodes) + idle * rest
        return total


def add_totals(totals: DeviceTotals, more: DeviceTotals) -> None:
    """Add one device's totals to others."""
    for each in fields(DeviceTotals):
        setattr(totals, each.name, getattr(totals, each.name) + getattr(more, each.name))


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index, 1/n to 1; 1 for no values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def water_filled(total: float, wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the weighted max-min fair shares of `total` by what each wants."""
    found = [0.0] * len(wanted)
    left = total
    order = sorted(range(len(wanted)), key=lambda index: wanted[index] / weights[index])
    weight = sum(weights)
    for index in order:
        found[index] = min(wanted[index], left * weights[index] / weight)
        left -= found[index]
        weight -= weights[index]
        if weight <= 0:
            break
    return found
