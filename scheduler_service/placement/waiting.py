"""Explains why a request waits: what for, on which worker, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.placement.account import Hold, Need, WorkerAccount
from splitpoint.config import counted, format_size


class Cause(StrEnum):
    """What a request waits for."""

    # Its own reader.
    READER = "reader"
    # A ready worker that could run it.
    WORKER = "worker"
    # The end of a trial: a request there may have ended an engine.
    TRIAL = "trial"
    # Slots of the worker's store, for what it streams.
    SLOTS = "slots"
    # Device memory.
    MEMORY = "memory"
    # A place in the worker's batch.
    BATCH = "batch"
    # Requests of other schedulers, for which the rest of the worker is kept.
    OTHER_SCHEDULERS = "other schedulers"
    # Its turn, and what else the policy holds requests back for.
    TURN = Hold.TURN.value
    SHARE = Hold.SHARE.value
    PREFILL = Hold.PREFILL.value
    RESTORES = Hold.RESTORES.value
    RESIDENTS = Hold.RESIDENTS.value
    RESERVATION = Hold.RESERVATION.value


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that could run the request, and what it would take there.

    Attributes:
        may_start: no trial keeps it from starting.
        hold: what the policy holds it back for, if the worker has room.
    """

    account: WorkerAccount
    need: Need
    may_start: bool
    hold: Hold

    @property
    def has_slots(self) -> bool:
        """True if the worker's store has the slots that the request needs."""
        slots = self.account.facts.store_slot_count
        return self.account.store.has_room(self.need.fits.slot_count, slots)

    @property
    def size_bytes(self) -> int:
        return self.need.pages * self.account.facts.page_bytes

    @property
    def missing_bytes(self) -> int:
        return max(0, self.size_bytes - self.account.free_bytes)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request waits. The numbers are those of the worker that lacks least for it.

    Attributes:
        reason: sentences for people, one for each worker that could run it.
        cause: what it waits for on that worker.
        place: that worker; None if no ready worker could run it.
        footprint_bytes: its smallest charge on any ready worker; 0 if there is none.
    """

    reason: str
    cause: Cause
    place: Place | None = None
    footprint_bytes: int = 0


def explain(places: Sequence[Place], *, is_paused: bool) -> Explanation:
    """Return why a request waits that could run in these places."""
    footprint = min((place.size_bytes for place in places), default=0)
    nearest = min(places, key=_lack, default=None)
    if is_paused:
        reason = "its reader is behind; it starts again once that has caught up"
        return Explanation(reason, Cause.READER, nearest, footprint)
    if nearest is None:
        return Explanation("no worker that could run it is ready", Cause.WORKER)
    reason = "; ".join(_reason(place, _cause(place)) for place in places)
    return Explanation(reason, _cause(nearest), nearest, footprint)


def _lack(place: Place) -> tuple[bool, int]:
    return not place.need.can_start, place.missing_bytes


def _cause(place: Place) -> Cause:
    account = place.account
    if not place.may_start:
        return Cause.TRIAL
    if place.need.can_start:
        return Cause(place.hold.value)
    if not place.has_slots:
        return Cause.SLOTS
    if place.size_bytes > account.free_bytes:
        return Cause.MEMORY
    return Cause.BATCH if account.free_places <= 0 else Cause.OTHER_SCHEDULERS


def _reason(place: Place, cause: Cause) -> str:
    account, name = place.account, place.account.facts.worker_id
    match cause:
        case Cause.TRIAL:
            return (
                f"worker {name} finds out which request ended an engine: suspects start one "
                "after the other"
            )
        case Cause.TURN:
            return f"earlier requests come first on worker {name}"
        case Cause.SHARE:
            return f"tenants that are behind their share come first on worker {name}"
        case Cause.PREFILL:
            tokens = counted(account.bound_tokens, "token")
            return f"worker {name} has {tokens} to prefill first"
        case Cause.RESTORES:
            return (
                f"worker {name} restores {format_size(account.restoring_bytes)} of requests that "
                "its link is the limit of"
            )
        case Cause.RESIDENTS:
            return (
                f"requests whose cache fits worker {name} come first there for a while: this one "
                "would be streamed, which takes the link from them"
            )
        case Cause.RESERVATION:
            return f"worker {name} is reserved for a request that has waited long"
        case Cause.SLOTS:
            return (
                f"streamed requests hold {account.store.promised_count:,} of the store's "
                f"{counted(account.facts.store_slot_count or 0, 'slot')}, "
                f"{place.need.fits.slot_count:,} are needed"
            )
        case Cause.MEMORY if account.free_bytes < 0:
            return (
                f"worker {name} is overcommitted by {format_size(-account.free_bytes)}: "
                "answers became longer than expected"
            )
        case Cause.MEMORY:
            return (
                f"worker {name} has {format_size(account.free_bytes)} free of the "
                f"{format_size(place.size_bytes)} needed"
            )
        case Cause.BATCH:
            running = account.running_count + account.others.request_count
            return (
                f"worker {name} runs {counted(running, 'request')}, its largest batch (--max-batch)"
            )
        case _:
            return f"the rest of worker {name} is kept for requests of other schedulers"
