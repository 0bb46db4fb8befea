"""Send open-loop load to a running stack, and measure what its clients see.

`vllm bench serve` and `aiperf` load a gateway by HTTP. This sends what they cannot: requests by
gRPC, of several tenants, at the times of a trace; and it reads the scheduler's own counters.

    python -m benchmarks.load [--address HOST:PORT | --url http://HOST:PORT] [--request-rate R]
        [--trace FILE|NAME] [--tenant-token-file TENANT=PATH] [--goodput METRIC:MS ...]
        [--json] [--output FILE]

Each request is sent when it is due, whatever became of the ones before. Times count from that
moment, not from the moment at which this process sent it. A server that stalls therefore cannot
hide the wait of the requests that arrive meanwhile (coordinated omission), and neither can a busy
client. Keys of the result are those of `vllm bench serve`; keys that only Splitpoint has follow.
Exits with 1 if no request completed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks import http
from benchmarks.harness import finish, parser_of
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import Internal, InvalidArgument, SplitpointError
from splitpoint.transport.tls import PLAIN, Identity, client_identity
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import LINE_SECONDS, Progress
from splitpoint_cli.simulate.measures import distribution, read_goals
from splitpoint_cli.traces.arrival import Arrival, Trace, scaled
from splitpoint_cli.traces.formats import load_trace
from splitpoint_cli.traces.statistics import quantile

# Low ids are often special: the end of a text, padding.
_FIRST_TOKEN = 16
# With more bursts than this, gamma-distributed gaps underflow to 0.
_LEAST_BURSTINESS = 0.01
# Workers report their counters about once a second.
_TELEMETRY_SECONDS = 1.2


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the load.

    Attributes:
        prompt: token ids.
        output_length: tokens to generate at most.
        tenant: the tenant that sends it; empty: the caller's.
        priority: within the tenant; higher goes first.
    """

    prompt: list[int]
    output_length: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says about an answer. None: it does not say.

    Attributes:
        output_tokens: by the server's count.
        cached_tokens: prompt tokens that were not computed.
        plan: residency and restore method, such as "resident load".
        queue_seconds: until a worker was told to run it.
    """

    output_tokens: int
    cached_tokens: int | None = None
    plan: str | None = None
    queue_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """The model under load. Token ids of prompts are below `vocabulary_size`."""

    name: str
    vocabulary_size: int
    context_length: int


class Server(Protocol):
    """A server under load."""

    async def model(self) -> Model: ...

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> Answer:
        """Generate one answer; call `on_tokens` with the number of tokens of each message.

        Raises SplitpointError if the answer does not become whole.
        """
        ...

    async def counters(self) -> dict[str, float] | None:
        """Return its totals until now; None if it has none."""
        ...


# -- what is sent, and when -------------------------------------------------------------


def random_samples(
    count: int, own: int, output: int, model: Model, seed: int, *, prefix: int = 0
) -> list[Sample]:
    """Return prompts of `prefix` random tokens that all share, and then `own` more.

    Raises InvalidArgument if they exceed the model's context.
    """
    _check_lengths([(prefix + own, output)], model)
    rng, ids = random.Random(seed), _plain_ids(model)
    shared = rng.choices(ids, k=prefix)
    return [Sample([*shared, *rng.choices(ids, k=own)], output) for _ in range(count)]


def prompt_of(
    arrival: Arrival, index: int, *, block_tokens: int, least: int, most: int, seed: int = 0
) -> list[int]:
    """Return a prompt of `arrival.input_length` token ids, each in [least, most].

    Equal hash ids give equal blocks. What no hash id names is the request's own: it depends on
    `index`, its place in the trace.
    """

    def drawn(seed: str, count: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randint(least, most) for _ in range(count)]

    tokens: list[int] = []
    for block in arrival.hash_ids:
        tokens += drawn(f"{seed} block {block}", block_tokens)
    missing = arrival.input_length - len(tokens)
    tokens += drawn(f"{seed} request {index}", missing)
    return tokens[: arrival.input_length]


def trace_samples(trace: Trace, model: Model, seed: int) -> list[Sample]:
    """Return the requests of a trace; equal blocks are equal tokens.

    Raises InvalidArgument if one exceeds the model's context.
    """
    _check_lengths([(each.input_length, each.output_length) for each in trace.arrivals], model)
    ids = _plain_ids(model)
    bounds = {"block_tokens": trace.block_tokens, "least": ids[0], "most": ids[-1]}
    return [
        Sample(
            prompt_of(each, index, seed=seed, **bounds),
            each.output_length,
            each.tenant,
            each.priority,
        )
        for index, each in enumerate(trace.arrivals)
    ]


def _plain_ids(model: Model) -> range:
    """Return the token ids that prompts are made of."""
    return range(min(_FIRST_TOKEN, model.vocabulary_size - 1), model.vocabulary_size)


def _check_lengths(lengths: Sequence[tuple[int, int]], model: Model) -> None:
    """Raise InvalidArgument for (prompt, answer) tokens that the model's context cannot hold.

    Called before prompts are made: those that no model can hold may not fit in memory, either.
    """
    for number, (prompt, output) in enumerate(lengths, 1):
        if prompt + output > model.context_length:
            raise InvalidArgument(
                f"request {number} has {prompt:,} prompt tokens and asks for {output:,} more: "
                f"{model.name} has a context of {model.context_length:,}",
                field="dataset",
            )


def due_seconds(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Return when each of `count` requests is due, in seconds from the start, ascending.

    The last one is due after count / rate seconds exactly: the gaps are scaled to their expected
    sum, as `vllm bench serve` does, so that runs are comparable.

    Args:
        rate: requests per second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less
            comes in bursts, more is more even.

    Raises InvalidArgument.
    """
    if not rate > 0:
        raise InvalidArgument("--request-rate must be above 0, or inf", field="request_rate")
    if not _LEAST_BURSTINESS <= burstiness < math.inf:
        raise InvalidArgument(
            f"--burstiness must be at least {_LEAST_BURSTINESS:g}", field="burstiness"
        )
    if rate == math.inf:
        return [0.0] * count
    rng, now, due = random.Random(f"gaps {seed}"), 0.0, []
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        due.append(now)
    return [seconds * count / rate / now for seconds in due]


