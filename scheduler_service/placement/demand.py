"""What one request asks of memory and time, in numbers: all that placement and policy know of it.

The scheduler's `Request` is a demand, and so is a request of `splitpoint simulate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from scheduler_service.placement.footprint import Fits, NeverFits
from scheduler_service.prefixes.lookup import CachedPrefix
from splitpoint.planning.plan import ForcedRestore, Residency
from splitpoint.selection import FULL, Selection
from splitpoint.speculation import DraftMethod


@dataclass(slots=True, eq=False, kw_only=True)
class Demand(ABC):
    """A request that waits or runs.

    Attributes:
        arrival: order of arrival; no two requests share it, and a retried one keeps it.
        weight: the tenant's weight, above 0.
        priority: larger first within the tenant.
        since: when it began to wait, in seconds of the queue's clock.
        worker_id: the only worker that may run it; empty: any.
        residency: None: resident if that fits, else streamed.
        forced: how its prefix is restored; None: as planned.
        selection: which cached tokens its decode steps read. A worker that cannot follow it reads
            them all.
        cached: where its leading tokens are cached.
        is_paused: its reader is behind, so that it had better not run.
        numerics_digest: of the worker that computed its latest tokens; None: none have come.
        verdicts: its footprint on an empty worker, by worker, as far as it was asked for.
    """

    arrival: int = 0
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    since: float = 0.0
    worker_id: str = ""
    residency: Residency | None = None
    forced: ForcedRestore | None = None
    selection: Selection = FULL
    cached: CachedPrefix = field(default_factory=CachedPrefix)
    is_paused: bool = False
    numerics_digest: str | None = None
    verdicts: dict[str, Fits | NeverFits] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place within its tenant: by priority, then by arrival."""
        return -self.priority, self.arrival

    @property
    @abstractmethod
    def prompt_count(self) -> int:
        """Tokens of the prompt, at least 1."""

    @property
    @abstractmethod
    def generated_count(self) -> int:
        """Tokens of the answer so far."""

    @property
    @abstractmethod
    def most_generated(self) -> int:
        """Tokens of the longest possible answer."""

    @property
    def least_generated(self) -> int:
        """Tokens before which nothing ends the answer."""
        return 0

    @property
    def runs_to_its_limit(self) -> bool:
        """True if nothing can end the answer before its longest."""
        return True

    @property
    def known_count(self) -> int:
        """Tokens of the prompt, and those that were generated so far."""
        return self.prompt_count + self.generated_count

    @property
    def token_count(self) -> int:
        """Tokens of the sequence with its longest answer."""
        return self.prompt_count + self.most_generated

    def cached_tokens(self, worker_id: str, device: int = 0) -> int:
        """Return how many of its tokens need no compute on a worker.

        The last one is always computed: its logits are needed. `device`: leading tokens that the
        worker's device holds.
        """
        stored = self.cached.own.get(worker_id, 0)
        return max(0, min(max(stored, device), self.known_count - 1))

    def steps_left(self, answer: int) -> int:
        """Return the tokens of an answer of this length that are not generated yet, at least 1."""
        return max(1, answer - self.generated_count)

    @property
    def is_structured(self) -> bool:
        """True if its answer must look as the client says."""
        return False

    @property
    def is_suspect(self) -> bool:
        """True if it may have ended an engine, until it gets past the place where that failed."""
        return False

    @property
    def drafter(self) -> DraftMethod | None:
        """The way to draft that was asked for by name; None: none was."""
        return None
