"""`splitpoint bench serve`: its times, prompts, figures, and runs on a scripted scheduler."""

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
from rich.console import Console
from typer.testing import CliRunner

from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint_cli.bench.serve import measures, splitpoint_backend
from splitpoint_cli.bench.serve.backends import (
    AnswerFacts,
    Counters,
    Sample,
    ServedModel,
    Waits,
)
from splitpoint_cli.bench.serve.load import Load, Record
from splitpoint_cli.bench.serve.picture import picture_of
from splitpoint_cli.bench.serve.prompts import RandomPrompts, trace_samples
from splitpoint_cli.bench.serve.report import details_of, results_of, table_of
from splitpoint_cli.bench.serve.requests import Requests, due_seconds
from splitpoint_cli.bench.serve.saving import file_name
from splitpoint_cli.bench.serve.workload import (
    Arrivals,
    Figures,
    RampUp,
    read_goals,
    read_percentiles,
)
from splitpoint_cli.main import app
from splitpoint_cli.traces.arrival import Arrival, Trace

MODEL = ServedModel("tiny", 256, 4096)
# Keys that `vllm bench serve` writes, too, with its default options and a goal.
VLLM_KEYS = {
    *("date", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{of}_{metric}_ms" for of in ("mean", "median", "std", "p99") for metric in ("ttft",)),
    *(f"{of}_{metric}_ms" for of in ("mean", "median", "std", "p99") for metric in ("tpot", "itl")),
}


def gaps(due: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *due], due, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    due = due_seconds(Arrivals(20.0, burstiness), 4000, random.Random(1))
    assert due == sorted(due)
    assert due[-1] == pytest.approx(4000 / 20)
    found = gaps(due)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    variation = statistics.pstdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)


def test_without_a_rate_all_requests_are_due_at_once() -> None:
    assert due_seconds(Arrivals(), 3, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("strategy", "middle"), [(RampUp.LINEAR, 20.5), (RampUp.EXPONENTIAL, 40**0.5)]
)
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy: RampUp, middle: float) -> None:
    arrivals = Arrivals(math.inf, 1e6, strategy, 1.0, 40.0)
    found = gaps(due_seconds(arrivals, 1001, random.Random(2)))
    rates = [1 / gap for gap in found]
    # Each rate is that in the middle of its step.
    assert rates[0] == pytest.approx(1.0, rel=0.02)
    assert rates[500] == pytest.approx(middle, rel=0.02)
    assert rates[-1] == pytest.approx(40.0, rel=0.02)


def test_a_linear_ramp_from_nothing_begins_soon() -> None:
    due = due_seconds(Arrivals(math.inf, 1e6, RampUp.LINEAR, 0.0, 5.0), 4, random.Random(2))
    # The rates are those in the middle of the four steps: 0.625, 1.875, 3.125 and 4.375.
    assert gaps(due) == pytest.approx([1.6, 1 / 1.875, 0.32, 1 / 4.375], rel=0.01)


@pytest.mark.parametrize("burstiness", [0.01, 0.05])
def test_the_largest_bursts_have_times(burstiness: float) -> None:
    due = due_seconds(Arrivals(20.0, burstiness), 3, random.Random(1))
    assert due == sorted(due)
    assert due[-1] == pytest.approx(3 / 20)


