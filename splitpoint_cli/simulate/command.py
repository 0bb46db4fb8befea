"""`splitpoint simulate`: what a fleet of any size would do with a trace, before it is bought."""

from __future__ import annotations

import time
from typing import Any

import typer

from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint_cli.options import takes_options
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    err,
    hand_over,
    out,
    print_table,
    with_exit_codes,
)
from splitpoint_cli.simulate import options
from splitpoint_cli.simulate.find import find_devices
from splitpoint_cli.simulate.measures import read_goals
from splitpoint_cli.simulate.options import SimulateOptions
from splitpoint_cli.simulate.report import facts_of, results_of, seconds_of, table_of
from splitpoint_cli.simulate.run import simulate as run
from splitpoint_cli.traces.statistics import describe


@with_exit_codes
@takes_options
def simulate(
    given: SimulateOptions,
    more_goals: options.MoreGoals = None,
    goodput: options.Goodput = None,
    tenant_weights: options.TenantWeights = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Simulate a fleet of devices under a trace, with the scheduler's own policy. Needs no GPU.

    Costs of a step are the planner's; equal options and seeds give equal results.
    """
    goals = read_goals([*(goodput or ()), *(more_goals or ())])
    if (more_goals or given.find) and not goodput:
        words = f"{more_goals[0]!r} belongs behind" if more_goals else "--find needs"
        raise InvalidArgument(f"{words} --goodput, such as ttft:500", field="goodput")
    if given.find and given.compare:
        raise InvalidArgument("--find takes one --policy, not --compare", field="compare")
    fleet, load = given.fleet(), given.load(tenant_weights or ())
    kinds = {kind.name: kind for kind, _ in fleet.devices}
    trace = load.read()
    facts = facts_of(fleet, load, describe(trace))
    del trace
    report: dict[str, Any] = {**facts, "runs": []}
    started = time.perf_counter()
    for settings in given.settings():
        name = settings.policy.value
        if given.find:
            found, outcome = find_devices(
                fleet,
                load,
                settings,
                seconds_of(goals),
                wanted=given.good_share,
                most=given.most_devices,
                processes=given.processes,
                on_try=lambda count, share: err.print(
                    f"{counted(count, 'device')}: {share:.1%} good"
                ),
            )
            report["find"] = {
                "device_count": found.device_count,
                "reason": found.reason,
                "good_share_by_devices": found.shares,
            }
            report["devices"] = {next(iter(kinds)): found.device_count or max(found.shares)}
        else:
            outcome = run(fleet, load, settings, processes=given.processes)
        report["runs"].append(results_of(outcome, name, goals, kinds))
    report["simulated_in_seconds"] = time.perf_counter() - started
    hand_over(report, lambda: _show(report), as_json=as_json, output=output)
    if given.find and report["find"]["device_count"] is None:
        raise typer.Exit(1)


def _show(report: dict[str, Any]) -> None:
    print_table(table_of(report, report["runs"]))
    if "find" in report:
        out.print(report["find"]["reason"])
