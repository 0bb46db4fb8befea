"""What one worker has promised to which requests: pages, places, prefill work and link bytes. Pure.

A request holds its pages and its place from its start to its end, prefill work and link bytes until
its first token. Workers of one store share the account of its slots.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.placement.demand import Demand
from scheduler_service.placement.footprint import Fits
from scheduler_service.placement.power import PowerAdvice, RecentKappa, advise_power
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import counted
from splitpoint.costs.bottleneck import kappa_crit
from splitpoint.costs.first_token import Backlog
from splitpoint.planning.plan import Residency
from splitpoint.shapes import chunks_of
from splitpoint.v1 import types_pb2

# A request of another scheduler that has waited longer than this goes first, however large it is.
_LONG_WAIT_SECONDS = 5.0
# Ticks without any charge on a worker after which nothing is kept free for other schedulers: each
# of them may be waiting for the others.
_IDLE_TICKS = 3


class Hold(StrEnum):
    """Why the policy holds a request back on a worker that has room for it."""

    # Others start first: earlier ones, or ones that fill the device better.
    TURN = "turn"
    # Its tenant is ahead of its share.
    SHARE = "share"
    # The worker has enough unprefilled tokens.
    PREFILL = "prefill"
    # Enough bytes of link-bound requests are being restored there.
    RESTORES = "restores"
    # It would be streamed there, and ones that would be resident wait, too.
    RESIDENTS = "residents"
    # The worker's memory is kept free for a request that has waited long.
    RESERVATION = "reservation"


@dataclass(frozen=True, slots=True)
class Charge:
    """Pages of one request: one of each full chunk of its prompt, and its own.

    Pages of chunks are shared: a worker that runs several requests with a chunk holds it once.
    """

    # Marks of the leading full chunks, in order.
    marks: Sequence[bytes] = ()
    # Pages for the rest of the prompt and for the answer, or of a streamed request.
    own_pages: int = 0


@dataclass(slots=True)
class Need:
    """What a request would take of one worker now, and how it would run there.

    Attributes:
        fits: its residency.
        charge: its pages by chunk: of its prompt and its expected answer.
        pages: those that it adds; none for chunks that running requests hold already.
        cached_tokens: K, tokens that must be in device memory but need no compute.
        new_tokens: T, tokens that are prefilled; at least 1.
        shared_tokens: tokens of those in chunks that running requests hold already.
        device_tokens: leading tokens that the worker's device holds, as far as is known.
        link_bytes: bytes that cross the link before its first token.
        is_link_bound: K / T is above the worker's kappa_crit.
        can_start: the worker has the memory, the place and all else that it needs now.
    """

    fits: Fits
    charge: Charge
    pages: int
    cached_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    device_tokens: int = 0
    link_bytes: int = 0
    is_link_bound: bool = False
    can_start: bool = True

    @property
    def is_streamed(self) -> bool:
        """True if its cache crosses the link in each decode step."""
        return self.fits.residency is Residency.STREAMED

    @property
    def kappa_ratio(self) -> float:
        return self.cached_tokens / self.new_tokens


@dataclass(frozen=True, slots=True)
class OthersHold:
    """What other schedulers hold and want on one worker, by its last message.

    Attributes:
        pages: charged to their requests.
        request_count: places in the batch that these have.
        slot_count: slots of the worker's store that are promised to streamed ones.
        busy_count: schedulers that have requests there, running or waiting.
        wanted_pages: needed by the request that has waited longest; 0 if none waits.
        waited_seconds: how long it has waited since its scheduler last started a request there.
    """

    pages: int = 0
    request_count: int = 0
    slot_count: int = 0
    busy_count: int = 0
    wanted_pages: int = 0
    waited_seconds: float = 0.0


@dataclass(slots=True)
class Running:
    """A request that started on the worker, and what it holds until it ends."""

    demand: Demand
    charge: Charge
    is_streamed: bool

    @property
    def pages(self) -> int:
        """Its pages, shared ones included."""
        return len(self.charge.marks) + self.charge.own_pages


@dataclass(slots=True)
class _Work:
    """What a request without a first token brings to a worker."""

    new_tokens: int
    link_bytes: int
    is_link_bound: bool


class Trial:
    """Keeps suspects apart on one worker, so that a second failure of an engine names its cause.

    A suspect ran on an engine that failed (`requests/failover.py`). Requests are named by arrival.
    """

    def __init__(self) -> None:
        self._suspect: int | None = None
        # No token of these has come from this worker yet.
        self._starting: set[int] = set()

    def may_start(self, *, is_suspect: bool) -> bool:
        """Return True if a request may start here.

        Nothing starts beside a suspect, and a suspect starts only beside requests that are
        past their start.
        """
        return self._suspect is None and not (is_suspect and self._starting)

    def start(self, arrival: int, *, is_suspect: bool) -> None:
        if is_suspect:
            self._suspect = arrival
        else:
            self._starting.add(arrival)

    def got_tokens(self, arrival: int, *, is_suspect: bool) -> bool:
        """Note that tokens came. Return True if that may let another request start.

        `is_suspect`: the request is a suspect after these tokens.
        """
        was_starting = arrival in self._starting
        self._starting.discard(arrival)
        if self._suspect == arrival and not is_suspect:
            self._suspect = None
            return True
        return was_starting and not self._starting

    def end(self, arrival: int) -> None:
        """Note that a request left the worker."""
        self._starting.discard(arrival)
        if self._suspect == arrival:
            self._suspect = None

    def check_integrity(self, running: Collection[int]) -> list[str]:
        """Return one line per violated invariant. `running`: every request on the worker."""
        known = self._starting if self._suspect is None else {*self._starting, self._suspect}
        missing = known.difference(running)
        return [f"{missing} are on trial but do not run"] if missing else []


class StoreAccount:
    """Slots of one store that are promised to streamed requests, on all of its workers.

    A streamed request leases what it computes until it ends, so together they must fit.
    Chunks of resident requests can be evicted, or are not stored.

    Attributes:
        workers: the accounts of the workers that use the store.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerAccount] = []
        self._promised: dict[int, int] = {}

    @property
    def promised_count(self) -> int:
        """Slots that streamed requests may still fill."""
        return sum(self._promised.values())

    def promised_to(self, arrivals: Collection[int]) -> int:
        """Return the slots that are promised to these requests."""
        return sum(self._promised.get(arrival, 0) for arrival in arrivals)

    def has_room(
        self, slot_count: int, store_slot_count: int | None, leaving: Collection[int] = ()
    ) -> bool:
        """Return True if the slots are free, or if the store's size is not known (None).

        `leaving`: arrivals of requests whose slots count as free.
        """
        if not slot_count or store_slot_count is None:
            return True
        promised = self.promised_count - self.promised_to(leaving)
        others = sum(worker.others.slot_count for worker in self.workers)
        return promised + others + slot_count <= store_slot_count

    def promise(self, arrival: int, slot_count: int) -> None:
        """Promise slots to a request."""
        if slot_count:
            self._promised[arrival] = slot_count

    def release(self, arrival: int) -> bool:
        """End a request's promise. Return True if it had one."""
        return self._promised.pop(arrival, None) is not None


