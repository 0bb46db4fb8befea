"""Every bad input has its code and its field, in a pure call and over the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from bad_sampling import BAD_SAMPLING
from google.protobuf.message import Message
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_doubles import SHAPE, answer, ids_request, stack

from scheduler_service.api.prompts import Encode
from scheduler_service.api.request import Request
from scheduler_service.api.validation import validate_generate
from scheduler_service.limits import Limits
from splitpoint.checkpoint.text import TooManyTokens
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound, SplitpointError
from splitpoint.planning.plan import LOADED, RECOMPUTED, Residency
from splitpoint.transport import statuses
from splitpoint.v1 import scheduler_pb2, types_pb2

TINY = replace(SHAPE, name="tiny", vocabulary_size=100, context_length=50)


def encode_bytes(text: str, most: int, *, adds_special_tokens: bool = True) -> list[int]:
    ids = [byte % 100 for byte in text.encode()]
    if len(ids) > most:
        raise TooManyTokens(len(ids), is_exact=True)
    return ids


def check(
    request: scheduler_pb2.GenerateRequest,
    encode: Encode | None = encode_bytes,
) -> Request:
    return validate_generate(request, TINY, encode, server_key=b"k" * 32)


def request_with(change: Callable[[scheduler_pb2.GenerateRequest], Any]) -> Any:
    request = ids_request([1, 2, 3])
    change(request)
    return request


def sampling(**fields: Any) -> Callable[[scheduler_pb2.GenerateRequest], None]:
    return lambda request: request.sampling.MergeFrom(types_pb2.SamplingParams(**fields))


def fields(**values: Any) -> Callable[[scheduler_pb2.GenerateRequest], None]:
    return lambda request: request.MergeFrom(scheduler_pb2.GenerateRequest(**values))


def speculation(**values: Any) -> Callable[[scheduler_pb2.GenerateRequest], None]:
    return fields(speculation=types_pb2.SpeculativeParams(**values))


def selection(**values: Any) -> Callable[[scheduler_pb2.GenerateRequest], None]:
    return fields(selection=types_pb2.SelectionParams(**values))


def clear(*names: str) -> Callable[[scheduler_pb2.GenerateRequest], None]:
    def change(request: scheduler_pb2.GenerateRequest) -> None:
        for name in names:
            request.ClearField(name)

    return change


COLUMNS = types_pb2.SELECTION_METHOD_COLUMNS
H2O = types_pb2.SELECTION_METHOD_H2O

BAD: list[tuple[str, Callable[[scheduler_pb2.GenerateRequest], Any]]] = [
    ("prompt", clear("token_ids")),
    ("text", fields(text="")),
    ("token_ids.ids", lambda request: request.token_ids.ClearField("ids")),
    ("token_ids.ids[3]", lambda request: request.token_ids.ids.append(100)),
    ("token_ids.ids[3]", lambda request: request.token_ids.ids.append(-1)),
    ("token_ids.ids", lambda request: request.token_ids.ids.extend([1] * 47)),
    ("text", fields(text="x" * 50)),
    ("sampling.max_tokens", sampling(max_tokens=48)),
    *((f"sampling.{field}", sampling(**values)) for field, values in BAD_SAMPLING),
    ("sampling.top_k", sampling(top_k=-1)),
    ("sampling.logit_bias[100]", sampling(logit_bias={100: 1.0})),
    ("sampling.stop_token_ids[1]", sampling(stop_token_ids=[1, 100])),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1] * 10_000)),
    ("truncate_prompt_tokens", fields(truncate_prompt_tokens=0)),
    ("truncate_prompt_tokens", fields(truncate_prompt_tokens=-2)),
    ("truncate_prompt_tokens", fields(truncate_prompt_tokens=1 << 20)),
    ("cache_salt", fields(cache_salt=b"s" * 129)),
    ("priority", fields(priority=11)),
    ("priority", fields(priority=-11)),
    ("request_id", fields(request_id="r" * 65)),
    ("request_id", fields(request_id="a\nb")),
    ("split_tokens", fields(split_tokens=-1)),
    ("residency", fields(residency=9)),
    ("restore_method", fields(restore_method=99)),
    ("restore_method", fields(restore_method=types_pb2.RESTORE_METHOD_SPLIT)),
    ("restore_method", fields(restore_method=types_pb2.RESTORE_METHOD_LOAD, split_tokens=0)),
    ("restore_method", fields(restore_method=types_pb2.RESTORE_METHOD_TOKENS, residency=2)),
    ("speculation.method", speculation(method=9)),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=-1)),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=33)),
    ("speculation.prompt_lookup_min", speculation(prompt_lookup_min=0)),
    ("speculation.prompt_lookup_min", speculation(prompt_lookup_min=65)),
    ("selection.method", selection()),
    ("selection.method", selection(ratio=0.1)),
    ("selection.method", selection(method=99, ratio=0.1)),
    ("selection.columns", selection(method=types_pb2.SELECTION_METHOD_MAPLE, ratio=0.1, columns=5)),
    ("selection.method", selection(method=H2O, ratio=0.1)),
    ("selection.ratio", selection(method=COLUMNS)),
    ("selection.ratio", selection(method=COLUMNS, ratio=0.0)),
    ("selection.ratio", selection(method=COLUMNS, ratio=1.01)),
    ("selection.ratio", selection(method=COLUMNS, ratio=math.nan)),
    ("selection.ratio", selection(method=types_pb2.SELECTION_METHOD_FULL, ratio=0.5)),
    ("selection.alpha", selection(method=COLUMNS, alpha=-1.0)),
    ("selection.alpha", selection(method=COLUMNS, alpha=math.nan)),
    ("selection.alpha", selection(method=types_pb2.SELECTION_METHOD_WINDOW, alpha=4.0)),
    ("selection.budget_tokens", selection(method=COLUMNS, budget_tokens=0)),
    ("selection.cap", selection(method=COLUMNS, alpha=4.0, cap=0.0)),
    ("selection.columns", selection(method=COLUMNS, ratio=0.1, columns=0)),
    ("selection.int8", selection(method=types_pb2.SELECTION_METHOD_WINDOW, ratio=0.1, int8=True)),
    ("selection.sinks", selection(method=COLUMNS, ratio=0.1, sinks=-1)),
    ("selection.recent", selection(method=COLUMNS, ratio=0.1, recent=0)),
    ("selection.full_layers", selection(method=COLUMNS, ratio=0.1, full_layers=-1)),
    (
        "speculation.method",
        fields(
            selection=types_pb2.SelectionParams(method=COLUMNS, ratio=0.1),
            speculation=types_pb2.SpeculativeParams(method=types_pb2.DRAFT_METHOD_SUFFIX),
        ),
    ),
    (
        "speculation.method",
        fields(
            selection=types_pb2.SelectionParams(method=COLUMNS, ratio=0.1, verify=True),
            speculation=types_pb2.SpeculativeParams(method=types_pb2.DRAFT_METHOD_OFF),
        ),
    ),
]


@pytest.mark.parametrize(("field", "change"), BAD, ids=[f"{n}-{f}" for n, (f, _) in enumerate(BAD)])
def test_bad_inputs_name_their_field(field: str, change: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(request_with(change))
    assert caught.value.field == field


async def test_bad_inputs_over_the_wire() -> None:
    """Send the same table to a real server, whose vocabulary and context are larger."""
    context, vocabulary = SHAPE.context_length, SHAPE.vocabulary_size
    async with stack(limits=Limits(retry_seconds=0.01)) as running:
        replaced = {
            "sampling.logit_bias[100]": sampling(logit_bias={vocabulary: 1.0}),
            "token_ids.ids[3]": lambda request: request.token_ids.ids.append(vocabulary),
            "token_ids.ids": lambda request: request.token_ids.ids.extend([1] * context),
            "text": fields(text="word " * context),
            "sampling.stop_token_ids[1]": sampling(stop_token_ids=[1, vocabulary]),
            "sampling.max_tokens": sampling(max_tokens=context - 2),
        }
        for field, change in BAD:
            asked = request_with(replaced.get(field, change))
            error = await running.error(asked)
            assert isinstance(error, InvalidArgument), field
            expected = field.replace("[100]", f"[{vocabulary}]")
            assert error.field == expected
        for request in (
            ids_request([1], model="other"),
            ids_request([1], worker_id="other"),
        ):
            assert isinstance(await running.error(request), NotFound)
        refused: tuple[tuple[str, Message, type[SplitpointError]], ...] = (
            ("Tokenize", scheduler_pb2.TokenizeRequest(), InvalidArgument),
            ("Tokenize", scheduler_pb2.TokenizeRequest(model="m", text="x"), NotFound),
            ("GetModel", scheduler_pb2.GetModelRequest(model="m"), NotFound),
            ("ExplainPlan", scheduler_pb2.ExplainPlanRequest(), InvalidArgument),
            (
                "ExplainPlan",
                scheduler_pb2.ExplainPlanRequest(cached_tokens=-1, new_tokens=1),
                InvalidArgument,
            ),
            (
                "ExplainPlan",
                scheduler_pb2.ExplainPlanRequest(cached_tokens=context, new_tokens=1),
                InvalidArgument,
            ),
            (
                "ExplainPlan",
                scheduler_pb2.ExplainPlanRequest(new_tokens=1, residency=7),  # type: ignore[arg-type]
                InvalidArgument,
            ),
            (
                "ExplainPlan",
                scheduler_pb2.ExplainPlanRequest(new_tokens=1, objective=7),  # type: ignore[arg-type]
                InvalidArgument,
            ),
            (
                "ExplainPlan",
                scheduler_pb2.ExplainPlanRequest(new_tokens=1, remote_cached_tokens=2),
                InvalidArgument,
            ),
        )
        for method, message, kind in refused:
            with pytest.raises(grpc.RpcError) as caught:
                await getattr(running.inference, method)(message)
            assert isinstance(statuses.error_of(caught.value), kind), method
        # Nothing of it reached the worker, and it still works.
        assert running.workers[0].admits == []
        assert (await running.generate(ids_request([5], 2))).token_ids == answer([5], 2)


def test_what_was_left_open_is_filled_in() -> None:
    checked = check(ids_request([1, 2, 3]))
    other = check(ids_request([1, 2, 3]))
    assert checked.sampling.max_tokens == 47
    assert 0 <= checked.sampling.seed != other.sampling.seed
    assert len(checked.request_id) == 32
    assert checked.request_id != other.request_id
    assert checked.residency is None
    assert checked.forced is None
    assert checked.token_count == 50
    given_all = request_with(
        lambda request: (
            sampling(max_tokens=4, seed=-3, stop=["a"], stop_token_ids=[1], ignore_eos=True)(
                request
            ),
            fields(residency=2, split_tokens=0, cache_salt=b"s", worker_id="w")(request),
        )
    )
    checked = check(given_all)
    assert (checked.sampling.max_tokens, checked.sampling.seed) == (4, -3)
    assert checked.forced == LOADED
    assert checked.residency is Residency.STREAMED
    assert checked.sampling == given_all.sampling
    assert check(fields_request(text="hello")).prompt == tuple(ord(c) % 100 for c in "hello")


def test_a_prompt_is_cut_so_that_its_answer_fits() -> None:
    long = [1, *range(2, 90)]
    for change, wanted in (
        (sampling(max_tokens=10), long[-40:]),
        (sampling(fills_context=True), long[-49:]),
        (sampling(max_tokens=50), long[-1:]),
    ):
        request = ids_request(long)
        request.sampling.ClearField("max_tokens")
        change(request)
        request.truncate_prompt_tokens = -1
        if request.sampling.max_tokens == 50:  # then not even one prompt token has room
            with pytest.raises(InvalidArgument):
                check(request)
        else:
            assert list(check(request).prompt) == wanted


def test_token_ids_are_recomputed_into_device_memory_only() -> None:
    asked = check(ids_request([1], restore_method=types_pb2.RESTORE_METHOD_TOKENS))
    assert asked.forced == RECOMPUTED
    assert asked.residency is Residency.RESIDENT
    loaded = check(ids_request([1], restore_method=types_pb2.RESTORE_METHOD_LOAD))
    assert (loaded.forced, loaded.residency) == (LOADED, None)


def fields_request(**values: Any) -> scheduler_pb2.GenerateRequest:
    return scheduler_pb2.GenerateRequest(**values)


def test_the_digest_is_of_the_body_only() -> None:
    one, two = check(ids_request([1], request_id="a")), check(ids_request([1], request_id="b"))
    assert one.body_digest == two.body_digest
    assert check(ids_request([2])).body_digest != one.body_digest
    assert check(ids_request([1], cache_salt=b"x")).body_digest != one.body_digest


def test_text_needs_a_tokenizer_and_its_tokens_a_row() -> None:
    for request in (fields_request(text="x"), request_with(sampling(stop=["x"]))):
        with pytest.raises(FailedPrecondition):
            check(request, None)
    with pytest.raises(InvalidArgument, match="lacks"):
        check(fields_request(text="x"), lambda text, most, adds_special_tokens=True: [100])
    with pytest.raises(InvalidArgument, match="empty"):
        check(fields_request(text="x"), lambda text, most, adds_special_tokens=True: [])


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(),
            "top_k": st.integers(-(2**31), 2**31 - 1),
            "top_p": st.floats(),
            "min_p": st.floats(),
            "presence_penalty": st.floats(),
            "frequency_penalty": st.floats(),
            "repetition_penalty": st.floats(),
            "max_tokens": st.integers(-(2**31), 2**31 - 1),
            "min_tokens": st.integers(-(2**31), 2**31 - 1),
            "logprobs": st.integers(-(2**31), 2**31 - 1),
            "seed": st.integers(-(2**63), 2**63 - 1),
        },
    ),
    prompt=st.lists(st.integers(-2, 101), max_size=60),
)
@settings(max_examples=300)
def test_whatever_passes_is_sound(values: dict[str, Any], prompt: list[int]) -> None:
    request = ids_request(prompt)
    request.sampling.MergeFrom(types_pb2.SamplingParams(**values))
    try:
        checked = check(request)
    except InvalidArgument as error:
        event(error.field.partition("[")[0])
        return
    assert 1 <= len(checked.prompt) < checked.token_count <= TINY.context_length
    assert all(0 <= token < TINY.vocabulary_size for token in checked.prompt)
    params = checked.sampling
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
        assert math.isfinite(getattr(params, name))
    assert params.temperature >= 0
    assert not params.HasField("top_p") or 0 < params.top_p <= 1
