"""Random bytes sent to every method give an answer or a documented status, and no crash."""

from __future__ import annotations

import asyncio
import logging
import random

import grpc
import pytest
from long_runs import scaled
from scheduler_doubles import MODEL_FOLDER, WorkerDouble, answer, ids_request, stack

from scheduler_service.limits import Limits
from scheduler_service.options import load_served_model
from splitpoint.v1 import scheduler_pb2

CASES = scaled(200, chaos=2000)
AT_ONCE = 50
CHAT = scheduler_pb2.ChatPrompt(
    messages='[{"role": "user", "content": "x"}]', tools='[{"type": "function"}]'
)
# By the method, and what is special about its message.
METHODS = {
    "InferenceService/Generate, chat": scheduler_pb2.GenerateRequest(chat=CHAT),
    "InferenceService/Tokenize, chat": scheduler_pb2.TokenizeRequest(chat=CHAT),
    "InferenceService/Detokenize": scheduler_pb2.DetokenizeRequest(token_ids=[5, 6, 700]),
    "InferenceService/GetTokenizer": scheduler_pb2.GetTokenizerRequest(model="stdlib-llama"),
    "InferenceService/Generate": scheduler_pb2.GenerateRequest(
        request_id="f", text="def f():", cache_salt=b"x", split_tokens=1
    ),
    "InferenceService/Tokenize": scheduler_pb2.TokenizeRequest(text="def f():"),
    "InferenceService/GetModel": scheduler_pb2.GetModelRequest(model="stdlib-llama"),
    "InferenceService/ListModels": scheduler_pb2.ListModelsRequest(),
    "InferenceService/ExplainPlan": scheduler_pb2.ExplainPlanRequest(
        cached_tokens=5, new_tokens=7, max_tokens=9
    ),
    "AdminService/ListWorkers": scheduler_pb2.ListWorkersRequest(),
    "AdminService/GetQueue": scheduler_pb2.GetQueueRequest(),
    "AdminService/GetSchedulerStatus": scheduler_pb2.GetSchedulerStatusRequest(),
}


def random_bytes(rng: random.Random, seed: bytes) -> bytes:
    """Return noise, or a valid message with some bytes changed, cut or repeated."""
    if not seed or rng.random() < 0.5:
        return rng.randbytes(rng.randrange(0, 64))
    mutated = bytearray(seed * rng.choice((1, 1, 2)))
    for _ in range(rng.randrange(1, 4)):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    return bytes(mutated[: rng.randrange(1, len(mutated) + 1)])


@pytest.mark.scaled
@pytest.mark.parametrize("method", sorted(METHODS))
async def test_random_bytes_crash_nothing(method: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(method)
    seed = METHODS[method].SerializeToString()
    codes: dict[grpc.StatusCode, int] = {}
    path = f"/splitpoint.v1.{method.partition(',')[0]}"
    streamed = path.endswith(("Generate", "GetTokenizer"))
    limits = Limits(retry_seconds=0.01)
    model = load_served_model(MODEL_FOLDER)
    async with stack(WorkerDouble(capacity_pages=512), limits=limits, model=model) as running:

        async def one(raw: bytes) -> None:
            try:
                if streamed:
                    call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
                    call = running.channel.unary_stream(path)
                    async for _ in call(raw, timeout=20):
                        pass
                else:
                    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
                    send = running.channel.unary_unary(path)
                    await send(raw, timeout=20)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            codes[code] = codes.get(code, 0) + 1

        with caplog.at_level(logging.ERROR):
            for _ in range(CASES // AT_ONCE):
                await asyncio.gather(*(one(random_bytes(rng, seed)) for _ in range(AT_ONCE)))
        assert sum(codes.values()) == CASES
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > CASES // 10
        assert grpc.StatusCode.INTERNAL not in codes
        assert grpc.StatusCode.UNKNOWN not in codes
        assert grpc.StatusCode.DEADLINE_EXCEEDED not in codes
        assert not caplog.records
        # And it still works.
        result = await running.generate(ids_request([5], 4))
        assert result.token_ids == answer([5], 4)
