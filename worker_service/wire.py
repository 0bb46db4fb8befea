"""Converts between the Run stream's messages and the engine's values, and validates commands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.keys import SALT_LIMIT, numerics_salt
from splitpoint.planning.plan import Plan, Residency, RestoreMethod, SplitLine
from splitpoint.shapes import ModelShape
from splitpoint.speculation import PLAIN
from splitpoint.structured.grammar import grammar_from_proto
from splitpoint.tiers import ChunkSource, Tier
from splitpoint.transport.convert import (
    draft_method_to_proto,
    plan_from_proto,
    profile_to_proto,
    selection_from_proto,
    selection_usage_to_proto,
    speculation_from_proto,
    tier_from_proto,
    to_message,
)
from splitpoint.v1 import types_pb2, worker_pb2
from worker_service.engine.messages import DraftEvent, FinishEvent, StepOutput, TokenEvent
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.fetching.results import FetchSource
from worker_service.streams import Charges, OtherStreams

ADDRESS_LIMIT = 255
# Positions of a prompt in one message: less than 1 MiB with 20 alternatives.
PROMPT_PIECE = 4096

_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "cancelled": types_pb2.FINISH_REASON_CANCELLED,
}


def admission_from(
    command: worker_pb2.AdmitCommand,
    shape: ModelShape,
    *,
    has_activations: bool,
    numerics_digest: str = "",
    stream: int = 0,
) -> Admission:
    """Return the admission of a command. Raises InvalidArgument naming the field.

    Args:
        numerics_digest: the worker's, which its chunk keys depend on.
        stream: number of the Run stream that the command came through.
    """
    bad_words = tuple(tuple(each.token_ids) for each in command.bad_words)
    sampling = Sampling.from_proto(command.sampling, bad_words)
    _check_tokens(command, sampling, shape)
    plan = plan_from_proto(command.plan)
    is_forced = command.HasField("forced_split_tokens")
    split = command.forced_split_tokens if is_forced else plan.split_tokens
    line = None
    if not is_forced:
        line = SplitLine(plan.split_slope, plan.split_intercept, plan.split_cap)
    if not has_activations and (split > 0 or (line is not None and line.cap > 0)):
        raise InvalidArgument(
            "the store holds no activations: only split 0 is possible",
            field="admit.forced_split_tokens",
            reason="NO_ACTIVATIONS",
        )
    for field, value in (
        ("forced_split_tokens", split),
        ("plan.tile_tokens", plan.tile_tokens),
        ("plan.resident_tokens", plan.resident_tokens),
        ("plan.recomputed_tokens", plan.recomputed_tokens),
    ):
        _check_not_negative(value, field)
    _check_method(plan, forces_split=is_forced)
    selection = selection_from_proto(command.selection if command.HasField("selection") else None)
    grammar = None
    if command.sampling.HasField("structured_output"):
        grammar = grammar_from_proto(command.sampling.structured_output)
    return Admission(
        request_id=command.request_id,
        attempt=command.attempt,
        prompt=tuple(command.prompt_token_ids),
        delivered=tuple(command.delivered_token_ids),
        sampling=sampling,
        residency=plan.residency,
        split_tokens=split,
        split_line=line,
        resident_tokens=plan.resident_tokens,
        schedule=plan.schedule,
        salt=numerics_salt(command.tenant_salt, numerics_digest),
        source=_source_of(command),
        method=plan.method,
        recomputed_tokens=plan.recomputed_tokens,
        tile_tokens=plan.tile_tokens,
        restores_all=is_forced,
        predicted_restore_seconds=plan.predicted_restore_seconds,
        traceparent=command.traceparent,
        speculation=speculation_from_proto(command.speculation).over(PLAIN),
        selection=selection,
        grammar=grammar,
        stream=stream,
    )


def _check_tokens(command: worker_pb2.AdmitCommand, sampling: Sampling, shape: ModelShape) -> None:
    prompt, delivered = command.prompt_token_ids, command.delivered_token_ids
    if not 1 <= len(command.request_id) <= 64:
        raise InvalidArgument("request_id must have 1 to 64 characters", field="admit.request_id")
    if not prompt:
        raise InvalidArgument("the prompt is empty", field="admit.prompt_token_ids")
    for field, ids in (("prompt_token_ids", prompt), ("delivered_token_ids", delivered)):
        if ids and not (min(ids) >= 0 and max(ids) < shape.vocabulary_size):
            raise InvalidArgument(
                f"token ids must be in [0, {shape.vocabulary_size})", field=f"admit.{field}"
            )
    if len(command.tenant_salt) > SALT_LIMIT:
        raise InvalidArgument(f"more than {SALT_LIMIT} bytes", field="admit.tenant_salt")
    if sampling.max_tokens < 1:
        raise InvalidArgument("must be above 0", field="admit.sampling.max_tokens")
    if len(delivered) >= sampling.max_tokens:
        raise InvalidArgument(
            "as many tokens were delivered as were asked for", field="admit.delivered_token_ids"
        )
    if len(prompt) + sampling.max_tokens > shape.context_length:
        raise InvalidArgument(
            f"{len(prompt)} prompt tokens and {sampling.max_tokens} new ones exceed the context "
            f"of {shape.context_length}",
            field="admit.prompt_token_ids",
        )


def _check_not_negative(value: int, field: str) -> None:
    if value < 0:
        raise InvalidArgument("must be at least 0", field=f"admit.{field}")


def _check_method(plan: Plan, *, forces_split: bool) -> None:
    """Raise InvalidArgument if the plan's restore method is not possible."""
    if plan.method is not RestoreMethod.TOKENS:
        return
    if plan.residency is not Residency.RESIDENT:
        raise InvalidArgument(
            "only a resident cache comes back by method TOKENS", field="admit.plan.method"
        )
    if forces_split:
        raise InvalidArgument("method TOKENS has no split point", field="admit.forced_split_tokens")


