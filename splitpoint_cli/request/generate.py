"""`splitpoint generate`: one request to a running scheduler, streamed to the terminal."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.markup import escape
from rich.table import Table

from splitpoint.client import Client, Generation
from splitpoint.client.answers import Completion, Logprobs, SpeculationUsage
from splitpoint.config import DEFAULT_ADDRESS, counted, format_size
from splitpoint.errors import Cancelled, Internal, Retryable, Unavailable
from splitpoint.planning.words import ExplainedPlan
from splitpoint.selection import SelectionUsage
from splitpoint.transport.tls import client_identity
from splitpoint_cli.options import Address, CaFile, TokenFile, configurable
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    err,
    hand_over,
    plain_reason,
    print_table,
    seconds_text,
    show_reason,
    with_exit_codes,
)
from splitpoint_cli.request import options


def summary(completion: Completion) -> str:
    """Return what was done and its time, in one line."""
    usage = completion.usage
    plan = completion.plan
    fetched = ""
    if plan is not None and plan.fetched_tokens:
        fetched = f" ({plan.fetched_tokens:,} fetched from {plan.fetch_source or 'another store'})"
    here = plan.device_tokens if plan is not None else 0
    restored = ""
    is_restored = usage.cached_tokens > here and completion.restore_seconds
    if plan is not None and is_restored:
        restored = (
            f"restored in {seconds_text(completion.restore_seconds)} "
            f"({plan.method.value}, "
            f"{seconds_text(plan.predicted_restore_seconds)} predicted), "
        )
    steps = ""
    if plan is not None and completion.step_seconds is not None:
        # The plan's steps read every token.
        exact = " without the selection" if usage.selection.is_approximate else ""
        steps = (
            f"{seconds_text(completion.step_seconds)} a step "
            f"({seconds_text(plan.predicted_step_seconds)} predicted for it alone{exact}), "
        )
    return (
        f"{counted(usage.completion_tokens, 'token')} ({_ending(completion)}), "
        f"{usage.cached_tokens:,} of {counted(usage.prompt_tokens, 'prompt token')} cached"
        f"{fetched}"
        f"{f' ({here:,} on the device)' if here else ''}, "
        f"{restored}{steps}{_drafts(usage.speculation)}"
        f"{_selected(usage.selection)}worker {completion.worker}, "
        f"first token after {seconds_text(completion.ttft_seconds)}, "
        f"{seconds_text(completion.seconds)} in all, seed {completion.seed}"
    )


def _drafts(usage: SpeculationUsage) -> str:
    """Return what was drafted, as a part of a list; empty for plain decoding."""
    if not usage.draft_token_count:
        return ""
    return (
        f"{usage.accepted_token_count:,} of {counted(usage.draft_token_count, 'drafted token')} "
        f"accepted ({usage.method.value}), "
    )


def _selected(usage: SelectionUsage) -> str:
    """Return what was read by selection, as a part of a list; empty if nothing was asked for."""
    if not usage.step_count:
        return f"no selection ({usage.off_reason}), " if usage.off_reason else ""
    rows = usage.fetched_row_count + usage.reused_row_count
    return (
        f"{usage.read_ratio:.1%} of the tokens read ({usage.fetched_row_count:,} of "
        f"{counted(rows, 'row')} fetched, {format_size(usage.link_bytes)}), {_pooled(usage)}"
    )


def _pooled(usage: SelectionUsage) -> str:
    """Return what a bounded pool took and left, as a part of a list; empty without one."""
    if not usage.pool_bytes:
        return ""
    return (
        f"{counted(usage.evicted_token_count, 'token')} evicted, the others in "
        f"{format_size(usage.pool_bytes)} of host memory, "
    )


def approximation(completion: Completion) -> str | None:
    """Return how an answer is approximate, or why a selection was not used; None otherwise."""
    usage = completion.usage.selection
    if usage.is_approximate:
        steps = counted(usage.step_count, "step")
        return (
            f"approximate: {steps} read {usage.read_ratio:.1%} of the tokens, "
            f"{usage.mean_read_tokens:,.0f} each, and skipped "
            f"{usage.skipped_token_count // usage.step_count:,}"
        )
    if usage.off_reason and not usage.step_count:
        return f"the selection was not used: {usage.off_reason}"
    return None


def _ending(completion: Completion) -> str:
    if completion.matched_stop is None:
        return completion.finish_reason.value
    return f"{completion.finish_reason.value} at {completion.matched_stop!r}"


def capped_split(completion: Completion, wanted: int | None) -> str | None:
    """Return why `--split` was not followed in full; None if it was."""
    plan = completion.plan
    if wanted is None or plan is None or plan.split_tokens >= wanted:
        return None
    cached = counted(plan.cached_tokens, "token of the prompt is", "tokens of the prompt are")
    return (
        f"--split {wanted:,} was capped at {plan.split_tokens:,}: {cached} cached, "
        "and nothing else can be rebuilt"
    )


def logprobs_table(completion: Completion) -> Table:
    """Return a row for each generated token: its log-probability, and the likeliest tokens."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("index", "token", "logprob"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("likeliest (token logprob)", overflow="fold")
    for index, found in enumerate(completion.logprobs):
        likeliest = ", ".join(
            f"{_named(token_id, text)} {value:.4f}"
            for (token_id, value), text in zip(found.top, found.top_bytes, strict=True)
        )
        token = _named(completion.token_ids[index], found.chosen_bytes)
        table.add_row(str(index), escape(token), f"{found.chosen:.4f}", escape(likeliest))
    return table


