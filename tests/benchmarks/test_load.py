"""`benchmarks.load`: its times, prompts and figures, and runs on a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_scheduler import Script, fake_scheduler
from running_gateway import running_gateway
from scheduler_doubles import SHAPE, stack

from benchmarks import load
from benchmarks.load import (
    Answer,
    Load,
    Model,
    Record,
    Sample,
    due_seconds,
    gateway,
    prompt_of,
    random_samples,
    results_of,
    trace_samples,
)
from splitpoint.errors import InvalidArgument, ResourceExhausted, SplitpointError, Unavailable
from splitpoint_cli.simulate.measures import distribution, read_goals
from splitpoint_cli.traces.arrival import Arrival, Trace

MODEL = Model("tiny", 256, 4096)
# Keys that `vllm bench serve` writes, too, with a goal.
VLLM_KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("num_prompts", "model_id", "request_rate", "max_concurrency"),
    *(
        f"{of}_{metric}_ms"
        for of in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    due = due_seconds(20.0, burstiness, 4000, 1)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(4000 / 20)
    gaps = [after - before for before, after in zip([0.0, *due], due, strict=False)]
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)


def test_without_a_rate_all_requests_are_due_at_once() -> None:
    assert due_seconds(math.inf, 1.0, 3, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "load_of",
    [
        lambda: due_seconds(0.0, 1.0, 2, 0),
        lambda: due_seconds(math.nan, 1.0, 2, 0),
        lambda: due_seconds(1.0, 0.0001, 2, 0),
        lambda: read_goals(["ttft"]),
        lambda: read_goals(["itl:5"]),
    ],
)
def test_what_makes_no_load_is_refused(load_of: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        load_of()


def test_goals_come_as_words_or_with_commas() -> None:
    goals = read_goals(["ttft:500", "tpot:50,e2el:9000"])
    assert goals == {"ttft": 500.0, "tpot": 50.0, "e2el": 9000.0}


def test_random_prompts_share_their_prefix_and_depend_on_the_seed_alone() -> None:
    def draw(seed: int) -> list[Sample]:
        return random_samples(30, 50, 10, MODEL, seed, prefix=7)

    samples = draw(3)
    assert samples == draw(3)
    assert samples != draw(4)
    assert {tuple(each.prompt[:7]) for each in samples} == {tuple(samples[0].prompt[:7])}
    assert len({tuple(each.prompt[7:]) for each in samples}) == 30
    assert {(len(each.prompt), each.output_length) for each in samples} == {(57, 10)}
    assert all(0 <= token < MODEL.vocabulary_size for each in samples for token in each.prompt)


def test_equal_blocks_of_a_trace_are_equal_tokens() -> None:
    arrivals = (
        Arrival(0.0, 20, 5, (1, 2, 3), "a", 2),
        Arrival(1.5, 20, 6, (1, 2, 4), "b"),
        Arrival(2.0, 12, 7),
    )
    trace = Trace("t", arrivals, block_tokens=8)
    first, second, third = trace_samples(trace, MODEL, 0)
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert [len(each.prompt) for each in (first, second, third)] == [20, 20, 12]
    assert (first.tenant, first.priority, first.output_length) == ("a", 2, 5)
    with pytest.raises(InvalidArgument, match="request 1 has 20 prompt tokens"):
        trace_samples(trace, Model("tiny", 256, 24), 0)


def test_prompts_share_the_blocks_that_the_trace_shares() -> None:
    one = Arrival(0.0, 20, 1, (7, 8, 9))
    two = Arrival(1.0, 18, 1, (7, 8, 4))
    prompts = [
        prompt_of(each, index, block_tokens=8, least=3, most=90)
        for index, each in enumerate((one, two))
    ]
    assert [len(prompt) for prompt in prompts] == [20, 18]
    assert prompts[0][:16] == prompts[1][:16]
    assert prompts[0][16:18] != prompts[1][16:]
    assert all(3 <= token <= 90 for prompt in prompts for token in prompt)
    alone = Arrival(0.0, 20, 1)
    own = [prompt_of(alone, index, block_tokens=8, least=3, most=90) for index in (0, 1)]
    assert own[0] != own[1]


# -- the load --------------------------------------------------------------------------


class Stalled:
    """A server that answers no request until `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.sent: list[Sample] = []
        self.running = self.most = 0

    async def model(self) -> Model:
        return MODEL

    async def counters(self) -> None:
        return None

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> Answer:
        self.sent.append(sample)
        self.running += 1
        self.most = max(self.most, self.running)
        await self.open.wait()
        self.running -= 1
        if sample.tenant == "bad":
            raise ResourceExhausted("full", reason="QUEUE_FULL")
        on_tokens(2)
        await asyncio.sleep(0)
        on_tokens(1)
        return Answer(3)


async def test_a_stalled_server_delays_no_arrival() -> None:
    server = Stalled()
    samples = [Sample([number], 3) for number in range(50)]
    due = [number / 5000 for number in range(50)]
    running = asyncio.create_task(Load(server).run(samples, due))
    while len(server.sent) < 50:
        await asyncio.sleep(0.001)
    assert server.running == 50  # all were sent, none was answered
    server.open.set()
    records = await running
    assert [record.due for record in records] == due
    assert all(record.due <= record.sent <= record.times[0] for record in records)
    assert [record.counts for record in records] == [[2, 1]] * 50


async def test_a_late_client_counts_its_own_delay() -> None:
    server, now = Stalled(), iter([0.0, *(10.0 + n for n in range(99))])
    server.open.set()
    [record] = await Load(server, clock=lambda: next(now)).run([Sample([1], 3)], [0.5])
    assert record.due == 0.5
    assert record.sent > 10  # a process that was asleep, for example
    assert record.ttft_ms == 1e3 * (record.times[0] - 0.5)


async def test_places_bound_what_runs_at_a_time_and_a_request_is_due_when_it_has_one() -> None:
    server = Stalled()
    samples = [Sample([number], 3) for number in range(20)]
    running = asyncio.create_task(Load(server, 4).run(samples, [0.0] * 20))
    while len(server.sent) < 4:
        await asyncio.sleep(0.001)
    server.open.set()
    records = await running
    assert server.most == 4
    assert [record.due == 0.0 for record in records] == [True] * 4 + [False] * 16


async def test_failures_are_counted_by_reason_and_nowhere_else() -> None:
    server = Stalled()
    server.open.set()
    samples = [Sample([1, 2], 3, "bad" if number % 3 == 0 else "") for number in range(9)]
    result = results_of(await Load(server).run(samples, [0.0] * 9))
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["failures"] == {"QUEUE_FULL": 3}
    assert result["total_input_tokens"] == 12
    assert result["total_output_tokens"] == 18


# -- the figures -----------------------------------------------------------------------


def record(due: float, times: list[float], counts: list[int], **more: Any) -> Record:
    tenant = more.pop("tenant", "")
    return Record(Sample([1] * 4, 9, tenant), due, due, times, counts, times[-1] + 0.5, **more)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = record(1.0, [1.25, 1.5, 2.0], [1, 3, 1])
    assert (one.ttft_ms, one.tpot_ms, one.e2el_ms) == (250, 750 / 4, 1500)
    assert one.itls_ms == [250, 500]
    assert one.keeps({"ttft": 250, "tpot": 188, "e2el": 1500})
    assert not one.keeps({"ttft": 249})


def test_distributions_are_numpys() -> None:
    rng = random.Random(5)
    values = [rng.expovariate(0.01) for _ in range(137)]
    found = distribution("x", values, (0, 50, 90, 99.9, 100))
    assert found["mean_x_ms"] == pytest.approx(np.mean(values))
    assert found["std_x_ms"] == pytest.approx(np.std(values))
    assert found["median_x_ms"] == pytest.approx(np.median(values))
    for percent in (0, 50, 90, 99.9, 100):
        assert found[f"p{percent}_x_ms"] == pytest.approx(np.percentile(values, percent))
    assert set(distribution("x", [], (99,)).values()) == {0.0}


def test_rates_and_our_own_figures() -> None:
    answer = Answer(5, cached_tokens=2, plan="resident load", queue_seconds=0.125)
    records = [
        record(0.0, [0.5, 1.0], [1, 4], answer=answer, tenant="a"),
        record(0.25, [1.75, 2.0], [1, 4], answer=answer, tenant="b"),
        Record(Sample([1], 1), 0.5, 0.5, ended=0.75, error="NO_WORKER", message="none"),
    ]
    work = {
        "engine_steps": 10,
        "scheduled_tokens": 80,
        "failovers": 2,
        "link_bound_requests": 4,
        "link_bound_seconds": 2.0,
        "device_bound_requests": 0,
        "device_bound_seconds": 0.0,
        "decision set": 1,
        "decision turn": 2,
        "decision best": 0,
    }
    result = results_of(records, {"ttft": 600.0}, work)
    assert result["duration"] == 2.5
    assert result["request_throughput"] == 2 / 2.5
    assert result["output_throughput"] == 10 / 2.5
    assert result["total_token_throughput"] == 18 / 2.5
    assert result["request_goodput"] == 1 / 2.5
    assert result["mean_ttft_ms"] == 1000.0
    assert result["cached_tokens"] == 4
    assert result["plans"] == {"resident load": 2}
    assert result["failures"] == {"NO_WORKER": 1}
    assert result["mean_queue_ms"] == 125.0
    assert (result["scheduled_tokens_per_step"], result["failovers"]) == (8.0, 2)
    assert result["decisions"] == {"set": 1, "turn": 2}
    assert (result["link_bound_requests"], result["mean_link_bound_wait_ms"]) == (4, 500.0)
    assert (result["device_bound_requests"], result["mean_device_bound_wait_ms"]) == (0, None)
    figures = {"completed": 1, "output_tokens": 5, "median_ttft_ms": 500.0, "p99_ttft_ms": 500.0}
    assert result["tenants"]["a"] == figures


# -- the program -----------------------------------------------------------------------


@pytest.fixture
def script(socket_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(load, "_TELEMETRY_SECONDS", 0.0)
    with fake_scheduler(socket_address) as script:
        yield script


def run(script: Script, *words: str) -> int:
    lengths = ("--random-input-len", "5", "--random-output-len", "3")
    return load.main(["--address", script.address, *lengths, *words])


def test_a_run_reports_under_the_keys_of_vllm(
    script: Script, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--num-prompts", "6", "--request-rate", "500", "--seed", "1", "--ignore-eos")
    goals = ("--goodput", "ttft:60000", "tpot:60000")
    output = ("--json", "--output", str(tmp_path / "result.json"))
    assert run(script, *words, *goals, *output) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= VLLM_KEYS
    assert (report["completed"], report["failed"]) == (6, 0)
    assert report["total_output_tokens"] == 30  # this scheduler repeats its prompt
    assert report["request_goodput"] == report["request_throughput"]
    assert report["cached_tokens"] == 12
    assert json.loads((tmp_path / "result.json").read_text()) == report
    sampling = script.requests[-1].sampling
    assert (sampling.max_tokens, sampling.ignore_eos) == (3, True)


def test_a_trace_is_replayed_in_the_name_of_its_tenants(script: Script, tmp_path: Path) -> None:
    trace, token = tmp_path / "trace.csv", tmp_path / "token"
    trace.write_text(
        "seconds,input_length,output_length,priority,tenant\n0,3,2,0,a\n0.02,4,2,2,b\n0.03,5,2,0,b\n"
    )
    token.write_text("secret")
    token.chmod(0o600)
    assert run(script, "--trace", str(trace), "--tenant-token-file", f"b={token}") == 0
    assert [len(request.token_ids.ids) for request in script.requests] == [3, 4, 5]
    assert [request.priority for request in script.requests] == [0, 2, 0]


def test_a_load_that_only_fails_ends_with_1(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.failures = [ResourceExhausted("full", reason="QUEUE_FULL") for _ in range(2)]
    assert run(script, "--num-prompts", "2", "--json") == 1
    assert json.loads(capsys.readouterr().out)["failures"] == {"QUEUE_FULL": 2}


@pytest.mark.parametrize(
    "words",
    [
        ("--request-rate", "0"),
        ("--goodput", "itl:5"),
        ("--trace", "/nowhere"),
        ("--tenant-token-file", "x"),
        ("--url", "ftp://a"),
        ("--random-input-len", "90"),
        ("--random-prefix-len", "1000000000000"),
    ],
)
def test_what_cannot_be_sent_is_refused(script: Script, words: tuple[str, ...]) -> None:
    assert run(script, *words) == 2
    assert not script.requests


# -- by HTTP ---------------------------------------------------------------------------


async def test_a_load_on_a_gateway() -> None:
    async with stack() as behind, running_gateway(behind.address) as http:
        url = f"http://{http.address}"
        async with gateway(url) as server:
            found = await server.model()
            assert (found.name, found.vocabulary_size) == (SHAPE.name, SHAPE.vocabulary_size)
            samples = [Sample([5 + n, 6, 7], 8) for n in range(20)]
            for each in await Load(server, 4).run(samples, [0.0] * 20):
                assert each.error == ""
                # An event each; the scheduler puts tokens together for a reader that is behind.
                assert set(each.counts) == {1}
                assert len(each.counts) <= each.output_tokens == 8
                assert each.answer is not None
                assert each.answer.cached_tokens == 0
            admits = behind.workers[0].admits
            assert {each.sampling.temperature for each in admits} == {0.0}
            assert all(each.sampling.ignore_eos for each in admits)
            with pytest.raises(SplitpointError, match="token ids must be in"):
                await server.send(Sample([SHAPE.vocabulary_size], 8), lambda count: None)
    with pytest.raises(Unavailable, match="cannot connect"):
        async with gateway(url) as server:
            await server.model()