class WorkerAccount:
    """What one worker has promised, and to which requests, by arrival.

    Answers grow, so the charges may exceed the capacity; nothing starts then. Neither is what
    other schedulers hold given away, nor a share that is theirs while their requests wait.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        store: StoreAccount | None = None,
        *,
        ahead_steps: float = 2.0,
        restoring_share: float = 0.5,
    ) -> None:
        """`store`: shared with the other workers of the worker's store.

        `ahead_steps`, `restoring_share`: see `PolicySettings`.
        """
        self.store = StoreAccount() if store is None else store
        self.store.workers.append(self)
        self._ahead_steps = ahead_steps
        self._restoring_share = restoring_share
        self.set_facts(facts)
        # A draining worker keeps its requests and gets no new ones.
        self.is_closed = False
        self.trial = Trial()
        self.kappa = RecentKappa()
        # Marks of the chunks on its device, by its last report.
        self.device_marks: Container[bytes] = frozenset()
        self.others = OthersHold()
        # How long our own first request has waited for this worker, or since the last start there.
        self.waited_seconds = 0.0
        # Requests that ever started.
        self.start_count = 0
        # Ticks since anything was charged on it, by any scheduler.
        self._idle_ticks = _IDLE_TICKS
        # Requests that have started and not ended.
        self.running: dict[int, Running] = {}
        # Those among them without a first token, the earliest start first, and their sums.
        self._prefilling: dict[int, _Work] = {}
        self.bound_tokens = 0
        self.link_bytes = 0
        self.restoring_bytes = 0
        # How many of the requests have each chunk, by mark.
        self._holders: Counter[bytes] = Counter()
        self._own_pages = 0

    def set_facts(self, facts: WorkerFacts) -> None:
        """Note what is known of the worker now; only its measured costs may have changed."""
        self.facts = facts
        self.page_count = facts.cache_capacity_bytes // facts.page_bytes
        self.first_token = facts.first_token()
        self.kappa_crit = kappa_crit(facts.shape, facts.profile, facts.encoding)
        self.stored_bytes_per_token = facts.shape.stored_kv_bytes_per_token(facts.encoding)

    def advise_power(self, telemetry: types_pb2.Telemetry | None) -> PowerAdvice | None:
        """Return the power cap that its requests leave room for. None: none, or no card."""
        limit = telemetry.power_default_limit_watts if telemetry is not None else 0.0
        return advise_power(self.kappa, self.kappa_crit, limit)

    @property
    def charged_pages(self) -> int:
        return len(self._holders) + self._own_pages

    @property
    def charged_bytes(self) -> int:
        return self.charged_pages * self.facts.page_bytes

    @property
    def free_pages(self) -> int:
        """Pages that no scheduler has charged; negative if more is charged than there is."""
        return self.page_count - self.charged_pages - self.others.pages

    @property
    def free_places(self) -> int:
        """Places in the batch that no scheduler has given to a request."""
        return self.facts.max_batch_size - self.running_count - self.others.request_count

    @property
    def free_bytes(self) -> int:
        return self.free_pages * self.facts.page_bytes

    @property
    def free_share(self) -> float:
        """Free part of the cache, at most 1; 0 for a worker without any, and below if more is
        charged than there is."""
        return self.free_bytes / max(1, self.facts.cache_capacity_bytes)

    @property
    def running_count(self) -> int:
        return len(self.running)

    def shared_count(self, marks: Sequence[bytes]) -> int:
        """Return how many of these leading chunks running requests have already.

        A request that has a chunk has all chunks before it, so the end is found by halving.
        """
        return bisect_left(marks, True, key=lambda mark: mark not in self._holders)

    def device_count(self, marks: Sequence[bytes], shared_count: int) -> int:
        """Return how many of these leading chunks its device holds, as far as is known.

        What a running request has (`shared_count`) is there, or will be when this one starts.
        """
        count = shared_count
        while count < len(marks) and marks[count] in self.device_marks:
            count += 1
        return count

    def pages_of(self, charge: Charge) -> int:
        """Return the pages that a charge would add now."""
        return len(charge.marks) - self.shared_count(charge.marks) + charge.own_pages

    def has_room_for(self, pages: int) -> bool:
        """Return True if a place in the batch and this many pages are free.

        Without a place in the batch the worker would queue the request by itself.
        """
        return self.free_places > 0 and pages <= self.free_pages and self.leaves_share(pages)

    def has_room_after(self, pages: int, leaving: Collection[int]) -> bool:
        """Return True if a place and this many pages are free once these requests have left.

        A page that they share counts as freed by each of them, so it may be too early.
        """
        freed = sum(self.running[arrival].pages for arrival in leaving)
        return self.free_places + len(leaving) > 0 and self.free_pages + freed >= pages

    def leaves_share(self, pages: int) -> bool:
        """Return True if this many more pages leave other schedulers what is theirs.

        While their requests wait, a scheduler that has its equal share of the worker leaves free
        what the first of them needs. One that has waited long, and longer than ours, is left its
        memory in any case. On an idle worker the one that has waited longest goes first.
        """
        others = self.others
        if not others.wanted_pages:
            return True
        is_first = self.waited_seconds >= others.waited_seconds
        if self._is_idle and (is_first or self._idle_ticks >= _IDLE_TICKS):
            return True
        if max(self.waited_seconds, others.waited_seconds) >= _LONG_WAIT_SECONDS:
            if is_first:
                return True
        elif self._has_share(pages, others.busy_count + 1):
            return True
        return self.free_pages - pages >= others.wanted_pages and self.free_places > 1

    def _has_share(self, pages: int, sharers: int) -> bool:
        """Return True if this many more pages, and a place, are within an equal share."""
        return (
            self.charged_pages + pages <= self.page_count // sharers
            and self.running_count < self.facts.max_batch_size // sharers
        )

    @property
    def _is_idle(self) -> bool:
        return not (self.charged_pages or self.others.pages)

    def tick(self) -> None:
        """Note that a moment has passed."""
        self._idle_ticks = self._idle_ticks + 1 if self._is_idle else 0

    # -- prefill work and restores ------------------------------------------------------

    @property
    def token_room(self) -> float:
        """New tokens that may still be bound to the worker: at least 1 if none are."""
        step = self.facts.max_batched_tokens
        if not step:
            return math.inf
        left = self._ahead_steps * step - self.bound_tokens
        return left if self._prefilling else max(1.0, left)

    @property
    def is_full(self) -> bool:
        """True if enough prefill work is bound to the worker."""
        return self.token_room < 1

    @property
    def backlog(self) -> Backlog:
        """What is queued on the worker before its next request."""
        return Backlog(self.bound_tokens, self.link_bytes)

    def hold(self, need: Need) -> Hold | None:
        """Return what holds a request back here; None if nothing does.

        One request is always let through, and so is one that is link-bound.
        """
        if self.is_full:
            return Hold.PREFILL
        if need.is_link_bound and self.restoring_bytes:
            most = self._restoring_share * self.facts.cache_capacity_bytes
            if self.restoring_bytes + need.link_bytes > most:
                return Hold.RESTORES
        return None

    # -- the life of a request on the worker ------------------------------------------------

    def start(self, demand: Demand, need: Need) -> None:
        """Charge a request that starts. Raises ValueError, and changes nothing, for one that has
        started already, or for more pages than are free."""
        arrival, charge = demand.arrival, need.charge
        if arrival in self.running:
            raise ValueError(f"request {arrival} is charged already")
        if not self.has_room_for(self.pages_of(charge)):
            raise ValueError(f"{self.pages_of(charge)} pages exceed the {self.free_pages} free")
        self.running[arrival] = Running(demand, charge, need.is_streamed)
        self._idle_ticks, self.waited_seconds = 0, 0.0
        self.start_count += 1
        self._holders.update(charge.marks)
        self._own_pages += charge.own_pages
        self._prefilling[arrival] = _Work(need.new_tokens, need.link_bytes, need.is_link_bound)
        self.bound_tokens += need.new_tokens
        self.link_bytes += need.link_bytes
        if need.is_link_bound:
            self.restoring_bytes += need.link_bytes
        self.trial.start(arrival, is_suspect=demand.is_suspect)
        self.store.promise(arrival, need.fits.slot_count)

    def computed(self, token_count: int) -> bool:
        """Note that a step prefilled this many tokens, of the earliest requests first.

        Return True if the worker is no longer full.
        """
        was_full = self.is_full
        for work in self._prefilling.values():
            if token_count <= 0:
                break
            # The last one is computed with the first token.
            done = min(work.new_tokens - 1, token_count)
            work.new_tokens -= done
            self.bound_tokens -= done
            token_count -= done
        return was_full and not self.is_full

    def prefilled(self, arrival: int) -> bool:
        """Note a request's first token, or its end. Return False if it had one before."""
        work = self._prefilling.pop(arrival, None)
        if work is None:
            return False
        self.bound_tokens -= work.new_tokens
        self.link_bytes -= work.link_bytes
        if work.is_link_bound:
            self.restoring_bytes -= work.link_bytes
        return True

    def grow(self, arrival: int, page_count: int) -> int:
        """Charge a request for this many pages, shared ones included, if that is more than before.

        Return the pages that were added.
        """
        running = self.running[arrival]
        added = max(0, page_count - running.pages)
        if added:
            self._own_pages += added
            charge = running.charge
            running.charge = Charge(charge.marks, charge.own_pages + added)
        return added

    def tokens_came(self, demand: Demand) -> int:
        """Charge a resident request for the pages of its answer. Return those that were added."""
        if self.running[demand.arrival].is_streamed:
            return 0
        return self.grow(demand.arrival, chunks_of(demand.known_count, self.facts.chunk_tokens))

    def end(self, arrival: int) -> bool:
        """End all that a request has of the worker, if it has anything.

        Return True if slots of the store are free now.
        """
        self.prefilled(arrival)
        self.trial.end(arrival)
        running = self.running.pop(arrival, None)
        if running is not None:
            self._own_pages -= running.charge.own_pages
            for mark in running.charge.marks:
                self._holders[mark] -= 1
                if not self._holders[mark]:
                    del self._holders[mark]
        return self.store.release(arrival)

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        problems = []
        charges = [running.charge for running in self.running.values()]
        own_pages = sum(charge.own_pages for charge in charges)
        if self._own_pages != own_pages:
            problems.append(f"{self._own_pages} own pages charged instead of {own_pages}")
        holders = Counter(mark for charge in charges for mark in charge.marks)
        if self._holders != holders:
            counts = counted(len(self._holders), "chunk is", "chunks are")
            problems.append(f"{counts} counted instead of {len(holders)}")
        if any(charge.own_pages < 0 for charge in charges):
            problems.append("a request is charged a negative number of pages")
        if len(charges) > self.facts.max_batch_size:
            problems.append(
                f"{counted(len(charges), 'request')} in a batch of {self.facts.max_batch_size}"
            )
        works = self._prefilling.values()
        if not self._prefilling.keys() <= self.running.keys():
            problems.append("requests are prefilled that do not run")
        if self.bound_tokens != sum(work.new_tokens for work in works):
            problems.append(f"{counted(self.bound_tokens, 'new token')} miscounted")
        if self.link_bytes != sum(work.link_bytes for work in works):
            problems.append(f"{counted(self.link_bytes, 'link byte')} miscounted")
        if self.restoring_bytes != sum(w.link_bytes for w in works if w.is_link_bound):
            problems.append(f"{counted(self.restoring_bytes, 'restoring byte')} miscounted")
        return problems + self.trial.check_integrity(self.running.keys())
