"""Workers whose weights are four times their device memory, with a store and as a process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from admitting import admitting
from local_stack import LocalStack, StackShape, local_stack, start_service, stop_process
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.planning.plan import Objective, ReasonKind, Residency
from splitpoint.planning.schedule import Lane
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.planning.weight_schedule import LAYER_PIECES
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import worker_pb2, worker_pb2_grpc
from worker_service.lanes.lanes import EmulatedLink
from worker_service.lanes.timeline import Span, Trace
from worker_service.weights.matrices import weight_sizes

NEW_TOKENS = 6
SIZES = {
    "opt": {"num_hidden_layers": 16, "hidden_size": 128, "ffn_dim": 384},
    "llama-3": {"num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 256},
}


def quarter(folder: Path) -> int:
    """Return the bytes of the weights."""
    return weight_sizes(read_decoder(folder), torch.device("cpu"), torch.float32).total // 4


# tests/worker/weights/test_worker_host_weights.py has every family.
@pytest.mark.parametrize("case", ["llama-3", pytest.param("opt", marks=pytest.mark.chaos)])
async def test_restores_and_streams_with_weights_on_the_host(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 0 writes a prefix, worker 1 brings it back at every split, in both residencies."""
    model = build_tiny(case, **SIZES[case])
    folder = write_tiny(case, tmp_path / "m", **SIZES[case])
    shape = StackShape(
        chunk_tokens=4,
        max_batch_size=2,
        max_batched_tokens=8,
        device_memory_bytes=quarter(folder),
    )
    async with local_stack(folder, tmp_path, shape) as stack:
        warned = [each for each in caplog.records if each.levelname == "WARNING"]
        assert sum("over the link in each step" in each.getMessage() for each in warned) == 2
        engine = stack.workers[1].engine
        assert engine.model.host_weight_bytes() > 0.8 * 4 * shape.device_memory_bytes
        prefix, answered = clear_prompt(model, 14, NEW_TOKENS)
        assert await answer(stack, prefix, "0") == answered
        prompt, wanted = clear_prompt(model, 3, NEW_TOKENS, before=[*prefix, *answered])
        cached = len(prefix) + NEW_TOKENS - 1
        engine.trace = Trace()
        # Slow enough for the link to be what a step waits for.
        engine.lanes.link = EmulatedLink(1e8)
        half, streamed = cached // 2, Residency.STREAMED
        for split, residency in (
            (0, Residency.RESIDENT),
            (half, Residency.RESIDENT),
            (half, streamed),
            (cached, streamed),
        ):
            salt = bytes([split, residency is Residency.STREAMED])
            await answer(stack, prefix, "0", cache_salt=salt)
            options = {"split": split, "residency": residency, "cache_salt": salt}
            assert await answer(stack, prompt, "1", **options) == wanted, (split, residency)
        check_order(engine.trace.spans, SIZES[case]["num_hidden_layers"])
        await stack.assert_clean()


async def test_for_throughput_one_pass_over_the_weights_serves_a_full_batch(tmp_path: Path) -> None:
    """Eight requests of six pages each do not fit as residents: most are streamed, and say why."""
    model = build_tiny("opt", **SIZES["opt"])
    folder = write_tiny("opt", tmp_path / "m", **SIZES["opt"])
    shape = StackShape(
        workers=1,
        chunk_tokens=4,
        max_batch_size=8,
        max_batched_tokens=16,
        device_memory_bytes=3 * quarter(folder) // 2,
        link_bytes_per_second=50_000_000,
        objective=Objective.THROUGHPUT,
        weight_objective=WeightObjective.THROUGHPUT,
    )
    asked = [clear_prompt(model, 18, NEW_TOKENS, seed=seed) for seed in range(8)]
    async with local_stack(folder, tmp_path, shape) as stack:
        completions = await asyncio.gather(
            *(
                stack.client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
                for prompt, _ in asked
            )
        )
        for completion, (_, wanted) in zip(completions, asked, strict=True):
            assert list(completion.token_ids) == wanted
        plans = [completion.plan for completion in completions if completion.plan is not None]
        streamed = [plan for plan in plans if plan.residency is Residency.STREAMED]
        assert len(streamed) >= 4
        reasons = [ReasonKind.FULL_BATCH in dict(plan.reasons) for plan in streamed]
        assert all(reasons)
        assert "for throughput: 8 requests" in stack.workers[0].weights
        await stack.assert_clean()


