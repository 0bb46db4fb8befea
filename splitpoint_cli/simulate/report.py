"""Reports of simulations: the keys of `vllm bench serve` first, then ours; tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import Machine
from splitpoint_cli.output import duration_text
from splitpoint_cli.simulate.measures import distribution
from splitpoint_cli.simulate.outcome import Outcome
from splitpoint_cli.simulate.run import Fleet, Load
from splitpoint_cli.traces.statistics import TraceStatistics


def facts_of(fleet: Fleet, load: Load, trace: TraceStatistics) -> dict[str, Any]:
    """Return what was simulated."""
    workers = fleet.workers()
    return {
        "model_id": fleet.shape.name,
        "devices": {kind.name: count for kind, count in fleet.devices},
        "cells": fleet.cell_count,
        "cache_bytes": {
            name: worker.facts.cache_capacity_bytes for name, worker in workers.items()
        },
        "max_batch_size": {name: worker.facts.max_batch_size for name, worker in workers.items()},
        "kappa_crit": {name: worker.kappa_crit for name, worker in workers.items()},
        "store_bytes_per_cell": fleet.store_bytes,
        "costs": {kind.name: kind.profile.description for kind, _ in fleet.devices},
        "trace": load.trace,
        "seed": load.seed,
        "num_prompts": trace.count,
        "request_rate": trace.request_rate,
        "mean_input_tokens": trace.mean_input,
        "mean_output_tokens": trace.mean_output,
        "seen_share": trace.seen_share,
    }


def results_of(
    outcome: Outcome, policy: str, goals_ms: Mapping[str, float], kinds: Mapping[str, Machine]
) -> dict[str, Any]:
    """Return the figures of one run."""
    seconds = outcome.seconds

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    goals = seconds_of(goals_ms)
    tokens = outcome.input_tokens + outcome.output_tokens
    found: dict[str, Any] = {
        "policy": policy,
        "duration": seconds,
        "completed": outcome.completed_count,
        "failed": outcome.rejected_count,
        "total_input_tokens": outcome.input_tokens,
        "total_output_tokens": outcome.output_tokens,
        "request_throughput": rate(outcome.completed_count),
        "request_goodput": rate(outcome.good_count(goals)) if goals else None,
        "output_throughput": rate(outcome.output_tokens),
        "total_token_throughput": rate(tokens),
    }
    tpots = [each for each in outcome.tpot if each >= 0]
    for name, values in (
        ("ttft", outcome.ttft),
        ("tpot", tpots),
        ("e2el", outcome.latency),
        ("queue", outcome.waited),
    ):
        found |= distribution(name, [1e3 * each for each in values])
    return found | _ours(outcome, goals_ms, kinds)


def seconds_of(goals_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: limit / 1e3 for name, limit in goals_ms.items()}


def _ours(
    outcome: Outcome, goals_ms: Mapping[str, float], kinds: Mapping[str, Machine]
) -> dict[str, Any]:
    uses = outcome.kinds.values()
    steps = sum(use.totals.step_count for use in uses)
    prefilled = sum(use.totals.prefilled_tokens for use in uses)
    decoded = sum(use.totals.decoded_tokens for use in uses)
    device_seconds = outcome.seconds * sum(use.device_count for use in uses)
    page_seconds = outcome.seconds * sum(use.page_count for use in uses)
    joules = outcome.joules(kinds)

    def share(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    return {
        "good_share": outcome.good_share(seconds_of(goals_ms)) if goals_ms else None,
        "cached_tokens": outcome.cached_tokens,
        "engine_steps": steps,
        "scheduled_tokens_per_step": share(prefilled + decoded, steps),
        "prefilled_tokens_per_step": share(prefilled, steps),
        "compute_use": share(sum(use.totals.step_seconds for use in uses), device_seconds),
        "link_use": share(sum(use.totals.link_seconds for use in uses), device_seconds),
        "memory_use": share(sum(use.totals.page_seconds for use in uses), page_seconds),
        "fairness": outcome.fairness(),
        "joules": joules,
        "joules_per_output_token": None if joules is None else share(joules, outcome.output_tokens),
        "tenants": {
            name: {
                "weight": tenant.weight,
                "completed": tenant.count,
                "mean_ttft_ms": 1e3 * tenant.ttft_seconds / tenant.count,
                "served_share": share(
                    tenant.served, sum(each.served for each in outcome.tenants.values())
                ),
            }
            for name, tenant in sorted(outcome.tenants.items())
            if name
        },
        "goals_ms": dict(goals_ms),
    }


# (key, name, format)
_ROWS = (
    ("completed", "requests", "{:,.0f}"),
    ("failed", "refused", "{:,.0f}"),
    ("request_throughput", "requests/s", "{:,.2f}"),
    ("output_throughput", "output tokens/s", "{:,.0f}"),
    ("total_token_throughput", "all tokens/s", "{:,.0f}"),
    ("request_goodput", "good requests/s", "{:,.2f}"),
    ("good_share", "good requests", "{:.1%}"),
    ("scheduled_tokens_per_step", "tokens a step", "{:,.1f}"),
    ("prefilled_tokens_per_step", "of prompts", "{:,.1f}"),
    ("compute_use", "computing", "{:.1%}"),
    ("link_use", "link in use", "{:.1%}"),
    ("memory_use", "cache in use", "{:.1%}"),
    ("fairness", "fairness (Jain)", "{:.4f}"),
    ("joules", "energy, J", "{:,.0f}"),
    ("joules_per_output_token", "J/output token", "{:.2f}"),
)
_LATENCIES = (
    ("ttft", "first token, ms"),
    ("tpot", "token after it, ms"),
    ("e2el", "whole answer, ms"),
    ("queue", "in the queue, ms"),
)


def table_of(facts: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a column for each run."""
    devices = ", ".join(f"{count:,} {name}" for name, count in facts["devices"].items())
    caches = ", ".join(format_size(size) for size in facts["cache_bytes"].values())
    batches = ", ".join(map(str, facts["max_batch_size"].values()))
    table = Table(
        title=f"{facts['model_id']} on {devices} (each {caches} of cache, batch {batches}): "
        f"{counted(facts['num_prompts'], 'request')} of {facts['trace']}, "
        f"{facts['request_rate']:.3g} a second, {duration_text(runs[0]['duration'])}",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("")
    for run in runs:
        table.add_column(run["policy"], justify="right")
    for key, name, form in _ROWS:
        cells = ["" if run[key] is None else form.format(run[key]) for run in runs]
        if any(cells):
            table.add_row(name, *cells)
    for metric, name in _LATENCIES:
        for kind in ("mean", "median", "p90", "p99"):
            cells = [f"{run[f'{kind}_{metric}_ms']:,.1f}" for run in runs]
            table.add_row(f"{name}: {kind}", *cells)
    return table
