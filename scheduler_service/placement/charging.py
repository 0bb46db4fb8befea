"""What a request is charged on a worker: chunks of its prompt, and its expected answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.footprint import Fits, Grant, grant_of
from scheduler_service.placement.ledger import Charge, Ledger
from scheduler_service.policy.waiting import Need
from splitpoint.planning.plan import Residency
from splitpoint.shapes import chunks_of
from splitpoint.words import counted


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
        worker, charge = ledger.facts, self.charge(request, ledger, fits)
        known = request.known_count
        device = device_tokens(request, ledger, fits)
        # The last token is always computed: its logits are needed.
        cached = max(min(request.cached.own.get(worker.worker_id, 0), known - 1), 0)
        cached = max(cached, min(device, known - 1))
        restored = max(0, cached - device)
        pages = ledger.pages_of(charge)
        return Way(
            pages=pages,
            cached_tokens=cached,
            new_tokens=known - cached,
            shared_tokens=(len(charge.marks) + charge.own_pages - pages) * worker.chunk_tokens,
            answer_tokens=self.steps_left(request),
            is_streamed=fits.residency is Residency.STREAMED,
            link_bytes=restored * ledger.stored_bytes_per_token,
            is_link_bound=restored > ledger.kappa_crit * (known - cached) > 0,
            fits=fits,
            charge=charge,
            device_tokens=device,
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
