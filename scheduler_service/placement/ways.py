"""What requests would take of the workers: where one may run, whether it fits, and its charge.

Pure: it reads the accounts of memory and changes none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView

from scheduler_service.api.request import Request
from scheduler_service.api.selection import followed_by
from scheduler_service.placement.charging import Charging, Way
from scheduler_service.placement.footprint import Fits, NeverFits, footprint_of
from scheduler_service.placement.ledger import Ledger, SlotLedger


class Ways:
    """The ways to run requests on the ready workers.

    Attributes:
        ledgers: of the ready workers, by id.
    """

    def __init__(self, charging: Charging) -> None:
        self.ledgers: dict[str, Ledger] = {}
        self._charging = charging
        self._slots: dict[str, SlotLedger] = {}  # by the store's address
        # What waiting requests would take, by arrival and worker: it does not change.
        self._verdicts: dict[int, dict[str, Fits | NeverFits]] = {}

    # -- waiting requests -----------------------------------------------------------

    def remember(self, request: Request) -> None:
        """Keep what is computed for a request, until `forget`."""
        self._verdicts[request.arrival] = {}

    def forget(self, request: Request) -> None:
        self._verdicts.pop(request.arrival, None)

    def forget_worker(self, worker_id: str) -> None:
        """Compute anew what requests would take of this worker."""
        for verdicts in self._verdicts.values():
            verdicts.pop(worker_id, None)

    def remembered(self) -> KeysView[int]:
        """Return the arrivals of the requests for which something is kept."""
        return self._verdicts.keys()

    # -- one request ----------------------------------------------------------------

    def open_to(self, request: Request) -> Iterator[Ledger]:
        """Iterate over the workers that take new requests and where this one may run."""
        for ledger in self.ledgers.values():
            if self.is_open_to(request, ledger):
                yield ledger

    def is_open_to(self, request: Request, ledger: Ledger) -> bool:
        """Return True if a worker takes new requests, and this one may run there."""
        if ledger.is_closed or request.worker_id not in ("", ledger.facts.worker_id):
            return False
        return ledger.facts.has_structured_output or not request.is_structured

    def verdict(self, request: Request, ledger: Ledger) -> Fits | NeverFits:
        """Return the footprint of a request on an empty worker."""
        known = self._verdicts.get(request.arrival, {})
        verdict = known.get(ledger.facts.worker_id)
        if verdict is None:
            verdict = known[ledger.facts.worker_id] = footprint_of(
                request.token_count,
                request.residency,
                ledger.facts,
                followed_by(ledger.facts, request.selection),
            )
        return verdict

    def way(self, request: Request, ledger: Ledger) -> Way | None:
        """Return what a request would take of a worker; None if it could never run there."""
        verdict = self.verdict(request, ledger)
        return self.way_of(request, ledger, verdict) if isinstance(verdict, Fits) else None

    def way_of(self, request: Request, ledger: Ledger, fits: Fits) -> Way:
        """Return what a request of this residency would take of a worker."""
        way = self._charging.way(request, ledger, fits)
        way.can_start = (
            ledger.trial.may_start(is_suspect=request.is_suspect)
            and ledger.has_room_for(way.pages)
            and self.has_slots(ledger, fits)
        )
        return way

    # -- slots of stores --------------------------------------------------------------

    def promised_slots(self, store_address: str) -> int:
        """Return the slots of a store that streamed requests may still fill."""
        slots = self._slots.get(store_address)
        return slots.promised_count if slots is not None else 0

    def slots_of(self, ledger: Ledger) -> SlotLedger:
        """Return the promised slots of a worker's store."""
        return self._slots.setdefault(ledger.facts.kvstore_address, SlotLedger())

    def of_same_store(self, ledger: Ledger) -> list[Ledger]:
        """Return the workers that use a worker's store."""
        address = ledger.facts.kvstore_address
        return [each for each in self.ledgers.values() if each.facts.kvstore_address == address]

    def has_slots(self, ledger: Ledger, fits: Fits, leaving: Collection[int] = ()) -> bool:
        """Return True if the worker's store has the slots that a streamed request fills.

        `leaving`: arrivals of requests whose slots count as free.
        """
        if not fits.slot_count:
            return True
        slots = self.slots_of(ledger)
        others_slots = sum(each.others.slot_count for each in self.of_same_store(ledger))
        return slots.has_room(
            fits.slot_count,
            ledger.facts.store_slot_count,
            others_slots=others_slots - slots.promised_to(leaving),
        )
