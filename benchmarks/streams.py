"""Measure how many tokens a second scheduler and worker carry to many clients at once.

A real scheduler process, a real worker process with a double in place of its model
(`benchmarks.double_worker`), and the clients of `benchmarks.load` in a process of their own,
connected over TCP on this host. Each process's processor time is read around the load and divided
by the tokens that came.

    python -m benchmarks.streams [--gateway] [--streams N] [--tokens N] [--step-ms MS] [--rounds R]
        [--json] [--output FILE]

Exits with 1 if a round stays below the limit of 8,000 tokens a second.

`--gateway` measures what a gateway adds to a stream: the same load by gRPC and by HTTP, through a
real gateway process. Rounds by gRPC and by HTTP follow each other, so that both meet the same
machine. Then it exits with 1 if the gateway adds more than 15 % to the median gap between tokens,
or takes more than 60 us of a processor for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness import finish, parser_of, processor_seconds
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.client import AsyncClient
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.stack.child import LogLine, Service, ServiceCommand, child_environment

LEAST_TOKENS_PER_SECOND = 8_000
MOST_ADDED_SHARE = 0.15
MOST_MICROSECONDS = 60.0
PROMPT_TOKENS = 16
WARM_UP_STREAMS = 8


@asynccontextmanager
async def running(
    step_ms: float, *, device_memory: str = "3GiB"
) -> AsyncIterator[tuple[str, dict[str, int]]]:
    """Run a scheduler and a worker with a double; yield the address and the processes by name."""
    model = str(resolve_model(None))
    alive, own = os.pipe()
    services: list[Service] = []

    async def start(name: str, *arguments: str) -> Service:
        command = ServiceCommand(name, ("-m", *arguments))
        service = await Service.start(sys.executable, command, alive, show_line, lambda _: None)
        services.append(service)
        await service.ready()
        return service

    with tempfile.TemporaryDirectory() as folder:
        socket = f"unix:{folder}/worker.sock"
        try:
            worker = await start(
                "worker",
                *("benchmarks.double_worker", "--step-ms", str(step_ms), "--model", model),
                *("--listen", socket, "--device", "cpu", "--device-memory", device_memory),
                *("--max-batch", "512", "--threads", "1", "--numerics", "fast"),
                *("--worker-id", "0"),
            )
            scheduler = await start(
                "scheduler",
                *("scheduler_service", "--listen", "127.0.0.1:0", "--model", model),
                *("--worker", socket, "--queue-capacity", "1024"),
            )
            async with AsyncClient(scheduler.address) as client:
                await client.wait_ready()
            pids = {each.name: each.process.pid for each in (worker, scheduler)}
            yield scheduler.address, pids
        finally:
            for service in reversed(services):
                service.terminate()
            for service in services:
                await service.close()
            os.close(alive)
            os.close(own)


def show_line(line: LogLine) -> None:
    if line.important:
        print(f"{line.service}: {line.text}", file=sys.stderr)


async def load(way: Sequence[str], streams: int, tokens: int) -> dict[str, Any]:
    """Let the clients of `benchmarks.load` read this many streams at once; return its result.

    `way`: the options that say where the server is.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.load", *way, "--json"),
        *("--num-prompts", str(streams), "--ignore-eos"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(tokens)),
        stdout=asyncio.subprocess.PIPE,
        env=child_environment({}),
    )
    assert process.stdout is not None
    said = await process.stdout.read()
    if await process.wait():
        raise RuntimeError(f"the load ended with {process.returncode}")
    result: dict[str, Any] = json.loads(said)
    return result