def _named(token_id: int, text: bytes) -> str:
    """Return the id of a token, and its text if it has one."""
    return f"{token_id} {text.decode(errors='backslashreplace')!r}" if text else str(token_id)


def logprobs_json(token_id: int, found: Logprobs) -> dict[str, object]:
    """Return one generated token's part of `--json`."""
    return {
        "token_id": token_id,
        "logprob": found.chosen,
        "bytes": list(found.chosen_bytes),
        "top": [
            {"token_id": other, "logprob": value, "bytes": list(text)}
            for (other, value), text in zip(found.top, found.top_bytes, strict=True)
        ],
    }


def completion_json(completion: Completion) -> dict[str, object]:
    """Return the object that `--json` prints."""
    usage = completion.usage
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "matched_stop": completion.matched_stop,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "speculation": dataclasses.asdict(usage.speculation),
            "selection": {
                **dataclasses.asdict(usage.selection),
                "read_ratio": usage.selection.read_ratio,
                "skipped_token_count": usage.selection.skipped_token_count,
            },
        },
        "logprobs": [
            logprobs_json(token_id, found)
            for token_id, found in zip(completion.token_ids, completion.logprobs, strict=False)
        ]
        if completion.logprobs
        else None,
        "seed": completion.seed,
        "request_id": completion.request_id,
        "worker": completion.worker,
        "plan": None if completion.plan is None else plan_json(completion.plan),
        "restore_seconds": completion.restore_seconds,
        "step_seconds": completion.step_seconds,
        "ttft_seconds": completion.ttft_seconds,
        "seconds": completion.seconds,
    }


def plan_json(plan: ExplainedPlan) -> dict[str, object]:
    return {
        "residency": plan.residency.value,
        "split_tokens": plan.split_tokens,
        "method": plan.method.value,
        "schedule": plan.schedule.value,
        "reason": plan.reason,
        "reason_details": list(plan.reason_details),
        "fetched_tokens": plan.fetched_tokens,
        "fetch_source": plan.fetch_source,
        "fetch_transfer": plan.fetch_transfer,
        "device_tokens": plan.device_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "resident_tokens": plan.resident_tokens,
        "predicted_restore_seconds": plan.predicted_restore_seconds,
        "predicted_load_seconds": plan.predicted_load_seconds,
        "predicted_recompute_seconds": plan.predicted_recompute_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
    }


@with_exit_codes
@configurable
def generate(
    *,
    prompt: options.PromptText = None,
    given: options.OneRequestOptions,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Complete a prompt, streaming the text."""
    request = given.request()
    text_or_ids = options.read_prompt(prompt, given.prompt_ids)
    identity = client_identity(ca=ca, token_file=token_file)
    with (
        Client(
            address, identity=identity, retry_seconds=given.retry_seconds, on_retry=tell_retry
        ) as client,
        client.generate(text_or_ids, **request) as generation,
    ):
        completion = _collect_until_interrupted(generation, stream=not as_json)
    asked = request.get("split")
    _report(completion, asked, as_json=as_json, output=output, with_reason=given.explain)


def tell_retry(error: Retryable, address: str) -> None:
    """Say on stderr that another scheduler goes on."""
    state = "does not answer" if isinstance(error, Unavailable) else "is full"
    cause = plain_reason(" ".join(error.message.split()))
    err.print(escape(f"the scheduler {state} ({cause}): going on at {address}"))


def _report(
    completion: Completion,
    split: int | None,
    *,
    as_json: bool,
    output: Path | None,
    with_reason: bool,
) -> None:
    """Print all that follows the text."""

    def show() -> None:
        if completion.logprobs:
            print_table(logprobs_table(completion))

    # On one line: indented, every token id would get a line of its own.
    hand_over(completion_json(completion), show, as_json=as_json, output=output, indent=None)
    for remark in (capped_split(completion, split), approximation(completion)):
        if remark is not None:
            err.print(escape(remark))
    if with_reason or (sys.stderr.isatty() and not as_json):
        err.print(f"[dim]{escape(summary(completion))}[/dim]")
    if with_reason and completion.plan is not None:
        show_reason(completion.plan)


def _collect_until_interrupted(generation: Generation, *, stream: bool) -> Completion:
    """Return the answer; SIGINT and SIGTERM cancel the request."""
    seen: list[int] = []

    def cancel(number: int, _: FrameType | None) -> None:
        seen.append(number)
        generation.close()

    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, cancel)
    try:
        return _collect(generation, stream=stream)
    except Cancelled:
        if not seen:
            raise
        raise Cancelled("interrupted") from None


def _collect(generation: Generation, *, stream: bool) -> Completion:
    """Return the answer; print its text as it comes if `stream`."""
    if not stream:
        return generation.complete()
    is_line_open = False
    try:
        for event in generation:
            is_line_open = True
            if isinstance(event, Completion):
                if not event.text and event.token_ids:
                    # A model without a tokenizer answers in token ids.
                    sys.stdout.write(",".join(str(token) for token in event.token_ids))
                return event
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:
        # An error on stderr starts on its own line.
        if is_line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
    raise Internal("the generation ended without an answer")
