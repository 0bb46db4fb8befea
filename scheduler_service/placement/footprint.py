"""Device memory of a request on a worker, and the residency that follows from it.

Pure: facts in, named answers out. What is free at the moment is the account's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import counted, format_size
from splitpoint.planning.plan import Reason, ReasonKind, Residency
from splitpoint.residency.selecting import pages_at_last
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import chunks_of


@dataclass(frozen=True, slots=True)
class Fits:
    """The worker can run the request once enough of its cache is free."""

    residency: Residency
    # Peak bytes: resident, with the longest possible answer and no page shared.
    size_bytes: int
    # Why this residency, for the plan.
    reasons: tuple[Reason, ...] = ()
    # Slots of the worker's store that the request will hold until it ends.
    slot_count: int = 0
    # Bytes beyond `size_bytes` that a request which must be streamed can use: the part of
    # its cache that stays on the device is not loaded in every step.
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NeverFits:
    """The worker could not run the request even if it ran nothing else."""

    reason: str
    needed_bytes: int
    capacity_bytes: int
    needed_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Device memory for one request, `spare_bytes` included in `size_bytes`."""

    residency: Residency
    # Bytes that are charged at the start, without pages that running requests share with it.
    size_bytes: int
    # Why this residency and this size, for the plan.
    reasons: tuple[Reason, ...] = ()
    # Streamed: for a part of the cache that stays on the device.
    spare_bytes: int = 0
    # Resident: leading tokens that the device holds already, as far as is known.
    device_tokens: int = 0


def footprint_of(
    token_count: int,
    residency: Residency | None,
    worker: WorkerFacts,
    selection: Selection = FULL,
) -> Fits | NeverFits:
    """Return the residency that a request gets on this worker, and its bytes.

    Args:
        token_count: prompt and max_tokens together; at least 1.
        residency: what the request asks for; None: resident if that fits, else streamed.
        selection: what the worker is to select; a streamed request needs pages for it.
    """
    resident = _resident(token_count, worker)
    if residency is Residency.RESIDENT:
        return resident
    if residency is None and (isinstance(resident, Fits) or not worker.kvstore_address):
        return resident  # without a store, these numbers explain more than "no store"
    return _streamed(token_count, worker, selection, is_forced=residency is not None)


def grant_of(fits: Fits, free_bytes: int, page_bytes: int) -> Grant:
    """Return a grant with spare memory: whole pages, at most half of what stays free."""
    free_pages = max(0, free_bytes - fits.size_bytes) // 2 // page_bytes
    spare = min(fits.spare_bytes, free_pages * page_bytes)
    reasons = fits.reasons
    if spare:
        reasons = (*reasons, Reason(ReasonKind.SPARE, (spare,)))
    return Grant(fits.residency, fits.size_bytes + spare, reasons, spare)


def _resident(token_count: int, worker: WorkerFacts) -> Fits | NeverFits:
    size = chunks_of(token_count, worker.chunk_tokens) * worker.page_bytes
    capacity = worker.cache_capacity_bytes
    if size <= capacity:
        return Fits(Residency.RESIDENT, size, (Reason(ReasonKind.FITS, (size, capacity)),))
    return NeverFits(
        f"{counted(token_count, 'token needs', 'tokens need')} {format_size(size)} of "
        f"device cache, worker {worker.worker_id} has {format_size(capacity)} "
        f"({counted(worker.capacity_tokens, 'token')})",
        needed_bytes=size,
        capacity_bytes=capacity,
        needed_tokens=token_count,
        capacity_tokens=worker.capacity_tokens,
    )


def _streamed(
    token_count: int, worker: WorkerFacts, selection: Selection, *, is_forced: bool
) -> Fits | NeverFits:
    slots = chunks_of(token_count, worker.chunk_tokens)
    whole = slots * worker.page_bytes
    selected = _selection_pages(token_count, worker, selection)
    size = (min(slots, worker.streamed_page_count) + selected) * worker.page_bytes
    capacity = worker.cache_capacity_bytes
    if not worker.kvstore_address:
        return NeverFits(
            f"worker {worker.worker_id} has no KV store, so it cannot stream",
            needed_bytes=size,
            capacity_bytes=0,
            needed_tokens=token_count,
            capacity_tokens=0,
        )
    held = worker.store_slot_count
    if held is not None and slots > held:
        return NeverFits(
            f"{counted(token_count, 'token needs', 'tokens need')} {counted(slots, 'slot')} of "
            f"the KV store's {held:,} "
            f"({counted(held * worker.chunk_tokens, 'token')}) to be streamed",
            needed_bytes=slots * worker.slot_bytes,
            capacity_bytes=held * worker.slot_bytes,
            needed_tokens=token_count,
            capacity_tokens=held * worker.chunk_tokens,
        )
    if size > capacity:
        return NeverFits(
            f"streaming needs {format_size(size)} of device cache, worker {worker.worker_id} "
            f"has {format_size(capacity)}",
            needed_bytes=size,
            capacity_bytes=capacity,
            needed_tokens=token_count,
            capacity_tokens=worker.capacity_tokens,
        )
    why = Reason(ReasonKind.ASKED_STREAMED)
    if whole > capacity:
        why = Reason(ReasonKind.EXCEEDS, (whole, capacity))
    return Fits(
        Residency.STREAMED,
        size,
        (why, Reason(ReasonKind.CHARGED, (size, selected, str(selection)))),
        slot_count=slots,
        # A request that asks for streaming wants the memory left alone.
        spare_bytes=0 if is_forced else max(0, whole - size),
    )


def _selection_pages(token_count: int, worker: WorkerFacts, selection: Selection) -> int:
    """Return the pages for rows and screens: none if the worker will read everything instead."""
    if selection.reads_all:
        return 0
    wanted = pages_at_last(worker.shape, selection, token_count, worker.chunk_tokens).count
    streamed = min(chunks_of(token_count, worker.chunk_tokens), worker.streamed_page_count)
    capacity = worker.cache_capacity_bytes // worker.page_bytes
    return wanted if streamed + wanted <= capacity else 0