# -- the load --------------------------------------------------------------------------


@dataclass(slots=True)
class Record:
    """What became of one request; seconds from the start of the load.

    Attributes:
        due: when it had to be sent, from which all else counts.
        sent: when it was.
        times, counts: of each message with tokens: when it came, and how many it had.
        ended: when the answer was whole, or failed.
        error: reason of the failure; empty: there was none.
    """

    sample: Sample
    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float = 0.0
    answer: Answer | None = None
    error: str = ""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that came: by the server's count, once it is known."""
        return sum(self.counts) if self.answer is None else self.answer.output_tokens

    @property
    def ttft_ms(self) -> float:
        """Time from due to the first token."""
        return 1e3 * (self.times[0] - self.due) if self.times else 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first; 0 if there was only one."""
        tokens = self.output_tokens
        return 1e3 * (self.times[-1] - self.times[0]) / (tokens - 1) if tokens > 1 else 0.0

    @property
    def e2el_ms(self) -> float:
        """Time from due to the whole answer."""
        return 1e3 * (self.ended - self.due)

    @property
    def itls_ms(self) -> list[float]:
        """Gaps between messages: tokens that came together have one gap."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1e3 * (after - before) for before, after in pairs]

    def keeps(self, goals: Mapping[str, float]) -> bool:
        """Return whether the answer keeps all goals, in milliseconds by metric."""
        return all(getattr(self, f"{metric}_ms") <= limit for metric, limit in goals.items())


class Load:
    """Sends samples to a server; `clock` is in seconds.

    With `max_concurrency` a request whose turn has come waits for a place, as a gateway in front
    of the server would let it wait: it is due when it has the place, and the load is not open any
    more.
    """

    def __init__(
        self,
        server: Server,
        max_concurrency: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._server = server
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._clock = clock
        self._began = 0.0
        self.ended_count = 0

    async def run(self, samples: Sequence[Sample], due: Sequence[float]) -> list[Record]:
        """Send every sample when it is due, and return what became of them, in this order."""
        self._began = self._clock()
        records = [Record(sample, at) for sample, at in zip(samples, due, strict=True)]
        async with asyncio.TaskGroup() as group:
            for record in records:
                wait = record.due - self._now()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._one(record))
        return records

    def _now(self) -> float:
        return self._clock() - self._began

    async def _one(self, record: Record) -> None:
        if self._places is None:
            await self._send(record)
            return
        must_wait = self._places.locked()
        async with self._places:
            if must_wait:
                record.due = self._now()
            await self._send(record)

    async def _send(self, record: Record) -> None:
        times, counts, clock, began = record.times, record.counts, self._clock, self._began

        def came(count: int) -> None:
            times.append(clock() - began)
            counts.append(count)

        record.sent = self._now()
        try:
            record.answer = await self._server.send(record.sample, came)
        except SplitpointError as error:
            record.error = error.reason or type(error).__name__
            record.message = error.message
        record.ended = self._now()
        self.ended_count += 1


