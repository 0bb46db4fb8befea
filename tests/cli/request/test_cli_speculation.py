"""What commands say of drafts: one request's, and a worker's. Under 1 s."""

from __future__ import annotations

from dataclasses import replace

from told_workers import telemetry, worker

from splitpoint.client.answers import (
    Completion,
    FinishReason,
    SpeculationUsage,
    Usage,
    WorkerSpeculation,
)
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint_cli.request.generate import completion_json, summary
from splitpoint_cli.request.status import speculation_text

DONE = Completion(
    token_ids=(1, 2),
    text="",
    finish_reason=FinishReason.LENGTH,
    matched_stop=None,
    usage=Usage(3, 2, 0),
    seed=1,
    plan=None,
    worker="0",
    request_id="r",
    logprobs=(),
    queue_seconds=0.0,
    restore_seconds=0.0,
    ttft_seconds=0.1,
    seconds=0.2,
)
DRAFTED = replace(
    DONE, usage=replace(DONE.usage, speculation=SpeculationUsage(DraftMethod.SUFFIX, 22, 60, 41))
)


def test_a_request_says_what_was_drafted() -> None:
    assert "draft" not in summary(DONE)
    assert "41 of 60 drafted tokens accepted (suffix)" in summary(DRAFTED)
    usage = completion_json(DRAFTED)["usage"]
    assert isinstance(usage, dict)
    assert usage["speculation"] == {
        "method": "suffix",
        "draft_count": 22,
        "draft_token_count": 60,
        "accepted_token_count": 41,
    }


def test_a_worker_says_what_it_can_draft_by() -> None:
    methods = (DraftMethod.SUFFIX, DraftMethod.MODEL)
    told = WorkerSpeculation(Speculation(DraftMethod.AUTO, 4), methods, "small")
    assert speculation_text(worker("0", telemetry(1.0), speculation=told)) == (
        "drafts by suffix, model; unasked auto; draft model small; at most 4 tokens a step; "
        "30 of 40 drafted tokens accepted"
    )
    quiet = WorkerSpeculation(PLAIN, (DraftMethod.SUFFIX,))
    assert speculation_text(worker("0", speculation=quiet)) == "drafts by suffix; unasked off"
