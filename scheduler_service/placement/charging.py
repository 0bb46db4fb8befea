"""What a request is charged on a worker: chunks of its prompt, and its expected answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.footprint import Fits, Grant, grant_of
from scheduler_service.placement.ledger import Charge, Ledger
from scheduler_service.policy.waiting import Need
from splitpoint.config import counted
from splitpoint.planning.plan import Residency
from splitpoint.shapes import chunks_of


@dataclass(slots=True, kw_only=True)
class Way(Need):
    """What a request would take of a worker, and how it would run there.

    Attributes:
        fits: its residency.
        charge: its pages by chunk.
        device_tokens: leading tokens that the worker's device holds, as far as is known.
    """

    fits: Fits
    charge: Charge
    device_tokens: int = 0

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        fits: Fits,
        charge: Charge,
        *,
        known: int,
        stored: int,
        device: int,
        shared: int,
        answer: int,
    ) -> Way:
        """Return what a request of these numbers would take now.

        `can_start` is left to the caller.

        Args:
            known: its tokens, at least 1, those that are generated already included.
            stored: leading tokens that the worker's store holds.
            device: leading tokens that its device holds.
            shared: leading chunks of the charge that running requests have.
            answer: tokens that are expected still, at least 1.
        """
        cached = cached_tokens(known, stored, device)
        restored = max(0, cached - device)
        return cls(
            pages=len(charge.marks) - shared + charge.own_pages,
            cached_tokens=cached,
            new_tokens=known - cached,
            shared_tokens=shared * ledger.facts.chunk_tokens,
            answer_tokens=answer,
            is_streamed=fits.residency is Residency.STREAMED,
            link_bytes=restored * ledger.stored_bytes_per_token,
            is_link_bound=restored > ledger.kappa_crit * (known - cached) > 0,
            fits=fits,
            charge=charge,
            device_tokens=device,
        )


class Charging:
    """Makes charges and grants.

    `lengths` predicts answers. None: each request is charged for its longest possible answer,
    so that no charge ever grows.
    """

    def __init__(self, lengths: AnswerLengths | None) -> None:
        self._lengths = lengths

    def completed(self, request: Request) -> None:
        """Learn from the length of an answer that ended."""
        if self._lengths is not None and not request.runs_to_its_limit:
            self._lengths.note(request.tenant, len(request.output))

    def charge(self, request: Request, ledger: Ledger, fits: Fits) -> Charge:
        """Return the pages that a request is charged for at its start."""
        worker = ledger.facts
        if fits.residency is Residency.STREAMED:
            return Charge((), fits.size_bytes // worker.page_bytes)
        expected = len(request.prompt) + self._expected_tokens(request)
        pages = chunks_of(max(request.known_count, expected), worker.chunk_tokens)
        marks = _marks(request, ledger)
        return Charge(marks, pages - len(marks))

    def way(self, request: Request, ledger: Ledger, fits: Fits) -> Way:
        """Return what a request would take now. `can_start` is left to the caller."""
        charge = self.charge(request, ledger, fits)
        return Way.of(
            ledger,
            fits,
            charge,
            known=request.known_count,
            stored=request.cached.own.get(ledger.facts.worker_id, 0),
            device=device_tokens(request, ledger, fits),
            shared=ledger.shared_count(charge.marks),
            answer=self.steps_left(request),
        )

    def grant(
        self, request: Request, ledger: Ledger, fits: Fits, spare_bytes: int
    ) -> tuple[Grant, Charge]:
        """Return what a request gets, and what that is charged.

        `spare_bytes`: free memory, of which a streamed request may get a part.
        """
        charge, page_bytes = self.charge(request, ledger, fits), ledger.facts.page_bytes
        if fits.residency is Residency.STREAMED:
            grant = grant_of(fits, spare_bytes, page_bytes)
            return grant, Charge((), grant.size_bytes // page_bytes)
        reason = fits.reason
        expected, most = self._expected_tokens(request), request.sampling.max_tokens
        if expected < most:
            answer = counted(expected, "token")
            reason += f", charged for an expected answer of {answer} of at most {most:,}"
        shared = ledger.shared_count(charge.marks)
        if shared:
            reason += f", {counted(shared, 'page')} shared with running requests"
        size = ledger.pages_of(charge) * page_bytes
        here = device_tokens(request, ledger, fits)
        return Grant(fits.residency, size, reason, device_tokens=here), charge

    def steps_left(self, request: Request) -> int:
        """Return the tokens of the answer that are expected and not generated yet, at least 1."""
        return max(1, self._expected_tokens(request) - len(request.output))

    def _expected_tokens(self, request: Request) -> int:
        """Return the expected length of the answer."""
        most = request.sampling.max_tokens
        if self._lengths is None or request.runs_to_its_limit:
            return most
        expected = self._lengths.expected(request.tenant, most)
        return min(most, max(expected, request.sampling.min_tokens))


def cached_tokens(known: int, stored: int, device: int) -> int:
    """Return how many of a request's tokens need no compute; see `Way.of`.

    The last one is always computed: its logits are needed.
    """
    return max(0, min(max(stored, device), known - 1))


def device_tokens(request: Request, ledger: Ledger, fits: Fits) -> int:
    """Return how many tokens of a request the worker's device holds; 0 for a streamed one."""
    if fits.residency is Residency.STREAMED:
        return 0
    return ledger.device_count(_marks(request, ledger)) * ledger.facts.chunk_tokens


def _marks(request: Request, ledger: Ledger) -> Sequence[bytes]:
    """Return the marks of the request's leading full chunks.

    Empty if they are not known, or if the worker shares no pages.
    """
    if not ledger.facts.shares_pages:
        return ()
    return request.cached.marks.get(ledger.facts.key_space, ())
