"""Test decode steps that read their stored tokens by selection, with real models and arenas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission
from selecting import maple_artifacts, select_always
from store_runner import streamed
from test_worker_streamed import CHUNK, GREEDY, Case, make_case

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.planning.weight_placement import OnHost, spread
from splitpoint.residency.selecting import StepSplit, wanted_rows
from splitpoint.selection import Selection, SelectionMethod, SelectionUsage
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan, collected_bytes
from worker_service.engine import engine as engine_module
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Sequence
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.lanes.timeline import FETCHING_ROWS, Trace
from worker_service.model.decoder import Decoder
from worker_service.retrieval.selector import ScreenSource, Selector
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.screen_factory import Screens

# Reads all stored tokens of these lengths, through screens and row pages.
WHOLE = Selection.parsed("columns:0.999,full_layers=0")
SOME = Selection.parsed("columns:0.3,full_layers=1")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def always_on(monkeypatch: pytest.MonkeyPatch) -> None:
    select_always(monkeypatch)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from make_case("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    threads = ThreadLanes(CPU)
    yield threads
    threads.close()


class Notes:
    """What requests read by selection, by name; screens never outlive their sequences."""

    def __init__(self, case: Case, engine: Engine) -> None:
        self.usages: dict[str, list[SelectionUsage]] = {}
        self._engine = engine
        case.runner.after_step = self._note

    def _note(self, output: StepOutput) -> None:
        for event in output.selections:
            self.usages.setdefault(event.key[0], []).append(event.usage)
        # Weights may be on their way for the next step.
        left = {span.lane for span in self._engine.lanes.finish()} - {Lane.WEIGHTS_IN}
        assert left == set(), "something is under way between steps"

    def sums(self, name: str) -> SelectionUsage:
        return sum(self.usages[name], SelectionUsage())


def check_left(engine: Engine) -> None:
    """Check that no page is held, and that none that is free has bytes of screens."""
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
    for plane in (*engine.cache.keys, *engine.cache.values):
        assert plane.isfinite().all()


def requests_of(case: Case, selection: Selection, *, salt: bytes = b"") -> list[Admission]:
    """All prompts, twice: those that select, and those that read everything; one is resident."""
    selecting = [
        streamed(str(index), prompt, GREEDY, salt=salt, selection=selection, resident_tokens=kept)
        for index, (prompt, kept) in enumerate(zip(case.prompts, (0, CHUNK, 40), strict=True))
    ]
    exact = [
        streamed(str(3 + index), prompt, GREEDY, salt=salt)
        for index, prompt in enumerate(case.prompts)
    ]
    return [*selecting, *exact, admission("6", case.prompts[0], GREEDY)]


@pytest.mark.parametrize("name", ["llama-3", "opt", "qwen2-windows", "qwen3", "gemma3"])
def test_a_selection_of_all_tokens_gives_the_text_of_full_attention(
    name: str, lanes: Lanes, tmp_path: Path
) -> None:
    """From a warm and a cold store, beside exact ones and prefills; chunks leave the device."""
    for case in make_case(name, tmp_path):
        for salt, budget in ((b"", 64), (b"cold", 24)):
            engine = case.engine(lanes)
            engine.max_batched_tokens = budget
            notes = Notes(case, engine)
            requests = requests_of(case, WHOLE, salt=salt)
            case.check(case.runner.run(engine, requests))
            check_left(engine)
            assert set(notes.usages) == {"0", "1", "2"}
            for index in range(3):
                # All but the first tokens, and the steps that built screens.
                assert 5 <= len(notes.usages[str(index)]) <= 7
                usage = notes.sums(str(index))
                assert usage.skipped_token_count == 0


def drawn_artifacts(case: Case) -> dict[SelectionMethod, Artifacts]:
    """Return maps of no use to ranking: what reads every token is exact with any."""
    shape, random = case.model.shape, torch.Generator().manual_seed(3)
    found = {}
    for method in (SelectionMethod.INFINIGEN, SelectionMethod.LOWRANK):
        names = ["skew"] if method is SelectionMethod.INFINIGEN else ["query_map", "key_map"]
        size = (shape.kv_head_count, shape.head_dim, shape.head_dim)
        tensors = {
            f"layers.{layer}.{name}": torch.randn(size, generator=random)
            for layer in range(shape.layer_count)
            for name in names
        }
        found[method] = Artifacts(method, tensors, {})
    rank = Selection.parsed("maple:1").kept_columns(shape.head_dim)
    return found | {SelectionMethod.MAPLE: maple_artifacts(shape, rank)}


@pytest.mark.parametrize("method", ["infinigen", "lowrank", "maple", "window"])
def test_all_tokens_are_read_exactly_through_every_screen(
    llama: Case, lanes: Lanes, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ScreenSource(llama.model.config, drawn_artifacts(llama))
    monkeypatch.setattr(engine_module, "ScreenSource", lambda *_: source)
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    selection = Selection.parsed(f"{method}:0.999,full_layers=0")
    transcript = llama.runner.run(engine, requests_of(llama, selection))
    llama.check(transcript)
    assert transcript.finishes["2"].selection_off_reason == ""
    assert len(notes.usages["2"]) == 7
    assert notes.sums("2").skipped_token_count == 0
    check_left(engine)


def test_tokens_that_layers_with_windows_read_are_reported(lanes: Lanes, tmp_path: Path) -> None:
    """Layers without windows read rows instead: they have no tiles."""
    for case in make_case("qwen2-windows", tmp_path):
        engine = case.engine(lanes)
        reported: list[bool] = []

        def note(output: StepOutput, reported: list[bool] = reported) -> None:
            if output.selections and output.step is not None:
                tokens = output.step.streamed
                reported.append(tokens is not None and tokens.loaded > 0)

        case.runner.after_step = note
        case.runner.run(engine, [streamed("2", case.prompts[2], GREEDY, selection=WHOLE)])
        assert reported == [True] * 7


@pytest.mark.parametrize("schedule", [Schedule.ROW, Schedule.PIPELINED])
def test_rows_come_from_the_store_whatever_else_is_on_the_device(
    llama: Case, lanes: Lanes, schedule: Schedule
) -> None:
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    request = streamed(
        "2", llama.prompts[2], GREEDY, split=40, resident_tokens=3 * CHUNK, schedule=schedule
    )
    llama.check(llama.runner.run(engine, [replace(request, selection=WHOLE)]))
    check_left(engine)
    assert len(notes.usages["2"]) == 7


@pytest.mark.parametrize("text", ["columns:1", "columns:alpha=inf,cap=1", "window:1"])
def test_what_reads_every_token_is_exact_and_says_so(
    llama: Case, lanes: Lanes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    request = streamed("2", llama.prompts[2], GREEDY, selection=Selection.parsed(text))
    transcript = llama.runner.run(engine, [request])
    llama.check(transcript)
    assert transcript.finishes["2"].selection_off_reason.endswith("reads every token")
    assert notes.usages == {}


@pytest.mark.parametrize(
    "text", ["window:0.3", "columns:alpha=0,cap=0.4", "columns:budget_tokens=20,int8"]
)
def test_every_screen_reads_what_it_is_to_read(llama: Case, lanes: Lanes, text: str) -> None:
    engine, selection = llama.engine(lanes), Selection.parsed(text)
    notes = Notes(llama, engine)
    transcript = llama.runner.run(
        engine, [streamed("2", llama.prompts[2], GREEDY, selection=selection)]
    )
    check_left(engine)
    assert transcript.finishes["2"].selection_off_reason == ""
    assert len(notes.usages["2"]) == 7
    rows = -(-wanted_rows(selection, 8 * CHUNK) // CHUNK) * CHUNK
    for step, usage in enumerate(notes.usages["2"]):
        # Beside the rows it reads the tail, which the store does not have.
        visible = 131 + step
        assert usage.visible_token_count == visible
        read = visible - 8 * CHUNK + rows
        if selection.alpha is not None:
            # Fewer are near the largest score than are always read.
            read = selection.sinks + selection.recent
        assert usage.read_token_count == read


def test_the_mean_of_the_steps_is_of_all_of_them(llama: Case, lanes: Lanes) -> None:
    """Also of the seven that select: they are what the answer took."""
    engine = llama.engine(lanes)
    running, found = engine.queues.running, dict[tuple[str, int, int], Sequence]()
    llama.runner.after_step = lambda _: found.update({each.key: each for each in running})
    transcript = llama.runner.run(engine, [streamed("2", llama.prompts[2], GREEDY, selection=SOME)])
    (sequence,) = found.values()
    # All of the prompt but its last token is cached.
    assert sequence.step_count == len(transcript.tokens["2"]) == GREEDY.max_tokens
    mean = sequence.step_seconds / sequence.step_count
    assert transcript.finishes["2"].mean_step_seconds == mean


def test_a_resident_cache_is_read_whole(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    request = replace(admission("2", llama.prompts[2], GREEDY), selection=SOME)
    transcript = llama.runner.run(engine, [request])
    llama.check(transcript)
    assert transcript.finishes["2"].selection_off_reason.startswith("the cache is on the device; ")
    assert notes.usages == {}


@pytest.mark.parametrize("text", ["infinigen:0.3", "lowrank:0.3"])
def test_a_selection_without_artefacts_reads_everything_and_says_so(
    llama: Case, lanes: Lanes, text: str
) -> None:
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    requests = [
        streamed("1", llama.prompts[1], GREEDY),
        streamed("2", llama.prompts[2], GREEDY, selection=Selection.parsed(text)),
    ]
    transcript = llama.runner.run(engine, requests)
    llama.check(transcript)
    check_left(engine)
    assert transcript.finishes["1"].selection_off_reason == ""
    assert "no artefacts" in transcript.finishes["2"].selection_off_reason
    assert notes.usages == {}


def test_keys_of_layer_inputs_that_no_store_keeps_are_not_made(llama: Case, tmp_path: Path) -> None:
    screens = Screens(llama.model.config, Selection.parsed("maple:0.3"), None)
    for has_activations, why in ((False, "the store keeps none"), (True, "")):
        layout = replace(llama.runner.connection.tensors.layout, has_activations=has_activations)
        plan = MemoryPlan(1 << 30, 0, 0, 1 << 12, 4, 0, collected_bytes=1 << 20)
        selector = Selector(
            *(llama.model.config, llama.model.shape, DeviceCache(layout, plan, CPU)),
            *(SerialLanes(CPU), lambda _: screens, lambda: None),
            can_draft=True,
        )
        found = selector.plan(screens.selection, 138, StepSplit(), is_streamed=True)
        assert found.off_reason.endswith(why)
        assert found.is_on == (why == "")


def test_a_model_with_windows_everywhere_is_read_whole(lanes: Lanes, tmp_path: Path) -> None:
    for case in make_case("mistral", tmp_path):
        engine = case.engine(lanes)
        transcript = case.runner.run(
            engine, [streamed("2", case.prompts[2], GREEDY, selection=SOME)]
        )
        case.check(transcript)
        assert "window" in transcript.finishes["2"].selection_off_reason


def test_few_stored_tokens_are_read_whole(
    llama: Case, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    engine = llama.engine(lanes)
    transcript = llama.runner.run(
        engine, [streamed("0", llama.prompts[0], GREEDY, selection=WHOLE)]
    )
    llama.check(transcript)
    assert "its 48 stored tokens" in transcript.finishes["0"].selection_off_reason


def test_what_no_room_is_planned_to_build_is_read_whole(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    plan, shape = engine.cache.plan, llama.model.shape
    # 138 tokens at last, of which 128 are stored.
    for tokens, reason in ((127, "building the screen of a layer takes"), (128, "")):
        engine.cache.plan = replace(plan, collected_bytes=collected_bytes(shape, tokens))
        request = streamed("2", llama.prompts[2], GREEDY, selection=WHOLE)
        transcript = llama.runner.run(engine, [request])
        llama.check(transcript)
        assert transcript.finishes["2"].selection_off_reason.startswith(reason)
        assert bool(reason) == bool(transcript.finishes["2"].selection_off_reason)
        check_left(engine)


def selected_run(case: Case, lanes: Lanes, salt: bytes) -> tuple[Transcript, Notes, Trace]:
    engine = case.engine(lanes)
    notes, trace = Notes(case, engine), Trace()
    # All restores end before the first step, so that both twins form the same batches.
    requests = requests_of(case, SOME, salt=salt)
    case.restore_all(engine, requests)
    engine.trace = trace
    transcript = case.runner.run(engine, [])
    check_left(engine)
    return transcript, notes, trace


def test_the_serial_twin_reads_the_same_rows(llama: Case, lanes: Lanes) -> None:
    """Count link bytes by spans: they are those of the rows that were chosen and missing."""
    runs = [selected_run(llama, each, b"") for each in (lanes, lanes)]
    engine = llama.engine(SerialLanes(CPU))
    notes = Notes(llama, engine)
    serial = llama.runner.run(engine, requests_of(llama, SOME))
    row = 2 * llama.model.shape.head_dim * 4
    for transcript, others, trace in runs:
        assert transcript.tokens == serial.tokens
        assert others.usages == notes.usages
        fetched = [span for span in trace.spans if span.name == FETCHING_ROWS]
        assert {span.lane for span in fetched} == {Lane.LINK_IN}
        assert {span.layer for span in fetched} == set(range(1, llama.model.shape.layer_count))
        usage = sum((others.sums(name) for name in others.usages), SelectionUsage())
        assert sum(span.amount for span in fetched) == usage.link_bytes
        assert usage.link_bytes == usage.fetched_row_count * row
        assert 0 < usage.fetched_row_count < usage.reused_row_count
    # Those that read everything beside them are exact.
    for index in range(3, 7):
        assert serial.tokens[str(index)] == llama.wanted[index % 3]
    assert serial.tokens["2"] != llama.wanted[2]


def test_what_a_selection_computed_is_no_other_requests_prefix(llama: Case, lanes: Lanes) -> None:
    """The store has its chunks, since they left the device, but nothing finds them."""
    salt, long = b"private", Sampling(max_tokens=3 * CHUNK, ignore_eos=True)
    prompt = llama.prompts[2]
    engine = llama.engine(lanes)
    notes = Notes(llama, engine)
    request = streamed("2", prompt, long, salt=salt, selection=SOME)
    answer = llama.runner.run(engine, [request]).tokens["2"]
    assert len(notes.usages["2"]) == 3 * CHUNK - 2
    store = llama.runner.store
    tokens = [*prompt, *answer]
    # The prompt's last row is computed with the first token: exact, and in the tail.
    assert store.peek(salt, tokens).cached_tokens == len(prompt) // CHUNK * CHUNK
    resident = admission("a", tokens, GREEDY)
    fresh = llama.runner.run(engine, [resident]).tokens["a"]
    again = llama.runner.run(engine, [streamed("b", tokens, GREEDY, salt=salt)]).tokens["b"]
    assert again == fresh
    check_left(engine)


def test_keys_of_chunks_that_leave_later_are_made_of_stored_layer_inputs(
    llama: Case, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all tokens, also those, is exact; their X comes over the link."""
    source = ScreenSource(llama.model.config, drawn_artifacts(llama))
    monkeypatch.setattr(engine_module, "ScreenSource", lambda *_: source)
    long, prompt = Sampling(max_tokens=3 * CHUNK, ignore_eos=True), llama.prompts[2]
    tokens, sent = [], []
    for selection in (Selection(), Selection.parsed("maple:0.999,full_layers=0")):
        engine, trace = llama.engine(lanes), Trace()
        engine.trace = trace
        request = streamed("2", prompt, long, selection=selection)
        tokens.append(llama.runner.run(engine, [request]).tokens["2"])
        sent.append(sum(span.tokens for span in trace.spans if span.name == "send X"))
        check_left(engine)
    assert tokens[0] == tokens[1]
    final = len(prompt) + 3 * CHUNK
    layers = llama.model.shape.layer_count
    # Exact steps send X, too, as much as their splits say.
    assert sent[1] - sent[0] >= layers * (final // CHUNK - 2) * CHUNK


def test_layers_whose_weights_are_on_the_host_choose_when_they_begin(
    lanes: Lanes, tmp_path: Path
) -> None:
    """W_Q of the next layer is not there yet: its tokens cannot be chosen before it.

    Nor does the model draft for itself, so that a lossless selection is off.
    """
    for case in make_case("llama", tmp_path):
        layers = case.model.shape.layer_count
        on_host = OnHost(spread(layers, layers), False, False)
        model = Decoder.load(tmp_path / "model", CPU, torch.float32, on_host)
        assert not model.is_resident
        hosted = replace(case, model=model)
        engine = hosted.engine(lanes)
        notes = Notes(hosted, engine)
        hosted.check(hosted.runner.run(engine, requests_of(hosted, WHOLE)))
        assert len(notes.usages["2"]) == 7
        check_left(engine)
        lossless = streamed("2", case.prompts[2], GREEDY, selection=replace(SOME, verify=True))
        (finish,) = hosted.runner.run(engine, [lossless]).finishes.values()
        assert "cannot draft" in finish.selection_off_reason
        check_left(engine)


def test_steps_that_select_or_build_teach_nothing_of_exact_ones(llama: Case, lanes: Lanes) -> None:
    engine = llama.engine(lanes)
    # More than any step takes: whatever is learnt lowers it.
    profile = replace(BUILT_IN_PROFILES["a100-80"], step_compute_seconds=1e6)
    engine.watch_costs(profile)
    selecting = streamed("2", llama.prompts[2], GREEDY, selection=WHOLE)
    llama.check(llama.runner.run(engine, [selecting]))
    assert engine.profile.step_compute_seconds == 1e6
    llama.check(llama.runner.run(engine, [replace(selecting, selection=Selection())]))
    assert engine.profile.step_compute_seconds < 1e6
    check_left(engine)


def test_screens_of_many_sequences_are_built_in_turn(llama: Case, lanes: Lanes) -> None:
    """The plan has room for K of 600 tokens at once: of four times 128."""
    engine = llama.engine(lanes)
    plan, shape = engine.cache.plan, llama.model.shape
    engine.cache.plan = replace(plan, collected_bytes=collected_bytes(shape, 600))
    notes = Notes(llama, engine)
    requests = [
        streamed(str(3 * number + 2), llama.prompts[2], GREEDY, selection=WHOLE)
        for number in range(6)
    ]
    llama.restore_all(engine, requests)
    llama.check(llama.runner.run(engine, []))
    assert sorted(len(usages) for usages in notes.usages.values()) == [6, 6, 7, 7, 7, 7]
    check_left(engine)