@pytest.mark.parametrize(
    "arrivals",
    [
        lambda: Arrivals(0.0),
        lambda: Arrivals(1.0, 0.0),
        lambda: Arrivals(1.0, 0.0001),
        lambda: Arrivals(1.0, 1.0, None, 1.0, 2.0),
        lambda: Arrivals(1.0, 1.0, RampUp.LINEAR, 1.0, 2.0),
        lambda: Arrivals(math.inf, 1.0, RampUp.LINEAR, 3.0, 2.0),
        lambda: Arrivals(math.inf, 1.0, RampUp.EXPONENTIAL, 0.0, 2.0),
        lambda: read_goals(["ttft"]),
        lambda: read_goals(["itl:5"]),
        lambda: read_percentiles("50,101"),
    ],
)
def test_what_makes_no_load_is_refused(arrivals: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        arrivals()


def test_goals_come_as_words_or_with_commas() -> None:
    assert read_goals(["ttft:500", "tpot:50,e2el:9000"]) == {
        "ttft": 500.0,
        "tpot": 50.0,
        "e2el": 9000.0,
    }


def test_random_prompts_share_their_prefix_and_depend_on_the_seed_alone() -> None:
    source = RandomPrompts(50, 10, prefix_length=7, range_ratio=0.5)
    requests = Requests(source, Arrivals(), 30, 2, seed=3)
    samples = requests.samples(MODEL)
    assert samples == requests.samples(MODEL)
    assert samples != Requests(source, Arrivals(), 30, 2, seed=4).samples(MODEL)
    assert {tuple(each.prompt[:7]) for each in samples} == {tuple(samples[0].prompt[:7])}
    assert len({tuple(each.prompt[7:27]) for each in samples}) == 30
    lengths = {len(each.prompt) - 7 for each in samples}
    assert lengths <= {*range(25, 76)}
    assert len(lengths) > 5
    assert {each.output_length for each in samples} <= {*range(5, 16)}
    assert all(0 <= token < MODEL.vocabulary_size for each in samples for token in each.prompt)
    warmups = requests.warmups(MODEL)
    assert [len(each.prompt) for each in warmups] == [len(each.prompt) for each in samples[:2]]
    assert all(each.prompt[:7] != samples[0].prompt[:7] for each in warmups)


def test_equal_blocks_of_a_trace_are_equal_tokens() -> None:
    trace = Trace(
        "t",
        (
            Arrival(0.0, 20, 5, (1, 2, 3), "a", 2),
            Arrival(1.5, 20, 6, (1, 2, 4), "b"),
            Arrival(2.0, 12, 7),
        ),
        block_tokens=8,
    )
    requests = Requests(trace, None, 3, 0, seed=0)
    first, second, third = requests.samples(MODEL)
    assert requests.due() == [0.0, 1.5, 2.0]
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert [len(each.prompt) for each in (first, second, third)] == [20, 20, 12]
    assert (first.tenant, first.priority, first.output_length) == ("a", 2, 5)
    with pytest.raises(InvalidArgument, match="request 1 has 20 prompt tokens"):
        trace_samples(trace, ServedModel("tiny", 256, 24), 0)


# -- the load --------------------------------------------------------------------------


class Stalled:
    """A backend that answers no request until `open` is set."""

    name = "stalled"

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.sent: list[Sample] = []
        self.running = self.most = 0

    async def served(self) -> ServedModel:
        return MODEL

    async def counters(self) -> Counters | None:
        return None

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> AnswerFacts:
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
        return AnswerFacts(len(sample.prompt), 3)


def test_a_stalled_server_delays_no_arrival() -> None:
    async def run() -> None:
        backend = Stalled()
        samples = [Sample([number], 3) for number in range(50)]
        due = [number / 5000 for number in range(50)]
        load = asyncio.create_task(Load(backend).run(samples, due))
        while len(backend.sent) < 50:
            await asyncio.sleep(0.001)
        assert backend.running == 50  # all were sent, none was answered
        backend.open.set()
        records = await load
        assert [record.due for record in records] == due
        assert all(record.due <= record.sent <= record.times[0] for record in records)
        assert [record.counts for record in records] == [[2, 1]] * 50

    asyncio.run(run())


def test_a_late_client_counts_its_own_delay() -> None:
    async def run() -> None:
        backend, now = Stalled(), iter([0.0, *(10.0 + n for n in range(99))])
        backend.open.set()
        [record] = await Load(backend, clock=lambda: next(now)).run([Sample([1], 3)], [0.5])
        assert record.due == 0.5
        assert record.sent > 10  # a process that was asleep, for example
        assert measures.ttft_ms(record) == 1e3 * (record.times[0] - 0.5)

    asyncio.run(run())


def test_places_bound_what_runs_at_a_time_and_a_request_is_due_when_it_has_one() -> None:
    async def run() -> None:
        backend = Stalled()
        samples = [Sample([number], 3) for number in range(20)]
        load = asyncio.create_task(Load(backend, 4).run(samples, [0.0] * 20))
        while len(backend.sent) < 4:
            await asyncio.sleep(0.001)
        backend.open.set()
        records = await load
        assert backend.most == 4
        assert [record.due == 0.0 for record in records] == [True] * 4 + [False] * 16

    asyncio.run(run())


def test_failures_are_counted_by_reason_and_nowhere_else() -> None:
    async def run() -> list[Record]:
        backend = Stalled()
        backend.open.set()
        samples = [Sample([1, 2], 3, "bad" if number % 3 == 0 else "") for number in range(9)]
        return await Load(backend).run(samples, [0.0] * 9)

    result = results_of(asyncio.run(run()), Figures(), None)
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["failures"] == {"QUEUE_FULL": 3}
    assert result["total_input_tokens"] == 12
    assert result["total_output_tokens"] == 18


# -- the figures -----------------------------------------------------------------------


def record(due: float, times: list[float], counts: list[int], **more: Any) -> Record:
    return Record(Sample([1] * 4, 9), due, due, times, counts, times[-1] + 0.5, **more)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = record(1.0, [1.25, 1.5, 2.0], [1, 3, 1])
    assert measures.ttft_ms(one) == 250
    assert measures.tpot_ms(one) == 750 / 4
    assert measures.itls_ms(one) == [250, 500]
    assert measures.e2el_ms(one) == 1500
    assert measures.is_good(one, {"ttft": 250, "tpot": 188, "e2el": 1500})
    assert not measures.is_good(one, {"ttft": 249})


def test_distributions_are_numpys() -> None:
    rng = random.Random(5)
    values = [rng.expovariate(0.01) for _ in range(137)]
    found = measures.distribution("x", values, (0, 50, 90, 99.9, 100))
    assert found["mean_x_ms"] == pytest.approx(np.mean(values))
    assert found["std_x_ms"] == pytest.approx(np.std(values))
    assert found["median_x_ms"] == pytest.approx(np.median(values))
    for percent in (0, 50, 90, 99.9, 100):
        assert found[f"p{percent}_x_ms"] == pytest.approx(np.percentile(values, percent))
    assert set(measures.distribution("x", [], (99,)).values()) == {0.0}


def some_records() -> list[Record]:
    facts = AnswerFacts(4, 5, cached_tokens=2, plan="resident load", queue_seconds=0.125)
    return [
        record(0.0, [0.5, 1.0], [1, 4], facts=facts),
        record(0.25, [1.75, 2.0], [1, 4], facts=facts),
        Record(Sample([1], 1), 0.5, 0.5, ended=0.75, error="NO_WORKER", message="none"),
    ]


def test_rates_and_our_own_figures() -> None:
    figures = Figures(("ttft",), (50,), {"ttft": 600.0})
    before = Counters(5, 40, 1, Waits(1, 0.5), Waits(2, 1.0), {"set": 3})
    work = Counters(15, 120, 3, Waits(5, 2.5), Waits(2, 1.0), {"set": 4, "turn": 2}) - before
    result = results_of(some_records(), figures, work)
    assert result["duration"] == 2.5
    assert result["request_throughput"] == 2 / 2.5
    assert result["output_throughput"] == 10 / 2.5
    assert result["total_token_throughput"] == 18 / 2.5
    assert result["request_goodput"] == 1 / 2.5
    assert result["max_output_tokens_per_s"] == 5.0
    assert result["max_concurrent_requests"] == 3
    assert result["mean_ttft_ms"] == 1000.0
    assert result["cached_tokens"] == 4
    assert result["plans"] == {"resident load": 2}
    assert result["failures"] == {"NO_WORKER": 1}
    assert result["mean_queue_ms"] == 125.0
    assert (result["scheduled_tokens_per_step"], result["failovers"]) == (8.0, 2)
    assert result["decisions"] == {"set": 1, "turn": 2}
    assert (result["link_bound_requests"], result["mean_link_bound_wait_ms"]) == (4, 500.0)
    assert (result["device_bound_requests"], result["mean_device_bound_wait_ms"]) == (0, None)
    assert "mean_itl_ms" not in result


def test_the_table_and_the_picture_show_a_run() -> None:
    pytest.importorskip("matplotlib")
    records = some_records()
    report = {
        "model_id": "tiny",
        "backend": "splitpoint",
        "num_prompts": 3,
        "request_rate": "inf",
        "max_concurrency": None,
        "burstiness": 1.0,
        "label": None,
        "date": "d",
        **results_of(records, Figures(goals={"ttft": 600.0}), Counters(10, 80, 1)),
    }
    console = Console(record=True, width=100)
    console.print(table_of(report))
    shown = console.export_text()
    assert "time to first token" in shown
    for line in (
        "2 completed, 1 failed",
        "8.0 tokens computed in each of 10",
        "1 move",
        "NO_WORKER",
    ):
        assert line in shown
    assert len(picture_of(report, records).axes) == 4
    assert file_name(report) == "splitpoint-infqps-tiny-d.json"
    assert details_of(records)["errors"] == ["", "", "none"]


# -- the command -----------------------------------------------------------------------


@pytest.fixture
def script(socket_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(splitpoint_backend, "_TELEMETRY_SECONDS", 0.0)
    with fake_scheduler(socket_address) as script:
        yield script


def serve(script: Script, *words: str) -> Any:
    lengths = ("--random-input-len", "5", "--random-output-len", "3")
    return CliRunner().invoke(
        app, ["bench", "serve", "--address", script.address, *lengths, *words]
    )


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (("--backend", "openai", "--address", "127.0.0.1:1"), "--base-url"),
        (("--base-url", "http://127.0.0.1:1"), "--address"),
    ],
)
def test_a_server_of_the_other_backend_is_refused(words: tuple[str, ...], own: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", *words])
    assert isinstance(done.exception, InvalidArgument)
    assert f"give {own}" in done.exception.message


def test_the_address_of_the_environment_is_no_choice_of_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITPOINT_ADDRESS", "127.0.0.1:1")
    url = "http://127.0.0.1:9"
    done = CliRunner().invoke(
        app, ["bench", "serve", "--backend", "openai", "--base-url", url, "--num-prompts", "1"]
    )
    assert isinstance(done.exception, Unavailable), done.exception


def test_the_command_reports_under_the_keys_of_vllm(script: Script, tmp_path: Path) -> None:
    done = serve(
        script,
        *("--num-prompts", "6", "--num-warmups", "1", "--request-rate", "500", "--seed", "1"),
        *("--goodput", "ttft:60000", "tpot:60000", "--metadata", "gpu=none", "--json"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path)),
        *("--result-filename", "r.json", "--ignore-eos", "--temperature", "0.5"),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report.keys() >= VLLM_KEYS
    assert (report["completed"], report["failed"], report["gpu"]) == (6, 0, "none")
    assert report["total_output_tokens"] == 30  # this scheduler repeats its prompt
    assert report["request_goodput"] == report["request_throughput"]
    assert report["cached_tokens"] == 12
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["input_lens"] == [5] * 6
    assert len(saved["itls"]) == 6
    assert {key: value for key, value in saved.items() if key in report} == report
    assert len(script.requests) == 7
    sampling = script.requests[-1].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, True, 0.5)


