"""What follows when an attempt ends without its answer: mostly another attempt.

Pure. Tokens that the client has are kept: the next worker is forced to repeat them. A request is
moved three times at most. Losses of an engine that another request is known to have ended do not
count.

A request whose content ends the engine that runs it (a poison request) would end one engine after
another. So after the first failure every request that the engine ran is a suspect. Suspects are
tried apart from each other: at most one runs on a worker at a time, it starts when all others there
have got past their start, and nothing else starts beside it (`placement/account.py`). A second
failure therefore names its cause. A suspect is cleared when it gets past the place where the first
engine failed. If it is suspected again later, it must get further past that place each time, so a
request that ends engines at random is found after a few of them, too.
A suspect whose reader is behind goes back to the queue at once, so that others can start on its
worker.

Another scheduler's requests on the same worker are not known here. A suspect that was lost beside
some is suspected again instead of blamed; the bound of its moves ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.api.request import Request
from splitpoint.config import counted
from splitpoint.errors import Internal, SplitpointError, Unavailable
from splitpoint.v1 import types_pb2

# Tokens beyond the last one that came before the failure after which a suspect is cleared: an
# engine may be a few steps ahead of what the scheduler has read. Each further failure multiplies
# them.
TRIAL_TOKENS = 8
_TRIAL_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Finished:
    """Every token of the answer has come."""

    reason: types_pb2.FinishReason


@dataclass(frozen=True, slots=True)
class Retry:
    """Queue the request again, at its old place."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request is not tried again."""

    error: SplitpointError


def finished(request: Request) -> Finished | None:
    """Return how the tokens that are there end the answer; None if more have to come."""
    output = request.output
    if len(output) and output.ends_in_stop:
        return Finished(types_pb2.FINISH_REASON_STOP)
    if len(output) >= request.sampling.max_tokens:
        return Finished(types_pb2.FINISH_REASON_LENGTH)
    return None


def find_culprit(running: Sequence[Request], *, were_alone: bool) -> Request | None:
    """Return the request that ended an engine, of those it ran; None if that is not known yet.

    At most one suspect runs on a worker, so the suspect among them is the cause of both failures,
    if they `were_alone`: no other scheduler had requests there.
    """
    if not were_alone:
        return None
    return next((request for request in running if request.is_suspect), None)


def suspect(request: Request) -> None:
    """Put a request under suspicion: an engine failed while it ran, and the cause is not known."""
    trial_tokens = TRIAL_TOKENS * _TRIAL_GROWTH**request.engine_failures
    request.engine_failures += 1
    request.cleared_at_tokens = len(request.output) + trial_tokens


def after_lost_attempt(
    request: Request,
    *,
    is_culprit: bool,
    cause: SplitpointError | None,
    most_refusals: int,
    most_moves: int,
) -> Finished | Retry | GiveUp:
    """Decide what becomes of a request whose attempt was lost.

    Args:
        is_culprit: the request ended the engine, and another one before.
        cause: why this attempt alone ended, if the worker goes on. None: the worker was lost, or
            was drained.
        most_refusals: number of attempts that end with a cause after which it is not tried again.
        most_moves: number of lost attempts (`request.moves`) that may be followed by another one.
    """
    if (ending := finished(request)) is not None:
        return ending
    if is_culprit:
        failures = request.engine_failures + 1
        lost = counted(failures, "worker was", "workers were")
        return GiveUp(
            Internal(
                f"{lost} lost while this request ran; it is not tried again",
                reason="REQUEST_QUARANTINED",
            )
        )
    if cause is not None and request.refusals >= most_refusals:
        return GiveUp(cause)
    if request.moves > most_moves:
        moves = counted(most_moves, "move", "moves")
        return GiveUp(
            Unavailable(
                f"the worker was lost again after {moves} to another one; send it again to go on",
                reason="TOO_MANY_MOVES",
            )
        )
    return Retry()
