"""One cell: a scheduler, the workers that it alone uses, and the store that these share.

Discrete events: an arrival, the end of a restore, the end of a run of steps. Which waiting
request starts next, and where, is decided by the live scheduler's own classes: `PolicyQueue`,
the ledgers of device memory, the footprint, and the choice among workers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler_service.placement.charging import Way
from scheduler_service.placement.footprint import Fits, NeverFits, footprint_of
from scheduler_service.placement.ledger import Charge, Ledger
from scheduler_service.placement.residency import RunningRequest, Wanted, reason_to_stream
from scheduler_service.placement.routing import Candidate, choose_worker, first_token_seconds
from scheduler_service.policy.owner import Start
from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.rooms import WorkerLimits
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.waiting import Need, Waiting
from splitpoint.costs.first_token import Backlog
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Objective, Residency
from splitpoint.shapes import chunks_of
from splitpoint_cli.simulate.device import Device
from splitpoint_cli.simulate.fleet import Worker
from splitpoint_cli.simulate.store import SimulatedStore
from splitpoint_cli.simulate.workload import SimulatedRequest


@dataclass(slots=True, eq=False)
class _Station:
    """A worker of the cell: its engine, its ledger, and the chunks that requests left there."""

    worker: Worker
    device: Device
    ledger: Ledger
    # Chunks in free pages, the least recently used first.
    kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    running: dict[int, SimulatedRequest] = field(default_factory=dict)
    counted_until: float = 0.0

    def count_pages(self, now: float) -> None:
        """Add what is charged to the integral, before that changes."""
        charged = self.ledger.charged_pages
        self.device.totals.page_seconds += charged * (now - self.counted_until)
        self.counted_until = now

    def with_kept(self, marks: Sequence[bytes], count: int) -> int:
        """Return how many of these leading chunks are on the device.

        `count`: those that running requests have.
        """
        while count < len(marks) and marks[count] in self.kept:
            count += 1
        return count


def way_of(need: Need) -> Way:
    """Return a need as what it is: every one that the policy has comes from a cell."""
    assert isinstance(need, Way)
    return need


class Cell:
    """Runs requests to their end.

    `rejected`: those that no worker could ever run, or that exceed the model's context.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: PolicySettings,
        *,
        store_bytes: int,
        streams: bool = True,
        request_seconds: float = 0.0,
    ) -> None:
        """`streams`: a request that is too long for the device's memory is streamed.

        `request_seconds`: from a request's arrival to its place in the queue.
        """
        self.now = 0.0
        self.rejected: list[SimulatedRequest] = []
        self.stations: dict[str, _Station] = {}
        self.queue: PolicyQueue[SimulatedRequest] = PolicyQueue(self, settings)
        self._residency = None if streams else Residency.RESIDENT
        self._request_seconds = request_seconds
        self._follows_steps = settings.policy is not Policy.FIFO
        self._fits: dict[tuple[str, int], Fits | NeverFits] = {}
        self._events: list[tuple[float, int, str, SimulatedRequest | None, int]] = []
        self._event_count = 0
        # Workers that begin a run at the end of the event under way.
        self._idle: dict[str, _Station] = {}
        for index, worker in enumerate(workers):
            name = f"{worker.facts.worker_id}-{index}"
            facts = replace(worker.facts, worker_id=name)
            device = Device(worker.costs, facts.max_batched_tokens)
            self.stations[name] = _Station(worker, device, Ledger(facts))
            limits = WorkerLimits(
                facts.cache_capacity_bytes, facts.page_bytes, facts.max_batched_tokens
            )
            self.queue.add_worker(name, limits)
        first = workers[0]
        self.chunk_tokens = first.facts.chunk_tokens
        self.context_length = first.facts.shape.context_length
        self.store = SimulatedStore(store_bytes // first.facts.slot_bytes)

    def run(self, requests: Iterable[SimulatedRequest]) -> None:
        """Run these requests, in order of arrival, until the last one has ended.

        Raises RuntimeError if one never ends, which is an error of the policy or of this class.
        """
        events = self._events
        for request in requests:
            arrives = request.arrived + self._request_seconds
            while events and events[0][0] <= arrives:
                self._happen()
            self.now = arrives
            self._arrive(request)
        while events:
            self._happen()
        running = sum(len(station.running) for station in self.stations.values())
        if running or len(self.queue):
            raise RuntimeError(f"{running} running and {len(self.queue)} waiting never end")

    # -- what the policy asks (`policy.queue.Owner`) ------------------------------------------

    def workers_for(self, item: SimulatedRequest) -> Iterable[str]:
        return self.stations

    def need(self, item: SimulatedRequest, worker_id: str) -> Way | None:
        station = self.stations[worker_id]
        fits = self._footprint(station.worker, item.token_count)
        return self._way(item, station, fits) if isinstance(fits, Fits) else None

    def room(self, worker_id: str) -> tuple[int, int]:
        ledger = self.stations[worker_id].ledger
        return ledger.free_pages, ledger.free_places

    def prefer(self, item: SimulatedRequest, needs: Mapping[str, Need]) -> str:
        if len(needs) == 1:
            return next(iter(needs))
        return choose_worker(
            self._candidate(item, worker_id, way_of(need)) for worker_id, need in needs.items()
        ).worker_id

    def instead(self, item: SimulatedRequest, needs: Mapping[str, Need]) -> Mapping[str, Need]:
        """Return the workers where it had better be streamed now than wait for memory."""
        found: dict[str, Need] = {}
        for worker_id, need in needs.items():
            station = self.stations[worker_id]
            missing = need.pages - station.ledger.free_pages
            facts = station.ledger.facts
            if self._residency is not None or missing <= 0 or facts.encoding.is_lossy:
                continue
            if way_of(need).fits.residency is Residency.STREAMED:
                continue
            streamed = footprint_of(item.token_count, Residency.STREAMED, facts)
            wanted = Wanted(item.input_tokens, item.cached_tokens, item.output_tokens, missing)
            running = [self._running(station, each) for each in station.running.values()]
            if isinstance(streamed, Fits) and reason_to_stream(
                facts, wanted, running, Objective.LATENCY
            ):
                found[worker_id] = self._way(item, station, streamed)
        return found

    def _way(self, item: SimulatedRequest, station: _Station, fits: Fits) -> Way:
        """Return what a request would take now."""
        ledger, charge = station.ledger, self._charge(item, fits)
        shared = ledger.shared_count(charge.marks) if charge.marks else 0
        device = station.with_kept(charge.marks, shared) if charge.marks else 0
        way = Way.of(
            ledger,
            fits,
            charge,
            known=item.input_tokens,
            stored=item.cached_tokens,
            device=device * self.chunk_tokens,
            shared=shared,
            answer=item.output_tokens,
        )
        way.can_start = ledger.has_room_for(way.pages)
        return way

    def _candidate(self, item: SimulatedRequest, worker_id: str, way: Way) -> Candidate:
        """Return a worker as a candidate, as `placement.routing.candidate_of` does."""
        ledger, rooms = self.stations[worker_id].ledger, self.queue.rooms
        backlog = Backlog(rooms.bound_tokens(worker_id), rooms.link_bytes(worker_id))
        known, stored, here = item.input_tokens, item.cached_tokens, way.device_tokens
        off_device = seconds = first_token_seconds(ledger, known, stored, 0, backlog)
        if here:
            seconds = first_token_seconds(ledger, known, stored, here, backlog)
        return Candidate(worker_id, seconds, off_device, ledger.free_share, ledger.running_count)

    def _running(self, station: _Station, request: SimulatedRequest) -> RunningRequest:
        generated = station.device.generated(request)
        return RunningRequest(
            request.input_tokens + generated,
            max(1, request.output_tokens - generated),
            station.ledger.pages_held(request.number),
            request.is_streamed,
        )

    # -- events -------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest) -> None:
        is_too_long = request.token_count > self.context_length
        if is_too_long or not any(
            isinstance(self._footprint(each.worker, request.token_count), Fits)
            for each in self.stations.values()
        ):
            request.ended = self.now
            self.rejected.append(request)
            return
        request.cached_tokens = self.store.held_count(request.marks) * self.chunk_tokens
        self.queue.push(
            Waiting(
                request,
                request.number,
                request.tenant,
                request.weight,
                request.priority,
                self.now,
            )
        )
        self._start_waiting()
        self._begin_runs()

    def _happen(self) -> None:
        when, _, worker_id, request, version = heapq.heappop(self._events)
        station = self.stations[worker_id]
        device = station.device
        if request is not None:
            self.now = when
            self._ready(station, request)
            self._begin_runs()
        elif version == device.version and device.run is not None:
            self.now = when
            self._run_ended(station)

    def _run_ended(self, station: _Station) -> None:
        device, queue, worker_id = station.device, self.queue, station.ledger.facts.worker_id
        first, ended, prefilled = device.finish()
        now, frees = self.now, bool(ended)
        if self._follows_steps and prefilled:
            frees |= queue.computed(worker_id, prefilled)
        for request in first:
            request.first_token = now
            self._seal(request)
            frees |= queue.tokens_came(request.number, 0, now)
        for request in ended:
            request.ended = now
            self._end(station, request)
        device.run = None
        self._idle[worker_id] = station
        if frees and len(queue):
            self._start_waiting()
        self._begin_runs()

    def _most_prefill_steps(self, worker_id: str) -> int | None:
        """Return the steps until the policy may bind more to the worker; None: it is not asked."""
        if not self._follows_steps or not len(self.queue):
            return None
        rooms = self.queue.rooms
        step = rooms.limits(worker_id).step_tokens
        missing = rooms.bound_tokens(worker_id) - self.queue.settings.ahead_steps * step
        return int(missing // step) + 1 if missing >= 0 else None

    def _ready(self, station: _Station, request: SimulatedRequest) -> None:
        """Let a request compute whose prefix is on the device."""
        device, worker_id = station.device, station.ledger.facts.worker_id
        device.add(request)
        if device.run is None or device.begun >= self.now:
            self._idle[worker_id] = station
        elif device.cut(self.now):
            self._post(device.ends, worker_id, None, device.version)

    def _begin_runs(self) -> None:
        """Begin a run on every device that has none, or whose run began at this moment."""
        for worker_id, station in self._idle.items():
            device = station.device
            device.begin(self.now, self._most_prefill_steps(worker_id))
            if device.run is not None:
                self._post(device.ends, worker_id, None, device.version)
        self._idle.clear()

    def _post(
        self, when: float, worker_id: str, request: SimulatedRequest | None, version: int = 0
    ) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (when, self._event_count, worker_id, request, version))

    # -- starts and ends ------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while len(self.queue) and (start := self.queue.next(self.now)) is not None:
            self._start(start)

    def _start(self, start: Start[SimulatedRequest]) -> None:
        request, station = start.waiting.item, self.stations[start.worker_id]
        way, ledger, chunk = way_of(start.need), station.ledger, self.chunk_tokens
        charge = way.charge
        request.started, request.worker_id = self.now, start.worker_id
        request.is_streamed = way.fits.residency is Residency.STREAMED
        here = way.device_tokens // chunk
        held = self.store.held_count(request.marks)
        cached = max(here, held)
        station.count_pages(self.now)
        ledger.grant(request.number, charge)
        request.pages = ledger.pages_held(request.number)
        station.running[request.number] = request
        self._make_room(station, charge.marks)
        request.context = request.restored_tokens = cached * chunk
        request.left = request.input_tokens - request.context
        self.store.touch(request.marks[:held])
        missing = (cached - here) * chunk
        if missing and not request.is_streamed:
            over = station.device.restore(missing, self.now)
            self._post(over, start.worker_id, request)
        else:
            self._ready(station, request)

    def _make_room(self, station: _Station, marks: Sequence[bytes]) -> None:
        """Forget the chunks whose pages are in use now."""
        kept, ledger = station.kept, station.ledger
        for mark in marks:
            kept.pop(mark, None)
        most = max(0, ledger.free_pages)
        while len(kept) > most:
            kept.popitem(last=False)

    def _seal(self, request: SimulatedRequest) -> None:
        """Let the store have what was computed of the prompt."""
        whole = request.input_tokens // self.chunk_tokens
        self.store.seal(request.marks, request.number, whole - len(request.marks))

    def _end(self, station: _Station, request: SimulatedRequest) -> None:
        station.count_pages(self.now)
        station.ledger.release(request.number)
        del station.running[request.number]
        self.queue.ended(request.number, self.now)
        if not request.is_streamed:
            # The first chunks last, so that a prefix loses its end first.
            for mark in reversed(request.marks):
                station.kept[mark] = None
                station.kept.move_to_end(mark)
            held = station.ledger.shared_count(request.marks)
            self._make_room(station, request.marks[:held])

    def _footprint(self, worker: Worker, token_count: int) -> Fits | NeverFits:
        key = (worker.type.name, -(-token_count // self.chunk_tokens))
        found = self._fits.get(key)
        if found is None:
            found = footprint_of(token_count, self._residency, worker.facts)
            self._fits[key] = found
        return found

    def _charge(self, request: SimulatedRequest, fits: Fits) -> Charge:
        if fits.residency is Residency.STREAMED:
            return Charge((), fits.size_bytes // self._page_bytes)
        if request.charge is None:
            pages = chunks_of(request.token_count, self.chunk_tokens)
            request.charge = Charge(request.marks, pages - len(request.marks))
        return request.charge

    @property
    def _page_bytes(self) -> int:
        return next(iter(self.stations.values())).ledger.facts.page_bytes
