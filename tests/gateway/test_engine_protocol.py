"""vLLM's engine protocol: what becomes of each field, and a real stack behind it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from local_stack import LocalStack, StackShape, local_stack
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from gateway_service.engine_protocol.answers import AnswerWriter
from gateway_service.engine_protocol.model import model_info
from gateway_service.engine_protocol.requests import generate_requests, scheduler_id
from gateway_service.engine_protocol.server import EngineServer, check_engine_address
from gateway_service.engine_protocol.servicer import EngineServicer
from gateway_service.upstream.schedulers import Upstream
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.transport.tls import PLAIN
from splitpoint.v1 import scheduler_pb2
from splitpoint_cli.stack.child import child_environment

PROMPT = "import asyncio\n\n\nclass Queue:\n"


def request(prompt: Any = (5, 6, 7), stream: bool = False, **sampling: Any) -> Any:
    """A request by token ids, or by a text."""
    message = vllm_engine_pb2.GenerateRequest(
        request_id="r", sampling_params=sampling, stream=stream
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokenized.input_ids.extend(prompt)
    return message


# -- requests -----------------------------------------------------------------------------


def test_what_is_unset_means_what_it_means_to_vllm() -> None:
    (one,) = generate_requests(request())
    assert list(one.token_ids.ids) == [5, 6, 7]
    assert one.request_id == "r"
    assert one.sampling.temperature == 1.0
    assert one.sampling.fills_context
    for name in ("max_tokens", "top_p", "repetition_penalty", "seed", "logprobs"):
        assert not one.sampling.HasField(name)
    assert not one.sampling.HasField("structured_output")


def test_every_field_arrives() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 2,
        "seed": 11,
        "logit_bias": {4: 1.5},
        "skip_special_tokens": True,
    }
    (one,) = generate_requests(request("text", **sampling))
    assert one.text == "text"
    told = json_format.MessageToDict(one.sampling, preserving_proto_field_name=True)
    renamed = {key: value for key, value in sampling.items() if key != "skip_special_tokens"}
    assert told == {**renamed, "seed": "11", "logit_bias": {"4": 1.5}}


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": {"choices": ["a", "b"]}}, {"choice": {"texts": ["a", "b"]}}),
    ],
)
def test_constraints_become_structured_outputs(
    constraint: dict[str, Any], wanted: dict[str, Any]
) -> None:
    (one,) = generate_requests(request(**constraint))
    found = json_format.MessageToDict(
        one.sampling.structured_output, preserving_proto_field_name=True
    )
    assert found == wanted


def test_each_of_several_answers_has_an_id_and_a_seed_of_its_own() -> None:
    found = generate_requests(request(n=3, seed=5))
    assert [each.request_id for each in found] == ["r-0", "r-1", "r-2"]
    assert [each.sampling.seed for each in found] == [5, 6, 7]
    assert {each.sampling.HasField("seed") for each in generate_requests(request(n=2))} == {False}


def test_long_ids_of_routers_become_short_ones() -> None:
    routers = ["cmpl-IbKSJfKeIp0vfJOm3aQlKknF-01a206f2-09cd-73ec-bf1b-88bfd74a362", "\n"]
    for text in (routers[0] + "1", routers[0] + "2", *routers):
        assert scheduler_id(text) == scheduler_id(text)
        assert len(f"{scheduler_id(text)}-127") <= 64
        assert scheduler_id(text).isprintable()
    assert scheduler_id(routers[0] + "1") != scheduler_id(routers[0] + "2")
    assert scheduler_id("") != scheduler_id("")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"mm_inputs": {"im_token_id": 1}}, "mm_inputs"),
        ({"media_refs": {"items": [{"url": "http://x"}]}}, "media_refs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "sampling_params.prompt_logprobs"),
        (
            {"sampling_params": {"truncate_prompt_tokens": 5}},
            "sampling_params.truncate_prompt_tokens",
        ),
        ({"sampling_params": {"structural_tag": "x"}}, "sampling_params.structural_tag"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"stop_token_ids": [2**31]}}, "sampling_params.stop_token_ids"),
        ({"tokenized": {"input_ids": [2**32 - 1]}}, "tokenized.input_ids"),
    ],
)
def test_what_splitpoint_does_not_do_is_refused_by_its_name(
    wrong: dict[str, Any], field: str
) -> None:
    given = {"tokenized": {"input_ids": [5]}, **wrong}
    with pytest.raises(InvalidArgument) as refused:
        generate_requests(vllm_engine_pb2.GenerateRequest(**given))
    assert refused.value.field == field


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="neither tokens nor a text"):
        generate_requests(vllm_engine_pb2.GenerateRequest())


def test_logprobs_of_impossible_tokens_are_numbers() -> None:
    message = scheduler_pb2.GenerateResponse()
    message.chunk.token_ids.append(4)
    position = message.chunk.logprobs.add(chosen_logprob=-0.5)
    position.top.add(token_id=9, logprob=float("-inf"))
    sent = AnswerWriter(0, 3, streams=True).message_of(message)
    assert sent is not None
    (top,) = sent.chunk.output_logprobs.top_logprobs
    assert (list(top.token_ids), list(top.values)) == ([9], [-9999.0])


@pytest.mark.parametrize("address", ["0.0.0.0:50080", "10.0.0.5:50080", "engine:50080", "[::]:1"])
def test_the_port_is_on_this_host_only(address: str) -> None:
    with pytest.raises(InvalidArgument, match="this host only"):
        check_engine_address(address)
    assert check_engine_address("127.0.0.1:0") == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine-listen", "0.0.0.0:50080"), "this host only"),
        (("--engine-listen", "50080"), "not an address"),
        (("--engine-token-file", "token"), "--engine-token-file is for --engine-listen"),
        (
            ("--engine-listen", "127.0.0.1:0", "--engine-token-file", "/nowhere"),
            "/nowhere cannot be read",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_listens(
    options: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "-m", "gateway_service", "--listen", "127.0.0.1:0", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=child_environment({}), check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_end_tokens_come_from_the_files() -> None:
    model = scheduler_pb2.Model(name="m", context_length=64)
    files = {
        "tokenizer_config.json": b'{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}',
        "tokenizer.json": json.dumps(
            {"added_tokens": [{"id": 3, "content": "<s>"}, {"id": 4, "content": "</s>"}]}
        ).encode(),
    }
    info = model_info(model, files)
    assert (list(info.eos_token_ids), info.bos_token_id) == ([4], 3)
    files["generation_config.json"] = b'{"eos_token_id": [4, 9]}'
    assert list(model_info(model, files).eos_token_ids) == [4, 9]
    assert list(model_info(model, {}).eos_token_ids) == []


# -- whose token, and whose trace ------------------------------------------------------------


class Recorder:
    """An upstream that notes the metadata of calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def call(self, service: Any, method: str, request: Any, metadata: Any = ()) -> Any:
        self.seen.append(metadata)
        return scheduler_pb2.GetModelResponse()