def _source_of(command: worker_pb2.AdmitCommand) -> FetchSource | None:
    """Return what to fetch from; None if nothing is. Raises InvalidArgument."""
    address, tier = command.source_store_address, command.source_tier
    _check_not_negative(command.meeting_tokens, "meeting_tokens")
    if command.meeting_tokens and not tier:
        raise InvalidArgument(
            "only what comes from a tier can meet what is computed", field="admit.meeting_tokens"
        )
    if not address and not tier:
        return None
    if len(address) > ADDRESS_LIMIT:
        raise InvalidArgument(
            f"more than {ADDRESS_LIMIT} characters", field="admit.source_store_address"
        )
    _check_not_negative(command.source_cached_tokens, "source_cached_tokens")
    try:
        place = ChunkSource(address, tier_from_proto(tier) if tier else Tier.ARENA)
    except ValueError as error:
        raise InvalidArgument(str(error), field="admit.source_tier") from error
    return FetchSource(
        place,
        command.source_cached_tokens,
        command.plan.predicted_fetch_seconds,
        command.meeting_tokens,
    )


def prompt_responses(output: StepOutput) -> Iterator[worker_pb2.RunResponse]:
    """Yield the messages of prompts' log-probabilities, without their steps."""
    for event in output.prompts:
        request_id, attempt, _ = event.key
        for piece in event.scores.pieces(PROMPT_PIECE):
            found = worker_pb2.PromptLogprobs(
                request_id=request_id,
                attempt=attempt,
                first_index=piece.first_index,
                logprobs=piece.logprobs,
                ranks=piece.ranks,
                top_token_ids=piece.top_token_ids,
                top_logprobs=piece.top_logprobs,
            )
            yield worker_pb2.RunResponse(
                running_count=output.running_count,
                cache_used_bytes=output.cache_used_bytes,
                prompt_logprobs=[found],
            )


