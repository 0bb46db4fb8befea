"""The cost of measuring: decode steps with and without account, metrics, telemetry and scrapes.

One engine and its runtime decode a batch again and again, in turns: watched as a worker's
is (every step goes into the account and the histograms, telemetry goes out each second,
and all metrics are scraped over HTTP each second), and unwatched. Both make
the messages of a Run stream. A busy machine moves a step's time by more than what is
looked for. So the processor time of all threads is compared, too, which moves less,
the scraper's own included; and each part's cost is timed by itself: of a step, in
microseconds, and of what comes once a second.

    python -m benchmarks.metrics_overhead [--rounds N] [--seconds S] [--dtype TYPE] [--json]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from prometheus_client import generate_latest

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.engine_runs import admission_of
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import commit, hardware
from worker_service.account import Account
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.choice import describe_device
from worker_service.device.memory import divide
from worker_service.device.populating import Populator
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepEvent, StepOutput
from worker_service.hardware.monitor import monitor_of
from worker_service.lanes.timeline import LaneTotals, Span
from worker_service.metrics import WorkerMetrics
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure
from worker_service.runtime import Runtime
from worker_service.startup.worker import LoadedWorker
from worker_service.telemetry import TELEMETRY_SECONDS, telemetry_of
from worker_service.wire import response_from

CPU = torch.device("cpu")
BATCH = 8
PROMPT_TOKENS = 128
CHUNK_TOKENS = 64
WARM_UP_TOKENS = 16
SCRAPE_SECONDS = 1.0
# Of each timing of one part, and how often it is repeated.
CALLS, REPEATS = 2000, 7
MODELS = ("bundled", "opt-125m")


@dataclass(frozen=True, slots=True)
class Step:
    """Mean seconds of a round's steps, by the clock and of all threads' processor time."""

    seconds: float
    processor_seconds: float


class Unkept(Account):
    """An account that keeps nothing."""

    def add(self, output: StepOutput) -> None:
        return


@dataclass
class Subject:
    """A worker whose engine decodes, and what watches it."""

    name: str
    worker: LoadedWorker
    meters: Meters
    metrics: WorkerMetrics
    sample: StepOutput | None = None

    def watch(self, watched: bool) -> None:
        runtime = self.worker.runtime
        runtime.account = Account() if watched else Unkept()
        runtime.observers = [self.metrics.observe] if watched else []

    async def decode(self, new_tokens: int, *, watched: bool) -> Step:
        """Run and return the steps in which the whole batch decodes."""
        self.watch(watched)
        runtime = self.worker.runtime
        listener = runtime.streams.open()
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.worker.engine.model.shape.vocabulary_size
        for index in range(BATCH):
            prompt = torch.randint(3, vocabulary, (PROMPT_TOKENS,), generator=generator)
            admission = admission_of(str(index), prompt.tolist(), new_tokens)
            runtime.admit(replace(admission, stream=listener.stream))
        due = time.monotonic() + TELEMETRY_SECONDS
        begun: tuple[float, float] | None = None
        ended = (0.0, 0.0)
        steps = finishes = number = 0
        first: set[str] = set()
        while finishes < BATCH:
            output = await listener.outputs.get()
            number += 1
            telemetry = None
            if watched and time.monotonic() >= due:
                telemetry = telemetry_of(self.worker)
                due = time.monotonic() + TELEMETRY_SECONDS
            response_from(output, number, telemetry).SerializeToString()
            if output.tokens and begun is not None:
                ended = time.perf_counter(), time.process_time()
                steps += 1
                self.sample = output
            first |= {event.key[0] for event in output.tokens}
            if begun is None and len(first) == BATCH:
                begun = time.perf_counter(), time.process_time()
            finishes += len(output.finishes)
        runtime.streams.close(listener)
        if begun is None:
            raise RuntimeError("the batch never decoded as one")
        return Step((ended[0] - begun[0]) / steps, (ended[1] - begun[1]) / steps)


@asynccontextmanager
async def subject(name: str, data_type: DataType, seed: int) -> AsyncIterator[Subject]:
    dtype = TORCH_TYPES[data_type]
    folder = resolve_model(None)
    if name == "bundled":
        model = Decoder.load(folder, CPU, dtype)
    else:
        config = DecoderConfig.of_shape(replace(BUILT_IN_SHAPES[name], data_type=data_type))
        model = Decoder.random(config, seed, CPU, dtype)
    engine = _engine(model)
    description = describe_device(CPU)
    profile = measure(model, CPU, description, lanes=engine.lanes)
    engine.watch_costs(profile)
    runtime = Runtime(engine, None)
    runtime.start()
    monitor = monitor_of(CPU)
    monitor.start()
    worker = LoadedWorker(
        worker_id=name,
        instance_id=bytes(16),
        model_folder=folder,
        engine=engine,
        runtime=runtime,
        store=None,
        device_description=description,
        weights="",
        populator=Populator(),
        weight_lock=None,
        monitor=monitor,
    )
    meters = Meters(Service.WORKER)
    try:
        yield Subject(name, worker, meters, WorkerMetrics(meters, worker))
    finally:
        await runtime.stop()
        monitor.stop()


def _engine(model: Decoder) -> Engine:
    """Return memory for the batch, to the end of the context."""
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK_TOKENS, has_activations=False)
    longest = min(model.shape.context_length, 2048)
    pages = BATCH * (-(-longest // CHUNK_TOKENS) + 1)
    limits: Any = {"max_batch_size": BATCH, "max_batched_tokens": 512}
    # Any large budget tells what is fixed; then exactly the pages needed.
    roomy = divide(
        model.shape, layout, budget_bytes=1 << 50, weight_bytes=model.weight_bytes, **limits
    )
    fixed = roomy.weight_bytes + roomy.workspace_bytes
    budget = fixed + max(pages, roomy.streamed_page_count) * roomy.page_bytes
    plan = divide(
        model.shape, layout, budget_bytes=budget, weight_bytes=model.weight_bytes, **limits
    )
    return Engine(
        model,
        DeviceCache(layout, plan, CPU),
        max_batch_size=limits["max_batch_size"],
        max_batched_tokens=limits["max_batched_tokens"],
        shares_prefixes=False,  # each round computes its prompts
    )


@asynccontextmanager
async def scraped(address: str) -> AsyncIterator[None]:
    """Scrape all metrics each second, as Prometheus does."""

    def fetch() -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
            page.read()

    async def scrape() -> None:
        while True:
            await asyncio.to_thread(fetch)
            await asyncio.sleep(SCRAPE_SECONDS)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# -- each part by itself ------------------------------------------------------------------


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the time of one call: the median of REPEATS timings of many calls."""
    timings = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        timings.append((time.perf_counter() - started) / calls)
    return 1e6 * statistics.median(timings)