async def answer(stack: LocalStack, prompt: list[int], worker: str, **options: Any) -> list[int]:
    completion = await stack.client.generate(
        prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker=worker, **options
    ).complete()
    return list(completion.token_ids)


def fills_of(spans: list[Span], layer: int) -> list[list[Span]]:
    """What came for one layer, each time: W_K and W_V first, then perhaps all the rest."""
    names = [piece.value for piece in LAYER_PIECES]
    mine = [span for span in spans if (span.lane, span.layer) == (Lane.WEIGHTS_IN, layer)]
    fills: list[list[Span]] = []
    for span in sorted(mine, key=lambda span: span.start):
        if span.name == names[0]:
            fills.append([])
        fills[-1].append(span)
    for fill in fills:
        came = [span.name for span in fill]
        # A restore rebuilds with W_K and W_V and needs no more.
        assert came in (names, names[:1]) or fill is fills[-1]
    return fills


def check_order(spans: list[Span], layers: int) -> None:
    """W_K, W_V before W_Q, W_O; whatever is rebuilt begins after the first two, and in
    steps of a streamed cache before the last weight is there."""
    early = 0
    for layer in range(layers):
        fills = fills_of(spans, layer)
        rebuilds = [span for span in spans if (span.name, span.layer) == ("rebuild", layer)]
        assert rebuilds
        for rebuild in rebuilds:
            fill = [each for each in fills if each[0].end <= rebuild.start][-1]
            early += len(fill) > 1 and rebuild.start < fill[-1].end
    assert early > 0


@pytest.mark.parametrize("grows", [False, True])
async def test_a_process_with_less_memory_than_weights_answers_and_says_so(
    grows: bool, tmp_path: Path
) -> None:
    """Over a slow link it computes longer pieces of prompts while the weights come."""
    model = build_tiny("qwen3", num_hidden_layers=16)
    folder = write_tiny("qwen3", tmp_path / "m", num_hidden_layers=16)
    prompt, wanted = clear_prompt(model, 25 if grows else 5, NEW_TOKENS)
    memory = 2 * quarter(folder) if grows else quarter(folder)
    slow = ("--link-rate", "20MB", "--weight-objective", "throughput") if grows else ()
    address = f"unix:{tmp_path}/w"
    process = await start_service(
        "worker_service",
        *("--listen", address, "--model", str(folder), "--device", "cpu", "--threads", "1"),
        *("--device-memory", str(memory), "--chunk-tokens", "2"),
        *("--max-batch", "4", "--max-batched-tokens", "4", *slow),
    )
    try:
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = await stub.GetInfo(worker_pb2.GetInfoRequest())
            assert info.weight_bytes < info.device_memory_bytes == memory
            assert info.profile.host_weight_bytes > 3 * quarter(folder)
            assert not grows or info.max_batched_tokens > 4
            assert 0 < info.profile.host_kv_weight_bytes < info.profile.host_weight_bytes
            assert "16 of 16 layers" in info.weights
            stream = stub.Run()
            await stream.write(admitting("a", prompt, NEW_TOKENS))
            tokens: list[int] = []
            async for response in stream:
                for result in response.tokens:
                    tokens += result.token_ids
                if response.finishes:
                    assert not response.finishes[0].error_code, response.finishes[0].error_message
                    break
            stream.cancel()
            assert tokens == wanted
    finally:
        await stop_process(process)