class Context:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata


async def test_a_calls_own_token_goes_before_the_gateways() -> None:
    upstream: Any = Recorder()
    own = ("authorization", "Bearer routers")
    for token, metadata in (("", ()), ("files", ()), ("files", (own, ("user-agent", "x")))):
        context: Any = Context(*metadata)
        await EngineServicer(upstream, token).GetServerInfo(
            vllm_engine_pb2.GetServerInfoRequest(), context
        )
    assert upstream.seen == [(), (("authorization", "Bearer files"),), (own,)]


async def test_a_routers_trace_goes_on() -> None:
    upstream: Any = Recorder()
    parent = ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")
    for metadata in ((parent,), (("traceparent", "nonsense"),), (parent, parent)):
        context: Any = Context(*metadata)
        await EngineServicer(upstream).GetServerInfo(
            vllm_engine_pb2.GetServerInfoRequest(), context
        )
    assert upstream.seen == [(parent,), (), ()]


# -- a stack behind it ---------------------------------------------------------------------


class Engine:
    """The stub of the protocol, and the stack that answers."""

    def __init__(self, stack: LocalStack, channel: grpc.aio.Channel) -> None:
        self.stack = stack
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    async def generate(self, message: Any) -> list[Any]:
        return [each async for each in self.stub.Generate(message, timeout=60)]

    async def complete(self, message: Any) -> Any:
        return (await self.generate(message))[-1].complete


