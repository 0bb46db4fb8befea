"""Requests, readers, outputs and the table of known requests, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_doubles import SHAPE, TOKENIZER, ids_request
from virtual_time import in_virtual_time, pass_time

from scheduler_service.api.delivery import LONGEST_PAUSE, Rounds
from scheduler_service.api.output import GROUP_TOKENS, Output
from scheduler_service.api.request import Reader, Request
from scheduler_service.api.validation import validate_generate
from scheduler_service.limits import Limits
from scheduler_service.requests.table import RequestTable
from splitpoint.errors import AlreadyExists, Internal, ResourceExhausted
from splitpoint.v1 import scheduler_pb2, types_pb2

MODEL_SHAPE = replace(SHAPE, name="tiny", vocabulary_size=4096, context_length=10_000)
EOS = 1


def checked(
    max_tokens: int = 50, request_id: str = "r", tenant: str = "", **sampling: Any
) -> Request:
    request = ids_request([5], max_tokens, request_id=request_id)
    request.sampling.MergeFrom(types_pb2.SamplingParams(**sampling))
    return validate_generate(
        request, MODEL_SHAPE, TOKENIZER.encode, tenant=tenant, server_key=b"k" * 32
    )


def output(**sampling: Any) -> Output:
    return Output(checked(**sampling).sampling, TOKENIZER, frozenset({EOS}))


class Listener:
    def __init__(self) -> None:
        self.pauses: list[bool] = []
        self.abandoned = 0

    def on_pause(self, request: Request, paused: bool) -> None:
        self.pauses.append(paused)

    def on_abandoned(self, request: Request) -> None:
        self.abandoned += 1


def make_request(listener: Listener | None = None, lag: int = 8, **sampling: Any) -> Request:
    request = checked(**sampling)
    request.output = Output(request.sampling, TOKENIZER, frozenset({EOS}))
    request.listener = listener or Listener()
    request.lag_tokens = lag
    return request


# -- rounds ------------------------------------------------------------------------


def grow(request: Request, rounds: Rounds, token_id: int) -> None:
    """Do what the manager does with a step."""
    request.append([token_id], [])
    rounds.add(request)
    rounds.deliver()


async def tokens_of(reader: Reader, messages: list[list[int]], busy_seconds: float) -> None:
    """Collect messages; each takes the event loop so long."""
    async for response in reader:
        if response.HasField("chunk"):
            messages.append(list(response.chunk.token_ids))
            pass_time(busy_seconds)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_virtual_time
async def test_short_rounds_deliver_each_step_as_it_comes() -> None:
    request, rounds = make_request(), Rounds()
    messages: list[list[int]] = []
    with request.attach() as reader:
        reading = asyncio.create_task(tokens_of(reader, messages, 0.0))
        await settle()
        for index in range(3):
            grow(request, rounds, 10 + index)
            await settle()
        request.complete(scheduler_pb2.GenerateComplete(), 1.0)
        await reading
    assert messages == [[10], [11], [12]]


@in_virtual_time
async def test_tokens_that_come_after_a_long_round_share_a_message() -> None:
    request, rounds = make_request(), Rounds()
    messages: list[list[int]] = []
    with request.attach() as reader:
        reading = asyncio.create_task(tokens_of(reader, messages, 0.05))
        await settle()
        grow(request, rounds, 10)
        await settle()
        assert messages == [[10]]
        for index in range(3):  # well within the pause that follows
            grow(request, rounds, 11 + index)
            await settle()
        assert messages == [[10]]
        while len(messages) < 2:
            await asyncio.sleep(0.01)
        grow(request, rounds, 14)
        # The end of a request waits for no round, and comes after all tokens.
        request.complete(scheduler_pb2.GenerateComplete(), 1.0)
        await reading
    assert messages == [[10], [11, 12, 13], [14]]


@in_virtual_time
async def test_a_pause_is_bounded_however_long_the_round_was() -> None:
    request, rounds, loop = make_request(), Rounds(), asyncio.get_running_loop()
    messages: list[list[int]] = []
    with request.attach() as reader:
        reading = asyncio.create_task(tokens_of(reader, messages, 0.3))
        await settle()
        grow(request, rounds, 10)
        await settle()
        assert isinstance(rounds._pause, asyncio.TimerHandle)
        assert rounds._pause.when() <= loop.time() + LONGEST_PAUSE
        request.complete(scheduler_pb2.GenerateComplete(), 1.0)
        await reading


# -- output ------------------------------------------------------------------------


def said(script: Output, ids: list[int], *, stopped: bool) -> str:
    for token_id in ids:
        script.append([token_id], [])
    texts = [script.chunk(index).text for index in range(0, len(script), GROUP_TOKENS)]
    return "".join(texts) + script.finish(stopped=stopped)


def test_a_stop_token_is_no_text() -> None:
    ids = TOKENIZER.encode("x = 1")
    script = output(stop_token_ids=[ids[-1]])
    assert said(script, ids, stopped=True) == TOKENIZER.decode(ids[:-1])
    assert script.ends_in_stop


def test_a_stop_token_before_min_tokens_is_text() -> None:
    ids = TOKENIZER.encode("x = 1; x = 2")
    script = output(stop_token_ids=[ids[0]], min_tokens=len(ids))
    assert said(script, ids, stopped=False) == "x = 1; x = 2"
    assert not script.ends_in_stop
    # A last stop token is text, too, if the length ended the request.
    ids = TOKENIZER.encode("x = 1")
    script = output(stop_token_ids=[ids[-1]], min_tokens=99)
    assert said(script, ids, stopped=False) == "x = 1"


def test_the_end_of_sequence_counts_unless_ignored() -> None:
    script = output()
    script.append([5, EOS], [])
    assert script.ends_in_stop
    script = output(ignore_eos=True)
    script.append([5, EOS], [])
    assert not script.ends_in_stop


def test_a_stop_string_ends_the_text() -> None:
    ids = TOKENIZER.encode("a = 1\n\nb = 2")
    script = output(stop=["\n\n"])
    assert said(script, ids, stopped=True) == "a = 1"
    assert script.matched_stop == "\n\n"
    assert script.ends_in_stop


def test_chunks_are_groups_with_their_logprobs() -> None:
    script = output()
    count = GROUP_TOKENS + 10
    logprobs = [types_pb2.PositionLogprobs(chosen_logprob=-index) for index in range(count)]
    script.append(list(range(2, 2 + count)), logprobs)
    first, second = script.chunk(0), script.chunk(GROUP_TOKENS)
    assert list(first.token_ids) + list(second.token_ids) == script.token_ids
    assert second.index == GROUP_TOKENS
    assert second.logprobs[0].chosen_logprob == -GROUP_TOKENS


@given(
    count=st.integers(1, 30),
    deliveries=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 6)), max_size=60),
)
def test_any_order_of_messages_gives_each_token_once(
    count: int, deliveries: Sequence[tuple[int, int]]
) -> None:
    """Deliver duplicate, late and reordered pieces of a sequence, then the whole sequence."""
    source = list(range(count))
    taken = Output(types_pb2.SamplingParams(), None, frozenset())
    for first, size in (*deliveries, *((index, 1) for index in range(count))):
        piece = source[first : first + size]
        if first > len(taken):
            with pytest.raises(ValueError, match=f"{first} came where {len(taken)} was due"):
                taken.count_new(first, len(piece))
        elif new := taken.count_new(first, len(piece)):
            taken.append(piece[-new:], [])
        assert taken.token_ids == source[: len(taken)]
    assert taken.token_ids == source


# -- readers ----------------------------------------------------------------------------


async def test_readers_get_everything_from_token_zero() -> None:
    listener = Listener()
    request = make_request(listener)
    done = scheduler_pb2.GenerateComplete(request_id="r")

    async def read(delay: int) -> tuple[list[int], bool]:
        ids: list[int] = []
        with request.attach() as reader:
            async for response in reader:
                if response.HasField("complete"):
                    return ids, response.complete == done
                assert response.chunk.index == len(ids)
                ids += response.chunk.token_ids
                for _ in range(delay):
                    await asyncio.sleep(0)
        raise AssertionError

    tasks = [asyncio.create_task(read(delay)) for delay in (0, 1, 5)]
    for index in range(20):
        request.append([10 + index], [])
        request.wake_readers()
        await asyncio.sleep(0)
    request.complete(done, 1.0)
    late = asyncio.create_task(read(0))
    for task in (*tasks, late):
        assert await task == (list(range(10, 30)), True)
    assert listener.abandoned == 0


async def test_lag_pauses_at_the_bound_and_resumes_at_half() -> None:
    listener = Listener()
    request = make_request(listener, lag=8)
    with request.attach() as slow:
        for index in range(8):
            request.append([index + 2], [])
        assert listener.pauses == []
        await anext(slow)  # eight tokens handed out, none taken yet
        request.append([20], [])
        assert listener.pauses == [True]
        for index in range(3):
            request.append([30 + index], [])
        await anext(slow)  # asking again says that the eight were taken
        assert listener.pauses == [True, False]
        assert slow.cursor == 8


async def test_the_lag_of_a_reader_that_leaves_counts_no_more() -> None:
    listener = Listener()
    request = make_request(listener, lag=2)
    with request.attach() as fast:
        with request.attach():
            request.append([2, 3, 4], [])
            assert listener.pauses == [True]
            await anext(fast)
            waiting = asyncio.create_task(anext(fast))
            await asyncio.sleep(0)
        assert listener.pauses == [True, False]
        waiting.cancel()
    assert listener.abandoned == 1


async def test_errors_follow_what_was_said_before() -> None:
    request = make_request()
    with request.attach() as reader:
        request.append([9], [])
        request.fail(Internal("broken"), 1.0)
        assert list((await anext(reader)).chunk.token_ids) == [9]
        with pytest.raises(Internal):
            await anext(reader)


# -- the table --------------------------------------------------------------------------


def test_the_table_remembers_what_completed() -> None:
    table = RequestTable(Limits(remember_seconds=60, remember_count=2))
    names = ("a", "b", "c")
    requests = {}
    for name in names:
        requests[name] = make_request(request_id=name)
        assert table.find(requests[name]) is None
        table.add(requests[name])
        assert table.find(checked(request_id=name)) is requests[name]
    with pytest.raises(AlreadyExists):
        table.find(checked(max_tokens=3, request_id="a"))
    for now, name in enumerate(names):
        requests[name].complete(scheduler_pb2.GenerateComplete(), now)
        table.ended(requests[name])
    table.expire(2.0)  # one too many
    assert table.find(checked(request_id="a")) is None
    assert table.find(checked(request_id="b")) is requests["b"]
    table.expire(61.5)
    assert table.find(checked(request_id="b")) is None
    assert table.find(checked(request_id="c")) is requests["c"]
    table.expire(1000.0)
    assert len(table) == 0


def test_the_table_forgets_what_failed() -> None:
    table = RequestTable(Limits())
    request = make_request()
    table.add(request)
    request.fail(Internal("x"), 0.0)
    table.ended(request)
    assert table.find(request) is None
    assert table.running() == []


# -- tenants ----------------------------------------------------------------------------


def test_ids_mean_something_within_their_tenant_only() -> None:
    table = RequestTable(Limits())
    one = make_request(tenant="a")
    table.add(one)
    assert table.find(checked(tenant="a")) is one
    assert table.find(checked(tenant="b")) is None
    assert table.find(checked(tenant="b", max_tokens=7)) is None
    assert table.find(checked()) is None
    with pytest.raises(AlreadyExists):
        table.find(checked(tenant="a", max_tokens=7))
    two = make_request(tenant="b")
    table.add(two)
    two.fail(Internal("x"), 1.0)
    table.ended(two)
    assert table.find(checked(tenant="b")) is None
    assert table.find(checked(tenant="a")) is one
    one.complete(scheduler_pb2.GenerateComplete(), 1.0)
    table.ended(one)
    table.expire(1.0 + Limits().remember_seconds)
    assert len(table) == 0


def test_workers_never_hear_the_same_name_twice() -> None:
    """A worker pauses a request by name: it must not pause another tenant's."""
    name = "x" * 64
    requests = [make_request(tenant=t, request_id=name) for t in ("a", "b", "a")]
    assert len({request.request_id for request in requests}) == 3
    assert all(len(request.request_id) == 64 for request in requests)
    assert make_request(request_id=name).request_id == name
    assert requests[0].key == ("a", name)


