"""Sources, speculation and selection on the worker's side of the Run stream. About 2 s."""

from __future__ import annotations

from typing import Any

import pytest

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.keys import SALT_LIMIT, numerics_salt
from splitpoint.planning.plan import RestoreMethod
from splitpoint.selection import FULL, Selection, SelectionUsage
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.tiers import ChunkSource, Tier
from splitpoint.transport.convert import (
    method_to_proto,
    selection_to_proto,
    selection_usage_to_proto,
    speculation_to_proto,
)
from splitpoint.v1 import types_pb2, worker_pb2
from worker_service.counters import Counters
from worker_service.engine.messages import (
    DraftEvent,
    FinishEvent,
    PrefillEvent,
    PromptEvent,
    SelectionEvent,
    StepEvent,
    StepOutput,
    TokenEvent,
)
from worker_service.engine.sampling import Choice, PromptScores
from worker_service.engine.sequence import Admission
from worker_service.fetching.results import FetchSource
from worker_service.lanes.timeline import StepTimes
from worker_service.metrics import selection_readings
from worker_service.wire import admission_from, prompt_responses, response_from

ONE, TWO = ("one", 1, 7), ("two", 4, 7)
SHAPE = shape_from_config(read_config(resolve_model(None)), name="stdlib-llama")


def admission(selection: types_pb2.SelectionParams | None = None, **params: Any) -> Admission:
    """Return what a worker makes of a command with these params."""
    command = worker_pb2.AdmitCommand(
        request_id="one",
        attempt=1,
        prompt_token_ids=[5, 6],
        sampling=types_pb2.SamplingParams(max_tokens=4),
        plan=types_pb2.Plan(
            residency=types_pb2.RESIDENCY_RESIDENT, method=method_to_proto(RestoreMethod.NONE)
        ),
        speculation=types_pb2.SpeculativeParams(**params),
        selection=selection,
    )
    return admission_from(command, SHAPE, has_activations=True)


def test_the_salt_of_chunk_keys_depends_on_the_numerics() -> None:
    command = worker_pb2.AdmitCommand(
        request_id="one",
        attempt=1,
        prompt_token_ids=[5, 6],
        sampling=types_pb2.SamplingParams(max_tokens=4),
        plan=types_pb2.Plan(
            residency=types_pb2.RESIDENCY_RESIDENT, method=method_to_proto(RestoreMethod.NONE)
        ),
        tenant_salt=b"s" * 128,
    )
    salts = {
        digest: admission_from(command, SHAPE, has_activations=True, numerics_digest=digest).salt
        for digest in ("", "aa", "bb")
    }
    assert salts == {digest: numerics_salt(b"s" * 128, digest) for digest in salts}
    assert all(len(salt) <= SALT_LIMIT for salt in salts.values())


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, None),
        ({"source_store_address": "b:1"}, ChunkSource("b:1")),
        ({"source_tier": types_pb2.TIER_DISK}, ChunkSource(tier=Tier.DISK)),
        ({"source_tier": types_pb2.TIER_POOL}, ChunkSource(tier=Tier.POOL)),
    ],
)
def test_a_source_is_another_store_or_a_tier(
    fields: dict[str, Any], place: ChunkSource | None
) -> None:
    command = worker_pb2.AdmitCommand(
        request_id="one",
        prompt_token_ids=[5, 6],
        sampling=types_pb2.SamplingParams(max_tokens=4),
        plan=types_pb2.Plan(
            residency=types_pb2.RESIDENCY_RESIDENT,
            method=method_to_proto(RestoreMethod.NONE),
            predicted_fetch_seconds=2.5,
        ),
        source_cached_tokens=48,
        **fields,
    )
    source = admission_from(command, SHAPE, has_activations=True).source
    assert source == (None if place is None else FetchSource(place, 48, 2.5))
    # Both, the arena itself, or a tier that this worker does not know.
    command.source_store_address = "b:1"
    unknown: Any = 9
    for tier in (types_pb2.TIER_DISK, unknown):
        command.source_tier = tier
        with pytest.raises(InvalidArgument):
            admission_from(command, SHAPE, has_activations=True)
    command.source_store_address, command.source_tier = "", types_pb2.TIER_ARENA
    with pytest.raises(InvalidArgument):
        admission_from(command, SHAPE, has_activations=True)


def test_drafts_are_those_of_the_command() -> None:
    assert admission().speculation == PLAIN
    for drafts in (PLAIN, Speculation(DraftMethod.MODEL, 8, 1), Speculation(DraftMethod.AUTO)):
        params = speculation_to_proto(drafts)
        fields: dict[str, Any] = {field.name: value for field, value in params.ListFields()}
        assert admission(None, **fields).speculation == drafts


