"""Sums what the drafts and the selection of one request came to, on all workers that ran it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.selection import FULL, UNUSED, Selection, SelectionUsage
from splitpoint.speculation import DraftMethod
from splitpoint.transport.convert import (
    draft_method_from_proto,
    draft_method_to_proto,
    selection_usage_from_proto,
    selection_usage_to_proto,
)
from splitpoint.v1 import types_pb2, worker_pb2

_NOTHING_DRAFTED = "nothing was drafted by it"
_NOTHING_DECODED = "no step followed the one that reads everything"


class DraftTally:
    """What the drafts of one request came to, on all workers that ran it."""

    def __init__(self) -> None:
        self._drafts = 0
        self._accepted = 0
        self._drafted: Counter[DraftMethod] = Counter()

    def add(self, result: worker_pb2.TokenResult) -> None:
        """Add the drafts of one step, if there were any."""
        if result.draft_token_count:
            self._drafts += 1
            self._accepted += result.accepted_token_count
            self._drafted[draft_method_from_proto(result.draft_method)] += result.draft_token_count

    @property
    def usage(self) -> types_pb2.SpeculationUsage:
        """The sums, under the method that drafted most tokens; OFF if none did."""
        most = self._drafted.most_common(1)
        return types_pb2.SpeculationUsage(
            method=draft_method_to_proto(most[0][0] if most else DraftMethod.OFF),
            draft_count=self._drafts,
            draft_token_count=self._drafted.total(),
            accepted_token_count=self._accepted,
        )


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
