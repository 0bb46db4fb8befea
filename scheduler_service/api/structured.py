"""Checks what a request's answer must look like, and that a worker can follow it."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_service.worker_facts import WorkerFacts
from splitpoint.structured.checker import GrammarChecker
from splitpoint.structured.grammar import grammar_from_proto, has_llguidance, unavailable
from splitpoint.v1 import types_pb2


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


def check_structured_output(
    sampling: types_pb2.SamplingParams, workers: Collection[WorkerFacts]
) -> None:
    """Raise FailedPrecondition unless a ready worker can follow a request's structured output."""
    if sampling.HasField("structured_output") and not any(
        worker.has_structured_output for worker in workers
    ):
        raise unavailable(
            "no ready worker can follow structured output: workers need a tokenizer and "
            "pip install 'splitpoint[structured]'"
        )
