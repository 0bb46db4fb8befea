"""What a request would take of a worker: chunks of its prompt, and its expected answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.placement.account import Charge, Need, WorkerAccount
from scheduler_service.placement.demand import Demand
from scheduler_service.placement.footprint import Fits, Grant, grant_of
from splitpoint.planning.plan import Reason, ReasonKind, Residency
from splitpoint.shapes import chunks_of


def need_of(account: WorkerAccount, demand: Demand, fits: Fits, answer: int) -> Need:
    """Return what a request would take of a worker now. `answer`: its expected length."""
    worker, known = account.facts, demand.known_count
    if fits.residency is Residency.STREAMED:
        charge = Charge((), fits.size_bytes // worker.page_bytes)
        shared = device = 0
    else:
        marks = _marks(demand, account)
        pages = chunks_of(max(known, demand.prompt_count + answer), worker.chunk_tokens)
        charge = Charge(marks, pages - len(marks))
        shared = account.shared_count(marks)
        device = account.device_count(marks, shared) * worker.chunk_tokens
    cached = cached_tokens(known, demand.cached.own.get(worker.worker_id, 0), device)
    restored = max(0, cached - device)
    pages = len(charge.marks) - shared + charge.own_pages
    return Need(
        fits,
        charge,
        pages=pages,
        cached_tokens=cached,
        new_tokens=known - cached,
        shared_tokens=shared * worker.chunk_tokens,
        device_tokens=device,
        answer_tokens=steps_left(demand, answer),
        link_bytes=restored * account.stored_bytes_per_token,
        is_link_bound=restored > account.kappa_crit * (known - cached) > 0,
        can_start=account.trial.may_start(is_suspect=demand.is_suspect)
        and account.has_room_for(pages)
        and account.store.has_room(fits.slot_count, worker.store_slot_count),
    )


def grant_for(
    account: WorkerAccount, demand: Demand, need: Need, answer: int, *, spares: bool
) -> Grant:
    """Return what a request gets that has just started, and charge it for spare memory.

    `answer`: its expected length. `spares`: a streamed request may get a part of what is free.
    """
    fits, page_bytes = need.fits, account.facts.page_bytes
    if need.is_streamed:
        free_bytes = fits.size_bytes + account.free_bytes if spares else 0
        grant = grant_of(fits, free_bytes, page_bytes)
        account.grow(demand.arrival, grant.size_bytes // page_bytes)
        return grant
    reasons = list(fits.reasons)
    if answer < demand.most_generated:
        reasons.append(Reason(ReasonKind.EXPECTED_ANSWER, (answer, demand.most_generated)))
    shared = need.shared_tokens // account.facts.chunk_tokens
    if shared:
        reasons.append(Reason(ReasonKind.SHARED_PAGES, (shared,)))
    size = need.pages * page_bytes
    return Grant(fits.residency, size, tuple(reasons), device_tokens=need.device_tokens)


def steps_left(demand: Demand, answer: int) -> int:
    """Return the tokens of an answer of this length that are not generated yet, at least 1."""
    return max(1, answer - demand.generated_count)


def cached_tokens(known: int, stored: int, device: int) -> int:
    """Return how many of a request's tokens need no compute.

    The last one is always computed: its logits are needed.

    Args:
        known: its tokens, at least 1, those that are generated already included.
        stored: leading tokens that the worker's store holds.
        device: leading tokens that its device holds.
    """
    return max(0, min(max(stored, device), known - 1))


def _marks(demand: Demand, account: WorkerAccount) -> Sequence[bytes]:
    """Return the marks of the request's leading full chunks.

    Empty if they are not known, or if the worker shares no pages.
    """
    if not account.facts.shares_pages:
        return ()
    return demand.cached.marks.get(account.facts.key_space, ())
