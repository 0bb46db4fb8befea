"""Runs a simulation: deals conversations to cells, and the cells to processes.

A cell is one scheduler with its workers and their store. Cells share nothing, as schedulers
that have their own workers, so they can run one after the other or in several processes with equal
results. Requests of one conversation go to one cell, as a front door with sticky sessions sends
them, unless that cell has had far more than its part.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from scheduler_service.policy.settings import PolicySettings
from splitpoint.costs.profile import Machine
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ModelShape
from splitpoint_cli.planning.sizing import Node
from splitpoint_cli.simulate.costs import NO_OVERHEADS, Overheads
from splitpoint_cli.simulate.device_types import Worker, worker_on
from splitpoint_cli.simulate.outcome import Outcome
from splitpoint_cli.traces.arrival import Arrival, Trace, limited, scaled
from splitpoint_cli.traces.formats import load_trace

# A cell gets no more of a conversation once it has this much more than the mean of the tokens.
_OVERLOAD = 1.15
# Tokens before which a cell is not taken for overloaded.
_LEAST_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests come. Factors as of `scaled`; `count` and `seconds` bound the trace."""

    trace: str
    seed: int = 0
    count: int | None = None
    seconds: float | None = None
    rate: float = 1.0
    length: float = 1.0
    output: float = 1.0
    tenants: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)

    def read(self) -> Trace:
        """Return the requests, at least one. Raises InvalidArgument.

        Also for weights of tenants that have no request.
        """
        whole = load_trace(self.trace, seed=self.seed, count=self.count, tenants=self.tenants)
        trace = scaled(whole, rate=self.rate, length=self.length, output=self.output)
        found = limited(trace, seconds=self.seconds)
        if not found.arrivals:
            first = trace.arrivals[0].seconds
            raise InvalidArgument(
                f"the first request of {self.trace} arrives after {first:,.3g} s: none is left "
                f"of the first {self.seconds:g} s",
                field="seconds",
            )
        tenants = {each.tenant for each in found.arrivals}
        if unknown := sorted(self.weights.keys() - tenants):
            raise InvalidArgument(
                f"no request is of the tenant {unknown[0]!r}; there are "
                f"{', '.join(map(repr, sorted(tenants)[:10]))}",
                field="tenant_weight",
            )
        return found


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices, and how they are divided.

    Attributes:
        devices: kind and count.
        cell_size: devices of one scheduler at most.
        store_bytes: host memory of each cell's store.
        streams: see `Cell`.
    """

    shape: ModelShape
    node: Node
    devices: Sequence[tuple[Machine, int]]
    cell_size: int
    store_bytes: int
    streams: bool = True
    overheads: Overheads = NO_OVERHEADS

    @property
    def device_count(self) -> int:
        return sum(count for _, count in self.devices)

    @property
    def cell_count(self) -> int:
        return -(-self.device_count // self.cell_size)

    def workers(self) -> dict[str, Worker]:
        """Return the worker on each kind of device, by its name. Raises ResourceExhausted."""
        return {
            kind.name: worker_on(
                kind,
                self.shape,
                replace(self.node, profile=kind.profile, device_memory_bytes=kind.memory_bytes),
                self.overheads,
            )
            for kind, _ in self.devices
        }

    def cells(self) -> list[list[str]]:
        """Return the kinds of each cell's devices: every cell gets its part of every kind."""
        kinds = [kind.name for kind, count in self.devices for _ in range(count)]
        count = self.cell_count
        return [kinds[first::count] for first in range(count)]


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part: every `of`-th cell from `first` on."""

    first: int = 0
    of: int = 1


def simulate(fleet: Fleet, load: Load, settings: PolicySettings, *, processes: int = 1) -> Outcome:
    """Run the requests on the fleet. Equal arguments give equal outcomes.

    `processes`: how many work at once; each makes the trace for itself.
    """
    count = max(1, min(processes, fleet.cell_count))
    if count == 1:
        return simulate_part(fleet, load, settings, Part())
    outcome = Outcome()
    parts = [Part(first, count) for first in range(count)]
    with ProcessPoolExecutor(count) as pool:
        for found in [pool.submit(simulate_part, fleet, load, settings, each) for each in parts]:
            outcome.add(found.result())
    return outcome


def simulate_part(fleet: Fleet, load: Load, settings: PolicySettings, part: Part) -> Outcome:
    """Run one process's cells."""
    # Millions of small objects that live to the end: looking for cycles among them finds none.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _run_cells(fleet, load.read(), load, settings, part)
    finally:
        if was_enabled:
            gc.enable()


def _run_cells(
    fleet: Fleet, trace: Trace, load: Load, settings: PolicySettings, part: Part
) -> Outcome:
    # These load what the scheduler's extra brings.
    from splitpoint_cli.simulate.simulator import Cell
    from splitpoint_cli.simulate.workload import requests_of

    workers, cells = fleet.workers(), fleet.cells()
    dealt = deal(trace.arrivals, [len(kinds) for kinds in cells])
    outcome = Outcome()
    for index in range(part.first, len(cells), part.of):
        kinds = [workers[name] for name in cells[index]]
        requests = requests_of(
            dealt[index],
            block_tokens=trace.block_tokens,
            chunk_tokens=fleet.node.chunk_tokens,
            context_length=fleet.shape.context_length,
            weights=load.weights,
        )
        dealt[index] = []
        cell = Cell(
            kinds,
            settings,
            store_bytes=fleet.store_bytes,
            streams=fleet.streams,
            request_seconds=fleet.overheads.request,
        )
        cell.run(requests)
        outcome.add_cell(cell, requests, trace.seconds)
    return outcome


def deal(arrivals: Sequence[Arrival], sizes: Sequence[int]) -> list[list[Arrival]]:
    """Return the arrivals of each cell; `sizes` are the devices of the cells.

    The cell with the least tokens for its size gets a conversation that begins.
    """
    dealt: list[list[Arrival]] = [[] for _ in sizes]
    if len(sizes) == 1:
        dealt[0] = list(arrivals)
        return dealt
    loads = [0.0] * len(sizes)
    least = [(0.0, index) for index in range(len(sizes))]
    homes: dict[int, int] = {}
    total, devices = 0.0, sum(sizes)
    for arrival in arrivals:
        tokens = arrival.input_length + arrival.output_length
        head = arrival.hash_ids[0] if arrival.hash_ids else None
        home = homes.get(head) if head is not None else None
        limit = max(_LEAST_TOKENS, _OVERLOAD * total / devices)
        if home is None or loads[home] > limit:
            while least[0][0] != loads[least[0][1]]:
                heapq.heapreplace(least, (loads[least[0][1]], least[0][1]))
            home = least[0][1]
            if head is not None:
                homes[head] = home
        dealt[home].append(arrival)
        loads[home] += tokens / sizes[home]
        total += tokens
    return dealt
