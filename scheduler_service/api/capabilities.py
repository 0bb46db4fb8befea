"""Checks that the ready workers can serve what a request asks for besides its tokens."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_service.api.request import Request
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.speculation import DraftMethod
from splitpoint.structured.checker import GrammarChecker
from splitpoint.structured.grammar import grammar_from_proto, has_llguidance, unavailable
from splitpoint.v1 import types_pb2

_WANTING = {
    DraftMethod.MODEL: "no ready worker has a draft model: start it with --draft-model",
    DraftMethod.SELF: (
        "no ready worker can draft by itself: start it with a KV store and --speculative-config "
        """'{"method": "self"}'"""
    ),
    DraftMethod.SUFFIX: (
        "no ready worker can draft by suffix: start it with --speculative-config "
        """'{"method": "suffix"}'"""
    ),
}


def check_capabilities(request: Request, workers: Collection[WorkerFacts]) -> None:
    """Check that one of the ready workers can do all that a request asks for.

    Raises InvalidArgument (a forced split that no store can serve, a draft method that no worker
    has), or FailedPrecondition (a selection that no worker has artefacts for, structured output
    that none can follow).
    """
    if request.forced is not None and workers:
        has_activations = any(worker.has_activations for worker in workers)
        request.forced.check(request.residency, has_activations=has_activations)
    _check_drafter(request.drafter, workers, "speculation.method")
    _check_selection(request.selection, workers)
    if request.is_structured and not any(worker.has_structured_output for worker in workers):
        raise unavailable(
            "no ready worker can follow structured output: workers need a tokenizer and "
            "pip install 'splitpoint[structured]'"
        )


def _check_drafter(
    method: DraftMethod | None, workers: Collection[WorkerFacts], field: str
) -> None:
    """Raise InvalidArgument for a method that none of the ready workers has. None: any will do."""
    if method and not any(method in worker.draft_methods for worker in workers):
        raise InvalidArgument(_WANTING[method], field=field, reason="NO_DRAFTER")


def _check_selection(selection: Selection, workers: Collection[WorkerFacts]) -> None:
    """Check that one of the ready workers can serve a selection.

    Raises FailedPrecondition if none has the method's artefacts, or the layer inputs that it needs;
    InvalidArgument if they were trained for another number of columns, or if none drafts what the
    selection verifies.
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
    if selection.method.keeps_inputs and not any(worker.has_activations for worker in able):
        raise FailedPrecondition(
            f"no ready worker can select by {selection.method}: it makes keys of layer inputs, "
            "which no store keeps; start it with --activations always",
            reason="NO_ACTIVATIONS",
        )
    if selection.verify:
        _check_drafter(DraftMethod.SELF, able, "selection.verify")


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


class GrammarChecks:
    """The scheduler's check of grammars. Without the extra `structured` workers alone compile."""

    def __init__(self) -> None:
        self._checker = GrammarChecker() if has_llguidance() else None

    def blocks(self, sampling: types_pb2.SamplingParams) -> bool:
        """Return True if `check` may wait for another process."""
        return sampling.HasField("structured_output") and self._checker is not None

    def check(self, sampling: types_pb2.SamplingParams) -> None:
        """Raise InvalidArgument, which names the field, for a grammar that cannot be compiled.

        Raises ResourceExhausted if too many are being compiled.
        """
        if sampling.HasField("structured_output"):
            grammar = grammar_from_proto(sampling.structured_output)
            if self._checker is not None:
                self._checker.check(grammar)

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()
