"""Decode steps in which clusters stand for the stored tokens that a selection does not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_runner import CPU, Transcript
from store_runner import store_runner, streamed
from test_worker_selected import Notes, always_on, check_left
from test_worker_streamed import CHUNK, Case
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.residency.selecting import SEGMENT_TOKENS
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import ArenaLayout
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.attention import PartialAttention
from worker_service.model.decoder import Decoder

NEW = 16
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True, logprobs=1)
# A segment is stored from the start; one is filled while it is decoded.
LENGTHS = (SEGMENT_TOKENS + 44, SEGMENT_TOKENS - 6)

__all__ = ["always_on"]
pytestmark = pytest.mark.usefixtures("one_thread")


# Grouped queries; heads of their own; windows below full layers.
@pytest.fixture(scope="module", params=["llama-3", "opt", "gemma3"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder, reference = tmp_path_factory.mktemp("case"), build_tiny(request.param)
    model = Decoder.load(write_tiny(request.param, folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    prompts, wanted = zip(*(clear_prompt(reference, n, NEW) for n in LENGTHS), strict=True)
    with store_runner(layout, folder, 400) as runner:
        case = Case(model, runner, list(prompts), list(wanted))
        # From now on the store has the prompts.
        case.check(runner.run(case.engine(SerialLanes(CPU)), requests_of(case, FULL, 0)))
        yield case


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    threads = ThreadLanes(CPU)
    yield threads
    threads.close()


def run(case: Case, lanes: Lanes, text: str, *, beside: bool = False) -> tuple[Transcript, Notes]:
    """Run both prompts by a selection; with `beside`, without its estimates and exactly, too.

    All restores end before the first step, so that the same steps have the same rows.
    """
    engine = case.engine(lanes)
    notes = Notes(case, engine)
    selection = Selection.parsed(text)
    requests = requests_of(case, selection, 0)
    if beside:
        requests += requests_of(case, replace(selection, estimate=False), 2)
        requests += requests_of(case, FULL, 4)
    if isinstance(lanes, ThreadLanes):
        case.restore_all(engine, requests)
        requests = []
    transcript = case.runner.run(engine, requests)
    check_left(engine)
    return transcript, notes


def requests_of(case: Case, selection: Selection, first: int) -> list[Admission]:
    return [
        streamed(str(first + index), prompt, GREEDY, selection=selection)
        for index, prompt in enumerate(case.prompts)
    ]


def test_where_all_is_read_the_text_is_that_of_full_attention(case: Case, lanes: Lanes) -> None:
    """Before, while and after a segment is filled: no row is counted twice."""
    transcript, notes = run(case, lanes, "columns:0.999,estimate,full_layers=0")
    case.check(transcript)
    for name in ("0", "1"):
        assert notes.sums(name).skipped_token_count == 0
        assert len(notes.usages[name]) >= NEW - 3


def test_what_is_not_read_takes_part_and_spoils_no_exact_sequence(
    case: Case, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[int, list[float]] = {}
    take = PartialAttention.take

    def note(self: PartialAttention, row: int, other: PartialAttention) -> None:
        take(self, row, other)
        weights.setdefault(row, []).append(float(other.total.min()))

    monkeypatch.setattr(PartialAttention, "take", note)
    transcript, notes = run(case, lanes, "columns:0.1,estimate,full_layers=0", beside=True)
    assert set(notes.usages) == {"0", "1", "2", "3"}
    for name in ("4", "5"):
        assert transcript.tokens[name] == case.wanted[int(name) % 2]
    # Each layer that selects, of each step of the first, and of the last steps of the second.
    of_first, of_second = (len(notes.usages[name]) for name in ("0", "1"))
    layers, rest = divmod(len(weights[0]), of_first)
    assert not rest
    assert 0 < layers <= len(case.model.layers)
    assert 0 < len(weights[1]) < layers * of_second
    assert set(weights) == {0, 1}
    assert min(min(of_row) for of_row in weights.values()) > 0


def test_the_serial_twin_estimates_the_same(case: Case, lanes: Lanes) -> None:
    text = "columns:0.1,estimate,full_layers=1"
    serial, others = run(case, SerialLanes(CPU), text)
    for _ in range(2):
        transcript, notes = run(case, lanes, text)
        assert transcript.tokens == serial.tokens
        assert notes.usages == others.usages
