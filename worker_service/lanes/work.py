"""A piece of work for a lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import Span


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work for a lane, and the values of its span.

    Attributes:
        call: enqueues (CUDA) or does (CPU) the work.
        size_bytes: bytes that cross the link; 0 for work that moves none.
        amount: bytes of a copy or FLOP of a product, to which costs are fitted.
    """

    name: str
    call: Callable[[], None]
    size_bytes: int = 0
    amount: float = 0.0
    layer: int | None = None
    tokens: int = 0


def span_of(lane: Lane, work: Work, start: float, end: float) -> Span:
    """Return the span of a piece of work that was done between these times."""
    return Span(lane, work.name, start, end, work.layer, work.tokens, work.amount)
