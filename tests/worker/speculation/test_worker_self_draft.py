"""Self drafts: what they see, what they write, and what they leave alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_doubles import self_drafting
from engine_runner import CPU, admission, make_engine
from store_runner import StoreRunner, store_runner, streamed
from test_worker_model_draft import NotingLanes
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.planning.schedule import Lane
from splitpoint.shapes import ArenaLayout
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine import sampling as sampling_module
from worker_service.engine.engine import Engine
from worker_service.engine.messages import DraftEvent, StepOutput
from worker_service.engine.sampling import Sampling, SamplingRow
from worker_service.engine.sequence import Sequence, Stage
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.speculation import self_draft
from worker_service.speculation.self_draft import SelfDrafter

CHUNK = 16
NEW = 20
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=11)
LENGTHS = (45, 126, 130)
EVERYTHING = 40


class Case:
    """A model, prompts with transformers' greedy answers, and a store."""

    def __init__(
        self,
        name: str,
        runner: StoreRunner,
        model: Decoder,
        lengths: tuple[int, ...] = LENGTHS,
    ) -> None:
        reference = build_tiny(name)
        self.model, self.runner = model, runner
        self.prompts, self.wanted = zip(
            *(clear_prompt(reference, length, NEW) for length in lengths), strict=True
        )

    def engine(self, window: int, lanes: Lanes) -> Engine:
        return make_engine(
            self.model,
            chunk_tokens=CHUNK,
            has_activations=True,
            window_pages=window,
            lanes=lanes,
        )

    def drafted(
        self, engine: Engine, sampling: Sampling, most: int, salt: bytes
    ) -> tuple[dict[str, list[int]], dict[tuple[str, int], list[int]]]:
        """Stream all prompts; return their texts, and the drafts for each place in them.

        Drafts are made between steps, and no step verifies them.
        """
        drafter = SelfDrafter(engine.model, engine.cache, engine.lanes)
        drafts: dict[tuple[str, int], list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            self.runner.admit(engine, streamed(str(index), prompt, sampling, salt=salt))
        texts: dict[str, list[int]] = {str(index): [] for index in range(len(self.prompts))}
        while any(len(text) < NEW for text in texts.values()):
            output = self.runner.step(engine)
            for event in output.tokens:
                texts[event.key[0]].append(event.choice.token_id)
            ready = [each for each in engine.queues.running if is_decoding(each)]
            with torch.inference_mode():
                proposed = drafter.propose([(each, most) for each in ready])
            for sequence, tokens in zip(ready, proposed, strict=True):
                drafts[sequence.key[0], sequence.generated_count] = tokens
        while not engine.is_idle:
            self.runner.step(engine)
        return texts, drafts


def drafting_engine(case: Case, window: int, lanes: Lanes | None = None) -> Engine:
    return self_drafting(case.model, CHUNK, window, lanes or SerialLanes(CPU))


def is_decoding(sequence: Sequence) -> bool:
    return sequence.stage is Stage.RUNNING and sequence.computed == len(sequence.tokens) - 1


# Grouped queries; windows below full layers; learned positions.
CASES = ("llama-3", "gemma3", "opt")


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("case")
    model = Decoder.load(write_tiny(request.param, folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 600) as runner:
        yield Case(request.param, runner, model)
    torch.set_num_threads(before)


def each_case(name: str, values: Rows[Any], essential: Rows[Any]) -> pytest.MarkDecorator:
    """Each case with each value; only these pairs of a case and a value outside `make chaos`."""
    return pytest.mark.parametrize(
        ("case", name),
        [
            pytest.param(*pair, marks=[] if pair in essential else pytest.mark.chaos)
            for pair in itertools.product(CASES, values)
        ],
        indirect=["case"],
    )


@each_case("sampling", [GREEDY, SAMPLED], [("llama-3", SAMPLED), *((c, GREEDY) for c in CASES)])
def test_drafts_that_see_everything_are_the_text(case: Case, sampling: Sampling) -> None:
    """With a window of the whole sequence a draft is what the step will choose."""
    salt = b"all" if sampling is GREEDY else b"sampled"
    texts, drafts = case.drafted(case.engine(EVERYTHING, SerialLanes(CPU)), sampling, 4, salt)
    if sampling is GREEDY:
        assert list(texts.values()) == list(case.wanted)
    checked = 0
    for (name, place), tokens in drafts.items():
        known = texts[name][place : place + 4]
        assert tokens[: len(known)] == known[: len(tokens)]
        checked += len(tokens)
    # All but those that had no room in their page.
    assert checked > 2 * NEW * len(LENGTHS)


def test_a_draft_copies_no_history_and_reports_no_probabilities(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft with a penalty and log-probabilities: what the rows of the choices hold."""
    seen: list[SamplingRow] = []

    def noting(
        logits: torch.Tensor, flags: torch.Tensor, rows: Rows[SamplingRow]
    ) -> tuple[list[bool], list[sampling_module.Choice | sampling_module.NonFiniteLogits]]:
        seen.extend(rows)
        return sampling_module.choose_with_flags(logits, flags, rows)

    monkeypatch.setattr(self_draft, "choose_with_flags", noting)
    sampling = replace(GREEDY, logprobs=2, repetition_penalty=1.3)
    engine = case.engine(EVERYTHING, SerialLanes(CPU))
    texts, drafts = case.drafted(engine, sampling, 4, b"history")
    for (name, place), tokens in drafts.items():
        known = texts[name][place : place + 4]
        assert tokens[: len(known)] == known[: len(tokens)]
    # One list for each sequence, which grew with it.
    assert len({id(row.tokens) for row in seen}) == len(LENGTHS)
    assert all(row.sampling.logprobs is None for row in seen)
    assert any(row.drafts for row in seen)


def test_no_draft_follows_a_token_that_ends_the_text(case: Case) -> None:
    """End by a stop token of the request, and by the model's own unless these are ignored.

    The stream itself knows neither, so it goes on.
    """
    engine = case.engine(EVERYTHING, SerialLanes(CPU))
    case.runner.admit(engine, streamed("0", case.prompts[2], GREEDY, salt=b"ends"))
    while not any(is_decoding(each) for each in engine.queues.running):
        case.runner.step(engine)
    (sequence,) = engine.queues.running
    lanes = NotingLanes(CPU)
    drafter = SelfDrafter(case.model, engine.cache, lanes)
    with torch.inference_mode():
        (whole,) = drafter.propose([(sequence, 6)])
        assert len(whole) == 6
        last = max(index for index in range(5) if whole[index] not in whole[:index])
        ending = SelfDrafter(case.model, engine.cache, lanes, eos_token_ids=(whole[last],))
        streaming = sequence.admission
        for drafting, sampling, length in (
            (drafter, replace(GREEDY, stop_token_ids=(whole[last],)), last + 1),
            (ending, replace(GREEDY, ignore_eos=False), last + 1),
            (ending, GREEDY, 6),
        ):
            sequence.admission = replace(streaming, sampling=sampling)
            assert drafting.propose([(sequence, 6)]) == [whole[:length]]
        sequence.admission = streaming
    assert [span.tokens for span in lanes.spans] == [6, last + 1, last + 1, 6]
    while not engine.is_idle:
        case.runner.step(engine)


@pytest.mark.parametrize(
    "case", [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.chaos)], indirect=True
)
def test_drafts_fill_spare_rows_and_change_nothing_else(case: Case) -> None:
    """Compare texts, cold and from what was sealed."""
    lanes = ThreadLanes(CPU)
    engine = case.engine(1, lanes)
    for _ in range(2):
        texts, drafts = case.drafted(engine, GREEDY, 8, b"spare")
        assert list(texts.values()) == list(case.wanted)
    for (name, place), tokens in drafts.items():
        # The newest token is at this position, and its page ends 16 rows after it begins.
        position = len(case.prompts[int(name)]) + place - 1
        room = CHUNK - position % CHUNK if position % CHUNK else 0
        assert len(tokens) == min(8, room)
    lanes.close()


FEW, DRAWN, MANY = (GREEDY, 1), (SAMPLED, 3), (GREEDY, 8)


@each_case(
    "drafts",
    [FEW, DRAWN, MANY],
    [("opt", FEW), ("llama-3", DRAWN), ("gemma3", MANY)],
)
def test_an_engine_that_drafts_gives_the_same_texts(
    case: Case, drafts: tuple[Sampling, int]
) -> None:
    """Cold and from the store, with a chunk as window and with everything on the device."""
    sampling, most = drafts
    plain = case.engine(0, SerialLanes(CPU))
    case.runner.after_step = lambda _: None
    requests = [
        streamed(str(index), prompt, sampling, salt=b"engine")
        for index, prompt in enumerate(case.prompts)
    ]
    wanted = case.runner.run(plain, requests).tokens
    speculation = Speculation(DraftMethod.SELF, num_speculative_tokens=most)
    drafted = [replace(each, speculation=speculation) for each in requests]
    for window in (1, EVERYTHING):
        for salt in (b"engine", bytes([window, most, sampling is GREEDY])):
            engine = drafting_engine(case, window)
            events: list[DraftEvent] = []
            steps: list[StepOutput] = []

            def note(
                output: StepOutput,
                engine: Engine = engine,
                events: list[DraftEvent] = events,
                steps: list[StepOutput] = steps,
            ) -> None:
                events += output.drafts
                steps += [output] if output.tokens else []
                claims, room = engine.cache.claims, engine.memory_plan.room_page_count
                assert claims.room_used <= room
                assert engine.cache.pages.used_count <= claims.promised_count + room

            case.runner.after_step = note
            found = case.runner.run(engine, [replace(each, salt=salt) for each in drafted])
            assert found.tokens == wanted
            assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
            assert {each.method for each in events} == {DraftMethod.SELF}
            assert all(each.drafted <= most for each in events)
            if window == EVERYTHING:
                assert all(each.accepted == each.drafted for each in events)
                assert len(steps) < NEW
    case.runner.after_step = lambda _: None


def test_nothing_moves_while_drafts_are_made(case: Case) -> None:
    lanes = ThreadLanes(CPU)
    engine = case.engine(1, lanes)
    engine_cache = engine.cache
    case.runner.admit(engine, streamed("0", case.prompts[2], GREEDY, salt=b"still"))
    while not any(is_decoding(each) for each in engine.queues.running):
        case.runner.step(engine)
    (sequence,) = engine.queues.running
    while sequence.computed % CHUNK > CHUNK - 6 or not sequence.computed % CHUNK:
        case.runner.step(engine)
    begun: list[Lane] = []
    lanes.before = begun.append
    planes = (*engine_cache.keys, *engine_cache.values)
    before = [plane.clone() for plane in planes]
    inputs = [plane.clone() for plane in engine_cache.inputs]
    with torch.inference_mode():
        (tokens,) = SelfDrafter(case.model, engine_cache, lanes).propose([(sequence, 4)])
    assert len(tokens) == 4
    assert begun == []
    page, row = sequence.page(sequence.computed // CHUNK), sequence.computed % CHUNK
    for plane, old in zip(planes, before, strict=True):
        changed = (plane != old).any(dim=3).any(dim=1)
        assert changed.nonzero().tolist() == [[page, row + index] for index in range(4)]
    for plane, old in zip(engine_cache.inputs, inputs, strict=True):
        assert torch.equal(plane, old)
    lanes.close()


def test_resident_sequences_and_streamed_weights_get_no_drafts(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine(1, SerialLanes(CPU))
    case.runner.admit(engine, admission("0", case.prompts[0], GREEDY))
    while not any(is_decoding(each) for each in engine.queues.running):
        case.runner.step(engine)
    drafter = SelfDrafter(case.model, engine.cache, engine.lanes)
    (resident,) = engine.queues.running
    assert drafter.propose([(resident, 4)]) == [[]]
    case.runner.admit(engine, streamed("1", case.prompts[2], GREEDY))
    while len(engine.queues.running) < 2 or not is_decoding(engine.queues.running[1]):
        case.runner.step(engine)
    monkeypatch.setattr(Decoder, "is_resident", False)
    assert drafter.propose([(each, 4) for each in engine.queues.running]) == [[], []]
    monkeypatch.undo()
    while not engine.is_idle:
        case.runner.step(engine)


def test_a_draft_without_numbers_ends_the_drafts_and_leaves_zeros(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine(1, SerialLanes(CPU))
    case.runner.admit(engine, streamed("0", case.prompts[2], GREEDY, salt=b"nan"))
    while not any(is_decoding(each) for each in engine.queues.running):
        case.runner.step(engine)
    (sequence,) = engine.queues.running
    while sequence.computed % CHUNK > CHUNK - 6 or not sequence.computed % CHUNK:
        case.runner.step(engine)
    drafter = SelfDrafter(case.model, engine.cache, engine.lanes)
    with torch.inference_mode():
        (tokens,) = drafter.propose([(sequence, 3)])
        assert len(tokens) == 3
        finish, calls = DecoderLayer.add_mlp, 0

        def spoiled(layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            factor = torch.nan if calls > len(case.model.layers) else 1.0
            return finish(layer, hidden) * factor

        monkeypatch.setattr(DecoderLayer, "add_mlp", spoiled)
        assert drafter.propose([(sequence, 3)]) == [tokens[:1]]
        monkeypatch.undo()
    page, row = sequence.page(sequence.computed // CHUNK), sequence.computed % CHUNK
    for plane in (*engine.cache.keys, *engine.cache.values):
        assert plane[page, :, row].any()
        assert not plane[page, :, row + 1].any()
    while not engine.is_idle:
        case.runner.step(engine)
