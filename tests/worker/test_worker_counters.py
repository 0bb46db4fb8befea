"""Test the counters against known bytes, tokens and kinds of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, admission, make_engine
from small_memory import LAYERS, small_engine
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.errors import FailedPrecondition
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import ArenaLayout
from worker_service.counters import (
    Counters,
    FirstTokenSeconds,
    Predicted,
    RestoredRequests,
    StepKind,
    Traffic,
    Way,
)
from worker_service.engine.engine import Engine
from worker_service.engine.messages import (
    FinishEvent,
    PrefillEvent,
    RestoreEvent,
    StepEvent,
    StepOutput,
    TokenEvent,
)
from worker_service.engine.sampling import Choice, Sampling
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes
from worker_service.lanes.timeline import LaneTotals, StepTimes
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure

CHUNK = 16
GREEDY = Sampling(max_tokens=4, ignore_eos=True)
# The last chunk is not full: 44 of the 45 tokens come back, the 45th is computed.
PROMPT, ANSWER = clear_prompt(build_tiny("llama"), 45, 4)
LONG, _ = clear_prompt(build_tiny("llama"), 130, 4)
SPLITS = (0, CHUNK, 20, 1000)
LANES: dict[str, Callable[[], Lanes]] = {
    "serial": lambda: SerialLanes(CPU),
    "overlapped": lambda: ThreadLanes(CPU),
    "over an emulated link": lambda: ThreadLanes(CPU, EmulatedLink(20e6)),
    "serial over an emulated link": lambda: SerialLanes(CPU, EmulatedLink(20e6)),
}


@dataclass
class Case:
    """A model and a store that has both prompts; engines that share neither cache nor lanes."""

    model: Decoder
    runner: StoreRunner

    def engine(self, lanes: Lanes) -> Engine:
        return make_engine(
            self.model, has_activations=True, lanes=lanes, staging_pages=48, cache_pages=80
        )

    def counters_of(self, engine: Engine) -> Counters:
        """Return counters that get all further outputs of the engine."""
        counters = Counters()
        self.runner.after_step = counters.add
        return counters

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one chunk in one layer, fp32."""
        shape = self.model.shape
        return 2 * shape.kv_head_count * CHUNK * shape.head_dim * 4

    @property
    def x_bytes(self) -> int:
        """Bytes of X of one chunk in one layer, fp32."""
        return CHUNK * self.model.shape.hidden_size * 4


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("counters")
    model = Decoder.load(write_tiny("llama", folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 200) as runner:
        made = Case(model, runner)
        requests = [admission("short", PROMPT, GREEDY), admission("long", LONG, GREEDY)]
        runner.run(made.engine(SerialLanes(CPU)), requests)
        yield made


# -- restores ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LANES)
@pytest.mark.parametrize("split", SPLITS)
def test_a_restore_counts_the_bytes_that_it_copies(case: Case, kind: str, split: int) -> None:
    lanes = LANES[kind]()
    engine = case.engine(lanes)
    counters = case.counters_of(engine)
    request = replace(admission("a", PROMPT, GREEDY), split_tokens=split)
    transcript = case.runner.run(engine, [request])
    lanes.close()
    assert transcript.tokens["a"] == ANSWER

    layers, cached = case.model.shape.layer_count, len(PROMPT) - 1
    rebuilt = min(split, cached)
    # Whole chunks are loaded, also the one in which the split lies; X of those that are
    # rebuilt in part too. Layer 0's X comes from token ids.
    loaded_chunks = 3 - rebuilt // CHUNK if rebuilt < cached else 0
    sent_chunks = -(-rebuilt // CHUNK)
    assert counters.link_in_bytes == {
        Traffic.KV: layers * loaded_chunks * case.kv_bytes,
        # And the X of the last chunk, which will be sealed anew with more tokens.
        Traffic.ACTIVATIONS: ((layers - 1) * sent_chunks + layers) * case.x_bytes,
        Traffic.WEIGHTS: 0,
    }
    method = RestoreMethod.of(rebuilt, cached)
    assert counters.restores == {**dict.fromkeys(counters.restores, 0), method: 1}
    wanted = {
        (Residency.RESIDENT, Way.LOADED): cached - rebuilt,
        (Residency.RESIDENT, Way.REBUILT): rebuilt,
    }
    assert {key: count for key, count in counters.cache_tokens.items() if count} == {
        key: count for key, count in wanted.items() if count
    }
    assert counters.split_tokens == rebuilt
    assert (counters.rebuild_seconds > 0) == (rebuilt > 0)
    assert counters.prefill_seconds == 0
    if "emulated" in kind:
        seconds = sum(counters.link_in_bytes.values()) / 20e6
        assert counters.link_in_seconds == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("kind", LANES)
def test_a_restore_from_both_ends_counts_each_token_once(case: Case, kind: str) -> None:
    lanes = LANES[kind]()
    engine = case.engine(lanes)
    counters = case.counters_of(engine)
    request = replace(
        admission("a", LONG, GREEDY), method=RestoreMethod.TOKENS, recomputed_tokens=64
    )
    case.runner.run(engine, [request])
    lanes.close()
    loaded = counters.cache_tokens[Residency.RESIDENT, Way.LOADED]
    recomputed = counters.cache_tokens[Residency.RESIDENT, Way.RECOMPUTED]
    assert loaded + recomputed == len(LONG) - 1
    assert recomputed % CHUNK == 0 or recomputed == len(LONG) - 1
    chunks = -(-loaded // CHUNK)
    assert counters.link_in_bytes[Traffic.KV] == case.model.shape.layer_count * chunks * (
        case.kv_bytes
    )
    assert counters.restores[RestoreMethod.TOKENS] == 1
    assert (counters.prefill_seconds > 0) == (recomputed > 0)
    assert counters.rebuild_seconds == 0
    # It has no split.
    assert counters.split_tokens is None


def test_what_a_lost_restore_copied_has_crossed_the_link_all_the_same(
    tmp_path: Path, case: Case
) -> None:
    with store_runner(case.runner.layout, tmp_path, 40) as runner:
        runner.run(case.engine(SerialLanes(CPU)), [admission("first", LONG, GREEDY)])
        lanes = SerialLanes(CPU)
        engine = case.engine(lanes)
        counters = Counters()
        runner.after_step = counters.add
        lost: list[Lane] = []

        def lose(lane: Lane) -> None:
            if lane is Lane.LINK_IN and not lost:
                lost.append(lane)
                runner.lose(engine.queues.running[0].match.chunks[3])  # type: ignore[union-attr]

        lanes.before = lose
        transcript = runner.run(engine, [admission("a", LONG, GREEDY)])
    assert transcript.finishes["a"].error is None
    assert counters.chunk_losses == 1
    layers = case.model.shape.layer_count
    # Nine chunks that were of no use, and the three before the lost one once more.
    assert counters.link_in_bytes[Traffic.KV] == layers * (9 + 3) * case.kv_bytes
    assert counters.cache_tokens[Residency.RESIDENT, Way.LOADED] == 3 * CHUNK
    assert sum(counters.restores.values()) == 1


# -- what comes before the first token behind a restore --------------------------------


@pytest.mark.parametrize("kind", LANES)
@pytest.mark.parametrize("split", [0, CHUNK])
def test_seconds_to_a_first_token_are_those_of_its_restore_and_prefill(
    case: Case, kind: str, split: int
) -> None:
    lanes = LANES[kind]()
    engine = case.engine(lanes)
    counters = case.counters_of(engine)
    # Eleven tokens are new: their first one is that of no other case.
    first = 2 * list(LANES).index(kind) + (split > 0)
    prompt = [*LONG[: 4 * CHUNK], first, *PROMPT[:10]]
    request = admission("a", prompt, Sampling(max_tokens=1, ignore_eos=True))
    case.runner.run(engine, [replace(request, split_tokens=split)])
    lanes.close()
    assert counters.cache_tokens[Residency.RESIDENT, Way.LOADED] == 4 * CHUNK - split
    found = counters.restored.seconds
    assert found.link == pytest.approx(counters.link_in_seconds)
    assert found.restore == pytest.approx(counters.rebuild_seconds)
    assert found.prefill == pytest.approx(counters.compute_seconds - counters.rebuild_seconds)
    assert found.total > found.prefill
    assert found.total >= found.restore + found.prefill
    if kind.startswith("serial"):
        assert found.total > found.link + found.restore + found.prefill
    if "emulated" in kind:
        assert found.link >= 0.99 * sum(counters.link_in_bytes.values()) / 20e6


def test_requests_without_a_restore_have_no_seconds(case: Case) -> None:
    """Test a new prompt, one that the device holds, and one that stays in the store."""
    engine = make_engine(case.model, has_activations=True, staging_pages=48, cache_pages=80)
    counters = case.counters_of(engine)
    case.runner.run(engine, [admission("new", [7, 8, 9], GREEDY)])
    case.runner.run(engine, [streamed("streamed", LONG, GREEDY)])
    assert sum(counters.restores.values()) == 1, "the tail of what is streamed"
    assert counters.restored.seconds == FirstTokenSeconds()
    case.runner.run(engine, [admission("restored", LONG, GREEDY)])
    once = replace(counters.restored.seconds)
    assert once.prefill > 0, "a single token, computed like a decode"
    case.runner.run(engine, [admission("held", LONG[: 8 * CHUNK + 1], GREEDY)])
    assert counters.device_tokens > 0
    assert counters.restored.seconds == once


KEY, OTHER = ("a", 0, 0), ("b", 0, 0)
RESTORED = RestoreEvent(
    KEY,
    64,
    0,
    RestoreMethod.LOAD,
    0.5,
    link_busy_seconds=0.4,
    compute_busy_seconds=0.1,
    loaded_tokens=48,
    device_tokens=16,
)


def test_a_step_is_shared_by_tokens_and_counts_with_the_first_token() -> None:
    requests = RestoredRequests()
    times = StepTimes(0.25, compute_busy=0.2)
    piece = StepOutput(
        restores=[RESTORED],
        prefills=[PrefillEvent(KEY, 6), PrefillEvent(OTHER, 3)],
        step=StepEvent(times, prefilled_tokens=9, decoded_tokens=1),
    )
    requests.add(piece)
    assert requests.seconds == FirstTokenSeconds(), "it has no token yet"
    last = StepOutput(
        tokens=[TokenEvent(KEY, 0, Choice(5))],
        prefills=[PrefillEvent(KEY, 2)],
        step=StepEvent(times, prefilled_tokens=2, decoded_tokens=0),
    )
    requests.add(last)
    expected = FirstTokenSeconds(link=0.4, restore=0.1, prefill=0.12 + 0.2, total=0.5 + 0.5)
    assert _near(requests, expected)
    # The next token is of a decode.
    requests.add(replace(last, prefills=[]))
    assert _near(requests, expected)


def _near(requests: RestoredRequests, expected: FirstTokenSeconds) -> bool:
    return asdict(requests.seconds) == pytest.approx(asdict(expected))


def test_what_ends_before_its_first_token_does_not_count() -> None:
    requests = RestoredRequests()
    requests.add(StepOutput(restores=[RESTORED]))
    requests.add(StepOutput(finishes=[FinishEvent(KEY, "cancelled")]))
    requests.add(StepOutput(tokens=[TokenEvent(KEY, 0, Choice(5))]))
    # A part of it stays in the store.
    requests.add(StepOutput(restores=[replace(RESTORED, device_tokens=0)]))
    requests.add(StepOutput(tokens=[TokenEvent(KEY, 0, Choice(5))]))
    assert requests.seconds == FirstTokenSeconds()


# -- steps ------------------------------------------------------------------------------


def test_kinds_of_steps_and_their_tokens(case: Case) -> None:
    """Prefill a prompt in three pieces, and another beside the first one's decodes."""
    engine = make_engine(case.model, max_batched_tokens=16, shares_prefixes=False)
    counters = Counters()

    def step() -> StepOutput:
        output = engine.step()
        counters.add(output)
        return output

    engine.admit(admission("a", PROMPT, GREEDY))
    outputs = [step() for _ in range(3)]
    # Pieces that end in no token are handed over and counted, too.
    assert [output.is_empty for output in outputs] == [False] * 3
    assert [bool(output.tokens) for output in outputs] == [False, False, True]
    engine.admit(admission("b", PROMPT[:20], GREEDY))
    while not engine.is_idle:
        step()
    assert step().is_empty
    # b's 16 and 4 tokens beside two of a's three decodes; then one of both, and two of b.
    assert counters.steps == {StepKind.PREFILL: 3, StepKind.MIXED: 2, StepKind.DECODE: 3}
    assert counters.prefilled_tokens == len(PROMPT) + 20
    assert counters.decoded_tokens == 3 + 3
    assert counters.generated_tokens == 4 + 4
    assert counters.step_seconds > 0
    assert sum(counters.link_in_bytes.values()) == 0
    assert 0 < counters.compute_seconds <= counters.step_seconds
    assert counters.rebuild_seconds == counters.prefill_seconds == 0
    assert counters.split_tokens is None


def test_reported_compute_never_decreases() -> None:
    """Count a step that has just ended and is for a moment neither under way nor added."""
    counters = Counters()
    assert counters.compute_until_now(0.5) == 0.5
    assert counters.compute_until_now(0.0) == 0.5
    counters.add(StepOutput(work=LaneTotals(compute_seconds=0.75)))
    assert counters.compute_until_now(0.0) == 0.75


@pytest.mark.parametrize("kind", LANES)
@pytest.mark.parametrize("split", [0, 64])
def test_a_streamed_step_counts_what_it_reads_each_time(case: Case, kind: str, split: int) -> None:
    lanes = LANES[kind]()
    engine = case.engine(lanes)
    request = streamed("a", LONG, GREEDY, split=split)
    case.runner.after_step = lambda _: None
    case.runner.admit(engine, request)
    case.runner.step(engine)  # brings the tail, and computes the first new token
    counters = case.counters_of(engine)
    case.runner.step(engine)
    layers, stored = case.model.shape.layer_count, len(LONG) // CHUNK
    rebuilt = split // CHUNK
    assert counters.steps[StepKind.DECODE] == 1
    assert counters.link_in_bytes[Traffic.KV] == layers * (stored - rebuilt) * case.kv_bytes
    assert counters.link_in_bytes[Traffic.ACTIVATIONS] == (layers - 1) * rebuilt * case.x_bytes
    assert counters.cache_tokens[Residency.STREAMED, Way.LOADED] == stored * CHUNK - split
    assert counters.cache_tokens[Residency.STREAMED, Way.REBUILT] == split
    assert counters.cache_tokens[Residency.RESIDENT, Way.LOADED] == 0
    assert counters.split_tokens == split
    assert counters.compute_seconds > counters.rebuild_seconds
    assert (counters.rebuild_seconds > 0) == (split > 0)
    while not engine.is_idle:
        case.runner.step(engine)
    lanes.close()


def test_of_a_streamed_prefix_the_restore_counts_what_stays(case: Case) -> None:
    """Keep three chunks and the tail on the device; X of others is no restored token."""
    engine = case.engine(SerialLanes(CPU))
    outputs: list[StepOutput] = []
    case.runner.after_step = outputs.append
    kept = streamed("a", LONG, GREEDY, resident_tokens=3 * CHUNK)
    rows = streamed("b", LONG, GREEDY, resident_tokens=3 * CHUNK, schedule=Schedule.ROW)
    nothing = streamed("c", LONG[: 8 * CHUNK + 1], GREEDY)
    case.runner.run(engine, [kept, rows, nothing])
    events = {event.key[0]: event for output in outputs for event in output.restores}
    tail = (len(LONG) - 1) % CHUNK
    assert events["a"].loaded_tokens == 3 * CHUNK + tail
    assert events["b"].loaded_tokens == tail
    assert events["c"].brought_tokens == 0
    counters = Counters()
    for output in outputs:
        counters.add(output)
    assert sum(counters.restores.values()) == 2
    assert counters.cache_tokens[Residency.RESIDENT, Way.LOADED] == 3 * CHUNK + 2 * tail


def test_with_windows_tokens_are_those_of_the_layer_that_sees_most(
    tmp_path: Path,
) -> None:
    model = Decoder.load(write_tiny("qwen2-windows", tmp_path / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path, 40) as runner:
        case = Case(model, runner)
        runner.run(case.engine(SerialLanes(CPU)), [admission("a", LONG, GREEDY)])
        engine = case.engine(SerialLanes(CPU))
        runner.admit(engine, streamed("b", LONG, GREEDY))
        runner.step(engine)
        counters = case.counters_of(engine)
        runner.step(engine)
    assert counters.cache_tokens[Residency.STREAMED, Way.LOADED] == 8 * CHUNK
    # One layer reads all eight chunks, two layers two each.
    assert counters.link_in_bytes[Traffic.KV] == (8 + 2 * 2) * case.kv_bytes


@pytest.mark.parametrize("kind", ["serial", "overlapped"])
def test_weights_on_the_host_are_counted_by_each_step(tmp_path: Path, kind: str) -> None:
    folder = write_tiny("llama-3", tmp_path / "deep", num_hidden_layers=LAYERS)
    lanes = LANES[kind]()
    engine = small_engine(folder, lanes)
    counters = Counters()
    engine.admit(admission("a", PROMPT[:3], GREEDY))
    counters.add(engine.step())
    while not engine.is_idle:
        counters.add(engine.step())
    # The first layers of the next step are on their way already: as many as have slots.
    lanes.finish()
    counters.add(engine.step())
    steps, weights = sum(counters.steps.values()), engine.model.layer_weights
    assert steps == 4
    assert weights is not None
    assert counters.link_in_bytes[Traffic.WEIGHTS] == (
        steps * engine.model.host_weight_bytes() + weights.slot_bytes
    )
    assert counters.link_in_bytes[Traffic.KV] == 0
    assert counters.link_in_seconds > 0
    lanes.close()


# -- predictions ------------------------------------------------------------------------


def test_predictions_are_compared_with_the_same_restores_and_steps(case: Case) -> None:
    lanes = ThreadLanes(CPU)
    engine = case.engine(lanes)
    engine.watch_costs(measure(case.model, CPU, "cpu", lanes=lanes))
    # Copies that measured the link are no traffic.
    counters = case.counters_of(engine)
    case.runner.run(engine, [])
    assert sum(counters.link_in_bytes.values()) == 0
    outputs: list[StepOutput] = []

    def take(output: StepOutput) -> None:
        outputs.append(output)
        counters.add(output)

    case.runner.after_step = take
    case.runner.run(engine, [admission("a", LONG, GREEDY)])
    case.runner.run(engine, [streamed("b", LONG, Sampling(max_tokens=8, ignore_eos=True))])
    lanes.close()
    [restore] = [
        event for output in outputs for event in output.restores if event.predicted_restore_seconds
    ]
    steps = [
        output.step.times
        for output in outputs
        if output.step is not None and output.step.times.predicted_seconds is not None
    ]
    assert len(steps) >= 6
    assert counters.predicted_seconds == {
        Predicted.RESTORE: restore.predicted_restore_seconds,
        Predicted.STEP: pytest.approx(sum(times.predicted_seconds or 0 for times in steps)),
    }
    assert counters.measured_seconds == {
        Predicted.RESTORE: restore.restore_seconds,
        Predicted.STEP: pytest.approx(sum(times.seconds for times in steps)),
    }


def test_an_error_in_a_lane_leaves_its_copies_counted(case: Case) -> None:
    """Fail one of a step's copies after half of them were made."""
    lanes = SerialLanes(CPU)
    engine = case.engine(lanes)
    case.runner.after_step = lambda _: None
    case.runner.admit(engine, streamed("a", LONG, GREEDY))
    case.runner.step(engine)
    copies = 0

    def fail(lane: Lane) -> None:
        nonlocal copies
        copies += lane is Lane.LINK_IN
        if copies == 2:
            raise FailedPrecondition("the bus is gone")

    lanes.before = fail
    with pytest.raises(FailedPrecondition, match="bus"):
        engine.step()
    lanes.before = None
    counters = case.counters_of(engine)
    case.runner.step(engine)
    layers, stored = case.model.shape.layer_count, len(LONG) // CHUNK
    assert counters.link_in_bytes[Traffic.KV] > layers * stored * case.kv_bytes
    while not engine.is_idle:
        case.runner.step(engine)
