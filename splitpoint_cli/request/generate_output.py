"""What `splitpoint generate` says of an answer, beside its text: for people, and as JSON."""

from __future__ import annotations

from rich.table import Table

from splitpoint.client.answers import Completion, Logprobs
from splitpoint.planning.planner import Plan
from splitpoint.words import counted
from splitpoint_cli.output import seconds_text


def summary(completion: Completion) -> str:
    """What was done and what it took, in one line."""
    usage = completion.usage
    fetched = completion.plan.fetched_tokens if completion.plan is not None else 0
    restored = ""
    is_restored = usage.cached_tokens and completion.restore_seconds
    if completion.plan is not None and is_restored:
        restored = (
            f"restored in {seconds_text(completion.restore_seconds)} "
            f"({completion.plan.method.value}, "
            f"{seconds_text(completion.plan.predicted_restore_seconds)} predicted), "
        )
    steps = ""
    if completion.plan is not None and completion.step_seconds is not None:
        steps = (
            f"{seconds_text(completion.step_seconds)} a step "
            f"({seconds_text(completion.plan.predicted_step_seconds)} predicted), "
        )
    return (
        f"{counted(usage.completion_tokens, 'token')} ({_ending(completion)}), "
        f"{usage.cached_tokens:,} of {counted(usage.prompt_tokens, 'prompt token')} cached"
        f"{f' ({fetched:,} fetched from another store)' if fetched else ''}, "
        f"{restored}{steps}worker {completion.worker}, "
        f"first token after {seconds_text(completion.ttft_seconds)}, "
        f"{seconds_text(completion.seconds)} in all, seed {completion.seed}"
    )


def _ending(completion: Completion) -> str:
    if completion.matched_stop is None:
        return completion.finish_reason.value
    return f"{completion.finish_reason.value} at {completion.matched_stop!r}"


def capped_split(completion: Completion, wanted: int | None) -> str | None:
    """What became of a `--split` beyond what is cached; None: it was followed."""
    plan = completion.plan
    if wanted is None or plan is None or plan.split_tokens >= wanted:
        return None
    cached = counted(plan.cached_tokens, "token of the prompt is", "tokens of the prompt are")
    return (
        f"--split {wanted:,} was capped at {plan.split_tokens:,}: {cached} cached, "
        "and nothing else can be rebuilt"
    )


def logprobs_table(completion: Completion) -> Table:
    """A row for each generated token: its log-probability, and the likeliest tokens there."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("index", "token", "logprob"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("likeliest (token logprob)", overflow="fold")
    for index, found in enumerate(completion.logprobs):
        likeliest = ", ".join(f"{token_id} {value:.4f}" for token_id, value in found.top)
        token = str(completion.token_ids[index])
        table.add_row(str(index), token, f"{found.chosen:.4f}", likeliest)
    return table


def logprobs_json(token_id: int, found: Logprobs) -> dict[str, object]:
    """One generated token's part of `--json`."""
    return {
        "token_id": token_id,
        "logprob": found.chosen,
        "top": [{"token_id": other, "logprob": value} for other, value in found.top],
    }


def completion_json(completion: Completion) -> dict[str, object]:
    """The object that `--json` prints."""
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


def plan_json(plan: Plan) -> dict[str, object]:
    return {
        "residency": plan.residency.value,
        "split_tokens": plan.split_tokens,
        "method": plan.method.value,
        "schedule": plan.schedule.value,
        "reason": plan.reason,
        "fetched_tokens": plan.fetched_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "resident_tokens": plan.resident_tokens,
        "predicted_restore_seconds": plan.predicted_restore_seconds,
        "predicted_load_seconds": plan.predicted_load_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
    }