def test_a_trace_is_replayed_and_results_are_appended(script: Script, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "seconds,input_length,output_length,priority\n0,3,2,0\n0.02,4,2,2\n0.03,5,2,0\n"
    )
    words = ("--dataset-name", "trace", "--dataset-path", str(trace), "--append-result")
    for _ in range(2):
        done = serve(script, *words, "--result-dir", str(tmp_path), "--result-filename", "all")
        assert done.exit_code == 0, done.output
    assert "the times of a trace" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "all").read_text().splitlines()]
    assert [(each["num_prompts"], each["request_rate"]) for each in lines] == [(3, "trace")] * 2
    assert [len(request.token_ids.ids) for request in script.requests[:3]] == [3, 4, 5]
    assert [request.priority for request in script.requests[:3]] == [0, 2, 0]


def test_a_load_that_only_fails_ends_with_1(script: Script) -> None:
    script.failures = [ResourceExhausted("full", reason="QUEUE_FULL") for _ in range(2)]
    done = serve(script, "--num-prompts", "2", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["failures"] == {"QUEUE_FULL": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--request-rate", "fast"), "neither a number nor inf"),
        (("--dataset-name", "trace"), "needs --dataset-path"),
        (("--dataset-path", "x"), "is for a trace"),
        (("ttft:5",), "belongs behind --goodput"),
        (("--save-result", "--result-dir", "/nowhere"), "is no folder"),
        (("--result-filename", "x.json"), "need --save-result"),
        (("--save-detailed",), "need --save-result"),
        (("--request-rate", "0"), "--request-rate must be above 0"),
        (("--burstiness", "2"), "--burstiness needs --request-rate or a ramp"),
        (("--metadata", "x"), "is not KEY=VALUE"),
        (("--tenant-token-file", "x"), "is not TENANT=PATH"),
        (("--random-input-len", "90"), "a context of 64"),
        (("--random-prefix-len", "1000000000000"), "a context of 64"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(
    script: Script, words: tuple[str, ...], message: str
) -> None:
    done = serve(script, *words)
    assert isinstance(done.exception, InvalidArgument)
    assert message in str(done.exception)
    assert not script.requests
