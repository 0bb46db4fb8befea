"""What follows when an attempt ends without its answer: mostly another attempt.

Pure. Tokens that the client has are kept: the next worker is forced to repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.api.request import Request
from splitpoint.errors import Internal, SplitpointError, Unavailable
from splitpoint.v1 import types_pb2
from splitpoint.words import counted


@dataclass(frozen=True, slots=True)
class Finished:
    """All tokens had come; only the worker's last message was lost."""

    reason: types_pb2.FinishReason
    matched_stop: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """Queue the request again, at its old place."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request is probably the cause of the losses."""

    error: SplitpointError


def after_lost_attempt(
    request: Request, losses: int, most_losses: int, cause: Unavailable | None
) -> Finished | Retry | GiveUp:
    """Decide what becomes of a request whose attempt was lost.

    Args:
        losses: attempts lost so far, this one included if the worker had begun it.
        most_losses: number of losses after which it is not tried again.
        cause: the worker's error, if it sent one.
    """
    output = request.output
    if len(output) and output.ends_in_stop:
        return Finished(types_pb2.FINISH_REASON_STOP, output.matched_stop)
    if len(output) >= request.sampling.max_tokens:
        return Finished(types_pb2.FINISH_REASON_LENGTH)
    if losses >= most_losses:
        lost = counted(losses, "worker was", "workers were")
        return GiveUp(
            cause
            or Internal(
                f"{lost} lost while this request ran; it is not tried again",
                reason="REQUEST_QUARANTINED",
            )
        )
    return Retry()