async def measured_rounds(
    arguments: argparse.Namespace, ways: Mapping[str, Sequence[str]], pids: Mapping[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """Load the stack in each way in turn; return the rounds of each."""
    progress = Progress()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for way in ways.values():
        await load(way, WARM_UP_STREAMS, arguments.tokens)
    for number in range(arguments.rounds):
        for name, way in ways.items():
            before = {each: processor_seconds(pid) for each, pid in pids.items()}
            own = os.times()
            result = await load(way, arguments.streams, arguments.tokens)
            spent = os.times()
            used = {each: processor_seconds(pid) - before[each] for each, pid in pids.items()}
            used["clients"] = (
                spent.children_user
                + spent.children_system
                - own.children_user
                - own.children_system
            )
            rounds[name].append(round_of(result, used))
            row = _row(rounds[name][-1])
            progress.say(f"round {number + 1} of {arguments.rounds}, {name}: {row}")
    return rounds


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    async with running(arguments.step_ms) as (address, pids):
        ways = {"grpc": ("--address", address)}
        rounds = (await measured_rounds(arguments, ways, pids))["grpc"]
    return {
        "benchmark": "streams",
        "streams": arguments.streams,
        "tokens_of_each": arguments.tokens,
        "step_ms": arguments.step_ms,
        "offered_tokens_per_second": round(1e3 * arguments.streams / arguments.step_ms),
        "least_tokens_per_second": LEAST_TOKENS_PER_SECOND,
        "tokens_per_second": statistics.median(each["tokens_per_second"] for each in rounds),
        "is_enough": all(each["tokens_per_second"] >= LEAST_TOKENS_PER_SECOND for each in rounds),
        "rounds": rounds,
    }


def round_of(result: Mapping[str, Any], used: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one round; microseconds of processor time by process."""
    tokens = result["total_output_tokens"]
    return {
        "tokens_per_second": result["output_throughput"],
        "completed": result["completed"],
        "failed": result["failed"],
        "seconds": result["duration"],
        "median_itl_ms": result["median_itl_ms"],
        "p99_itl_ms": result["p99_itl_ms"],
        "median_ttft_ms": result["median_ttft_ms"],
        "microseconds_per_token": {
            name: round(1e6 * seconds / tokens, 1) for name, seconds in used.items()
        },
    }


def _row(each: Mapping[str, Any]) -> str:
    costs = ", ".join(f"{name} {us:.0f}" for name, us in each["microseconds_per_token"].items())
    return (
        f"{each['tokens_per_second']:,.0f} tokens/s, {each['completed']} streams whole, "
        f"{each['failed']} failed; median gap {each['median_itl_ms']:.2f} ms, p99 gap "
        f"{each['p99_itl_ms']:.0f} ms; us of a processor per token: {costs}"
    )


def show(result: Mapping[str, Any]) -> None:
    rounds: Sequence[Mapping[str, Any]] = result["rounds"]
    print(
        f"{result['streams']} streams at once, {result['hardware']}: "
        f"{result['tokens_per_second']:,.0f} tokens/s (limit: at least "
        f"{result['least_tokens_per_second']:,}; offered "
        f"{result['offered_tokens_per_second']:,})"
    )
    for each in rounds:
        print(f"  {_row(each)}")


# -- what a gateway adds ----------------------------------------------------------------


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


async def measure_gateway(arguments: argparse.Namespace) -> dict[str, Any]:
    async with (
        running(arguments.step_ms) as (scheduler, pids),
        gateway_for(scheduler) as (gateway, gateway_pid),
    ):
        ways = {"grpc": ("--address", scheduler), "http": ("--url", f"http://{gateway}")}
        rounds = await measured_rounds(arguments, ways, {**pids, "gateway": gateway_pid})
    return {
        "benchmark": "gateway",
        "streams": arguments.streams,
        "tokens_of_each": arguments.tokens,
        "step_ms": arguments.step_ms,
        **figures_of(rounds),
        "rounds": rounds,
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


def show_gateway(result: Mapping[str, Any]) -> None:
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
            print(f"  {name}: {_row(each)}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gateway", action="store_true", help="by gRPC and by HTTP, in turn")
    parser.add_argument("--streams", type=int, help="at once; default: 500, with --gateway 64")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument(
        "--step-ms", type=float, help="of the double's engine step; default: 25, 20"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    by_gateway = arguments.gateway
    arguments.streams = arguments.streams or (64 if by_gateway else 500)
    arguments.step_ms = arguments.step_ms or (20.0 if by_gateway else 25.0)
    result = run_until_signal((measure_gateway if by_gateway else measure)(arguments))
    finish(arguments, result, show_gateway if by_gateway else show)
    return 0 if result["is_enough"] else 1


if __name__ == "__main__":
    sys.exit(main())
