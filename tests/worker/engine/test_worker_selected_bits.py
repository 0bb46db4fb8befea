"""Test selections with the kernels of invariant numerics: what is exact keeps its bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_runner import CPU
from store_runner import streamed
from test_worker_same_bits import INVARIANT
from test_worker_selected import SOME, WHOLE, always_on, check_left, requests_of
from test_worker_streamed import GREEDY, NEW, Case, make_case
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.host.processor import compiler
from splitpoint.selection import FULL
from splitpoint.shapes import DataType
from splitpoint_cli.bench.engine import use_worker_kernels
from worker_service.engine.messages import StepOutput
from worker_service.engine.sequence import Admission
from worker_service.kernels import units
from worker_service.lanes.lanes import SerialLanes

__all__ = ["always_on"]

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module", params=["llama", "qwen2-windows"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("case")
    shape = read_shape(write_tiny(request.param, folder / "shape"), DataType.FLOAT32)
    # Before the model is loaded.
    use_worker_kernels(CPU, DataType.FLOAT32, [shape.head_dim], wish=INVARIANT)
    yield from make_case(request.param, folder)


@pytest.mark.parametrize("most_parts", [512, 5])
def test_exact_answers_have_the_same_bits_beside_selections(
    case: Case, most_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts wait until all are there, or come in the order of positions."""
    monkeypatch.setattr(units, "ATTENTION_PARTS", most_parts)
    alone = scores_of(case, [streamed("4", case.prompts[1], GREEDY)])
    assert len(alone) == NEW
    for selection in (WHOLE, replace(SOME, full_layers=0)):
        beside = scores_of(case, requests_of(case, selection))
        assert beside == alone


def scores_of(case: Case, requests: list[Admission]) -> list[float | None]:
    """Return the log-probabilities of the tokens of request 4."""
    engine = case.engine(SerialLanes(CPU))
    scores: list[float | None] = []
    selected: set[str] = set()

    def note(output: StepOutput) -> None:
        scores.extend(each.choice.logprob for each in output.tokens if each.key[0] == "4")
        selected.update(each.key[0] for each in output.selections)

    case.runner.after_step = note
    transcript = case.runner.run(engine, requests)
    exact = [each for each in requests if each.selection in (FULL, WHOLE)]
    for each in exact:
        name = each.request_id
        assert transcript.tokens[name] == case.wanted[int(name) % 3], name
    assert selected == {each.request_id for each in requests if not each.selection.is_full}
    check_left(engine)
    return scores
