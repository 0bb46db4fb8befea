"""Results of `bench serve`: the keys of `vllm bench serve` first, then ours; and a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.table import Table

from splitpoint.config import counted
from splitpoint_cli.bench.serve import measures
from splitpoint_cli.bench.serve.backends import Counters, ServedModel, Waits
from splitpoint_cli.bench.serve.load import Record
from splitpoint_cli.bench.serve.workload import METRICS, Arrivals, Figures
from splitpoint_cli.bench.shared.report import commit, hardware, report_table
from splitpoint_cli.traces.statistics import quantile

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per token after it",
    "itl": "gap between messages",
    "e2el": "whole answer",
    "queue": "wait for a worker",
    "late": "sent after due",
}


def facts_of_run(
    backend: str,
    model: ServedModel,
    arrivals: Arrivals | None,
    *,
    label: str | None,
    count: int,
    max_concurrency: int | None,
    metadata: Mapping[str, str],
) -> dict[str, Any]:
    """Return what was asked for, as the first keys of the result.

    `arrivals`: None if requests come at the times of a trace.
    """
    facts: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "label": label,
        "model_id": model.name,
        "num_prompts": count,
        **metadata,
        "request_rate": "trace",
        "burstiness": None,
        "max_concurrency": max_concurrency,
    }
    if arrivals is None:
        return facts
    facts["request_rate"] = "inf" if arrivals.rate == math.inf else arrivals.rate
    facts["burstiness"] = arrivals.burstiness
    if arrivals.ramp_up is not None:
        facts |= {
            "ramp_up_strategy": arrivals.ramp_up.value,
            "ramp_up_start_rps": arrivals.start_rate,
            "ramp_up_end_rps": arrivals.end_rate,
        }
    return facts


def results_of(
    records: Sequence[Record], figures: Figures, work: Counters | None
) -> dict[str, Any]:
    """Return what was measured: vllm's keys, then ours."""
    return {
        **measures.throughput(records, figures),
        **measures.latencies(records, figures),
        **_ours(records, figures, work),
    }


def _ours(records: Sequence[Record], figures: Figures, work: Counters | None) -> dict[str, Any]:
    done = measures.completed(records)
    facts = [record.facts for record in done if record.facts is not None]
    cached = [each.cached_tokens for each in facts if each.cached_tokens is not None]
    waits = [1e3 * each.queue_seconds for each in facts if each.queue_seconds is not None]
    late = [1e3 * (record.sent - record.due) for record in records]
    found: dict[str, Any] = {
        "cached_tokens": sum(cached) if cached else None,
        "plans": dict(Counter(each.plan for each in facts if each.plan is not None)),
        "failures": dict(Counter(record.error for record in records if record.error)),
        **measures.distribution("queue", waits, figures.percentiles),
        **measures.distribution("late", late, figures.percentiles),
        **_work(work),
        "tenants": _tenants(done),
        "goals_ms": figures.goals,
        "times_count_from": "the moment at which a request was due",
        "hardware": hardware(),
        "commit": commit(),
    }
    return found


def _work(work: Counters | None) -> dict[str, Any]:
    """Return what the server did meanwhile; None where it does not say, or did nothing."""
    work_or_nothing = work or Counters()
    found: dict[str, Any] = {
        "failovers": None if work is None else work.failovers,
        "engine_steps": None if work is None else work.steps,
        "scheduled_tokens_per_step": _ratio(
            work_or_nothing.scheduled_tokens, work_or_nothing.steps
        ),
        "decisions": dict(work_or_nothing.decisions),
    }
    for kind in ("link_bound", "device_bound"):
        waits: Waits = getattr(work_or_nothing, kind)
        found[f"{kind}_requests"] = None if work is None else waits.count
        found[f"mean_{kind}_wait_ms"] = _ratio(1e3 * waits.seconds, waits.count)
    return found


def _ratio(amount: float, count: int) -> float | None:
    return amount / count if count else None


