"""Test that streamed steps give the same tokens, in tiles of any size."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine
from long_runs import scaled
from store_runner import StoreRunner, store_runner, streamed, wait_loaded
from tiny_models import build_tiny, clear_prompt, write_tiny
from torch.profiler import ProfilerActivity, profile

from splitpoint.planning.plan import SplitLine
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import ArenaLayout, Encoding
from worker_service.device.memory import staging_bytes
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission, Stage
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes
from worker_service.lanes.timeline import Trace
from worker_service.model.decoder import Decoder
from worker_service.store.verifier import Verifier

CHUNK = 16
NEW = 8
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True, logprobs=1)
# Lengths around chunk borders; each frees chunks and takes new pages while it grows.
LENGTHS = (45, 79, 130)
SPLITS = (0, 1, CHUNK - 1, CHUNK, 56, 1000)
SPLITS_AND_TILES = [(0, 3), (1, 16), (56, 1), (56, 3), (1000, 16)]

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Case:
    """A model, prompts with transformers' answers to them, and a store with both."""

    model: Decoder
    runner: StoreRunner
    prompts: list[list[int]]
    wanted: list[list[int]]

    def engine(
        self,
        lanes: Lanes,
        *,
        tile_pages: int = 3,
        staging_pages: int = 48,
        room_pages: int | None = None,
    ) -> Engine:
        engine = make_engine(
            self.model,
            has_activations=True,
            encoding=self.runner.layout.encoding,
            lanes=lanes,
            staging_pages=staging_pages,
            room_pages=room_pages,
            cache_pages=80,
        )
        engine.tile_pages = tile_pages
        return engine

    def warm(self) -> None:
        """Write prompts and answers into the store."""
        lanes = SerialLanes(CPU)
        requests = [admission(str(i), prompt, GREEDY) for i, prompt in enumerate(self.prompts)]
        self.check(self.runner.run(self.engine(lanes), requests))

    def check(self, transcript: Transcript) -> None:
        for name, tokens in transcript.tokens.items():
            assert tokens == self.wanted[int(name) % len(self.wanted)], name

    def run(
        self,
        engine: Engine,
        split: int | SplitLine,
        *,
        salt: bytes = b"",
        residents: Sequence[int] = (),
        restored_at_once: bool = False,
        **options: Any,
    ) -> list[float]:
        """Stream all prompts, run some resident beside them; return their log-probabilities.

        `restored_at_once`: all prefixes are on the device before the first batch, as over
        `SerialLanes`. Otherwise the threads decide which requests share the first batches.
        """
        requests = [
            streamed(str(i), prompt, GREEDY, split=split, salt=salt, **options)
            for i, prompt in enumerate(self.prompts)
        ]
        requests += [
            admission(str(len(self.prompts) + i), self.prompts[i], GREEDY) for i in residents
        ]
        scores: list[float] = []

        def note(output: StepOutput) -> None:
            scores.extend(event.choice.logprob or 0.0 for event in output.tokens)
            assert engine.lanes.finish() == [], "something is under way between steps"

        self.runner.after_step = note
        if restored_at_once:
            self.restore_all(engine, requests)
        transcript = self.runner.run(engine, [] if restored_at_once else requests)
        assert len(transcript.tokens) == len(requests)
        self.check(transcript)
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
        return scores

    def restore_all(self, engine: Engine, requests: Sequence[Admission]) -> None:
        """Admit the requests and bring their prefixes, of which only the tails are read here."""
        for each in requests:
            self.runner.admit(engine, each)
        begun = threading.Event()
        engine.lanes.before = lambda _: assert_set(begun)
        assert not engine.step().ran
        begun.set()
        for sequence in engine.queues.running:
            wait_loaded(sequence)
        engine.lanes.before = None


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def make_case(name: str, folder: Path, encoding: Encoding = Encoding.NATIVE) -> Iterator[Case]:
    reference = build_tiny(name)
    model = Decoder.load(write_tiny(name, folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(
        model.shape, chunk_tokens=CHUNK, has_activations=True, encoding=encoding
    )
    prompts, wanted = zip(*(clear_prompt(reference, n, NEW) for n in LENGTHS), strict=True)
    with store_runner(layout, folder, 400) as runner:
        case = Case(model, runner, list(prompts), list(wanted))
        case.warm()
        yield case


# GQA; learned positions; windows everywhere; windows above; norms on keys.
CASES = ("llama-3", "opt", "mistral", "qwen2-windows", "qwen3", "gemma2", "gemma3")


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    yield from make_case(request.param, tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from make_case("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    opened = ThreadLanes(CPU)
    yield opened
    opened.close()


def each_in_one(
    splits: Sequence[int], other: int, families: Sequence[str] = CASES
) -> pytest.MarkDecorator:
    """All splits in the first family, and one in these others; the rest in `make chaos`."""

    def is_essential(case: str, split: int) -> bool:
        return case == CASES[0] or (case in families and split == other)

    return pytest.mark.parametrize(
        ("case", "split"),
        [
            pytest.param(*each, marks=[] if is_essential(*each) else pytest.mark.chaos)
            for each in itertools.product(CASES, splits)
        ],
        indirect=["case"],
    )


# In the middle of a chunk: some is rebuilt, and some loaded.
@each_in_one(SPLITS, 56)
def test_tokens_are_those_of_transformers(case: Case, split: int, lanes: ThreadLanes) -> None:
    """Batch several streamed sequences with a resident one, from a warm store."""
    case.run(case.engine(lanes, tile_pages=(1, 3, 16)[split % 3]), split, residents=[1])


@pytest.mark.parametrize(
    ("split", "tile_pages"),
    [
        pytest.param(*each, marks=[] if each in SPLITS_AND_TILES else pytest.mark.chaos)
        for each in itertools.product([0, 1, 56, 1000], [1, 3, 16])
    ],
)
def test_the_serial_twin_computes_the_same_bits(
    llama: Case, split: int, tile_pages: int, lanes: ThreadLanes
) -> None:
    engine = llama.engine(lanes, tile_pages=tile_pages)
    overlapped = llama.run(engine, split, restored_at_once=True)
    serial = llama.run(llama.engine(SerialLanes(CPU), tile_pages=tile_pages), split)
    assert overlapped == serial


@each_in_one([0, 24, 1000], 24, ("mistral", "gemma3"))
def test_a_long_prompt_is_prefilled_behind_a_prefix_in_the_store(
    case: Case, split: int, lanes: ThreadLanes
) -> None:
    """Attend in each piece of the prompt what the pieces before it stored."""
    engine = case.engine(lanes)
    engine.max_batched_tokens = 40
    case.run(engine, split, salt=bytes([split % 251]))
    assert engine.last_step is not None
    case.run(engine, split, salt=bytes([split % 251]), resident_tokens=2 * CHUNK)


@pytest.mark.scaled
def test_runs_with_delayed_lanes_find_no_race(llama: Case) -> None:
    """Delay copies and products at random, in staging memory of every size."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    lanes = ThreadLanes(CPU)

    def delay(_: Lane) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.choice([0.0, 1e-4, 3e-4]))

    lanes.before = delay
    few = Sampling(max_tokens=3, ignore_eos=True, logprobs=1)
    # Scores besides tokens: a row of another tile seldom changes which token is best.
    exact: dict[tuple[str, int], float] = {}
    for number in range(scaled(30, chaos=100)):
        serial = number == 0
        engine = llama.engine(
            SerialLanes(CPU) if serial else lanes,
            tile_pages=rng.randrange(1, 5),
            staging_pages=rng.randrange(3, 13),
        )
        chosen = range(3) if serial else rng.sample(range(3), rng.randrange(1, 4))
        requests = [
            streamed(
                str(index),
                llama.prompts[index],
                few,
                split=rng.randrange(140),
                resident_tokens=rng.choice([0, 0, 20, 64]),
                schedule=rng.choice([Schedule.ROW, Schedule.PIPELINED]),
            )
            for index in chosen
        ]
        found: dict[tuple[str, int], float] = {}

        def note(output: StepOutput, found: dict[tuple[str, int], float] = found) -> None:
            for event in output.tokens:
                found[event.key[0], event.index] = event.choice.logprob or 0.0

        llama.runner.after_step = note
        transcript = llama.runner.run(engine, requests)
        for name, tokens in transcript.tokens.items():
            assert tokens == llama.wanted[int(name)][:3], (number, name)
        exact = exact or found
        for key, value in found.items():
            assert value == pytest.approx(exact[key], abs=2e-4), (number, key)
    lanes.close()


def test_the_next_layer_is_on_the_link_while_this_one_computes(llama: Case) -> None:
    """Measure by the spans' clock, on a link that is slower than the device.

    The layers behind the first one take it half a second, with room for all of them: so long may
    a busy machine keep this thread from the first layer's product.
    """
    rate = 2e5
    lanes = ThreadLanes(CPU, EmulatedLink(rate))
    engine = llama.engine(lanes, tile_pages=2)
    few = Sampling(max_tokens=2, ignore_eos=True)
    llama.runner.after_step = lambda _: None
    llama.runner.admit(engine, streamed("2", llama.prompts[2], few, split=64))
    llama.runner.step(engine)
    engine.trace = Trace()  # without the restore's spans
    transcript = Transcript()
    step_until_idle(llama.runner, engine, transcript)
    assert transcript.tokens["2"] == llama.wanted[2][1:2]
    spans = engine.trace.spans
    link = sorted((s for s in spans if s.lane is Lane.LINK_IN), key=lambda span: span.start)
    assert {span.name for span in link} == {"send X", "load K,V"}
    # Layer 0's X comes from token ids.
    assert all(span.layer for span in link if span.name == "send X")
    finish = [span for span in spans if span.name == "finish"]
    assert any(
        copy.start < product.end and (copy.layer or 0) > (product.layer or 0)
        for copy in link
        for product in finish
        if product.start < copy.end
    )
    times = engine.last_step
    assert times is not None
    layers, shape = llama.model.shape.layer_count, llama.model.shape
    stored = 8 * CHUNK  # of 130 + 1 tokens
    assert times.rebuilt_tokens == layers * 64
    assert times.loaded_tokens == layers * (stored - 64)
    assert times.link_bytes == (layers - 1) * 64 * shape.activation_bytes_per_token_layer + (
        times.loaded_tokens * shape.kv_bytes_per_token_layer
    )
    assert times.link_busy == pytest.approx(times.link_bytes / rate, rel=0.05)
    assert 0 < times.compute_busy < times.seconds
    # One step decoded it, and no step is shorter than what crossed the link in it.
    mean = transcript.finishes["2"].mean_step_seconds
    assert mean is not None
    assert mean > times.link_busy
    resident = llama.runner.run(engine, [admission("3", llama.prompts[2], few)])
    assert resident.finishes["3"].mean_step_seconds is None
    lanes.close()


def test_windows_read_what_some_query_sees(
    lanes: ThreadLanes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Read at most two of 8 stored chunks in layers with a window of 20."""
    for case in make_case("qwen2-windows", tmp_path_factory.mktemp("windows")):
        engine = case.engine(lanes)
        few = Sampling(max_tokens=2, ignore_eos=True)
        case.runner.run(engine, [streamed("2", case.prompts[2], few)])
        assert engine.last_step is not None
        # The last query is at 130; the tail chunk from 128 on is on the device.
        assert engine.last_step.loaded_tokens == 8 * CHUNK + 2 * 2 * CHUNK


def test_the_split_follows_the_sequence(llama: Case, lanes: ThreadLanes) -> None:
    engine = llama.engine(lanes)
    line = SplitLine(0.5, 4.0, 1000)
    seen: list[tuple[int, int]] = []

    def note(_: StepOutput) -> None:
        for sequence in engine.queues.running:
            if engine.last_step is not None and sequence.stage is Stage.RUNNING:
                # The step computed the token before the one that was appended.
                length = sequence.computed - 1
                seen.append((length, engine.last_step.rebuilt_tokens))

    llama.runner.after_step = note
    transcript = llama.runner.run(engine, [streamed("1", llama.prompts[1], GREEDY, split=line)])
    llama.check(transcript)
    layers = llama.model.shape.layer_count
    assert seen == [(length, layers * line.at(length, CHUNK)) for length, _ in seen]
    assert {split // layers for _, split in seen} == {48}  # at 79 to 85 tokens


def test_what_stays_on_the_device_is_neither_loaded_nor_rebuilt(
    llama: Case, lanes: ThreadLanes
) -> None:
    few = Sampling(max_tokens=4, ignore_eos=True)
    layers = llama.model.shape.layer_count
    claims = []
    for kept in (0, 3 * CHUNK, 5 * CHUNK + 7, 1000):
        engine = llama.engine(lanes)
        most = 0

        def note(_: StepOutput, engine: Engine = engine) -> None:
            nonlocal most
            most = max(most, engine.cache.pages.used_count)

        llama.runner.after_step = note
        request = streamed("2", llama.prompts[2], few, split=2 * CHUNK, resident_tokens=kept)
        claims.append(engine.page_manager.claim_of(request))
        transcript = llama.runner.run(engine, [request])
        assert transcript.tokens["2"] == llama.wanted[2][:4]
        assert engine.last_step is not None
        chunks = min(kept // CHUNK, 8)
        rebuilt = max(2 - chunks, 0)
        assert engine.last_step.rebuilt_tokens == layers * rebuilt * CHUNK
        assert engine.last_step.loaded_tokens == layers * (8 - chunks - rebuilt) * CHUNK
        assert most == chunks + 1 <= claims[-1]
    assert claims == sorted(claims)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_activations_that_stay_on_the_device_are_rebuilt_from_without_the_link(
    name: str, lanes: ThreadLanes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Run schedule ROW from a warm and a cold store, with two chunks of X in a page."""
    for case in make_case(name, tmp_path_factory.mktemp("row")):
        row: Any = {"schedule": Schedule.ROW}
        for kept in (CHUNK, 5 * CHUNK, 1000):
            engine = case.engine(lanes)
            engine.max_batched_tokens = 40
            case.run(engine, 0, salt=bytes([kept % 251]), resident_tokens=kept, **row)
            case.run(engine, 24, resident_tokens=kept, **row)
        engine, layers = case.engine(lanes), case.model.shape.layer_count
        few = Sampling(max_tokens=4, ignore_eos=True)
        request = streamed("2", case.prompts[2], few, resident_tokens=5 * CHUNK, **row)
        most = 0

        def note(_: StepOutput, engine: Engine = engine) -> None:
            nonlocal most
            most = max(most, engine.cache.pages.used_count)

        case.runner.after_step = note
        engine.trace = Trace()
        case.runner.run(engine, [request])
        times = engine.last_step
        assert times is not None
        assert times.rebuilt_tokens == layers * 5 * CHUNK
        assert times.loaded_tokens == layers * 3 * CHUNK
        # Only what is loaded crosses the link, and X of five chunks takes three pages.
        assert times.link_bytes == times.loaded_tokens * case.model.shape.kv_bytes_per_token_layer
        taken = [span for span in engine.trace.spans if span.name == "copy X"]
        assert {span.layer for span in taken} == set(range(1, layers))
        assert most == 3 + 1 <= engine.page_manager.claim_of(request)


@pytest.mark.parametrize("serial", [False, True])
def test_a_chunk_lost_in_mid_step_costs_its_own_sequence_a_new_start(
    llama: Case, serial: bool
) -> None:
    """Reuse a slot under the copies: the NaN that was read must not stay anywhere."""
    lanes = SerialLanes(CPU) if serial else ThreadLanes(CPU)
    engine = llama.engine(lanes)
    lost: list[int] = []

    def lose(lane: Lane) -> None:
        victim = next((s for s in engine.queues.running if s.key[0] == "1"), None)
        if lane is not Lane.LINK_IN or victim is None or len(victim.stored) < 2:
            return
        # Once while it decodes, and once while it is prefilled again.
        if len(victim.tokens) in (81, 85) and len(victim.tokens) not in lost:
            lost.append(len(victim.tokens))
            chunk, tensors = victim.stored[1], llama.runner.connection.tensors
            llama.runner.lose(chunk)
            for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
                plane[chunk.slot] = float("nan")

    lanes.before = lose
    # A salt of its own, so that other tests do not lose these chunks.
    llama.run(engine, 24, salt=b"lost" + bytes([serial]))
    assert lost == [81, 85]
    for plane in (*engine.cache.keys, *engine.cache.values, *engine.cache.inputs):
        assert plane.isfinite().all()
    lanes.close()


def test_a_step_that_read_a_damaged_chunk_does_not_go_on_computing(tmp_path: Path) -> None:
    """Wait for the store's answer: the engine has nothing to compute meanwhile."""
    for case in make_case("llama", tmp_path):
        engine = make_engine(
            case.model,
            has_activations=True,
            cache_pages=80,
            lanes=SerialLanes(CPU),
            verifier=Verifier(0.0),
        )
        for plane in case.runner.connection.tensors.keys:
            plane[list(case.runner.store.pool.chunks())] += 1
        computing: list[float] = []

        def note(
            output: StepOutput, engine: Engine = engine, computing: list[float] = computing
        ) -> None:
            computing.extend([engine.computing_seconds] * output.loss_count)

        case.runner.after_step = note
        case.check(case.runner.run(engine, [admission("1", case.prompts[1], GREEDY)]))
        assert computing == [0.0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logits_that_are_no_numbers_end_a_request_whose_chunks_are_intact(
    tmp_path: Path, is_streamed: bool
) -> None:
    """Let the model itself give NaN: no chunk is dropped, and other requests go on."""
    bad = 5
    for case in make_case("llama", tmp_path):
        weights = case.model._embedding
        engine = case.engine(SerialLanes(CPU))
        prompt = [*case.prompts[1][:64], bad]
        with torch.no_grad():
            weights[bad] = float("nan")
        request = (
            streamed("bad", prompt, GREEDY) if is_streamed else admission("bad", prompt, GREEDY)
        )
        transcript = case.runner.run(engine, [request])
        error = transcript.finishes["bad"].error
        assert error is not None
        assert error.reason == "NON_FINITE_LOGITS"
        assert case.runner.store.inspection.damaged_count == 0
        assert case.runner.store.peek(b"", prompt).cached_tokens == 64
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


def step_until_idle(runner: StoreRunner, engine: Engine, transcript: Transcript) -> None:
    transcript.add(runner.step(engine))
    while not engine.is_idle:
        transcript.add(runner.step(engine))


def test_an_error_in_a_lane_ends_the_step_and_leaves_nothing_under_way(llama: Case) -> None:
    lanes = ThreadLanes(CPU)
    engine = llama.engine(lanes, tile_pages=1)
    copies = 0

    def fail(lane: Lane) -> None:
        nonlocal copies
        copies += lane is Lane.LINK_IN
        if copies == 30:
            raise OSError("the bus is gone")

    lanes.before = fail
    llama.runner.after_step = lambda _: None
    for index in (1, 2):
        llama.runner.admit(engine, streamed(str(index), llama.prompts[index], GREEDY, split=40))
    transcript = Transcript()
    with pytest.raises(OSError, match="the bus is gone"):
        step_until_idle(llama.runner, engine, transcript)
    lanes.before = None
    assert lanes.finish() == []
    # The step that failed counted no token.
    step_until_idle(llama.runner, engine, transcript)
    llama.check(transcript)
    lanes.close()


@pytest.mark.parametrize(("split", "tile_pages"), [(0, 16), (56, 1), (1000, 16)])
def test_a_step_takes_no_more_memory_than_was_planned(
    llama: Case, split: int, tile_pages: int
) -> None:
    """Check everything that a step allocates in prefills and decodes, with tiles of any size."""
    engine = llama.engine(SerialLanes(CPU), tile_pages=tile_pages)
    engine.max_batched_tokens = 64
    shape, layout, plan = llama.model.shape, llama.runner.layout, engine.memory_plan
    staged = staging_bytes(shape, layout, plan.staging_pages)
    assert engine.staging.size_bytes == staged
    inputs = plan.input_page_count * CHUNK * shape.activation_bytes_per_token
    room = plan.room_page_count * plan.page_bytes
    llama.runner.after_step = lambda _: None
    salt = b"memory" + bytes([split % 251, tile_pages])
    for index, prompt in enumerate(llama.prompts):
        llama.runner.admit(engine, streamed(str(index), prompt, GREEDY, split=split, salt=salt))
    most = 0
    ran = True
    while ran:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            ran = llama.runner.step(engine).ran
        live = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
    print("peak", most, "of", plan.workspace_bytes - staged - inputs - room)
    assert 0 < most <= plan.workspace_bytes - staged - inputs - room
