"""Measure what the gateway adds to a stream: the same load by gRPC and by HTTP, in turn.

A real scheduler process, a real worker process with a double in place of its model
(`benchmarks.double_worker`), a real gateway process, and the clients of `benchmarks.load` in a
process of their own. Rounds by gRPC and by HTTP follow each other, so that both meet the same
machine. Each process's processor time is read around the load and divided by the tokens that came.

    python -m benchmarks.gateway [--streams N] [--tokens N] [--step-ms MS] [--rounds R]
        [--json] [--output FILE]

Exits with 1 if the gateway adds more than 15 % to the median gap between tokens, or takes more than
60 us of a processor for a token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness import processor_seconds
from benchmarks.streams import WARM_UP_STREAMS, load, round_of, run_benchmark, running, show_line
from splitpoint_cli.bench.harness import Progress, commit, hardware
from splitpoint_cli.stack.child import Service, ServiceCommand

MOST_ADDED_SHARE = 0.15
MOST_MICROSECONDS = 60.0


@asynccontextmanager
async def gateway_for(scheduler: str) -> AsyncIterator[tuple[str, int]]:
    """Run a gateway; yield its address and its process."""
    alive, own = os.pipe()
    arguments = ("-m", "gateway_service", "--listen", "127.0.0.1:0", "--scheduler", scheduler)
    command = ServiceCommand("gateway", arguments)
    service = await Service.start(sys.executable, command, alive, show_line, lambda _: None)
    try:
        await service.ready()
        yield service.address, service.process.pid
    finally:
        service.terminate()
        await service.close()
        os.close(alive)
        os.close(own)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    progress = Progress()
    rounds: dict[str, list[dict[str, Any]]] = {"grpc": [], "http": []}
    async with (
        running(arguments.step_ms) as (scheduler, pids),
        gateway_for(scheduler) as (gateway, gateway_pid),
    ):
        pids["gateway"] = gateway_pid
        ways = {
            "grpc": ("--address", scheduler),
            "http": ("--url", f"http://{gateway}"),
        }
        for way in ways.values():
            await load(way, WARM_UP_STREAMS, arguments.tokens)
        for number in range(arguments.rounds):
            for name, way in ways.items():
                before = {each: processor_seconds(pid) for each, pid in pids.items()}
                result = await load(way, arguments.streams, arguments.tokens)
                used = {each: processor_seconds(pid) - before[each] for each, pid in pids.items()}
                rounds[name].append(round_of(result, used))
                progress.say(f"round {number + 1} of {arguments.rounds}, {name}")
    return {
        "benchmark": "gateway",
        "streams": arguments.streams,
        "tokens_of_each": arguments.tokens,
        "step_ms": arguments.step_ms,
        **figures_of(rounds),
        "rounds": rounds,
        "commit": commit(),
        "hardware": hardware(),
    }


def figures_of(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians over the rounds, and whether they keep the limits."""
    gaps = {
        name: statistics.median(each["median_itl_ms"] for each in found)
        for name, found in rounds.items()
    }
    added = gaps["http"] / gaps["grpc"] - 1
    microseconds = statistics.median(
        each["microseconds_per_token"]["gateway"] for each in rounds["http"]
    )
    is_whole = not any(each["failed"] for found in rounds.values() for each in found)
    return {
        "median_itl_ms": gaps,
        "added_share": added,
        "most_added_share": MOST_ADDED_SHARE,
        "gateway_microseconds_per_token": microseconds,
        "most_microseconds_per_token": MOST_MICROSECONDS,
        "is_enough": is_whole and added <= MOST_ADDED_SHARE and microseconds <= MOST_MICROSECONDS,
    }


def show(result: Mapping[str, Any]) -> None:
    gaps = result["median_itl_ms"]
    print(
        f"{result['streams']} streams at once, a step each {result['step_ms']:g} ms, "
        f"{result['hardware']}: median gap {gaps['grpc']:.2f} ms by gRPC, {gaps['http']:.2f} ms by "
        f"HTTP ({result['added_share']:+.1%}; limit {result['most_added_share']:+.0%}); gateway "
        f"{result['gateway_microseconds_per_token']:.0f} us of a processor per token (limit "
        f"{result['most_microseconds_per_token']:.0f})"
    )
    for name, rounds in result["rounds"].items():
        for each in rounds:
            costs = ", ".join(
                f"{process} {us:.0f}" for process, us in each["microseconds_per_token"].items()
            )
            print(
                f"  {name}: {each['tokens_per_second']:,.0f} tokens/s, median gap "
                f"{each['median_itl_ms']:.2f} ms, p99 {each['p99_itl_ms']:.2f} ms, us per token: "
                f"{costs}"
            )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, show, streams=64, step_ms=20.0))
