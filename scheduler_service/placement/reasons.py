"""Explains why a request waits: what for, on which worker, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.placement.charging import Way
from scheduler_service.placement.ledger import Ledger
from scheduler_service.policy.hold import Hold
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
        promised_slots: slots of its store that streamed requests may still fill.
        has_slots: the store has those that the request needs.
        may_start: no trial keeps it from starting.
        hold: what the policy holds it back for, if the worker has room.
        bound_tokens, restoring_bytes: work that is bound to the worker already.
    """

    ledger: Ledger
    way: Way
    promised_slots: int
    has_slots: bool
    may_start: bool
    hold: Hold
    bound_tokens: int
    restoring_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.way.pages * self.ledger.facts.page_bytes

    @property
    def missing_bytes(self) -> int:
        return max(0, self.size_bytes - self.ledger.free_bytes)


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
    return not place.way.can_start, place.missing_bytes


def _cause(place: Place) -> Cause:
    ledger = place.ledger
    if not place.may_start:
        return Cause.TRIAL
    if place.way.can_start:
        return Cause(place.hold.value)
    if not place.has_slots:
        return Cause.SLOTS
    if place.size_bytes > ledger.free_bytes:
        return Cause.MEMORY
    return Cause.BATCH if ledger.free_places <= 0 else Cause.OTHER_SCHEDULERS


def _reason(place: Place, cause: Cause) -> str:
    ledger, name = place.ledger, place.ledger.facts.worker_id
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
            tokens = counted(place.bound_tokens, "token")
            return f"worker {name} has {tokens} to prefill first"
        case Cause.RESTORES:
            return (
                f"worker {name} restores {format_size(place.restoring_bytes)} of requests that "
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
                f"streamed requests hold {place.promised_slots:,} of the store's "
                f"{counted(ledger.facts.store_slot_count or 0, 'slot')}, "
                f"{place.way.fits.slot_count:,} are needed"
            )
        case Cause.MEMORY if ledger.free_bytes < 0:
            return (
                f"worker {name} is overcommitted by {format_size(-ledger.free_bytes)}: "
                "answers became longer than expected"
            )
        case Cause.MEMORY:
            return (
                f"worker {name} has {format_size(ledger.free_bytes)} free of the "
                f"{format_size(place.size_bytes)} needed"
            )
        case Cause.BATCH:
            running = ledger.running_count + ledger.others.request_count
            return f"worker {name} runs {counted(running, 'request')}, its batch limit"
        case _:
            return f"the rest of worker {name} is kept for requests of other schedulers"
