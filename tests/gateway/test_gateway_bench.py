"""`splitpoint bench serve --backend openai`: a load by HTTP, and what it says when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from running_gateway import RunningGateway, running_gateway
from scheduler_doubles import SHAPE, Stack, stack

from gateway_service.settings import Limits
from splitpoint.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.transport.tls import PLAIN
from splitpoint_cli.bench.serve.backends import Sample, Sampling
from splitpoint_cli.bench.serve.load import Load
from splitpoint_cli.bench.serve.openai.backend import openai_backend
from splitpoint_cli.bench.serve.openai.connection import Server


@pytest.fixture
async def behind() -> AsyncIterator[Stack]:
    async with stack() as running:
        yield running


async def loaded(http: RunningGateway, **sampling: Any) -> Any:
    url = f"http://{http.address}"
    async with openai_backend(url, PLAIN, {}, Sampling(**sampling), "") as backend:
        model = await backend.served()
        assert (model.name, model.vocabulary_size) == (SHAPE.name, SHAPE.vocabulary_size)
        samples = [Sample([5 + n, 6, 7], 8, priority=n % 3) for n in range(20)]
        records = await Load(backend, 4).run(samples, [0.0] * len(samples))
        # Connections are used again.
        assert http.server.connection_count <= 4
        return records


async def test_a_load(behind: Stack) -> None:
    async with running_gateway(behind.address) as http:
        for record in await loaded(http, ignore_eos=True, logprobs=1):
            assert record.error == ""
            # An event each, but the scheduler puts tokens together for a reader that is behind.
            assert set(record.counts) == {1}
            assert len(record.counts) <= 8
            assert record.output_tokens == 8
            assert record.facts.prompt_tokens == 3
            assert record.facts.cached_tokens == 0
        admits = behind.workers[0].admits
        assert {each.sampling.temperature for each in admits} == {0.0}
        assert all(each.sampling.ignore_eos for each in admits)


async def test_failures_are_named(behind: Stack) -> None:
    async def failure(http: RunningGateway, sample: Sample, model: str = "") -> SplitpointError:
        url = f"http://{http.address}"
        async with openai_backend(url, PLAIN, {}, Sampling(), model) as backend:
            try:
                await backend.served()
                await backend.send(sample, lambda count: None)
            except SplitpointError as error:
                return error
        raise AssertionError("it did not fail")

    async with running_gateway(behind.address) as http:
        error = await failure(http, Sample([SHAPE.vocabulary_size], 8))
        assert isinstance(error, InvalidArgument)
        assert "token ids must be in" in error.message
        assert isinstance(await failure(http, Sample([1], 8), "other"), NotFound)
        too_many = await failure(http, Sample([1] * 5, SHAPE.context_length))
        assert too_many.reason == "CONTEXT_LENGTH_EXCEEDED"
    limits = Limits(requests=1)
    async with running_gateway(behind.address, limits=limits) as http:
        http.gateway.open_count = 1
        assert isinstance(await failure(http, Sample([1], 8)), ResourceExhausted)
        http.gateway.open_count = 0
    with pytest.raises(Unavailable, match="cannot connect"):
        async with openai_backend(f"http://{http.address}", PLAIN, {}, Sampling(), "") as backend:
            await backend.served()


async def test_a_server_that_hides_its_vocabulary() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "m", "max_model_len": 9}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with openai_backend(url, PLAIN, {}, Sampling(), "") as backend:
            with pytest.raises(FailedPrecondition, match="vocabulary_size"):
                await backend.served()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a?b"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a URL"):
        Server.of(url)


def test_urls() -> None:
    assert Server.of("http://[::1]:80/base/") == Server("::1", 80, "/base", False)
    assert Server.of("https://example.org") == Server("example.org", 443, "", True)