def own_costs(measured: Subject) -> dict[str, float]:
    """Microseconds: of a step, of a span of lanes, of what comes once a second."""
    output, account = measured.sample, Account()
    if output is None or output.step is None:
        raise RuntimeError("no decode step was seen")
    event = output.step
    kept = measured.worker.runtime.account
    measured.worker.runtime.account = account
    spans = [Span(Lane.LINK_IN, "load K,V", 0.0, 1e-3, 0, 64, 1e6)] * 100
    costs = {
        "report_us": microseconds(lambda: StepEvent(event.times, 0, BATCH, None)),
        "account_us": microseconds(lambda: account.add(output)),
        "histograms_us": microseconds(lambda: measured.metrics.observe(output)),
        "span_us": microseconds(lambda: LaneTotals().add(spans), 100) / len(spans),
        "telemetry_us": microseconds(
            lambda: telemetry_of(measured.worker).SerializeToString(), 200
        ),
        "scrape_us": microseconds(lambda: generate_latest(measured.meters.registry), 20),
    }
    measured.worker.runtime.account = kept
    costs["step_us"] = costs["report_us"] + costs["account_us"] + costs["histograms_us"]
    costs["second_us"] = costs["telemetry_us"] + costs["scrape_us"]
    return costs


# -- the benchmark ------------------------------------------------------------------------


