"""Corrects a plan by the worker's report of what really happened. Pure."""

from __future__ import annotations

from dataclasses import replace

from splitpoint.planning.plan import Plan, Reason, ReasonKind, Residency
from splitpoint.selection import Selection, SelectionUsage
from splitpoint.speculation import DraftMethod, Speculation
from splitpoint.transport.convert import draft_method_from_proto, method_from_proto
from splitpoint.v1 import types_pb2, worker_pb2

# A restore within these multiples of its predicted time is not commented on, nor is one
# that differs by less than the seconds below: other work on the processor does as much.
_AS_PREDICTED = (0.75, 1.25)
_NEGLIGIBLE_SECONDS = 0.01


def actual_plan(plan: Plan, report: worker_pb2.RestoreReport | None) -> Plan:
    """Return the plan with what the worker found and did; its reasons name the differences."""
    if report is None or report.method == 0:
        return plan
    method = method_from_proto(report.method)
    for correct in (_fetched, _on_device, _predicted, _recomputed, _timed):
        plan = correct(plan, report)
    found = (report.cached_tokens, report.split_tokens, method)
    if found == (plan.cached_tokens, plan.split_tokens, plan.method):
        return plan
    total = plan.cached_tokens + plan.new_tokens
    reasons: list[Reason] = []
    is_as_long = report.cached_tokens == plan.cached_tokens
    if not 0 < report.cached_tokens == report.device_tokens:
        # Else nothing was left to restore, as the headline says.
        if not is_as_long:
            tokens = (report.cached_tokens, plan.cached_tokens)
            reasons.append(Reason(ReasonKind.FOUND_CACHED, tokens))
        reasons.append(Reason(ReasonKind.USED, (method.value, report.split_tokens)))
    return plan.because(
        *reasons,
        cached_tokens=report.cached_tokens,
        new_tokens=max(1, total - report.cached_tokens),
        split_tokens=report.split_tokens,
        method=method,
        predicted_recompute_seconds=plan.predicted_recompute_seconds if is_as_long else 0.0,
    )


def with_drafts(
    plan: Plan, asked: Speculation, usage: types_pb2.SpeculationUsage, *, can_draft: bool
) -> Plan:
    """Return the plan with a reason that says what was drafted, or why nothing was.

    `asked`: what the last worker was asked to draft. `can_draft`: it has that method.
    """
    if usage.draft_token_count:
        method = draft_method_from_proto(usage.method).value
        counts = (usage.draft_token_count, usage.draft_count, usage.accepted_token_count)
        return plan.because(Reason(ReasonKind.DRAFTED, (method, *counts)))
    if not asked.is_on:
        return plan
    why = ReasonKind.NO_DRAFTS
    if not can_draft:
        why = ReasonKind.NO_DRAFTER
    elif asked.method is DraftMethod.SELF and plan.residency is Residency.RESIDENT:
        why = ReasonKind.DRAFTS_ARE_FOR_STREAMS
    return plan.because(Reason(why, (asked.method.value,)))


def with_selection(
    plan: Plan, asked: Selection, usage: SelectionUsage, *, drafts_give_way: bool = False
) -> Plan:
    """Return the plan with reasons that say what was selected, or why everything was read.

    `drafts_give_way`: the worker drafts by default, but not beside this selection.
    """
    if asked.is_full:
        return plan
    if usage.step_count:
        unit = "drafted tokens" if asked.verify else "steps"
        rows = usage.fetched_row_count + usage.reused_row_count
        counts = (usage.step_count, unit, usage.fetched_row_count, rows)
        plan = plan.because(Reason(ReasonKind.SELECTED, (str(asked), usage.read_ratio, *counts)))
        if usage.off_reason:
            plan = plan.because(Reason(ReasonKind.READ_ALL, (usage.off_reason,)))
    else:
        plan = plan.because(Reason(ReasonKind.NOT_SELECTED, (str(asked), usage.off_reason)))
    return plan.because(Reason(ReasonKind.DRAFTS_OFF)) if drafts_give_way else plan


def _fetched(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the fetched tokens and how they came; a reason tells how long that took."""
    if not plan.fetched_tokens and not report.fetched_tokens:
        return plan
    found = (report.fetched_tokens, report.fetch_transfer, report.fetch_seconds)
    return plan.because(
        Reason(ReasonKind.FETCHED, found),
        fetched_tokens=report.fetched_tokens,
        fetch_source=plan.fetch_source if report.fetched_tokens else "",
        fetch_transfer=report.fetch_transfer if report.fetched_tokens else "",
    )


def _on_device(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the tokens that were on the device already; a reason says how many."""
    found, expected = report.device_tokens, plan.device_tokens
    if expected == found:
        return plan
    return plan.because(Reason(ReasonKind.FOUND_ON_DEVICE, (found, expected)), device_tokens=found)


def _predicted(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the worker's own prediction, made with the costs it had measured by then."""
    predicted = report.predicted_restore_seconds
    if not predicted:
        return plan
    later = predicted - plan.predicted_restore_seconds
    return replace(
        plan,
        predicted_restore_seconds=predicted,
        predicted_ttft_seconds=plan.predicted_ttft_seconds + later,
    )


def _recomputed(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the tokens recomputed from ids before they met the chunks loaded from the back."""
    if report.recomputed_tokens == plan.recomputed_tokens:
        return plan
    met, expected = report.recomputed_tokens, plan.recomputed_tokens
    reasons = [Reason(ReasonKind.MET, (met, expected))] if met else []
    return plan.because(*reasons, recomputed_tokens=met)


def _timed(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Explain a restore that took much less or more time than predicted."""
    seconds, predicted = report.restore_seconds, report.predicted_restore_seconds
    if not seconds or not predicted or abs(seconds - predicted) < _NEGLIGIBLE_SECONDS:
        return plan
    ratio = seconds / predicted
    if _AS_PREDICTED[0] <= ratio <= _AS_PREDICTED[1]:
        return plan
    busy = (report.compute_busy_seconds, report.link_busy_seconds)
    plan = plan.because(Reason(ReasonKind.RESTORED, (seconds, predicted, *busy)))
    if report.first_use_bytes:
        plan = plan.because(Reason(ReasonKind.FIRST_USE, (report.first_use_bytes,)))
    return plan