def response_from(
    output: StepOutput, step: int, telemetry: types_pb2.Telemetry | None = None
) -> worker_pb2.RunResponse:
    """Return the message of one step's output."""
    response = worker_pb2.RunResponse(
        step=step,
        running_count=output.running_count,
        cache_used_bytes=output.cache_used_bytes,
        profile=None if output.profile is None else profile_to_proto(output.profile),
        telemetry=telemetry,
        scheduled_token_count=0 if output.step is None else output.step.scheduled_tokens,
        prefilled_token_count=sum(event.token_count for event in output.prefills),
    )
    drafts = {event.key: event for event in output.drafts}
    selections = {event.key: event.usage for event in output.selections}
    # A step that verified drafts gives several tokens to one request.
    for key, events in itertools.groupby(output.tokens, key=lambda event: event.key):
        result = _tokens_from(list(events), drafts.get(key))
        if (usage := selections.get(key)) is not None:
            result.selection.CopyFrom(selection_usage_to_proto(usage))
        response.tokens.append(result)
    response.restores.extend(
        to_message(worker_pb2.RestoreReport, event) for event in output.restores
    )
    response.finishes.extend(finish_from(event) for event in output.finishes)
    return response


def _tokens_from(events: list[TokenEvent], draft: DraftEvent | None) -> worker_pb2.TokenResult:
    """Return the message of one request's tokens. `draft`: what the step verified for it."""
    request_id, attempt, _ = events[0].key
    result = worker_pb2.TokenResult(
        request_id=request_id,
        attempt=attempt,
        first_index=events[0].index,
        token_ids=[event.choice.token_id for event in events],
    )
    if draft is not None:
        result.draft_method = draft_method_to_proto(draft.method)
        result.draft_token_count = draft.drafted
        result.accepted_token_count = draft.accepted
    for event in events:
        if event.choice.logprob is not None or event.choice.hidden_state:
            position = to_message(
                types_pb2.PositionLogprobs,
                event.choice,
                chosen_logprob=event.choice.logprob or 0.0,
                top=[
                    types_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                    for token_id, logprob in event.choice.top_logprobs
                ],
                # The scheduler's.
                chosen_token_bytes=b"",
                chosen_token_id=0,
                chosen_rank=0,
            )
            result.logprobs.append(position)
    return result


def finish_from(event: FinishEvent) -> worker_pb2.RequestFinish:
    """Return the message of a request's end."""
    request_id, attempt, _ = event.key
    finish = worker_pb2.RequestFinish(request_id=request_id, attempt=attempt)
    if event.error is not None:
        finish.error_code = event.error.code
        finish.error_message = event.error.message
        finish.error_reason = event.error.reason
    else:
        finish.reason = _REASONS[event.reason]
    if event.mean_step_seconds is not None:
        finish.mean_step_seconds = event.mean_step_seconds
    finish.selection_off_reason = event.selection_off_reason
    return finish


def refusal(command: worker_pb2.AdmitCommand, stream: int, error: SplitpointError) -> FinishEvent:
    """Return the end of a request of a Run stream that was never admitted."""
    return FinishEvent((command.request_id, command.attempt, stream), error=error)


def charges_from_proto(message: worker_pb2.Charges, now: float) -> Charges:
    """Return what a scheduler charges. Raises InvalidArgument for what cannot be."""
    numbers = {
        "cache_bytes": message.cache_bytes,
        "request_count": message.request_count,
        "slot_count": message.slot_count,
        "wanted_bytes": message.wanted_bytes,
    }
    for field, value in (*numbers.items(), ("waited_seconds", message.waited_seconds)):
        if not 0 <= value < math.inf:
            raise InvalidArgument("must be at least 0", field=f"charge.charges.{field}")
    since = now - message.waited_seconds if message.wanted_bytes else None
    return Charges(**numbers, waiting_since=since)


def others_to_proto(others: OtherStreams, now: float) -> worker_pb2.OtherStreams:
    """Return the message of what other streams charge and want."""
    charges = others.charges
    waited = 0.0 if charges.waiting_since is None else max(0.0, now - charges.waiting_since)
    return worker_pb2.OtherStreams(
        stream_count=others.stream_count,
        busy_count=others.busy_count,
        charges=worker_pb2.Charges(
            cache_bytes=charges.cache_bytes,
            request_count=charges.request_count,
            slot_count=charges.slot_count,
            wanted_bytes=charges.wanted_bytes,
            waited_seconds=waited,
        ),
    )
