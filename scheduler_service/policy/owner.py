"""What the queue asks of its owner, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from scheduler_service.policy.waiting import Need, R, Waiting

R_contra = TypeVar("R_contra", contravariant=True)


class Owner(Protocol[R_contra]):
    """Knows requests and workers: what each would take, and what is free."""

    def workers_for(self, item: R_contra) -> Iterable[str]:
        """Return the workers on which it could start, the one that it is pinned to alone."""

    def need(self, item: R_contra, worker_id: str) -> Need | None:
        """Return what it would take there now. None if it could not run there even alone, is
        pinned elsewhere or paused, or if the worker takes nothing new."""

    def room(self, worker_id: str) -> tuple[int, int]:
        """Return the worker's free pages and free places in its batch."""

    def prefer(self, item: R_contra, needs: Mapping[str, Need]) -> str:
        """Return the best of these workers; it can start on each of them."""

    def instead(self, item: R_contra, needs: Mapping[str, Need]) -> Mapping[str, Need]:
        """Return other needs with which it starts at once on workers that lack memory for it.

        Empty if it had better wait.
        """


class Decision(StrEnum):
    """Why a request starts now."""

    # It was the first in turn that could.
    TURN = "turn"
    # It belongs to the set that fills its worker best.
    SET = "set"
    # The same, of a tenant ahead of its share: no other could use the worker.
    SPARE = "spare"
    # Memory was kept for it.
    RESERVATION = "reservation"
    # It lacks memory, and had better be streamed than wait.
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Start(Generic[R]):
    """A request that starts now. The owner grants it the memory that `need` names."""

    waiting: Waiting[R]
    worker_id: str
    need: Need
    decision: Decision = Decision.TURN
