"""Streamed sequences keep their first and newest chunks on the device, and read only the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import CPU, make_engine
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout
from worker_service.device.memory import SINK_PAGES, MemoryPlan, divide, draft_window_pages
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Stage
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

CHUNK = 16
NEW = 20
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
# One ends within the window, one crosses a chunk's border in its first steps.
LENGTHS = (45, 126, 130)


class Case:
    """A model, prompts with transformers' answers, and a store."""

    def __init__(self, name: str, folder: Path, runner: StoreRunner, model: Decoder) -> None:
        reference = build_tiny(name)
        self.model, self.runner = model, runner
        self.prompts, self.wanted = zip(
            *(clear_prompt(reference, length, NEW) for length in LENGTHS), strict=True
        )

    def engine(self, window: int, **options: Any) -> Engine:
        options = {"lanes": SerialLanes(CPU), **options}
        return make_engine(
            self.model,
            chunk_tokens=CHUNK,
            has_activations=True,
            window_pages=window,
            **options,
        )

    def run(self, engine: Engine, salt: bytes, **options: Any) -> list[StepOutput]:
        """Stream all prompts, check their texts and charges, and return what the steps gave."""
        outputs: list[StepOutput] = []

        def note(output: StepOutput) -> None:
            outputs.append(output)
            for sequence in engine.queues.running:
                claim = sequence.claim
                assert claim.held - claim.room_count <= claim.promised
                assert claim.promised <= engine.page_manager.claim_of(sequence.admission)

        self.runner.after_step = note
        requests = [
            streamed(str(i), prompt, GREEDY, salt=salt, **options)
            for i, prompt in enumerate(self.prompts)
        ]
        transcript = self.runner.run(engine, requests)
        assert [transcript.tokens[each.request_id] for each in requests] == list(self.wanted)
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
        return outputs


# Grouped queries; windows below full layers.
@pytest.fixture(scope="module", params=["llama-3", "gemma3"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("case")
    model = Decoder.load(write_tiny(request.param, folder / "model"), CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, folder, 600) as runner:
        yield Case(request.param, folder, runner, model)
    torch.set_num_threads(before)


# Every window and both schedules in each family, but not each with each.
PAIRED = [
    ("llama-3", 1, Schedule.PIPELINED),
    ("llama-3", 3, Schedule.ROW),
    ("llama-3", 40, Schedule.PIPELINED),
    ("gemma3", 1, Schedule.ROW),
    ("gemma3", 3, Schedule.PIPELINED),
    ("gemma3", 40, Schedule.ROW),
]


@pytest.mark.parametrize(
    ("case", "window", "schedule"),
    [
        pytest.param(*each, marks=[] if each in PAIRED else pytest.mark.chaos)
        for each in itertools.product(
            ["llama-3", "gemma3"], [1, 3, 40], [Schedule.PIPELINED, Schedule.ROW]
        )
    ],
    indirect=["case"],
)
def test_texts_are_those_without_a_window(case: Case, window: int, schedule: Schedule) -> None:
    """Cold, then from the store; with and without a front; split, and loaded whole."""
    for kept in (0, 3 * CHUNK):
        salt = bytes([window, kept, schedule is Schedule.ROW])
        engine = case.engine(window, max_batched_tokens=40, lanes=ThreadLanes(CPU))
        case.run(engine, salt, resident_tokens=kept, schedule=schedule)
        case.run(engine, salt, resident_tokens=kept, schedule=schedule, split=56)
        engine.lanes.close()


@pytest.mark.parametrize("window", [0, 1, 3])
def test_steps_read_what_is_between_front_and_window(case: Case, window: int) -> None:
    """Only the restore brings the window."""
    engine = case.engine(window)
    case.run(engine, b"reads")
    outputs = case.run(engine, b"reads")
    kept = window + (SINK_PAGES if window else 0)
    assert engine.memory_plan.streamed_page_count == 1 + kept
    full = [(length - 1) // CHUNK for length in LENGTHS]
    restores = {each.key[0]: each for output in outputs for each in output.restores}
    for index, length in enumerate(LENGTHS):
        brought = min(kept, full[index]) * CHUNK
        tail = (length - 1) % CHUNK
        assert restores[str(index)].loaded_tokens == brought + tail
        planes = case.model.shape.kv_bytes_per_token + case.model.shape.activation_bytes_per_token
        least = brought * case.model.shape.kv_bytes_per_token
        assert least <= restores[str(index)].link_bytes <= least + CHUNK * planes
    steps = [output.step for output in outputs if output.step is not None]
    assert steps[0].streamed is not None
    assert steps[0].streamed.loaded == sum(max(0, each - kept) for each in full) * CHUNK


def test_a_victim_gives_up_its_front_then_its_window_then_its_sinks(case: Case) -> None:
    engine = case.engine(2)
    case.run(engine, b"victim")
    request = streamed("0", case.prompts[2], GREEDY, salt=b"victim", resident_tokens=3 * CHUNK)
    case.runner.admit(engine, request)
    case.runner.after_step = lambda _: None
    while not engine.queues.running or engine.queues.running[0].stage is not Stage.RUNNING:
        case.runner.step(engine)
    (sequence,) = engine.queues.running
    pages = engine.page_manager
    # The tail is full by now, or nearly: chunks 0 to 3 are the front, 6 and 7 the window.
    assert sequence.stored_range == range(4, 6)
    left = []
    spare = pages.spare_count
    while pages.give_up_kept(sequence):
        left.append((sequence.kept_chunks, sequence.window_chunks, sequence.stored_range))
        assert pages.spare_count == spare + len(left)
        assert sequence.claim.held <= sequence.claim.promised
    assert left == [
        (3, 2, range(3, 6)),
        (2, 2, range(2, 6)),
        (1, 2, range(1, 6)),
        (1, 1, range(1, 7)),
        (1, 0, range(1, 8)),
        (0, 0, range(8)),
    ]
    assert sequence.claim.promised == 1
    tokens = [event.choice.token_id for event in engine.queues.output.tokens]
    while not engine.is_idle:
        tokens += [event.choice.token_id for event in case.runner.step(engine).tokens]
    assert tokens[-NEW + 1 :] == list(case.wanted[2])[1:]


def test_the_window_is_a_part_of_the_context_and_gives_way_in_little_memory() -> None:
    shape = BUILT_IN_SHAPES["opt-125m"]
    layout = ArenaLayout.of(shape, chunk_tokens=64, has_activations=True)
    # 5 % of 2,048 tokens are 102: two chunks.
    window = draft_window_pages(shape, 64)
    assert window == 2

    def plan(budget: int, **options: Any) -> MemoryPlan:
        return divide(
            shape,
            layout,
            budget_bytes=budget,
            weight_bytes=shape.weight_bytes,
            max_batch_size=4,
            max_batched_tokens=64,
            window_pages=window,
            **options,
        )

    roomy = plan(8 << 30)
    assert (roomy.streamed_page_count, roomy.window_page_count, roomy.sink_page_count) == (4, 2, 1)
    assert plan(8 << 30, has_store=False).streamed_page_count == 1
    fixed = roomy.weight_bytes + roomy.workspace_bytes
    # The room gives way, too.
    least = 5 - roomy.room_page_count
    plans = [plan(fixed + pages * roomy.page_bytes) for pages in range(least, 9)]
    assert sorted({each.window_page_count for each in plans}) == [0, 1, 2]
    assert all(2 * each.streamed_page_count <= each.page_count for each in plans)
    # Each draft is a row of the step, with logits.
    assert plan(8 << 30, draft_tokens=4).page_count < roomy.page_count
