"""Parts of a CPU's attention take what the memory plan counts, however long a prefix is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine
from store_runner import store_runner, streamed
from tiny_models import VOCABULARY, write_tiny
from torch.profiler import ProfilerActivity, profile

from splitpoint.host.processor import compiler
from splitpoint.shapes import ArenaLayout, ModelShape
from worker_service.device.memory import (
    MemoryPlan,
    part_bytes,
    staging_bytes,
)
from worker_service.engine.sampling import Sampling
from worker_service.kernels.choice import by_flags, use
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

CHUNK = 4
LENGTH = 4000
NEW = 3
PROMPTS = [[3 + (7 * row + index * index) % 101 for index in range(LENGTH)] for row in range(2)]

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.chaos), 1500])
def test_a_decode_step_over_a_long_prefix_stays_within_the_plan(tmp_path: Path, split: int) -> None:
    """Twice as many parts as may wait come in tiles; the answers are those from the device."""
    assert max(map(max, PROMPTS)) < VOCABULARY
    use(by_flags(torch.float32, set()).parsed("decode=fused,prefill=fused"))
    folder = write_tiny(
        "llama", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=2 * LENGTH
    )
    model = Decoder.load(folder, CPU, torch.float32)
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    pages = LENGTH // CHUNK
    part = part_bytes(model.shape)
    greedy = Sampling(max_tokens=NEW, ignore_eos=True, logprobs=1)
    with store_runner(layout, tmp_path, 3 * pages) as runner:
        first = make_engine(
            model,
            chunk_tokens=CHUNK,
            has_activations=True,
            max_batched_tokens=512,
            cache_pages=3 * pages,
            device_memory_bytes=1 << 28,
        )
        on_device = runner.run(
            first, [admission(str(row), each, greedy) for row, each in enumerate(PROMPTS)]
        )
        engine = make_engine(
            model,
            chunk_tokens=CHUNK,
            has_activations=True,
            lanes=SerialLanes(CPU),
            staging_pages=48,
            cache_pages=80,
        )
        for row, prompt in enumerate(PROMPTS):
            runner.admit(engine, streamed(str(row), prompt, greedy, split=split))
        from_tiles, most, ran = Transcript(), 0, True
        while ran:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                output = runner.step(engine)
            from_tiles.add(output)
            live, ran = 0, output.ran
            for each in profiler.profiler.kineto_results.events():
                if each.name() == "[memory]":
                    live += each.nbytes()
                    most = max(most, live)
    planned = planned_bytes(engine.memory_plan, model.shape)
    # All parts of a layer at once would not fit.
    assert len(PROMPTS) * pages * part > planned
    assert 0 < most <= planned
    assert from_tiles.tokens == on_device.tokens


def planned_bytes(plan: MemoryPlan, shape: ModelShape) -> int:
    """What the plan leaves for a step's own tensors, without what it may collect for screens."""
    inputs = plan.input_page_count * CHUNK * shape.activation_bytes_per_token
    room = plan.room_page_count * plan.page_bytes
    layout = ArenaLayout.of(shape, chunk_tokens=CHUNK, has_activations=True)
    staged = staging_bytes(shape, layout, plan.staging_pages)
    return plan.workspace_bytes - staged - inputs - room - plan.collected_bytes
