"""Self drafts that attend rows which a selection fetches: the text is that of full decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_runner import CPU, Transcript
from selecting import select_always
from store_runner import store_runner, streamed
from test_worker_self_draft import (
    CHUNK,
    GREEDY,
    LENGTHS,
    NEW,
    SAMPLED,
    Case,
    drafting_engine,
    is_decoding,
)
from tiny_models import write_tiny

from splitpoint.selection import FULL, Selection, SelectionUsage
from splitpoint.shapes import ArenaLayout
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Sequence
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.speculation.self_draft import SelfDrafter

# With this number of stored tokens every row is fetched.
WHOLE = Selection.parsed("columns:0.999,verify")
SOME = Selection.parsed("columns:0.2,columns=4,int8,verify")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def always_on(monkeypatch: pytest.MonkeyPatch) -> None:
    select_always(monkeypatch)


# Grouped queries; heads of their own, with learned positions; windows below full layers.
CASES = ("llama-3", "opt", "gemma3")


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("case")
    model = Decoder.load(write_tiny(request.param, folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 600) as runner:
        yield Case(request.param, runner, model)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = ThreadLanes(CPU)
    yield made
    made.close()


def is_drafting(sequence: Sequence) -> bool:
    """Return whether screens are built, and the page has room for drafts."""
    has_room = 0 < sequence.computed % CHUNK <= CHUNK - 6
    is_built = sequence.reads is not None and sequence.reads.is_built
    return is_decoding(sequence) and has_room and is_built


def requests_of(
    case: Case, sampling: Sampling, selection: Selection, salt: bytes
) -> list[Admission]:
    """One for each prompt, which drafts as long as its page has rows if it selects."""
    drafts = Speculation(DraftMethod.SELF, num_speculative_tokens=6) if selection.verify else PLAIN
    return [
        replace(
            streamed(str(index), prompt, sampling, salt=salt, selection=selection),
            speculation=drafts,
        )
        for index, prompt in enumerate(case.prompts)
    ]


def run(
    case: Case, engine: Engine, requests: list[Admission]
) -> tuple[Transcript, dict[str, SelectionUsage]]:
    """Run the requests together; return what their drafts read. Check that they leave nothing."""
    usages: dict[str, SelectionUsage] = {}

    def note(output: StepOutput) -> None:
        drafted = {event.key: event.drafted for event in output.drafts}
        for event in output.selections:
            assert event.usage.step_count == drafted[event.key]
            usages[event.key[0]] = usages.get(event.key[0], SelectionUsage()) + event.usage

    case.runner.after_step = note
    found = case.runner.run(engine, requests)
    case.runner.after_step = lambda _: None
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
    for plane in (*engine.cache.keys, *engine.cache.values):
        assert plane.isfinite().all()
    return found, usages


def decoding(case: Case, engine: Engine, selection: Selection) -> tuple[Sequence, SequenceReads]:
    """Return a sequence once its screens are built and its page has room for drafts."""
    request = streamed("0", case.prompts[2], GREEDY, salt=b"one", selection=selection)
    case.runner.admit(engine, request)
    while True:
        case.runner.step(engine)
        for sequence in filter(is_drafting, engine.queues.running):
            if sequence.reads is not None:
                return sequence, sequence.reads


# Both in one family; the others draw in `make chaos`.
@pytest.mark.parametrize(
    ("case", "sampling"),
    [
        ("llama-3", SAMPLED),
        *((case, GREEDY) for case in CASES),
        *(pytest.param(case, SAMPLED, marks=pytest.mark.chaos) for case in CASES[1:]),
    ],
    indirect=["case"],
)
def test_the_text_is_that_of_full_decoding(case: Case, lanes: Lanes, sampling: Sampling) -> None:
    """Several draft together, cold and from the store; chunks leave the device meanwhile."""
    plain, _ = run(case, drafting_engine(case, 1), requests_of(case, sampling, FULL, b"plain"))
    if sampling is GREEDY:
        assert [plain.tokens[str(index)] for index in range(len(LENGTHS))] == list(case.wanted)
    for salt, used in ((b"plain", lanes), (b"cold", SerialLanes(CPU))):
        engine = drafting_engine(case, 1, used)
        found, usages = run(case, engine, requests_of(case, sampling, SOME, salt))
        assert found.tokens == plain.tokens
        for name in ("1", "2"):
            assert 0 < usages[name].read_token_count < usages[name].visible_token_count
            assert usages[name].fetched_row_count > 0
            assert usages[name].link_bytes > 0
            assert not usages[name].is_approximate


def test_drafts_that_attend_every_row_are_the_text(case: Case, lanes: Lanes) -> None:
    engine = drafting_engine(case, 1, lanes)
    sequence, reads = decoding(case, engine, WHOLE)
    drafter = SelfDrafter(case.model, engine.cache, lanes)
    done = sequence.generated_count
    with torch.inference_mode():
        (tokens,) = drafter.propose([(sequence, 5)])
    assert tokens == list(case.wanted[2][done : done + 5])
    # One choice serves the draft, and every row crosses once.
    heads = engine.cache.layout.kv_head_count
    assert (
        reads.counts.wanted == reads.counts.fetched == len(reads.layers) * heads * reads.row_count
    )
    assert reads.row_count == reads.stored_tokens
    while not engine.is_idle:
        case.runner.step(engine)


def test_a_draft_writes_spare_rows_and_row_pages_alone(case: Case, lanes: Lanes) -> None:
    """The screens learn nothing from it."""
    engine = drafting_engine(case, 1, lanes)
    sequence, reads = decoding(case, engine, SOME)
    cache = engine.cache
    # As bits: those of screens may be a NaN.
    planes = [plane.view(torch.int32) for plane in (*cache.keys, *cache.values)]
    before = [plane.clone() for plane in planes]
    known = reads.stored_tokens, list(reads.chunks)
    with torch.inference_mode():
        (tokens,) = SelfDrafter(case.model, cache, lanes).propose([(sequence, 4)])
    assert len(tokens) == 4
    assert known == (reads.stored_tokens, list(reads.chunks))
    page, row = sequence.page(sequence.computed // CHUNK), sequence.computed % CHUNK
    spare = {(page, row + index) for index in range(4)}
    layers = len(cache.keys)
    for index, (plane, old) in enumerate(zip(planes, before, strict=True)):
        changed = {
            (each[0], each[1]) for each in (plane != old).any(dim=3).any(dim=1).nonzero().tolist()
        }
        selects = reads.selects(index % layers)
        assert {each for each, _ in changed - spare} == (set(reads.row_pages) if selects else set())
    while not engine.is_idle:
        case.runner.step(engine)


def test_screens_that_are_lost_are_built_again(case: Case) -> None:
    """Take a kept page from a sequence, and then withdraw a chunk that it reads."""
    engine = drafting_engine(case, 2)
    requests = requests_of(case, GREEDY, SOME, b"lost")
    for each in requests:
        case.runner.admit(engine, each)
    texts: dict[str, list[int]] = {each.key[0]: [] for each in requests}
    troubles = 0
    while not engine.is_idle or len(texts["0"]) < NEW:
        for event in case.runner.step(engine).tokens:
            texts[event.key[0]].append(event.choice.token_id)
        if troubles == 2:
            continue
        for sequence in engine.queues.running:
            reads = sequence.reads
            if sequence.key[0] != "1" or reads is None or not reads.is_built:
                continue
            if not troubles:
                assert engine.page_manager.give_up_kept(sequence)
                assert not reads.is_built
            elif len(texts["1"]) > 9:
                case.runner.lose(sequence.stored[2])
            else:
                continue
            troubles += 1
    assert troubles == 2
    assert [texts[str(index)] for index in range(len(LENGTHS))] == list(case.wanted)
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


def test_an_error_while_drafting_leaves_no_row(
    case: Case, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may be missing that were to come: the next step reads everything, and builds anew."""
    engine = drafting_engine(case, 1, lanes)
    sequence, reads = decoding(case, engine, SOME)
    done = sequence.generated_count
    texts = []

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the device is broken")

    with monkeypatch.context() as broken, torch.inference_mode():
        broken.setattr(case.model, "logits", fail)
        with pytest.raises(RuntimeError, match="broken"):
            SelfDrafter(case.model, engine.cache, lanes).propose([(sequence, 4)])
    assert not reads.is_built
    assert not lanes.finish()
    while not engine.is_idle:
        texts += [event.choice.token_id for event in case.runner.step(engine).tokens]
    assert reads.chunks == []
    assert texts == list(case.wanted[2][done:])
