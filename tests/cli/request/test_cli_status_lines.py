"""What `status` and `generate` print about drafts, selections and tenants. Under 1 s."""

from __future__ import annotations

from dataclasses import replace

from told_workers import telemetry, worker

from splitpoint.client.answers import (
    Completion,
    FinishReason,
    SpeculationUsage,
    TenantStatus,
    Usage,
    WorkerSpeculation,
)
from splitpoint.selection import SelectionMethod
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint_cli.request.generate import completion_json, summary
from splitpoint_cli.request.status import selection_text, speculation_text, tenant_lines

METHODS = (SelectionMethod.COLUMNS, SelectionMethod.WINDOW)
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


def test_a_worker_says_what_it_selects_by_and_what_it_read() -> None:
    told = telemetry(1.0, 500.0)
    assert selection_text(worker("0", told, selection_methods=METHODS)) == (
        "selects by columns, window; 1,000 steps read 12.5% of the tokens"
    )
    for idle in (None, telemetry(1.0, 0.0)):
        text = selection_text(worker("0", idle, selection_methods=METHODS))
        assert text == "selects by columns, window"


def test_tenants_are_named_with_what_metrics_call_them() -> None:
    tenants = [
        TenantStatus("acme", "1a2b3c4d", 2.0, 3, 1, 75.25, 5.0 * (1 << 30)),
        TenantStatus("", "unnamed", 1.0, 0, 0, 0.0, 0.0),
    ]
    assert list(tenant_lines(tenants)) == [
        "tenant acme: 3 running, 1 waiting for 75.2 s at most, weight 2, has had 5 GiB x s; "
        "metrics call it 1a2b3c4d",
        "tenant (unnamed): 0 running, 0 waiting, weight 1, has had 0 B x s; metrics "
        "call it unnamed",
    ]


def test_without_tenants_there_is_nothing_to_say() -> None:
    assert list(tenant_lines([TenantStatus("", "unnamed", 1.0, 3, 0, 0.0, 1.0)])) == []
    assert list(tenant_lines([])) == []
