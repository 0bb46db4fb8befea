"""Measure how many tokens a second scheduler and worker carry to many clients at once.

A real scheduler process, a real worker process with a double in place of its model
(`benchmarks.double_worker`), and the clients of `benchmarks.load` in a process of their own,
connected over TCP on this host. Each process's processor time is read around the load and divided
by the tokens that came.

    python -m benchmarks.streams [--streams N] [--tokens N] [--step-ms MS] [--rounds R]
        [--json] [--output FILE]

Exits with 1 if a round stays below the limit of 8,000 tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness import finish, parser_of, processor_seconds
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.client import AsyncClient
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress, commit, hardware
from splitpoint_cli.stack.child import LogLine, Service, ServiceCommand, child_environment

LEAST_TOKENS_PER_SECOND = 8_000
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


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    progress = Progress()
    rounds = []
    async with running(arguments.step_ms) as (address, pids):
        way = ("--address", address)
        await load(way, WARM_UP_STREAMS, arguments.tokens)
        for number in range(arguments.rounds):
            before = {name: processor_seconds(pid) for name, pid in pids.items()}
            own = os.times()
            result = await load(way, arguments.streams, arguments.tokens)
            spent = os.times()
            used = {name: processor_seconds(pid) - before[name] for name, pid in pids.items()}
            used["clients"] = (
                spent.children_user
                + spent.children_system
                - own.children_user
                - own.children_system
            )
            rounds.append(round_of(result, used))
            progress.say(f"round {number + 1} of {arguments.rounds}: {_row(rounds[-1])}")
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
        "commit": commit(),
        "hardware": hardware(),
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
        f"{each['failed']} failed; p99 gap {each['p99_itl_ms']:.0f} ms; us of a processor per "
        f"token: {costs}"
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


def run_benchmark(
    doc: str | None,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]],
    show: Callable[[Mapping[str, Any]], None],
    *,
    streams: int,
    step_ms: float,
) -> int:
    """Measure as the command line says, show the result, and return the exit code.

    `streams` and `step_ms` are defaults of options.
    """
    parser = parser_of(doc)
    parser.add_argument("--streams", type=int, default=streams)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument(
        "--step-ms", type=float, default=step_ms, help="of the double's engine step"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments))
    finish(arguments, result, show)
    return 0 if result["is_enough"] else 1


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, show, streams=500, step_ms=25.0))