@asynccontextmanager
async def served(scheduler: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the protocol in front of this scheduler."""
    upstream = Upstream([scheduler], PLAIN, call_seconds=10.0)
    server = EngineServer(upstream)
    address = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(1.0)
        await upstream.close()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    shape = StackShape(workers=1, chunk_tokens=16)
    async with (
        local_stack(resolve_model(None), tmp_path, shape) as stack,
        served(stack.client.address) as channel,
    ):
        yield Engine(stack, channel)


async def test_answers_are_those_of_the_stack(engine: Engine) -> None:
    client = engine.stack.client
    prompt = (await client.tokenize(PROMPT * 4)).token_ids
    wanted = await client.generate(prompt, max_tokens=24, logprobs=2).complete()
    asked = request(prompt, temperature=0.0, max_tokens=24, logprobs=2)

    whole = await engine.complete(asked)
    assert tuple(whole.output_ids) == wanted.token_ids
    assert (whole.finish_reason, whole.prompt_tokens) == ("length", len(prompt))
    assert (whole.completion_tokens, whole.index) == (24, 0)
    assert whole.cached_tokens >= 16, "the chunks of the call before"
    assert list(whole.output_logprobs.token_ids) == list(wanted.token_ids)
    chosen = [each.chosen for each in wanted.logprobs]
    assert list(whole.output_logprobs.token_logprobs) == pytest.approx(chosen, abs=1e-3)
    assert all(len(each.values) == 2 for each in whole.output_logprobs.top_logprobs)

    asked.stream, asked.request_id = True, "streamed"
    *chunks, last = await engine.generate(asked)
    tokens = [token for each in chunks for token in each.chunk.token_ids]
    assert tuple(tokens) == wanted.token_ids == tuple(last.complete.output_ids)
    counts = [each.chunk.completion_tokens for each in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == 24
    assert {each.chunk.prompt_tokens for each in chunks} == {len(prompt)}
    assert sum(len(each.chunk.output_logprobs.token_ids) for each in chunks) == 24

    asked.request_id, asked.sampling_params.stop[:] = "stopped", [" "]
    stopped = await engine.complete(asked)
    assert (stopped.finish_reason, stopped.matched_stop_str) == ("stop", " ")


async def test_several_answers_abortion_errors_and_readings(engine: Engine) -> None:
    sampled = request((5, 6, 7), temperature=1.5, seed=3, n=3, max_tokens=12, ignore_eos=True)
    found = {each.complete.index: each.complete for each in await engine.generate(sampled)}
    assert sorted(found) == [0, 1, 2]
    texts = {tuple(each.output_ids) for each in found.values()}
    assert len(texts) == 3
    sampled.request_id, sampled.sampling_params.n, sampled.sampling_params.seed = "alone", 1, 4
    alone = await engine.complete(sampled)
    assert list(alone.output_ids) == list(found[1].output_ids), "its seed is the first plus 1"

    await check_abortion(engine)
    await check_errors(engine)
    await check_readings(engine)
    await engine.stack.assert_clean()


async def check_abortion(engine: Engine) -> None:
    """By Abort, and by a router that leaves."""
    long = request((5, 6, 7), True, temperature=0.0, max_tokens=3000, ignore_eos=True, n=2)
    long.request_id = "aborted"
    messages = aiter(engine.stub.Generate(long))
    found = [await anext(messages)]
    await engine.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["aborted", "unknown"]))
    found += [each async for each in messages]
    ends = [each.complete for each in found if each.HasField("complete")]
    assert [each.finish_reason for each in ends] == ["abort", "abort"]
    assert {each.index for each in ends} == {0, 1}
    tokens = [t for each in found if each.chunk.index == 0 for t in each.chunk.token_ids]
    assert list(next(each.output_ids for each in ends if each.index == 0)) == tokens

    long.request_id = "left"
    call = engine.stub.Generate(long)
    await call.read()
    call.cancel()
    async with asyncio.timeout(20):
        while (await engine.stack.client.scheduler_status()).running_count:
            await asyncio.sleep(0.02)


async def check_errors(engine: Engine) -> None:
    for wrong, code in (
        (request((5,), max_tokens=99_999), grpc.StatusCode.INVALID_ARGUMENT),
        (request((), max_tokens=4), grpc.StatusCode.INVALID_ARGUMENT),
        (request((5,), prompt_logprobs=1), grpc.StatusCode.INVALID_ARGUMENT),
        (request((5,), n=2, temperature=-1.0), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.generate(wrong)
        assert refused.value.code() is code
    for method, message in (
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await getattr(engine.stub, method)(message)
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED, method
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await engine.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
    assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def check_readings(engine: Engine) -> None:
    folder = resolve_model(None)
    health = await engine.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "")
    info = await engine.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    config = json.loads((folder / "config.json").read_text())
    assert info.served_model_name == info.model_path == folder.name
    assert list(info.eos_token_ids) == [config["eos_token_id"]]
    assert info.bos_token_id == config["bos_token_id"]
    assert info.vocab_size == config["vocab_size"]
    assert list(info.architectures) == config["architectures"]
    server = await engine.stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (server.active_requests, server.block_size) == (0, 16)
    assert server.model_dtype == "torch.float32"
    (load,) = (await engine.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 0)
    assert load.max_total_num_tokens > 1000
    assert load.gen_throughput > 0
    chunks = [c async for c in engine.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    packed = b"".join(each.data for each in chunks)
    assert [each.sha256 for each in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(packed).hexdigest()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    ids = (await engine.stack.client.tokenize(PROMPT)).token_ids
    assert tuple(tokenizer.encode(PROMPT).ids) == ids


async def test_a_stack_that_is_away_is_unhealthy() -> None:
    async with served("127.0.0.1:1") as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert not health.healthy
        assert "no scheduler" in health.message
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert away.value.code() is grpc.StatusCode.UNAVAILABLE
