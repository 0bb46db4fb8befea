"""`benchmarks.store`: what it reads and counts, and a small run of the real thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.store import SlotRun, main, measure_redis, redis_server, runs_of
from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.harness import Progress

SMALL = ("--memory", "12MiB", "--run-slots", "4", "--calls", "256", "--in-flight", "8")
BATCHED = ("--batch", "16", "--chunks", "192", "--repeats", "5")


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


def test_a_small_run_ends_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    assert main([*SMALL, *BATCHED, "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == report
    assert report["mapping"]["payload_bytes"] % (4 * 512 << 10) == 0
    assert report["mapping"]["ratio"] > 0
    counts = {kind: each["count"] for kind, each in report["calls"]["by_kind"].items()}
    assert counts == dict.fromkeys(("Reserve", "Seal", "Match", "Release"), 64)
    assert report["batches"]["chunks_per_second"] > 0
    assert set(report["streams"]) == {"Redis SET", "Redis GET"}
    assert report["streams"]["Redis GET"]["ratio_to_memcpy"] > 0


def test_redis_leaves_nothing_in_the_server() -> None:
    with redis_server(None) as client:
        client.set("of another client", "x")
        rates = measure_redis(client, b"v" * 1_000, repeats=2, progress=Progress())
        assert set(rates) == {"Redis SET", "Redis GET"}
        assert min(rates.values()) > 0
        assert client.keys() == [b"of another client"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--memory", "1MiB"), "runs of 16 slots need"), (("--batch", "9999"), "at most 1024")],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        main(words)
