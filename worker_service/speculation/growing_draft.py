"""What drafters that run a model have in common: a draft that grows token by token, and its span.

The tokens are chosen as those of the text are, so a draft also ends where a text ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from splitpoint.planning.schedule import Lane
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Sequence
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span


@dataclass(slots=True, eq=False)
class GrowingDraft:
    """The draft of one sequence.

    Attributes:
        sampling: the request's, without reports: see `drafting_sampling`.
        most: tokens that it may have.
        tokens: the drafted tokens so far.
        has_ended: no token follows.
    """

    sampling: Sampling
    most: int
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def wants_more(self) -> bool:
        return not self.has_ended and len(self.tokens) < self.most

    def append(self, token_id: int, eos_token_ids: tuple[int, ...]) -> None:
        """Add a token. None follows one that ends the text, as the engine decides it."""
        self.tokens.append(token_id)
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        self.has_ended = is_eos or token_id in self.sampling.stop_token_ids


def drafting_sampling(sequence: Sequence) -> Sampling:
    """Return how drafts of a sequence are chosen: as its tokens are, with no reports."""
    return replace(sequence.admission.sampling, logprobs=None)


def count_drafts(lanes: Lanes, started: float, drafts: Iterable[GrowingDraft]) -> None:
    """Count the compute time since `started` (`time.perf_counter`) as that of the drafts.

    The span's tokens are those that were drafted. Tokens of sequences that the draft model
    had to compute first take time in the span, and are not counted.
    """
    tokens = sum(len(draft.tokens) for draft in drafts)
    now = time.perf_counter()
    lanes.count_spans([Span(Lane.COMPUTE, "draft", started, now, tokens=tokens)])