async def measured(
    connected: AbstractAsyncContextManager[Server],
    draw: Callable[[Model], Sequence[Sample]],
    due: Sequence[float],
    max_concurrency: int | None,
    progress: Progress,
) -> tuple[Model, list[Record], dict[str, float] | None]:
    """Connect and send; return the model, the records, and what the server counted meanwhile.

    `draw`: the requests. They are drawn before the load begins, so that nothing delays them.
    """
    async with connected as server:
        model = await server.model()
        samples, before = draw(model), await server.counters()
        load = Load(server, max_concurrency)
        telling = asyncio.create_task(_tell(load, len(samples), progress))
        # What exists by now is no garbage: looking through it would delay requests.
        gc.collect()
        gc.freeze()
        try:
            records = await load.run(samples, due)
        finally:
            gc.unfreeze()
            telling.cancel()
        after = await server.counters()
    if before is None or after is None:
        return model, records, None
    return model, records, {name: count - before.get(name, 0) for name, count in after.items()}


async def _tell(load: Load, count: int, progress: Progress) -> None:
    while True:
        await asyncio.sleep(LINE_SECONDS)
        progress.say(f"{load.ended_count} of {count} requests have ended")


# -- servers ---------------------------------------------------------------------------


class Scheduler:
    """A scheduler, by gRPC. Requests of a tenant go through the client that has its token."""

    def __init__(self, clients: Mapping[str, AsyncClient], model: str, *, ignore_eos: bool) -> None:
        """`clients`: by tenant; that of the empty name serves all tenants without their own."""
        self._clients = clients
        self._model = model
        self._ignore_eos = ignore_eos
        # True if something was sent after the last reading of the counters.
        self._has_sent = False

    async def model(self) -> Model:
        found = await self._clients[""].get_model(self._model)
        return Model(found.name, found.shape.vocabulary_size, found.context_length)

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> Answer:
        self._has_sent = True
        client = self._clients.get(sample.tenant) or self._clients[""]
        events = client.generate(
            sample.prompt,
            model=self._model,
            max_tokens=sample.output_length,
            ignore_eos=self._ignore_eos,
            priority=sample.priority,
        )
        async for event in events:
            if isinstance(event, Completion):
                plan = event.plan
                return Answer(
                    event.usage.completion_tokens,
                    event.usage.cached_tokens,
                    None if plan is None else f"{plan.residency.value} {plan.method.value}",
                    event.queue_seconds,
                )
            if event.token_ids:
                on_tokens(len(event.token_ids))
        raise Internal("the generation ended without an answer")

    async def counters(self) -> dict[str, float]:
        """Return the totals of scheduler and workers, once the workers have reported again."""
        if self._has_sent:
            await asyncio.sleep(_TELEMETRY_SECONDS)
            self._has_sent = False
        own = self._clients[""]
        status, workers = await asyncio.gather(own.scheduler_status(), own.list_workers())
        known = [worker.telemetry for worker in workers if worker.telemetry is not None]
        return {
            "engine_steps": sum(each.step_count for each in known),
            "scheduled_tokens": sum(each.scheduled_token_count for each in known),
            "failovers": status.failover_count,
            "link_bound_requests": status.link_bound_count,
            "link_bound_seconds": status.link_bound_wait_seconds_sum,
            "device_bound_requests": status.device_bound_count,
            "device_bound_seconds": status.device_bound_wait_seconds_sum,
            **{f"decision {name}": count for name, count in status.decision_counts.items()},
        }


