"""One waiting request as the policy sees it, and what it would take of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")

# Bounds of a request's priority.
LEAST_PRIORITY, MOST_PRIORITY = -10, 10


@dataclass(slots=True, eq=False)
class Waiting(Generic[R]):
    """A request that waits.

    Attributes:
        item: the owner's request; the policy hands it back.
        arrival: order of arrival; no two requests share it, and a retried one keeps it.
        tenant: which share pays for it.
        weight: the tenant's weight, above 0.
        priority: larger first within the tenant.
        since: when it began to wait, in seconds of the owner's clock.
    """

    item: R
    arrival: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    since: float = 0.0

    @property
    def rank(self) -> tuple[int, int]:
        """Its place within its tenant: by priority, then by arrival."""
        return -self.priority, self.arrival


@dataclass(slots=True)
class Need:
    """What a request would take of one worker now.

    Attributes:
        pages: pages that it adds for its prompt and its expected answer; none for chunks that
            running requests hold already.
        cached_tokens: K, tokens that must be in device memory but need no compute.
        new_tokens: T, tokens that are prefilled; at least 1.
        shared_tokens: tokens of those in chunks that running requests hold already.
        answer_tokens: expected tokens that are generated.
        is_streamed: its cache crosses the link in each decode step.
        link_bytes: bytes that cross the link before its first token.
        is_link_bound: K / T is above the worker's kappa_crit.
        can_start: the worker has the memory, the place and all else that it needs now.
    """

    pages: int
    cached_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    answer_tokens: int = 0
    is_streamed: bool = False
    link_bytes: int = 0
    is_link_bound: bool = False
    can_start: bool = True

    @property
    def kappa_ratio(self) -> float:
        return self.cached_tokens / self.new_tokens

    @property
    def density(self) -> float:
        """Part of the memory that is filled by computing, up to 1: T / (K + T) of the paper.

        The answer counts, too: it is computed, and holds memory.
        """
        computed = self.new_tokens + self.answer_tokens
        return computed / (max(0, self.cached_tokens - self.shared_tokens) + computed)
