"""Requests of a benchmark to an engine in this process, without gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitpoint.planning.plan import Residency, SplitLine
from splitpoint.selection import FULL, Selection
from splitpoint.speculation import PLAIN, Speculation
from splitpoint_cli.bench.shared.ending import held
from splitpoint_cli.bench.shared.local_store import LocalStore
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission

# The longest sleep while a restore is under way: the store may have an answer, too.
_PAUSE_SECONDS = 1e-3


def admission_of(
    name: str,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    residency: Residency = Residency.RESIDENT,
    split_tokens: int = 0,
    split_line: SplitLine | None = None,
    speculation: Speculation = PLAIN,
    selection: Selection = FULL,
) -> Admission:
    """Return a greedy request for exactly `new_tokens` tokens.

    `split_line`: the engine follows it, and draws it anew when costs change; None: the
    split stays.
    """
    return Admission(
        request_id=name,
        attempt=0,
        prompt=tuple(prompt),
        delivered=(),
        sampling=Sampling(max_tokens=new_tokens, ignore_eos=True),
        residency=residency,
        split_tokens=split_tokens,
        split_line=split_line,
        salt=b"",
        speculation=speculation,
        selection=selection,
    )


def outputs_until_idle(
    engine: Engine, store: LocalStore | None = None, *, in_turn: bool = False
) -> Iterator[StepOutput]:
    """Step until no request is left; yield what each step gave. Raises a request's error.

    Args:
        store: carries out what the engine asks of its store; None: the engine has none.
        in_turn: each step begins with what the store was asked before it. Otherwise a busy machine
            decides from which step on new chunks are in the store.
    """
    while True:
        with held():
            output = engine.step()
        for finish in output.finishes:
            if finish.error is not None:
                raise finish.error
        yield output
        if store is not None:
            with held():
                store.handle(output, engine.cache)
        if engine.is_idle:
            return
        if store is not None:
            waits = not output.ran and not engine.is_restoring
            for answer in store.all_answers() if in_turn else store.answers(wait=waits):
                engine.post(answer)
        if not engine.can_go_on(output):
            engine.wait(_PAUSE_SECONDS)
