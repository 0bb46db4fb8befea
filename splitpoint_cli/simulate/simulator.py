"""The simulator of one cell: a scheduler, the workers that it alone uses, and their store.

Discrete events: an arrival, the end of a restore, the end of a run of steps. Which waiting
request starts next, and where, is decided by the live scheduler's own `PolicyQueue` and its
accounts of the workers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from scheduler_service.placement.account import WorkerAccount
from scheduler_service.placement.footprint import Fits, NeverFits
from scheduler_service.policy.order import Start
from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.prefixes.lookup import CachedPrefix
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Residency
from splitpoint.shapes import chunks_of
from splitpoint_cli.simulate.device import Device
from splitpoint_cli.simulate.device_types import Worker
from splitpoint_cli.simulate.workload import SimulatedRequest


@dataclass(slots=True, eq=False)
class _Station:
    """A worker of the cell: its engine, its account, and the chunks that requests left there."""

    worker: Worker
    device: Device
    account: WorkerAccount
    # Chunks in free pages, the least recently used first.
    kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    counted_until: float = 0.0

    def count_pages(self, now: float) -> None:
        """Add what is charged to the integral, before that changes."""
        charged = self.account.charged_pages
        self.device.totals.page_seconds += charged * (now - self.counted_until)
        self.counted_until = now


class SimulatedStore:
    """The KV store of one cell: `slot_count` chunks in host memory, least recently used first out.

    Chunks that only one request has are kept as one entry: nothing asks for them again, but they
    take room until they are evicted.
    """

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.used_count = 0
        # Chunks of each entry, by name, the least recently used first.
        self._entries: OrderedDict[bytes | int, int] = OrderedDict()

    def held_count(self, marks: Sequence[bytes]) -> int:
        """Return how many of these leading chunks it holds."""
        entries = self._entries
        count = 0
        for mark in marks:
            if mark not in entries:
                break
            count += 1
        return count

    def touch(self, marks: Sequence[bytes]) -> None:
        """Note that these held chunks were read, the last one first: it goes before its parents."""
        for mark in reversed(marks):
            self._entries.move_to_end(mark)

    def seal(self, marks: Sequence[bytes], number: int, own_count: int) -> None:
        """Store a request's chunks: its shared ones, and `own_count` that it alone has."""
        if own_count:
            self._put(-1 - number, own_count)
        for mark in reversed(marks):
            self._put(mark, 1)
        while self.used_count > self.slot_count:
            _, count = self._entries.popitem(last=False)
            self.used_count -= count

    def _put(self, name: bytes | int, count: int) -> None:
        if name in self._entries:
            self._entries.move_to_end(name)
        else:
            self._entries[name] = count
            self.used_count += count


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
        self.queue = PolicyQueue(settings)
        self._residency = None if streams else Residency.RESIDENT
        self._request_seconds = request_seconds
        self._follows_steps = settings.policy is not Policy.FIFO
        # Footprints by worker, of requests of this many chunks.
        self._verdicts: dict[int, dict[str, Fits | NeverFits]] = {}
        # Those that wait or run.
        self._requests: dict[int, SimulatedRequest] = {}
        self._events: list[tuple[float, int, str, SimulatedRequest | None, int]] = []
        self._event_count = 0
        # Workers that begin a run at the end of the event under way.
        self._idle: dict[str, _Station] = {}
        for index, worker in enumerate(workers):
            name = f"{worker.facts.worker_id}-{index}"
            facts = replace(worker.facts, worker_id=name)
            device = Device(worker.costs, facts.max_batched_tokens)
            self.queue.add_worker(facts)
            station = _Station(worker, device, self.queue.workers.accounts[name])
            # What ended requests left there stays until its pages are needed.
            station.account.device_marks = station.kept
            self.stations[name] = station
        first = workers[0]
        self._key_space = first.facts.key_space
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
        if self._requests:
            waiting = len(self.queue)
            running = len(self._requests) - waiting
            raise RuntimeError(f"{running} running and {waiting} waiting never end")

    # -- events -------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest) -> None:
        request.residency = self._residency
        count = chunks_of(request.token_count, self.chunk_tokens)
        request.verdicts = self._verdicts.setdefault(count, {})
        is_too_long, workers = request.token_count > self.context_length, self.queue.workers
        if is_too_long or not any(
            isinstance(workers.verdict(request, account), Fits)
            for account in workers.accounts.values()
        ):
            request.ended = self.now
            self.rejected.append(request)
            return
        held = self.store.held_count(request.marks) * self.chunk_tokens
        request.cached = CachedPrefix(
            own=dict.fromkeys(self.stations, held), marks={self._key_space: request.marks}
        )
        self._requests[request.arrival] = request
        self.queue.push(request, self.now)
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
        device, queue, worker_id = station.device, self.queue, station.account.facts.worker_id
        first, ended, prefilled = device.finish()
        now, frees = self.now, bool(ended)
        if self._follows_steps and prefilled:
            frees |= queue.computed(worker_id, prefilled)
        for request in first:
            request.first_token = now
            self._seal(request)
            frees |= queue.tokens_came(request, now) and self._follows_steps
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
        account = self.stations[worker_id].account
        step = account.facts.max_batched_tokens
        missing = account.bound_tokens - self.queue.settings.ahead_steps * step
        return int(missing // step) + 1 if missing >= 0 else None

    def _ready(self, station: _Station, request: SimulatedRequest) -> None:
        """Let a request compute whose prefix is on the device."""
        device, worker_id = station.device, station.account.facts.worker_id
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

    def _start(self, start: Start) -> None:
        request, station = self._requests[start.demand.arrival], self.stations[start.worker_id]
        need, chunk = start.need, self.chunk_tokens
        request.started, request.device = self.now, station.device
        request.is_streamed = need.is_streamed
        here = need.device_tokens // chunk
        held = self.store.held_count(request.marks)
        cached = max(here, held)
        station.count_pages(self.now)
        self.queue.start(start, self.now)
        request.pages = station.account.running[request.arrival].pages
        self._make_room(station, need.charge.marks)
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
        kept = station.kept
        for mark in marks:
            kept.pop(mark, None)
        most = max(0, station.account.free_pages)
        while len(kept) > most:
            kept.popitem(last=False)

    def _seal(self, request: SimulatedRequest) -> None:
        """Let the store have what was computed of the prompt."""
        whole = request.input_tokens // self.chunk_tokens
        self.store.seal(request.marks, request.arrival, whole - len(request.marks))

    def _end(self, station: _Station, request: SimulatedRequest) -> None:
        station.count_pages(self.now)
        self.queue.ended(request.arrival, self.now)
        del self._requests[request.arrival]
        if not request.is_streamed:
            # The first chunks last, so that a prefix loses its end first.
            for mark in reversed(request.marks):
                station.kept[mark] = None
                station.kept.move_to_end(mark)
            held = station.account.shared_count(request.marks)
            self._make_room(station, request.marks[:held])
