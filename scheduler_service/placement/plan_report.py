"""Corrects a plan by the worker's report of what really happened. Pure."""

from __future__ import annotations

from splitpoint.config import counted, format_size
from splitpoint.planning.plan import Plan, Residency
from splitpoint.planning.reasons import explained
from splitpoint.selection import Selection, SelectionUsage
from splitpoint.speculation import DraftMethod, Speculation
from splitpoint.tiers import Transfer
from splitpoint.transport.convert import draft_method_from_proto, method_from_proto
from splitpoint.v1 import types_pb2, worker_pb2

# A restore within these multiples of its predicted time is not commented on, nor is one
# that differs by less than the seconds below: other work on the processor does as much.
_AS_PREDICTED = (0.75, 1.25)
_NEGLIGIBLE_SECONDS = 0.01
_TRANSFER_NAMES = {Transfer.GRPC.value: "gRPC", Transfer.MOONCAKE.value: "Mooncake"}
# Link or device limits a restore if it is busy for this part of it.
_LIMITS = 0.5


def actual_plan(plan: Plan, report: worker_pb2.RestoreReport | None) -> Plan:
    """Return the plan with what the worker found and did; its details name the differences."""
    if report is None or report.method == 0:
        return plan
    method = method_from_proto(report.method)
    for correct in (_fetched, _on_device, _predicted, _recomputed, _timed):
        plan = correct(plan, report)
    found = (report.cached_tokens, report.split_tokens, method)
    if found == (plan.cached_tokens, plan.split_tokens, plan.method):
        return plan
    total = plan.cached_tokens + plan.new_tokens
    details: list[str] = []
    used = f"used method {method.value} with split {report.split_tokens:,}"
    if report.cached_tokens != plan.cached_tokens:
        found_tokens = counted(report.cached_tokens, "token")
        used = f"found {found_tokens} cached instead of {plan.cached_tokens:,} and {used}"
    if not 0 < report.cached_tokens == report.device_tokens:
        # Else nothing was left to restore, as the headline says.
        details.append(f"the worker {used}")
    is_as_long = report.cached_tokens == plan.cached_tokens
    return explained(
        plan,
        *details,
        cached_tokens=report.cached_tokens,
        new_tokens=max(1, total - report.cached_tokens),
        split_tokens=report.split_tokens,
        method=method,
        predicted_recompute_seconds=plan.predicted_recompute_seconds if is_as_long else 0.0,
    )


def with_drafts(
    plan: Plan, asked: Speculation, usage: types_pb2.SpeculationUsage, *, can_draft: bool
) -> Plan:
    """Return the plan with a detail that says what was drafted, or why nothing was.

    `asked`: what the last worker was asked to draft. `can_draft`: it has that method.
    """
    if usage.draft_token_count:
        share = usage.accepted_token_count / usage.draft_token_count
        method = draft_method_from_proto(usage.method).value
        return explained(
            plan,
            f"{method} drafted {counted(usage.draft_token_count, 'token')} "
            f"in {counted(usage.draft_count, 'step')}, {usage.accepted_token_count:,} "
            f"({share:.0%}) were accepted",
        )
    if not asked.is_on:
        return plan
    why = "no draft was found, or none would have paid"
    if not can_draft:
        why = "the worker has no such drafter"
    elif asked.method is DraftMethod.SELF and plan.residency is Residency.RESIDENT:
        why = "drafts of this kind pay only while the cache is streamed"
    return explained(plan, f"{asked.method.value} drafted nothing: {why}")


def with_selection(
    plan: Plan, asked: Selection, usage: SelectionUsage, *, drafts_give_way: bool = False
) -> Plan:
    """Return the plan with details that say what was selected, or why everything was read.

    `drafts_give_way`: the worker drafts by default, but not beside this selection.
    """
    if asked.is_full:
        return plan
    detail = f"{asked} was not used"
    if usage.step_count:
        rows = usage.fetched_row_count + usage.reused_row_count
        kind = "drafted tokens" if asked.verify else "steps"
        detail = (
            f"{asked} read {usage.read_ratio:.1%} of the tokens in "
            f"{usage.step_count:,} {kind} and fetched {usage.fetched_row_count:,} of "
            f"{counted(rows, 'row')}"
        )
    if usage.off_reason:
        others = "; other steps read every token" if usage.step_count else ""
        detail += f"{others}: {usage.off_reason}"
    details = [detail]
    if drafts_give_way:
        details.append("the worker's drafts are off beside it")
    return explained(plan, *details)


def _fetched(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the fetched tokens and how they came; a detail tells how long that took."""
    if not plan.fetched_tokens and not report.fetched_tokens:
        return plan
    by = report.fetch_transfer.split(", ") if report.fetch_transfer else []
    ways = f" by {' and '.join(_TRANSFER_NAMES.get(way, way) for way in by)}" if by else ""
    fetched = f"{counted(report.fetched_tokens, 'token')}{ways} in {report.fetch_seconds:.2g} s"
    return explained(
        plan,
        f"fetched {fetched if report.fetched_tokens else 'nothing'}",
        fetched_tokens=report.fetched_tokens,
        fetch_source=plan.fetch_source if report.fetched_tokens else "",
        fetch_transfer=report.fetch_transfer if report.fetched_tokens else "",
    )


def _on_device(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the tokens that were on the device already; a detail says how many."""
    found, expected = report.device_tokens, plan.device_tokens
    if expected == found:
        return plan
    if not expected:
        detail = f"{counted(found, 'token was', 'tokens were')} on the device already"
    elif not found:
        left = counted(expected, "token that was", "tokens that were")
        detail = f"the {left} expected on the device had left it"
    else:
        detail = f"{found:,} of {counted(expected, 'token')} expected on the device were there"
    return explained(plan, detail, device_tokens=found)


def _predicted(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the worker's own prediction, made with the costs it had measured by then."""
    predicted = report.predicted_restore_seconds
    if not predicted:
        return plan
    later = predicted - plan.predicted_restore_seconds
    return explained(
        plan,
        predicted_restore_seconds=predicted,
        predicted_ttft_seconds=plan.predicted_ttft_seconds + later,
    )


def _recomputed(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Set the tokens recomputed from ids before they met the chunks loaded from the back."""
    if report.recomputed_tokens == plan.recomputed_tokens:
        return plan
    details: list[str] = []
    if report.recomputed_tokens:
        expected = f" where {plan.recomputed_tokens:,} was expected"
        details.append(
            f"they met at {report.recomputed_tokens:,}{expected if plan.recomputed_tokens else ''}"
        )
    return explained(plan, *details, recomputed_tokens=report.recomputed_tokens)


def _timed(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """Explain a restore that took much less or more time than predicted."""
    seconds, predicted = report.restore_seconds, report.predicted_restore_seconds
    if not seconds or not predicted or abs(seconds - predicted) < _NEGLIGIBLE_SECONDS:
        return plan
    ratio = seconds / predicted
    if _AS_PREDICTED[0] <= ratio <= _AS_PREDICTED[1]:
        return plan
    device, link = report.compute_busy_seconds, report.link_busy_seconds
    busy = f"the link was busy {_ms(link)}, the device {_ms(device)}"
    if device > link:
        busy = f"the device was busy {_ms(device)}, the link {_ms(link)}"
    if max(device, link) < _LIMITS * seconds:
        busy = f"{busy}, neither of them most of the time"
    if report.first_use_bytes:
        size = format_size(report.first_use_bytes)
        busy = f"{busy}; {size} of the worker's cache was used for the first time"
    times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
    return explained(plan, f"restored in {_ms(seconds)}, {times} x the prediction: {busy}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
