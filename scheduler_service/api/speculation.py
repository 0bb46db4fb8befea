"""Checks that a worker has a request's draft method, and counts what its drafts came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.errors import InvalidArgument
from splitpoint.speculation import DraftMethod
from splitpoint.transport.convert import draft_method_from_proto, draft_method_to_proto
from splitpoint.v1 import types_pb2, worker_pb2

_WANTING = {
    DraftMethod.MODEL: "no ready worker has a draft model: start it with --draft-model",
    DraftMethod.SELF: (
        "no ready worker can draft by itself: that needs a KV store, and a worker whose own method "
        "(--speculative-config) is self or auto"
    ),
    DraftMethod.SUFFIX: (
        "no ready worker can draft by suffix: start it with --speculative-config "
        """'{"method": "suffix"}'"""
    ),
}


def check_drafter(method: DraftMethod | None, workers: Collection[WorkerFacts]) -> None:
    """Raise InvalidArgument for a method that none of the ready workers has. None: any will do."""
    if method and not any(method in worker.draft_methods for worker in workers):
        raise InvalidArgument(_WANTING[method], field="speculation.method", reason="NO_DRAFTER")


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