def test_a_tenants_quota_counts_what_has_not_ended() -> None:
    table = RequestTable(Limits(tenant_requests=2))
    requests = [make_request(tenant="a", request_id=str(n)) for n in range(2)]
    for request in requests:
        table.check_quota("a")
        table.add(request)
    with pytest.raises(ResourceExhausted) as caught:
        table.check_quota("a")
    assert caught.value.reason == "TENANT_QUOTA"
    assert caught.value.retry_after_seconds == table.limits.retry_seconds
    table.check_quota("b")
    requests[0].complete(scheduler_pb2.GenerateComplete(), 1.0)
    table.ended(requests[0])
    table.check_quota("a")
    RequestTable(Limits()).check_quota("a")


def test_a_resume_reaches_no_other_tenants_request() -> None:
    table = RequestTable(Limits())
    theirs = checked(request_id="r", tenant="a")
    table.add(theirs)
    message = ids_request([5], 50, request_id="r")
    for tenant in ("a", "b"):
        message.resume.next_index = 2
        message.resume.token_ids[:] = [7, 8]
        again = validate_generate(
            message, MODEL_SHAPE, TOKENIZER.encode, tenant=tenant, server_key=b"k" * 32
        )
        # The resume is not part of the body, and the seed is the tenant's own.
        assert (again.body_digest, again.resume.token_ids) == (theirs.body_digest, (7, 8))
        assert table.find(again) is (theirs if tenant == "a" else None)
        assert (again.sampling.seed == theirs.sampling.seed) is (tenant == "a")