@asynccontextmanager
async def scheduler(
    address: str,
    identity: Identity = PLAIN,
    tenants: Mapping[str, Identity] | None = None,
    model: str = "",
    *,
    ignore_eos: bool = True,
) -> AsyncIterator[Scheduler]:
    """Connect to a scheduler, once for the caller and once for each named tenant."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(AsyncClient(address, identity=each))
            for name, each in {"": identity, **(tenants or {})}.items()
        }
        yield Scheduler(clients, model, ignore_eos=ignore_eos)


class Gateway:
    """A gateway, by HTTP: streamed completions of token ids, as the scheduler gets them.

    For `benchmarks.streams --gateway`, which compares the two ways by the same clients.
    """

    def __init__(self, place: str, *, ignore_eos: bool) -> None:
        self._place = place
        self._name = ""
        self._ignore_eos = ignore_eos

    async def model(self) -> Model:
        async with aclosing(http.answer(self._place, "/v1/models")) as parts:
            body = b"".join([part async for part in parts])
        found = json.loads(body)["data"][0]
        self._name = found["id"]
        return Model(self._name, found["vocabulary_size"], found["max_model_len"])

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> Answer:
        body = {
            "model": self._name,
            "prompt": sample.prompt,
            "max_tokens": sample.output_length,
            "ignore_eos": self._ignore_eos,
            "temperature": 0.0,  # the scheduler's default; OpenAI's is to sample
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = None
        async with aclosing(http.events(self._place, "/v1/completions", body)) as events:
            async for event in events:
                if usage is None and b'"finish_reason":null' in event:
                    on_tokens(1)  # the usage has the exact number
                elif event != b"[DONE]":
                    usage = json.loads(event).get("usage") or usage
        if usage is None:
            raise Internal("the stream ended without its usage", reason="NO_USAGE")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Answer(usage["completion_tokens"], cached)

    async def counters(self) -> None:
        """Return None: the protocol has none."""


@asynccontextmanager
async def gateway(url: str, *, ignore_eos: bool = True) -> AsyncIterator[Gateway]:
    """Use the gateway at http://HOST:PORT. Raises InvalidArgument for another URL."""
    scheme, _, place = url.rstrip("/").partition("://")
    if scheme != "http" or not place or "/" in place:
        raise InvalidArgument(f"{url!r} is not http://HOST:PORT", field="url")
    yield Gateway(place, ignore_eos=ignore_eos)


# -- the result ------------------------------------------------------------------------


def results_of(
    records: Sequence[Record],
    goals: Mapping[str, float] | None = None,
    work: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what was measured. Failed requests count only in `failed` and `failures`."""
    done = [record for record in records if not record.error]
    seconds = max((record.ended for record in records), default=0.0)
    prompt = sum(len(record.sample.prompt) for record in done)
    output = sum(record.output_tokens for record in done)
    answers = [record.answer for record in done if record.answer is not None]
    begun = [record for record in done if record.times]

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": rate(len(done)),
        "request_goodput": rate(sum(each.keeps(goals) for each in done)) if goals else None,
        "output_throughput": rate(output),
        "total_token_throughput": rate(prompt + output),
        **distribution("ttft", [record.ttft_ms for record in begun]),
        **distribution("tpot", [each.tpot_ms for each in begun if each.output_tokens > 1]),
        **distribution("itl", [gap for record in begun for gap in record.itls_ms]),
        **distribution("e2el", [record.e2el_ms for record in begun]),
        **distribution(
            "queue", [1e3 * a.queue_seconds for a in answers if a.queue_seconds is not None]
        ),
        **distribution("late", [1e3 * (record.sent - record.due) for record in records]),
        "cached_tokens": sum(each.cached_tokens or 0 for each in answers),
        "plans": dict(Counter(each.plan for each in answers if each.plan is not None)),
        "failures": dict(Counter(record.error for record in records if record.error)),
        **({} if work is None else _work(work)),
        "tenants": _tenants(done),
        "goals_ms": dict(goals or {}),
    }


def _work(work: Mapping[str, float]) -> dict[str, Any]:
    """Return what the server did meanwhile; a mean of nothing is None."""

    def mean(total: str, count: str, factor: float = 1.0) -> float | None:
        return factor * work[total] / work[count] if work[count] else None

    return {
        "failovers": work["failovers"],
        "engine_steps": work["engine_steps"],
        "scheduled_tokens_per_step": mean("scheduled_tokens", "engine_steps"),
        "decisions": {
            name.removeprefix("decision "): count
            for name, count in work.items()
            if name.startswith("decision ") and count
        },
        "link_bound_requests": work["link_bound_requests"],
        "mean_link_bound_wait_ms": mean("link_bound_seconds", "link_bound_requests", 1e3),
        "device_bound_requests": work["device_bound_requests"],
        "mean_device_bound_wait_ms": mean("device_bound_seconds", "device_bound_requests", 1e3),
    }


def _tenants(done: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return what each named tenant got."""
    found = {}
    for name in sorted({record.sample.tenant for record in done} - {""}):
        own = [record for record in done if record.sample.tenant == name]
        firsts = sorted(record.ttft_ms for record in own)
        found[name] = {
            "completed": len(own),
            "output_tokens": sum(record.output_tokens for record in own),
            "median_ttft_ms": quantile(firsts, 0.5),
            "p99_ttft_ms": quantile(firsts, 0.99),
        }
    return found


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['model_id']}: {result['completed']:,} completed, {result['failed']:,} failed in "
        f"{result['duration']:.2f} s; {result['request_throughput']:.2f} requests and "
        f"{result['output_throughput']:,.1f} output tokens a second"
    )
    kinds = ("mean", "median", "std", "p90", "p99")
    print(f"{'milliseconds':<14}" + "".join(f"{kind:>11}" for kind in kinds))
    for metric in ("ttft", "tpot", "itl", "e2el", "queue", "late"):
        values = (f"{result[f'{kind}_{metric}_ms']:>11,.1f}" for kind in kinds)
        print(f"{metric:<14}" + "".join(values))
    for key in ("request_goodput", "cached_tokens", "plans", "failures", "decisions", "tenants"):
        if result.get(key):
            print(f"{key}: {result[key]}")