def _tenants(done: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return what each named tenant got."""
    names = {record.sample.tenant for record in done} - {""}
    return {
        name: {
            "completed": len(own),
            "output_tokens": sum(record.output_tokens for record in own),
            "median_ttft_ms": quantile(sorted(map(measures.ttft_ms, own)), 0.5),
        }
        for name in sorted(names)
        if (own := [record for record in done if record.sample.tenant == name])
    }


def details_of(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the values of each request, in the order in which they were due; seconds."""
    facts = [record.facts for record in records]
    return {
        "input_lens": [len(record.sample.prompt) for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.due for record in records],
        "ttfts": [measures.ttft_ms(record) / 1e3 for record in records],
        "itls": [[gap / 1e3 for gap in measures.itls_ms(record)] for record in records],
        "errors": [record.message for record in records],
        "e2els": [measures.e2el_ms(record) / 1e3 for record in records],
        "tenants_of_requests": [record.sample.tenant for record in records],
        "cached_lens": [None if each is None else each.cached_tokens for each in facts],
        "queue_seconds": [None if each is None else each.queue_seconds for each in facts],
        "plans_of_requests": [None if each is None else each.plan for each in facts],
    }


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the distributions as rows, and the rates as the caption."""
    metrics = [metric for metric in (*METRICS, "queue", "late") if f"mean_{metric}_ms" in report]
    percentiles = [
        key.removeprefix("p").removesuffix("_late_ms")
        for key in report
        if key.endswith("_late_ms") and key.startswith("p")
    ]
    table = report_table(
        f"{report['model_id']} behind {report['backend']}: "
        f"{counted(report['num_prompts'], 'request')} at {_rate_text(report)}",
        *("milliseconds", "mean", "median", "std"),
        *(f"p{percent}" for percent in percentiles),
    )
    for metric in metrics:
        columns = ("mean", "median", "std", *(f"p{percent}" for percent in percentiles))
        values = (f"{report[f'{column}_{metric}_ms']:,.1f}" for column in columns)
        table.add_row(_NAMES[metric], *values)
    table.caption = "\n".join(_caption(report))
    return table


def _rate_text(report: Mapping[str, Any]) -> str:
    if "ramp_up_strategy" in report:
        return (
            f"{report['ramp_up_start_rps']:g} to {report['ramp_up_end_rps']:g} a second, "
            f"{report['ramp_up_strategy']}"
        )
    if report["request_rate"] == "inf":
        return "once" if report["max_concurrency"] is None else "any rate"
    if report["request_rate"] == "trace":
        return "the times of a trace"
    even = report["burstiness"]
    kind = "Poisson" if even == 1 else f"burstiness {even:g}"
    return f"{report['request_rate']:g} a second, {kind}"


def _caption(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{report['completed']:,} completed, {report['failed']:,} failed in "
        f"{report['duration']:.2f} s; at most {report['max_concurrent_requests']:,} at once",
        f"{report['request_throughput']:.2f} requests, {report['output_throughput']:,.1f} output "
        f"tokens and {report['total_token_throughput']:,.1f} tokens in all a second",
    ]
    if report["request_goodput"] is not None:
        goals = " ".join(f"{metric}:{limit:g}" for metric, limit in report["goals_ms"].items())
        lines.append(f"{report['request_goodput']:.2f} requests a second keep {goals}")
    if report["cached_tokens"] is not None:
        lines.append(
            f"{report['cached_tokens']:,} of {report['total_input_tokens']:,} prompt tokens cached"
        )
    if report["plans"]:
        plans = (f"{name} {count:,}" for name, count in sorted(report["plans"].items()))
        lines.append(f"plans: {', '.join(plans)}")
    if report["scheduled_tokens_per_step"] is not None:
        lines.append(
            f"{report['scheduled_tokens_per_step']:.1f} tokens computed in each of "
            f"{report['engine_steps']:,} engine steps; {counted(report['failovers'], 'move')}"
        )
    if report["link_bound_requests"]:
        lines.append(
            f"{counted(report['link_bound_requests'], 'request')} bound by the link waited "
            f"{report['mean_link_bound_wait_ms']:,.1f} ms on average"
        )
    if report["failures"]:
        reasons = (f"{name} {count:,}" for name, count in sorted(report["failures"].items()))
        lines.append(f"failures: {', '.join(reasons)}")
    lines.append(f"{report['hardware']}; times count from when a request was due")
    return lines
