"""Peak device bytes of a request on a worker, and the residency that follows.

Pure: facts in, named answers out. All sizes are those of `splitpoint.shapes`;
what is free at the moment is the ledger's business, not this file's.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint.planning.planner import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape, chunks_of
from splitpoint.words import counted


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as policy sees it; from its GetInfo and its store's GetStats."""

    worker_id: str
    shape: ModelShape
    profile: Profile
    chunk_tokens: int
    has_activations: bool
    cache_capacity_bytes: int
    page_bytes: int
    # Pages that a streamed request occupies however long it is.
    streamed_page_count: int
    max_batch_size: int
    # Empty: no store, so neither reuse nor streaming.
    kvstore_address: str = ""
    # What chunk keys depend on, and the name of the store's arena (empty: unknown).
    layout_hash: bytes = b""
    store_instance_id: bytes = b""
    # Slots of the store's arena (None: it could not be asked), bytes of each.
    store_slot_count: int | None = None
    slot_bytes: int = 0
    # How the worker restores, with how much staging memory (0: unknown), in what
    # pieces it prefills (0: unknown), and how its store keeps what it reads.
    schedule: Schedule = Schedule.SERIAL
    staging_tokens: int = 0
    max_batched_tokens: int = 0
    encoding: Encoding = Encoding.NATIVE

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one resident request has the whole cache."""
        return self.cache_capacity_bytes // self.page_bytes * self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a worker."""

    # Prompt and max_tokens together; at least 1.
    token_count: int
    # None: resident where that fits, streamed otherwise.
    residency: Residency | None = None


@dataclass(frozen=True, slots=True)
class Fits:
    """The worker can run it once enough of its cache is free."""

    residency: Residency
    size_bytes: int
    # Why this residency, for the plan.
    reason: str
    # Slots of the worker's store that it will hold until it ends.
    slot_count: int = 0
    # Streamed because it must: what its cache takes beyond `size_bytes`. Any part of it
    # that stays on the device need not be pulled in every step.
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NeverFits:
    """The worker could not run it with nothing else on it. The numbers that say so."""

    reason: str
    needed_bytes: int
    capacity_bytes: int
    needed_tokens: int
    capacity_tokens: int


def footprint_of(demand: Demand, worker: WorkerFacts) -> Fits | NeverFits:
    """Which residency the request gets on this worker, and what that costs."""
    resident = _resident(demand, worker)
    if demand.residency is Residency.RESIDENT:
        return resident
    if demand.residency is None and isinstance(resident, Fits):
        return resident
    if demand.residency is None and not worker.kvstore_address:
        return resident  # whose numbers say more than "no store"
    return _streamed(demand, worker)


def resident_share(fits: Fits, free_bytes: int, page_bytes: int) -> int:
    """Bytes that a streamed request may keep besides its charge: half of what is free then.

    The other half is for those who come next; whoever waits already comes first.
    """
    share = min(fits.spare_bytes, (free_bytes - fits.size_bytes) // 2)
    return max(share, 0) // page_bytes * page_bytes


def page_count(demand: Demand, worker: WorkerFacts, residency: Residency) -> int:
    """Device pages: one per chunk of the whole sequence, or what streaming occupies."""
    pages = chunks_of(demand.token_count, worker.chunk_tokens)
    if residency is Residency.STREAMED:
        return min(pages, worker.streamed_page_count)
    return pages


def _resident(demand: Demand, worker: WorkerFacts) -> Fits | NeverFits:
    size = page_count(demand, worker, Residency.RESIDENT) * worker.page_bytes
    capacity = worker.cache_capacity_bytes
    if size <= capacity:
        return Fits(
            Residency.RESIDENT,
            size,
            f"resident: {format_size(size)} of cache fit the worker's {format_size(capacity)}",
        )
    return NeverFits(
        f"{counted(demand.token_count, 'token needs', 'tokens need')} {format_size(size)} of "
        f"device cache, worker {worker.worker_id} has {format_size(capacity)} "
        f"({counted(worker.capacity_tokens, 'token')})",
        needed_bytes=size,
        capacity_bytes=capacity,
        needed_tokens=demand.token_count,
        capacity_tokens=worker.capacity_tokens,
    )


def _streamed(demand: Demand, worker: WorkerFacts) -> Fits | NeverFits:
    tokens, slots = demand.token_count, chunks_of(demand.token_count, worker.chunk_tokens)
    size = page_count(demand, worker, Residency.STREAMED) * worker.page_bytes
    capacity = worker.cache_capacity_bytes
    if not worker.kvstore_address:
        return NeverFits(
            f"worker {worker.worker_id} has no KV store, so it cannot stream",
            needed_bytes=size,
            capacity_bytes=0,
            needed_tokens=tokens,
            capacity_tokens=0,
        )
    held = worker.store_slot_count
    if held is not None and slots > held:
        return NeverFits(
            f"{counted(tokens, 'token needs', 'tokens need')} {counted(slots, 'slot')} of the KV "
            f"store's {held:,} "
            f"({counted(held * worker.chunk_tokens, 'token')}) to be streamed",
            needed_bytes=slots * worker.slot_bytes,
            capacity_bytes=held * worker.slot_bytes,
            needed_tokens=tokens,
            capacity_tokens=held * worker.chunk_tokens,
        )
    if size > capacity:
        return NeverFits(
            f"streaming needs {format_size(size)} of device cache, worker {worker.worker_id} "
            f"has {format_size(capacity)}",
            needed_bytes=size,
            capacity_bytes=capacity,
            needed_tokens=tokens,
            capacity_tokens=worker.capacity_tokens,
        )
    whole = page_count(demand, worker, Residency.RESIDENT) * worker.page_bytes
    why = (
        f"{format_size(whole)} of cache exceed the worker's {format_size(capacity)}"
        if whole > capacity
        else "as asked for"
    )
    return Fits(
        Residency.STREAMED,
        size,
        f"streamed: {why}, so {format_size(size)} are charged",
        slot_count=slots,
        # Who asks for streaming wants the memory left alone.
        spare_bytes=whole - size if demand.residency is None else 0,
    )