@pytest.mark.parametrize(
    ("field", "value"),
    [("method", 9), ("num_speculative_tokens", 33), ("prompt_lookup_min", 0)],
)
def test_bad_params_name_their_field(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        admission(None, **{field: value})
    assert caught.value.field == f"speculation.{field}"


def test_a_selection_reaches_the_engine() -> None:
    approximate = Selection.parsed("window:0.1")
    assert admission().selection == FULL
    assert admission(selection_to_proto(approximate)).selection == approximate
    for wrong in (types_pb2.SelectionParams(), selection_to_proto(Selection.parsed("h2o:0.1"))):
        with pytest.raises(InvalidArgument) as caught:
            admission(wrong)
        assert caught.value.field == "selection.method"


def test_a_step_and_the_end_say_what_was_selected() -> None:
    usage = SelectionUsage(step_count=1, visible_token_count=90, read_token_count=9, link_bytes=64)
    output = StepOutput(
        tokens=[TokenEvent(ONE, 7, Choice(50)), TokenEvent(TWO, 0, Choice(9))],
        selections=[SelectionEvent(ONE, usage)],
        finishes=[FinishEvent(TWO, reason="length", selection_off_reason="it is short")],
    )
    response = response_from(output, 1)
    first, second = response.tokens
    assert first.selection == selection_usage_to_proto(usage)
    assert not second.HasField("selection")
    assert response.finishes[0].selection_off_reason == "it is short"
    counters = Counters()
    counters.add(output)
    counters.add(output)
    assert counters.selected == usage + usage
    read = {
        (reading.metric.name, *reading.labels): reading.value
        for reading in selection_readings(counters.selected)
    }
    assert read["splitpoint_selection_tokens_total", "skipped"] == 2 * 81
    assert read["splitpoint_selection_link_bytes_total",] == 128


def test_a_steps_tokens_of_one_request_are_one_result_with_its_drafts() -> None:
    output = StepOutput(
        tokens=[
            TokenEvent(ONE, 7, Choice(50, -0.5, ((50, -0.5),))),
            TokenEvent(ONE, 8, Choice(51, -1.5, ((52, -0.25),))),
            TokenEvent(TWO, 0, Choice(9)),
        ],
        drafts=[DraftEvent(ONE, DraftMethod.SUFFIX, drafted=3, accepted=1)],
    )
    first, second = response_from(output, 1).tokens
    assert (first.request_id, first.attempt, first.first_index) == ("one", 1, 7)
    assert list(first.token_ids) == [50, 51]
    assert [each.chosen_logprob for each in first.logprobs] == [-0.5, -1.5]
    assert [each.top[0].token_id for each in first.logprobs] == [50, 52]
    assert first.draft_method == types_pb2.DRAFT_METHOD_SUFFIX
    assert (first.draft_token_count, first.accepted_token_count) == (3, 1)
    assert second == worker_pb2.TokenResult(request_id="two", attempt=4, token_ids=[9])


def test_a_piece_of_a_prefill_is_reported_although_it_gives_no_token() -> None:
    step = StepEvent(StepTimes(0.3), prefilled_tokens=40, decoded_tokens=2)
    # 10 of the 40 are of requests of other streams.
    output = StepOutput(step=step, prefills=[PrefillEvent(ONE, 25), PrefillEvent(TWO, 5)])
    assert output.has_news
    response = response_from(output, 1)
    assert (response.scheduled_token_count, response.prefilled_token_count) == (42, 30)
    assert (
        response_from(
            StepOutput(finishes=[FinishEvent(ONE, reason="stop")]), 2
        ).scheduled_token_count
        == 0
    )


def test_the_account_counts_drafts_by_method() -> None:
    counters = Counters()
    suffix, model = DraftMethod.SUFFIX, DraftMethod.MODEL
    counters.add(StepOutput(drafts=[DraftEvent(ONE, suffix, 3, 1), DraftEvent(TWO, model, 2, 2)]))
    counters.add(StepOutput(drafts=[DraftEvent(ONE, suffix, 4, 0)]))
    assert (counters.drafts[suffix], counters.drafts[model]) == (2, 1)
    assert (counters.drafted_tokens[suffix], counters.drafted_tokens[model]) == (7, 2)
    assert (counters.accepted_tokens[suffix], counters.accepted_tokens[model]) == (1, 2)
    assert counters.drafts[DraftMethod.SELF] == 0, "shown from the start"


def test_log_probabilities_of_a_prompt_go_in_pieces() -> None:
    count, width = 20_000, 20
    scores = PromptScores(
        7,
        [-float(index) for index in range(count)],
        [*range(1, count + 1)],
        [*range(count * width)],
        [-0.5] * (count * width),
    )
    messages = [*prompt_responses(StepOutput(prompts=[PromptEvent(ONE, scores)], running_count=3))]
    assert max(message.ByteSize() for message in messages) < 1 << 20
    pieces = [piece for message in messages for piece in message.prompt_logprobs]
    assert len(pieces) == len(messages) > 1
    assert {(each.request_id, each.attempt) for each in pieces} == {ONE[:2]}
    at = 7
    for each in pieces:
        assert each.first_index == at
        assert len(each.top_token_ids) == len(each.top_logprobs) == width * len(each.ranks)
        at += len(each.logprobs)
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        assert [value for each in pieces for value in getattr(each, name)] == getattr(scores, name)
    assert {message.running_count for message in messages} == {3}
