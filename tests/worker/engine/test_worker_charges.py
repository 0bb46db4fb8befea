"""Charges of streamed requests are what they hold, and many of them run in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import CPU, admission, make_engine
from long_runs import scaled
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import VOCABULARY, write_tiny

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout
from worker_service.device.memory import MemoryPlan, divide
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

CHUNK = 16
REQUESTS = scaled(24, chaos=64)
# So many resident requests would fill the memory.
RESIDENTS = REQUESTS // 8
PROMPT = 160
NEW = 20
pytestmark = pytest.mark.scaled

GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
# Pages of one resident request at its end.
RESIDENT_PAGES = -(-(PROMPT + NEW) // CHUNK)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(write_tiny("llama", tmp_path_factory.mktemp("model")), CPU, torch.float32)


@pytest.fixture
def runner(model: Decoder, tmp_path: Path) -> Iterator[StoreRunner]:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path, 2400) as opened:
        yield opened


def memory_for_residents(
    model: Decoder, layout: ArenaLayout, count: int, pages_each: int = RESIDENT_PAGES
) -> int:
    """Return the bytes of a worker without a store that holds `count` resident requests."""

    def plan(budget: int) -> MemoryPlan:
        return divide(
            model.shape,
            layout,
            budget_bytes=budget,
            weight_bytes=model.weight_bytes,
            max_batch_size=REQUESTS,
            max_batched_tokens=64,
            has_store=False,
        )

    roomy = plan(1 << 40)
    fixed = roomy.weight_bytes + roomy.workspace_bytes
    return plan(fixed + count * pages_each * roomy.page_bytes).budget_bytes


class Watch:
    """Checks after each step that no sequence holds more than it was charged."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.peak_pages = self.peak_decodes = self.peak_held = 0

    def __call__(self, output: StepOutput) -> None:
        engine = self._engine
        claims, room = engine.cache.claims, engine.memory_plan.room_page_count
        used = engine.cache.pages.used_count
        assert claims.room_used <= room
        assert used <= claims.promised_count + room
        self.peak_pages = max(self.peak_pages, used)
        if output.step is not None:
            self.peak_decodes = max(self.peak_decodes, output.step.decoded_tokens)
        for sequence in engine.queues.running:
            claim = sequence.claim
            assert claim.held == sum(page is not None for page in sequence.pages) + len(
                sequence.row_pages
            )
            self.peak_held = max(self.peak_held, claim.held - claim.room_count)


def engine_of(model: Decoder, budget: int) -> Engine:
    return make_engine(
        model,
        has_activations=True,
        max_batch_size=REQUESTS,
        device_memory_bytes=budget,
        lanes=SerialLanes(CPU),
    )


def test_streamed_requests_decode_together_where_an_eighth_of_them_fits_resident(
    model: Decoder, runner: StoreRunner
) -> None:
    budget = memory_for_residents(model, runner.layout, RESIDENTS)
    prompts = [prompt_of(PROMPT, seed) for seed in range(REQUESTS)]
    resident = engine_of(model, 1 << 26)
    requests = [admission(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    wanted = runner.run(resident, requests).tokens
    # Cold under another salt, where all prefill at once, and from a warm store.
    for salt in (b"cold", b""):
        engine = engine_of(model, budget)
        plan = engine.memory_plan
        assert plan.device_page_count <= RESIDENTS * RESIDENT_PAGES
        runner.after_step = watch = Watch(engine)
        requests = [
            streamed(str(i), prompt, GREEDY, salt=salt, split=40 * (i % 3))
            for i, prompt in enumerate(prompts)
        ]
        found = runner.run(engine, requests)
        assert found.tokens == wanted
        assert all(each.error is None for each in found.finishes.values())
        # Cold, the first requests end before the last ones are prefilled.
        assert salt or watch.peak_decodes == REQUESTS
        assert watch.peak_held == plan.streamed_page_count
        assert watch.peak_pages <= REQUESTS + plan.room_page_count <= RESIDENTS * RESIDENT_PAGES
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
        assert engine.cache.claims.room_used == 0


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_64_long_requests_of_opt_125m_decode_together_where_8_resident_ones_fit(
    tmp_path: Path,
) -> None:
    """The same with 1,152 tokens each, in the real shape: minutes, and 6 GB of shared memory."""
    chunk, new = 64, 8
    prompt, pages_each = 18 * chunk - new, 18
    sampling = Sampling(max_tokens=new, ignore_eos=True)
    config = DecoderConfig.of_shape(BUILT_IN_SHAPES["opt-125m"])
    model = Decoder.random(config, 0, CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=chunk, has_activations=False)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.shape.vocabulary_size
    prompts = torch.randint(3, vocabulary, (REQUESTS, prompt), generator=generator).tolist()
    budget = memory_for_residents(model, layout, 8, pages_each)

    def engine_with(limit: int, step_tokens: int = 64) -> Engine:
        return make_engine(
            model,
            has_activations=False,
            max_batch_size=REQUESTS,
            device_memory_bytes=limit,
            lanes=SerialLanes(CPU),
            chunk_tokens=chunk,
            max_batched_tokens=step_tokens,
        )

    with store_runner(layout, tmp_path, REQUESTS * pages_each + 8) as runner:
        wanted: dict[str, list[int]] = {}
        for first in range(0, REQUESTS, 8):
            few = [admission(str(i), prompts[i], sampling) for i in range(first, first + 8)]
            wanted |= runner.run(engine_with(3 << 30, 512), few).tokens
        engine = engine_with(budget)
        plan = engine.memory_plan
        assert plan.device_page_count <= 8 * pages_each
        runner.after_step = watch = Watch(engine)
        found = runner.run(
            engine, [streamed(str(i), each, sampling) for i, each in enumerate(prompts)]
        )
    assert found.tokens == wanted
    assert watch.peak_decodes == REQUESTS
    assert watch.peak_held == plan.streamed_page_count
    assert watch.peak_pages <= REQUESTS + plan.room_page_count <= 8 * pages_each


@pytest.mark.parametrize("schedule", [Schedule.PIPELINED, Schedule.ROW])
@pytest.mark.parametrize("kept", [0, 3, 8])
def test_the_charge_of_a_streamed_request_is_what_it_holds(
    model: Decoder, runner: StoreRunner, schedule: Schedule, kept: int
) -> None:
    """Compare the measured peak of pages outside the room with the claim, cold and warm."""
    for _ in range(2):
        engine = engine_of(model, 1 << 26)
        runner.after_step = watch = Watch(engine)
        request = streamed(
            "a", prompt_of(PROMPT), GREEDY, resident_tokens=kept * CHUNK, schedule=schedule
        )
        runner.run(engine, [request])
        claim = engine.page_manager.claim_of(request)
        assert claim - 1 <= watch.peak_held <= claim


def test_a_worker_without_a_store_has_no_room(model: Decoder, runner: StoreRunner) -> None:
    limits: dict[str, Any] = {"max_batch_size": 4, "max_batched_tokens": 64}
    plans = [
        divide(
            model.shape,
            runner.layout,
            budget_bytes=1 << 28,
            weight_bytes=model.weight_bytes,
            has_store=has_store,
            **limits,
        )
        for has_store in (True, False)
    ]
    assert [plan.room_page_count for plan in plans] == [2 * (64 // CHUNK + 1), 0]
    assert plans[0].device_page_count == plans[1].page_count