# -- the command -----------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    add = found.add_argument
    add("--address", default=DEFAULT_ADDRESS, help="of the scheduler")
    add("--url", help="http://HOST:PORT of a gateway; absent: by gRPC to --address")
    add("--ca", help="certificate authority of the scheduler")
    add("--token-file", help="token of the caller; role admin: its run reads the counters")
    add("--tenant-token-file", action="append", default=[], metavar="TENANT=PATH")
    add("--model", default="", help="served model; absent: the only one")
    add("--request-rate", type=float, default=math.inf, help="requests per second; inf: at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: evenly")
    add("--max-concurrency", type=int, help="hold requests back while this many run")
    add("--num-prompts", type=int, default=1000, help="requests; of a trace at most this many")
    add("--seed", type=int, default=0, help="of prompts and gaps")
    add("--random-input-len", type=int, default=1024, help="prompt tokens of each")
    add("--random-output-len", type=int, default=128, help="tokens that each generates at most")
    add("--random-prefix-len", type=int, default=0, help="prompt tokens before them, shared by all")
    add("--trace", metavar="FILE|NAME", help="JSON lines, CSV, or the name of a made trace")
    add("--trace-rate", type=float, default=1.0, help="factor of the trace's rate")
    add("--trace-input", type=float, default=1.0, help="factor of its prompts' lengths")
    add("--trace-output", type=float, default=1.0, help="factor of its answers' lengths")
    add("--trace-tenants", type=int, default=1, help="tenants of a made trace")
    add("--ignore-eos", action="store_true", help="generate all tokens asked for")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="such as ttft:500 tpot:50")
    return found


def requests_of(
    given: argparse.Namespace,
) -> tuple[Callable[[Model], Sequence[Sample]], Sequence[float]]:
    """Return what is sent, by the model, and when, in seconds. Raises InvalidArgument."""
    count, seed = given.num_prompts, given.seed
    due = due_seconds(given.request_rate, given.burstiness, count, seed)
    if given.trace is None:
        sizes = (count, given.random_input_len, given.random_output_len)
        prefix = given.random_prefix_len
        return lambda model: random_samples(*sizes, model, seed, prefix=prefix), due
    trace = load_trace(given.trace, seed=seed, count=count, tenants=given.trace_tenants)
    trace = scaled(
        trace, rate=given.trace_rate, length=given.trace_input, output=given.trace_output
    )
    count = len(trace.arrivals)
    if given.request_rate == math.inf:
        due = [each.seconds for each in trace.arrivals]
    else:
        due = due_seconds(given.request_rate, given.burstiness, count, seed)
    return lambda model: trace_samples(trace, model, seed), due


def connected_by(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Server]:
    """Return the server that the command line names. Raises InvalidArgument."""
    ignore_eos = arguments.ignore_eos
    if arguments.url is not None:
        return gateway(arguments.url, ignore_eos=ignore_eos)
    tenants = {}
    for word in arguments.tenant_token_file:
        name, _, path = word.partition("=")
        if not (name and path):
            raise InvalidArgument(f"{word!r} is not TENANT=PATH", field="tenant_token_file")
        tenants[name] = client_identity(ca=arguments.ca, token_file=path)
    identity = client_identity(ca=arguments.ca, token_file=arguments.token_file)
    return scheduler(arguments.address, identity, tenants, arguments.model, ignore_eos=ignore_eos)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    try:
        goals, (draw, due) = read_goals(arguments.goodput), requests_of(arguments)
        model, records, work = run_until_signal(
            measured(connected_by(arguments), draw, due, arguments.max_concurrency, Progress())
        )
    except SplitpointError as error:
        print(f"benchmarks.load: {error.message}", file=sys.stderr)
        return 2
    result = {
        "benchmark": "load",
        "model_id": model.name,
        "num_prompts": len(records),
        "request_rate": str(arguments.request_rate) if arguments.trace is None else "trace",
        "max_concurrency": arguments.max_concurrency,
        "seed": arguments.seed,
        **results_of(records, goals, work),
    }
    finish(arguments, result, show)
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