async def compare(
    measured: Subject, rounds: int, seconds: float, progress: Progress
) -> dict[str, object]:
    """Both in turns, so long that each has several scrapes; who is first alternates."""
    arguments = argparse.Namespace(
        metrics="127.0.0.1:0", metrics_open=False, tls_cert=None, tls_key=None, tls_ca=None
    )
    step = await measured.decode(WARM_UP_TOKENS, watched=False)
    # Before the port is opened: from then on this loop must be free to be read.
    costs = own_costs(measured)
    room = min(measured.worker.engine.model.shape.context_length, 2048) - PROMPT_TOKENS
    new_tokens = max(WARM_UP_TOKENS, min(room, round(seconds / step.seconds)))
    times: dict[bool, list[Step]] = {False: [], True: []}
    async with metrics_served(arguments, measured.meters) as address:
        for number in progress.track(f"rounds of {measured.name}", range(rounds)):
            for watched in (False, True) if number % 2 else (True, False):
                async with scraped(address) if watched else contextlib.nullcontext():
                    times[watched].append(await measured.decode(new_tokens, watched=watched))
    clocks = {watched: [step.seconds for step in times[watched]] for watched in times}
    used = {watched: [step.processor_seconds for step in times[watched]] for watched in times}
    # Of a step, and of the seconds that pass meanwhile.
    alone = statistics.median(clocks[False])
    share = costs["step_us"] / (1e6 * alone) + costs["second_us"] / 1e6
    return {
        "model": measured.name,
        "steps_per_round": new_tokens - 1,
        "step_seconds_unwatched": alone,
        "step_seconds_watched": statistics.median(clocks[True]),
        "measured_overhead": overhead(clocks),
        "spread_of_rounds": max(clocks[False]) / min(clocks[False]) - 1,
        "processor_seconds_unwatched": statistics.median(used[False]),
        "processor_overhead": overhead(used),
        "processor_spread_of_rounds": max(used[False]) / min(used[False]) - 1,
        "overhead_by_parts": share,
        **costs,
    }


def overhead(seconds: dict[bool, list[float]]) -> float:
    """Return the overhead of watching: the median of the rounds' ratios, less 1."""
    pairs = zip(seconds[True], seconds[False], strict=True)
    return statistics.median(watched / alone for watched, alone in pairs) - 1


async def run(
    names: list[str], data_type: DataType, rounds: int, seconds: float, progress: Progress
) -> list[dict[str, object]]:
    cases = []
    for name in names:
        async with subject(name, data_type, seed=0) as measured:
            cases.append(await compare(measured, rounds, seconds, progress))
    return cases


def table_of(cases: list[dict[str, object]]) -> str:
    lines = [
        f"{'model':<10} {'unwatched step':>15} {'overhead':>9} {'rounds differ':>14} "
        f"{'processor':>10} {'overhead':>9} {'rounds differ':>14} "
        f"{'parts: step':>12} {'second':>8} {'overhead':>9}"
    ]
    for case in cases:
        values = {name: float(str(value)) for name, value in case.items() if name != "model"}
        lines.append(
            f"{case['model']:<10} {1e3 * values['step_seconds_unwatched']:>12.3f} ms "
            f"{values['measured_overhead']:>9.2%} {values['spread_of_rounds']:>14.1%} "
            f"{1e3 * values['processor_seconds_unwatched']:>7.2f} ms "
            f"{values['processor_overhead']:>9.2%} "
            f"{values['processor_spread_of_rounds']:>14.1%} "
            f"{values['step_us']:>9.1f} us {values['second_us'] / 1e3:>5.2f} ms "
            f"{values['overhead_by_parts']:>9.2%}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round, about")
    parser.add_argument("--dtype", choices=[each.value for each in DataType], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.model or list(MODELS)
    cases = run_until_signal(
        run(names, DataType(arguments.dtype), arguments.rounds, arguments.seconds, Progress())
    )
    result = {
        "benchmark": "metrics_overhead",
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "scrape_seconds": SCRAPE_SECONDS,
        "telemetry_seconds": TELEMETRY_SECONDS,
        "seed": 0,
        "commit": commit(),
        "hardware": hardware(),
        "cases": cases,
    }
    finish(arguments, result, lambda _: print(table_of(cases)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
