"""Both clients against a fake scheduler: same names, same answers, same errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_scheduler import Script, fake_scheduler

from splitpoint import errors
from splitpoint.client import AsyncClient, Client
from splitpoint.client.answers import Completion, FinishReason, RedisStatus, Tokens
from splitpoint.client.requests import generate_request
from splitpoint.planning.plan import Objective, Residency
from splitpoint.tiers import Tier
from splitpoint.v1 import types_pb2


@pytest.fixture
def script(socket_address: str) -> Iterator[Script]:
    with fake_scheduler(socket_address) as script:
        yield script


def test_the_two_clients_have_the_same_names() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)


def test_stream_and_complete(script: Script) -> None:
    script.tail = "!"
    with Client(script.address) as client:
        events = list(client.generate("abc", max_tokens=3))
        whole = client.generate("abc").complete()
    assert [e.text for e in events if isinstance(e, Tokens)] == ["a", "b", "c", "!"]
    last = events[-1]
    assert isinstance(last, Completion)
    assert last.text == whole.text == "abc!"
    assert last.token_ids == (97, 98, 99)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage.cached_tokens == 2
    assert last.plan is not None
    assert last.plan.residency is Residency.RESIDENT
    assert (last.worker, last.seed, last.ttft_seconds, last.seconds) == ("0", 7, 0.25, 0.5)
    assert last.matched_stop is None


async def test_async_stream_and_complete(script: Script) -> None:
    async with AsyncClient(script.address) as client:
        await client.wait_ready(5)
        events = [event async for event in client.generate([97, 98])]
        whole = await client.generate([97, 98]).complete()
        assert (await client.tokenize("ab")).token_ids == (97, 98)
        assert (await client.get_model()).name == "tiny"
        assert len(await client.list_models()) == 1
        assert (await client.explain_plan(2, 1))[0].plan is not None
        assert [worker.id for worker in await client.list_workers()] == ["0", "1"]
        assert (await client.get_queue()).requests[0].waited_seconds == 1.5
        assert (await client.scheduler_status()).completed_count == 5
        assert await client.health()
    assert isinstance(events[-1], Completion)
    assert whole.token_ids == (97, 98)


def test_unary_calls(script: Script) -> None:
    with Client(script.address) as client:
        client.wait_ready(5)
        assert client.tokenize("ab").tokens == ("a", "b")
        assert client.get_model().shape.layer_count == 1
        assert client.list_models()[0].context_length == 64
        plans = client.explain_plan(
            2,
            1,
            residency=Residency.STREAMED,
            objective=Objective.THROUGHPUT,
            remote_cached_tokens=3,
            remote_store_address="far:1",
        )
        asked = script.explained[0]
        assert asked.residency == types_pb2.RESIDENCY_STREAMED
        assert asked.objective == types_pb2.OBJECTIVE_THROUGHPUT
        assert (asked.remote_cached_tokens, asked.remote_store_address) == (3, "far:1")
        client.explain_plan(2, 1, remote_cached_tokens=3, tier=Tier.DISK)
        assert (script.explained[1].tier, script.explained[0].tier) == (types_pb2.TIER_DISK, 0)
        assert plans[1].plan is None
        assert plans[1].rejection == "never fits"
        assert [worker.ready for worker in client.list_workers()] == [True, True]
        assert client.get_queue().capacity == 8
        _check_what_is_counted(client)
        with pytest.raises(errors.NotFound):
            client.health("no.such.Service")


def _check_what_is_counted(client: Client) -> None:
    status = client.scheduler_status()
    assert (status.uptime_seconds, status.ttft_count, status.ttft_seconds_sum) == (60, 5, 1.25)
    assert status.redis == RedisStatus("unix:///r", is_up=True)
    first, second = client.list_workers()
    assert first.telemetry is not None
    assert first.telemetry.link_in_bytes == 1 << 20
    # Zero is an answer, absence is none.
    assert (first.telemetry.split_tokens, first.telemetry.energy_joules) == (0, None)
    assert (first.telemetry.power_watts, first.kappa_crit) == (70.5, 1.5)
    assert (first.loss_count, first.last_lost_seconds_ago) == (0, None)
    assert (second.telemetry, second.kappa_crit) == (None, None)
    assert (second.loss_count, second.last_lost_seconds_ago) == (2, 7.5)


def test_errors_come_back_whole(script: Script) -> None:
    with Client(script.address) as client:
        with pytest.raises(errors.InvalidArgument, match="prompt is empty") as caught:
            client.generate("").complete()
        assert caught.value.field == "prompt"
        with pytest.raises(errors.ResourceExhausted) as full:
            client.explain_plan(0, 65)
        assert full.value.metadata == {"needed_bytes": "65"}
        script.endless = True
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("abc", timeout=0.2).complete()


async def test_async_errors_come_back_whole(script: Script) -> None:
    async with AsyncClient(script.address) as client:
        with pytest.raises(errors.InvalidArgument):
            await client.generate("").complete()
        with pytest.raises(errors.ResourceExhausted):
            await client.explain_plan(0, 65)


def test_unavailable_is_retried_before_the_first_token_with_the_same_id(script: Script) -> None:
    script.failures = [errors.Unavailable("not yet", retry_after_seconds=0.01)]
    with Client(script.address) as client:
        assert client.generate("abc").complete().text == "abc"
    assert len({request.request_id for request in script.requests}) == 1
    assert len(script.requests) == 2


def test_nothing_else_is_retried(script: Script) -> None:
    script.failures = [errors.ResourceExhausted("full", retry_after_seconds=0.01)]
    with Client(script.address) as client, pytest.raises(errors.ResourceExhausted):
        client.generate("abc").complete()
    assert len(script.requests) == 1


def test_without_retries_nothing_goes_on_after_the_first_token(script: Script) -> None:
    script.fail_after = 1
    with Client(script.address, retry_seconds=0) as client:
        generation = client.generate("abc")
        assert isinstance(next(generation), Tokens)
        with pytest.raises(errors.Unavailable, match="worker is gone"):
            next(generation)
    assert len(script.requests) == 1


def test_leaving_early_cancels(script: Script) -> None:
    script.endless = True
    with Client(script.address) as client:
        with client.generate("abc") as generation:
            next(generation)
        assert script.cancelled.wait(30)
        script.cancelled.clear()
        for _ in client.generate("abc"):
            break
        assert script.cancelled.wait(30)


async def test_async_leaving_early_cancels(script: Script) -> None:
    script.endless = True
    async with AsyncClient(script.address) as client:
        async with client.generate("abc") as generation:
            await anext(generation)
        assert script.cancelled.wait(30)


def test_a_gap_in_the_tokens_is_an_error(script: Script) -> None:
    script.gap = True
    with Client(script.address) as client, pytest.raises(errors.Internal, match="token 1"):
        client.generate("abc").complete()


def test_no_scheduler() -> None:
    with Client("127.0.0.1:1", timeout=2) as client:
        with pytest.raises(errors.Unavailable):
            client.list_workers()
        with pytest.raises(errors.DeadlineExceeded, match="not ready"):
            client.wait_ready(0.1)


def test_request_fields() -> None:
    request = generate_request(
        [1, 2],
        {
            "max_tokens": 5,
            "temperature": 0.0,
            "stop": ["x"],
            "logit_bias": {3: 1.5},
            "worker": "1",
            "split": 0,
            "residency": Residency.STREAMED,
            "timeout": 3,
        },
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")
    assert request.HasField("split_tokens")
    assert request.residency == types_pb2.RESIDENCY_STREAMED
    assert request.worker_id == "1"
    assert 1 <= len(request.request_id) <= 64


def test_values_no_field_can_hold() -> None:
    with pytest.raises(errors.InvalidArgument):
        generate_request([1 << 40], {})
    with pytest.raises(errors.InvalidArgument):
        generate_request("x", {"max_tokens": 1 << 40})
    with pytest.raises(TypeError, match="max_token"):
        generate_request("x", {"max_token": 1})  # type: ignore[typeddict-unknown-key]


def test_importing_the_client_needs_no_torch() -> None:
    code = "import sys, splitpoint.client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
