"""Test selections whose rows come from a store that keeps int8 or int4.

The text of plain streaming from the same store is the reference: it decodes whole chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drafter_doubles import self_drafting
from engine_runner import CPU
from store_runner import streamed
from test_worker_selected import SOME, WHOLE, Notes, always_on, check_left, drawn_artifacts, lanes
from test_worker_streamed import CHUNK, GREEDY, NEW, Case, make_case

from splitpoint.planning.schedule import Lane
from splitpoint.selection import Selection
from splitpoint.shapes import Encoding
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine import engine as engine_module
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.timeline import FETCHING_ROWS, Trace
from worker_service.retrieval.selector import ScreenSource

__all__ = ["always_on", "lanes"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[Encoding.INT8, Encoding.INT4], ids=lambda each: each.value)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """`wanted` is what plain streaming gives, with prompts and answers in the store."""
    for case in make_case("llama-3", tmp_path_factory.mktemp("case"), request.param):
        engine = case.engine(SerialLanes(CPU))
        requests = [
            streamed(str(index), prompt, GREEDY) for index, prompt in enumerate(case.prompts)
        ]
        case.wanted = list(case.runner.run(engine, requests).tokens.values())
        yield case


@pytest.mark.parametrize(
    "texts",
    [
        ("columns:0.999", "infinigen:0.999,full_layers=0", "lowrank:0.999"),
        ("window:0.999", "columns:0.999,int8,full_layers=0"),
        ("maple:0.999,full_layers=0",),
    ],
)
def test_all_rows_give_the_text_of_whole_chunks(
    case: Case, lanes: Lanes, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full layers read whole chunks of the same store, others rows."""
    source = ScreenSource(case.model.config, drawn_artifacts(case))
    monkeypatch.setattr(engine_module, "ScreenSource", lambda *_: source)
    engine = case.engine(lanes)
    notes = Notes(case, engine)
    requests = [
        streamed(str(index), case.prompts[index], GREEDY, selection=Selection.parsed(text))
        for index, text in enumerate(texts)
    ]
    transcript = case.runner.run(engine, requests)
    case.check(transcript)
    for name, finish in transcript.finishes.items():
        assert finish.selection_off_reason == ""
        assert len(notes.usages[name]) == NEW - 1
        assert notes.sums(name).skipped_token_count == 0
    check_left(engine)


def test_the_encoded_bytes_of_rows_cross_the_link(case: Case, lanes: Lanes) -> None:
    engine, layout = case.engine(lanes), case.runner.layout
    engine.trace = Trace()
    notes = Notes(case, engine)
    case.runner.run(engine, [streamed("2", case.prompts[2], GREEDY, selection=SOME)])
    usage = notes.sums("2")
    # By hand, for heads of 16: a scale and 16 codes; a scale, a minimum and 8 bytes of codes.
    row_bytes = 2 * {Encoding.INT8: 2 + 16, Encoding.INT4: 4 + 8}[layout.encoding]
    assert usage.link_bytes == usage.fetched_row_count * row_bytes
    fetched = [span for span in engine.trace.spans if span.name == FETCHING_ROWS]
    assert sum(span.amount for span in fetched) == usage.link_bytes
    # A chunk of the exact layer crosses encoded, too.
    assert engine.last_step is not None
    exact = 8 * 2 * layout.kv_slot_bytes
    assert engine.last_step.link_bytes == exact + notes.usages["2"][-1].link_bytes


def test_verified_drafts_give_the_text_of_plain_streaming(case: Case, lanes: Lanes) -> None:
    """Chunks that stay on the device when they fill are those of the store from then on."""
    long = Sampling(max_tokens=3 * CHUNK, ignore_eos=True)
    plain = [streamed("2", case.prompts[2], long, salt=b"plain")]
    texts = case.runner.run(case.engine(lanes), plain).tokens
    # Another salt: nothing of the answers is in the store, which would be other bytes.
    verified = [
        replace(
            each,
            salt=b"verified",
            selection=Selection.parsed("columns:0.2,verify"),
            speculation=Speculation(DraftMethod.SELF, num_speculative_tokens=6),
        )
        for each in plain
    ]
    engine = self_drafting(case.model, CHUNK, 1, lanes, case.runner.layout.encoding)
    engine.tile_pages = 3
    notes = Notes(case, engine)
    found = case.runner.run(engine, verified)
    assert found.tokens == texts
    assert sum(event.accepted for event in found.drafts) > 0
    assert notes.sums("2").fetched_row_count > 0
    check_left(engine)


def test_a_chunk_lost_while_rows_are_read_costs_a_new_start(case: Case, lanes: Lanes) -> None:
    """Reuse a slot under the copies: the NaN that was decoded must not stay anywhere."""
    engine = case.engine(lanes)
    lost: list[int] = []

    def lose(lane: Lane) -> None:
        victim = next((each for each in engine.queues.running if each.selects), None)
        if lane is not Lane.LINK_IN or victim is None or lost:
            return
        lost.append(len(victim.tokens))
        chunk, tensors = victim.stored[4], case.runner.connection.tensors
        case.runner.lose(chunk)
        for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
            # A scale of this is not a number.
            plane[chunk.slot] = 255

    lanes.before = lose
    notes = Notes(case, engine)
    request = streamed("2", case.prompts[2], GREEDY, salt=b"lost", selection=WHOLE)
    transcript = case.runner.run(engine, [request])
    assert len(lost) == 1
    assert len(transcript.tokens["2"]) == NEW
    assert len(notes.usages["2"]) == NEW - 4
    check_left(engine)
