"""`splitpoint bench restore`: its arithmetic, and a small run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_files import read_trace
from typer.testing import CliRunner

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape
from splitpoint_cli.bench.restore_report import (
    ACTIVATIONS,
    BOTH_ENDS,
    COLUMN,
    LOAD,
    NO_LINK,
    PIPELINED,
    SERIAL,
    TOKENS,
    RestoreResults,
    RestoreWorkload,
    Result,
    SweepPoint,
    Timing,
    picture_of,
    ratios_of,
    report_of,
    table_of,
)
from splitpoint_cli.bench.restore_runs import Restorer
from splitpoint_cli.bench.stored_prefixes import Stored, stored_prefixes
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment
from worker_service.kernels.choice import in_use
from worker_service.model.decoder import Decoder

# One layer more than the first, whose X is never sent; the last chunk is partial.
SMALL = ("--shape", "opt-125m", "--layers", "2", "--prompt", "200", "--threads", "1")
WORKLOAD = RestoreWorkload("opt-125m", "float32", 200, 2, "cpu", 1, 5, 0, layers=2)


def result(name: str, *seconds: float, link: float = 0.0, device: float = 0.0) -> Result:
    timings = [Timing(each, link, device, 100) for each in seconds]
    return Result(name, timings, 1e-7, 64, 64, predicted_seconds=1.0)


def found(*results: Result, sweep: tuple[SweepPoint, ...] = ()) -> RestoreResults:
    profile = Profile(1e9, 0, 1e9, 0, 1e9)
    return RestoreResults(profile, profile, "mapped", results, sweep, ("nothing",), 1e-5)


ALL = (
    result(LOAD, 4.0, 2.0, 3.0),
    result(TOKENS, 6.0),
    result(BOTH_ENDS, 1.5),
    result(COLUMN, 2.0),
    result(SERIAL, 3.3, 3.1, 3.2, link=1.5, device=1.2),
    result(PIPELINED, 1.8, 1.6, 1.4, link=1.28, device=1.0),
)
# As wide as results of a real model are.
WIDE = tuple(
    Result(
        name, [Timing(0.123, 0.1, 0.1, 100), Timing(0.0987, 0.1, 0.1, 100)], 1e-7, 31_744, 64, 0.12
    )
    for name in (LOAD, TOKENS, BOTH_ENDS, ACTIVATIONS, COLUMN, SERIAL, PIPELINED)
)
SWEEP = (
    SweepPoint("column", 0, 3.0, 3.0),
    SweepPoint("column", 64, 2.0, 2.1),
    SweepPoint("pipelined", 0, 3.3, 3.0),
    SweepPoint("pipelined", 64, 1.0, 1.1),
    SweepPoint("pipelined", 128, 9.0, 1.1),
)


def test_ratios_by_hand() -> None:
    assert ratios_of(found(*ALL, sweep=SWEEP)) == {
        "pipelined_to_load": 0.533,
        "pipelined_to_bound": 1.25,
        "pipelined_to_serial_busy": 1.067,
        "sequential_to_pipelined": 1.25,
        "both_ends_to_load": 0.5,
        "both_ends_to_tokens": 0.25,
    }
    assert ratios_of(found(result(LOAD, 1.0))) == {}


def test_the_report_is_json_a_table_and_a_picture() -> None:
    report = report_of(WORKLOAD, found(*ALL, sweep=SWEEP))
    assert json.loads(json.dumps(report)) == report
    assert report["contenders"][LOAD]["seconds"] == 3.0
    assert report["contenders"][SERIAL]["link_busy_seconds"] == 1.5
    assert report["largest_difference"] == 1e-7
    table = table_of(report)
    assert table.row_count == len(ALL)
    assert "skipped: nothing" in str(table.caption)
    assert next(iter(table.columns[3].cells)) == "2 s-4 s"
    assert NO_LINK in str(table.caption)
    linked = report_of(WORKLOAD, replace(found(*ALL), link_rate=2e9))
    assert NO_LINK not in str(table_of(linked).caption)
    curves, bars = picture_of(report).axes
    labels = [text.get_text() for text in curves.get_legend().get_texts()]  # type: ignore[union-attr]
    assert [label for label in labels if "measured" in label][:2] == [
        "sequential (KVPR), measured",
        "pipelined, measured",
    ]
    assert [text.get_text() for text in bars.get_yticklabels()] == [each.name for each in ALL]


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape = WORKLOAD.model_shape
    return Decoder.random(
        DecoderConfig.of_shape(shape), WORKLOAD.seed, torch.device("cpu"), torch.float32
    )


def test_every_way_brings_back_what_was_stored_and_others_are_found_out(model: Decoder) -> None:
    with stored_prefixes(WORKLOAD, model, torch.device("cpu")) as stored:
        restorer = Restorer(stored, WORKLOAD)
        ways = [
            *(
                lambda split=split, schedule=schedule: restorer.split(split, schedule, 64)
                for split in (0, 64, 130, 200)
                for schedule in (Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED)
            ),
            lambda: restorer.split(128, Schedule.PIPELINED, 64, serial=True),
            lambda: restorer.both_ends(64),
            restorer.prefill,
        ]
        for number, way in enumerate(ways):
            stored.pages.poison()
            with pytest.raises(Internal, match="differ"):
                stored.check("nothing was restored")
            spans = way()
            assert stored.check(str(number)) <= 1e-5
            assert {span.lane for span in spans} <= {Lane.LINK_IN, Lane.COMPUTE}
        _one_wrong_element(stored)
        restorer.close()


def _one_wrong_element(stored: Stored) -> None:
    stored.pages.values[1][-1, 3, 200 % 64 - 1, 5] += 0.1
    with pytest.raises(Internal, match="differ"):
        stored.check("a wrong element of the last sequence's last token")


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", "restore", "--json", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_small_run_measures_everything(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.png", "trace.json")]
    report = run(
        *SMALL,
        *("--link-rate", "2GB", "--sweep", "--tile", "64"),
        *("--output", str(files[0]), "--png", str(files[1]), "--trace", str(files[2])),
    )
    assert json.loads(files[0].read_text()) == report
    assert list(report["contenders"]) == [
        *(LOAD, TOKENS, BOTH_ENDS),
        *(ACTIVATIONS, COLUMN, SERIAL, PIPELINED),
    ]
    assert all(len(each["runs"]) == 5 for each in report["contenders"].values())
    assert report["verified"]
    assert report["kernels"] == str(in_use())
    assert report["largest_difference"] <= report["tolerance"]
    # Four chunks of K and V in two layers; all of X but the first layer's.
    chunk = 64 * 768 * 4
    assert report["contenders"][LOAD]["link_bytes"] == 4 * 2 * 2 * chunk
    assert report["contenders"][ACTIVATIONS]["link_bytes"] == 4 * chunk
    assert report["contenders"][PIPELINED]["tile_tokens"] == 64
    for schedule in ("column", "pipelined"):
        splits = [each["split"] for each in report["sweep"] if each["schedule"] == schedule]
        assert splits == [0, 64, 128, 200]
    assert report["ratios"]["pipelined_to_bound"] >= 1
    assert report["skipped"] == []
    assert files[1].read_bytes().startswith(b"\x89PNG")
    recorded = read_trace(files[2])
    assert recorded.spans
    assert recorded.facts["link"] == "emulated at 2 GB/s"


def test_grouped_queries_have_no_splits_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grouped = ModelShape("tiny", "llama", 2, 64, 4, 1, 16, 96, 128, 256)
    monkeypatch.setitem(BUILT_IN_SHAPES, "tiny", grouped)
    report = run("--shape", "tiny", "--prompt", "130", "--batch", "2", "--threads", "1")
    assert list(report["contenders"]) == [LOAD, TOKENS, BOTH_ENDS]
    assert report["skipped"] == [
        "splits: rho is 2, so activations are not stored and cannot pay",
    ]
    assert set(report["ratios"]) == {"both_ends_to_load", "both_ends_to_tokens"}
    assert picture_of(report).axes


def test_a_balanced_link_is_measured_and_named() -> None:
    """A link that loads everything in the time that recomputing it takes."""
    arguments = ("--shape", "smollm2-135m", "--layers", "2", "--balance", "--prompt", "130")
    report = run(*arguments, "--threads", "1")
    load, tokens = report["contenders"][LOAD], report["contenders"][TOKENS]
    # An emulated link never takes less than its rate allows.
    assert load["link_busy_seconds"] > 0.99 * load["link_bytes"] / report["link_rate"]
    # With grouped queries no activations are stored.
    assert report["skipped"]
    assert tokens["link_bytes"] == 0 < load["link_bytes"]
    assert report["contenders"][BOTH_ENDS]["predicted_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--shape", "opt-1"), "shape"),
        (("--dtype", "int4"), "dtype"),
        (("--prompt", "2049"), "prompt"),
        (("--tile", "65"), "tile"),
        (("--layers", "13"), "layers"),
        (("--link-rate", "0"), "link_rate"),
        (("--link-rate", "20"), "link_rate"),
        (("--link-rate", "100MB", "--balance"), "balance"),
        (("--png", "no/such/folder.png"), "png"),
        (("--png", "out.svg"), "png"),
        (("--output", "no/such/folder.json"), "output"),
        (("--trace", "no/such/folder.json"), "trace"),
        (("--trace", "/"), "trace"),
        (("--device", "cuda:99", "--layers", "1"), "device"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(*arguments)
    assert caught.value.field == field


def test_what_there_is_instead_is_listed() -> None:
    with pytest.raises(InvalidArgument, match="there are opt-125m, "):
        run("--shape", "nope")
    with pytest.raises(InvalidArgument, match=r"there are .*bfloat16"):
        run("--dtype", "nope")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('hidden by a test', name='matplotlib')\n"
    )
    environment = child_environment({})
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    picture = tmp_path / "out.png"
    done = subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "bench", "restore", *SMALL, "--png", picture],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
        check=False,
    )
    assert done.returncode == 2
    assert "needs matplotlib, which is not installed" in done.stderr
    assert "splitpoint[plots]" in done.stderr
    assert not picture.exists()
