"""Checks that a worker can serve a request's selection, and sums what it came to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from scheduler_service.api.speculation import check_drafter
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.selection import FULL, UNUSED, Selection, SelectionMethod, SelectionUsage
from splitpoint.speculation import DraftMethod
from splitpoint.transport.convert import (
    selection_usage_from_proto,
    selection_usage_to_proto,
)
from splitpoint.v1 import types_pb2, worker_pb2

_NOTHING_DRAFTED = "nothing was drafted by it"
_NOTHING_DECODED = "no step followed the one that reads everything"


def check_selection(selection: Selection, workers: Collection[WorkerFacts]) -> None:
    """Check that one of the ready workers can serve a selection.

    Raises FailedPrecondition if none has the method's artefacts, InvalidArgument if they were
    trained for another number of columns, or if none drafts what the selection verifies.
    """
    if selection.reads_all:
        return
    able = [worker for worker in workers if selection.method in worker.selections]
    if not able:
        raise _wanting(selection.method)
    trained = {worker.selections[selection.method] for worker in able}
    able = [worker for worker in able if worker.has_columns(selection)]
    if not able:
        raise InvalidArgument(
            f"selection: columns is {selection.columns}, but artefacts of {selection.method} were "
            f"trained for {', '.join(map(str, sorted(trained)))}",
            field="selection.columns",
        )
    if selection.verify:
        check_drafter(DraftMethod.SELF, able)


class SelectionTally:
    """What the selection of one request came to, on all workers that ran it."""

    def __init__(self, selection: Selection = FULL, *, is_resumed: bool = False) -> None:
        self._selection = selection
        # Earlier steps were another scheduler's: they may have read by selection.
        self._is_resumed = is_resumed
        self._sum = UNUSED
        if selection.reads_all and not selection.is_full:
            self._sum = SelectionUsage(off_reason=f"{selection} reads every token")

    def started(self, worker: WorkerFacts) -> None:
        """Note on which worker an attempt begins."""
        if not self._selection.reads_all and not worker.can_follow(self._selection):
            self._note(f"worker {worker.worker_id} cannot select by {self._selection.method}")

    def add(self, result: worker_pb2.TokenResult) -> None:
        """Add what one step read by selection, if it did."""
        if result.HasField("selection"):
            self._sum += selection_usage_from_proto(result.selection)

    def finished(self, finish: worker_pb2.RequestFinish) -> None:
        """Note why steps of an attempt read everything."""
        self._note(finish.selection_off_reason)

    def _note(self, reason: str) -> None:
        self._sum += SelectionUsage(off_reason=reason)

    @property
    def selection(self) -> Selection:
        return self._selection

    @property
    def sum(self) -> SelectionUsage:
        """The sums, and whether the text may depend on the selection."""
        is_used, reason = self._sum.step_count > 0, self._sum.off_reason
        if not (is_used or reason or self._selection.reads_all):
            reason = _NOTHING_DRAFTED if self._selection.verify else _NOTHING_DECODED
        is_approximate = (is_used or self._is_resumed) and self._selection.is_approximate
        return replace(self._sum, off_reason=reason, is_approximate=is_approximate)

    @property
    def usage(self) -> types_pb2.SelectionUsage:
        return selection_usage_to_proto(self.sum)


def _wanting(method: SelectionMethod) -> FailedPrecondition:
    if not method.is_calibrated:
        return FailedPrecondition(
            f"no ready worker can select by {method}: that needs a KV store", reason="NO_SELECTION"
        )
    return FailedPrecondition(
        f"no ready worker has artefacts of {method}: make them with `splitpoint calibrate MODEL "
        f"--screen {method}`, and start the workers anew (--artifacts names their folder)",
        reason="NO_ARTIFACTS",
    )
