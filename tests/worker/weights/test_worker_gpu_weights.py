"""Weights on the host of a CUDA device: exact tokens, a budget that is kept, locked memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import admission, run_all
from small_memory import LAYERS, small_engine, total_bytes
from tiny_models import FAMILY_CASES, build_tiny, clear_prompt, write_tiny

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import ArenaLayout, DataType, ModelShape
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import divide, place
from worker_service.device.pinning import CudaRegistrar
from worker_service.engine.engine import Engine
from worker_service.engine.sampling import Sampling
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import SerialLanes
from worker_service.lanes.timeline import Trace
from worker_service.model.decoder import Decoder
from worker_service.weights.lock import WeightLock
from worker_service.weights.matrices import weight_sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda:0")
NEW_TOKENS = 8
# Workspaces that libraries take from torch's allocator, outside of the budget.
LIBRARY_BYTES = 128 << 20


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_tokens_are_exact_with_a_quarter_of_the_weights_memory(case: str, tmp_path: Path) -> None:
    folder = write_tiny(case, tmp_path, num_hidden_layers=LAYERS)
    model = build_tiny(case, num_hidden_layers=LAYERS)
    prompts, wanted = zip(*(clear_prompt(model, n, NEW_TOKENS) for n in (1, 3, 9)), strict=True)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [admission(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    for lanes in (StreamLanes(CUDA), SerialLanes(CUDA)):
        engine = small_engine(folder, lanes)
        assert engine.model.host_weight_bytes() > total_bytes(folder, CUDA) // 2
        transcript = run_all(engine, requests)
        assert [transcript.tokens[str(i)] for i in range(len(prompts))] == list(wanted)
        lanes.close()


def test_memory_stays_within_the_budget_and_copies_beside_compute(tmp_path: Path) -> None:
    """A model of 1.4 GiB in 16 bits needs a quarter of it, as torch counts it."""
    shape = ModelShape("large", "llama", 16, 2048, 16, 4, 128, 5632, 8192, 2048, DataType.BFLOAT16)
    config = DecoderConfig.of_shape(shape)
    sizes = weight_sizes(config, CUDA, torch.bfloat16)
    layout = ArenaLayout.of(shape, chunk_tokens=16, has_activations=False)
    limits: Any = {"max_batch_size": 4, "max_batched_tokens": 64}
    budget = sizes.total // 4
    placement = place(shape, layout, sizes, budget_bytes=budget, **limits)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    model = Decoder.random(config, 1, CUDA, torch.bfloat16, placement.on_host)
    plan = divide(shape, layout, budget_bytes=budget, weight_bytes=placement.device_bytes, **limits)
    assert model.weight_bytes == plan.weight_bytes
    lock = WeightLock(CudaRegistrar(CUDA), model.host_memory)
    lock.wait()
    lanes = StreamLanes(CUDA)
    engine = Engine(model, DeviceCache(layout, plan, CUDA), lanes=lanes, **limits)
    engine.trace = Trace()
    try:
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        requests = [admission(str(i), [5 + i] * 20, sampling) for i in range(4)]
        transcript = run_all(engine, requests)
        assert all(len(tokens) == 8 for tokens in transcript.tokens.values())
        engine.trace.extend(lanes.finish())
        assert torch.cuda.max_memory_allocated(CUDA) - before <= budget + LIBRARY_BYTES
        assert lock.locked_bytes >= model.host_weight_bytes()
        assert all(memory.is_pinned() for memory in model.host_memory)
        weights = [span for span in engine.trace.spans if span.lane is Lane.WEIGHTS_IN]
        assert {span.layer for span in weights} > set(placement.on_host.layers)
    finally:
        lanes.close()
        lock.close()
