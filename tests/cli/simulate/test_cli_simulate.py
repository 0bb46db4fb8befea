"""`splitpoint simulate`: one report for people or as JSON, and errors before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import PROFILE
from typer.testing import CliRunner

from splitpoint_cli.main import app

SMALL = (
    *("simulate", "--model", "llama-168m", "--devices", "l40s=2", "--num-prompts", "30"),
    *("--trace-input", "0.03", "--trace-output", "0.1"),
)


def ran(*words: str) -> str:
    done = CliRunner().invoke(app, [*SMALL, *words])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout


def error_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*SMALL, *words])
    assert done.exit_code != 0
    return str(done.exception)


def test_the_keys_are_those_of_bench_serve() -> None:
    report = json.loads(ran("--json", "--goodput", "ttft:500", "tpot:50"))
    (run,) = report["runs"]
    assert run["policy"] == "fifo"
    assert run["completed"] == 30
    assert run["goals_ms"] == {"ttft": 500.0, "tpot": 50.0}
    for key in (
        *("duration", "request_throughput", "request_goodput", "output_throughput"),
        *("mean_ttft_ms", "median_tpot_ms", "p99_e2el_ms", "scheduled_tokens_per_step"),
        *("link_use", "memory_use", "fairness", "joules"),
    ):
        assert run[key] >= 0
    assert report["devices"] == {"l40s": 2}


def test_tenants_that_wait_for_nothing_are_served_fairly(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["seconds,input_length,output_length,tenant", "0,500,50,a", "1,900,90,", "2,700,70,b"]
    trace.write_text("\n".join(lines))
    (run,) = json.loads(ran("--json", "--trace", str(trace)))["runs"]
    assert run["fairness"] == pytest.approx(1.0)


def test_policies_stand_side_by_side() -> None:
    report = json.loads(ran("--json", "--compare", "--trace-tenants", "2"))
    assert [run["policy"] for run in report["runs"]] == ["fifo", "fair", "utilisation"]
    assert report["runs"][0]["tenants"].keys() == {"tenant-0", "tenant-1"}
    table = ran("--compare")
    assert "utilisation" in table.splitlines()[1]
    assert "first token, ms: p99" in table


def test_the_number_of_devices_is_found() -> None:
    report = json.loads(ran("--json", "--find", "gpus", "--goodput", "ttft:60000"))
    assert report["find"]["device_count"] == 1
    assert report["devices"] == {"l40s": 1}
    done = CliRunner().invoke(app, [*SMALL, "--find", "gpus", "--goodput", "ttft:0.01"])
    assert "no number suffices" in done.stdout
    assert done.exit_code == 1


def test_a_measured_worker_brings_its_cache_and_chunks(tmp_path: Path) -> None:
    status = {
        "workers": [
            {
                "id": "w",
                "profile": json.loads(PROFILE.to_json()),
                "cache_capacity_bytes": 50_000_000,
            }
        ],
        "models": [{"chunk_tokens": 16}],
        "stores": [{"slot_count": 100}],
    }
    path = tmp_path / "status.json"
    path.write_text(json.dumps(status))
    told = json.loads(ran("--json", "--profile", str(path), "--devices", "1"))
    assert told["devices"] == {"measured": 1}
    assert told["cache_bytes"] == {"measured": 50_000_000}
    assert told["store_bytes_per_cell"] == 100 * 16 * 12288
    # Its memory holds few long requests. What the worker chose is in a newer status.
    assert told["max_batch_size"] == {"measured": 32}
    status["workers"][0]["max_batch_size"] = 96
    path.write_text(json.dumps(status))
    told = json.loads(ran("--json", "--profile", str(path), "--devices", "1"))
    assert told["max_batch_size"] == {"measured": 96}
    told = json.loads(ran("--json", "--profile", str(path), "--devices", "1", "--max-batch", "7"))
    assert told["max_batch_size"] == {"measured": 7}
    path.write_text(PROFILE.to_json())
    assert "give --device-memory" in error_of("--profile", str(path), "--devices", "1")
    assert "is a number" in error_of("--profile", str(path), "--device-memory", "2GiB")


@pytest.mark.parametrize("more", [(), ("--find", "gpus", "--goodput", "ttft:500")])
def test_a_trace_of_which_no_request_is_left_is_refused(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "late.csv"
    path.write_text("seconds,input_length,output_length\n5,100,10\n")
    message = error_of("--trace", str(path), "--seconds", "1", *more)
    assert "arrives after 5 s: none is left of the first 1 s" in message


def test_prompts_beyond_any_context_are_refused_and_cost_nothing() -> None:
    """Chunks of 10^11 tokens would be named for ever."""
    (run,) = json.loads(ran("--json", "--trace-input", "1e6"))["runs"]
    assert run["failed"] == 30
    assert run["completed"] == 0
    done = CliRunner().invoke(app, [*SMALL, "--trace-input", "1e9"])
    assert done.exit_code == 2
    assert "1e+06" in done.output or "1000000" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--find", "gpus"), "--find needs --goodput"),
        (("tpot:50",), "belongs behind --goodput"),
        (("--find", "gpus", "--compare", "--goodput", "ttft:5"), "takes one --policy"),
        (("--goodput", "ttft"), "is no goal"),
        (("--devices", "P4=2"), "is not one of a100-40"),
        (("--trace", "nothing"), "is neither a file nor one of"),
        (("--residency", "streamed"), "are not simulated"),
        (("--tenant-weight", "a"), "is not TENANT=WEIGHT"),
        (("--tenant-weight", "a=2"), "no request is of the tenant 'a'"),
    ],
)
def test_wrong_input_is_refused(words: tuple[str, ...], message: str) -> None:
    assert message in error_of(*words)
