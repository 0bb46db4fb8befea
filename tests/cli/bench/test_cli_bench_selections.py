"""`splitpoint bench offload --select`: what is counted, and a small run of the real thing.

Takes about 10 seconds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.residency.selecting import SelectedStep
from splitpoint.selection import Selection
from splitpoint_cli.bench.offload import offload
from splitpoint_cli.bench.offload_report import (
    ANEW,
    FULL_LOAD,
    RESIDENT,
    SELECTED,
    LengthResults,
    OffloadSample,
    OffloadWorkload,
    RowSums,
    Step,
    select_report_of,
    table_of,
)

FACTS = {
    "layers": 4,
    "query_heads": 4,
    "kv_heads": 2,
    "weights": "random",
    "heads_are_averaged": False,
}
WORKLOAD = OffloadWorkload(
    *("By hand", "float32", 1, 100, 8, 1000.0, 2, "cpu", 1, 0),
    select=Selection.parsed("columns:0.1"),
    lengths=(100,),
)


def run(seconds: float, size: int, rows: RowSums, overlap: float | None = None) -> OffloadSample:
    steps = (Step(seconds, link_bytes=size),) * 2
    return OffloadSample(steps, ((1, 2, 3),), rows=rows, expected_bytes=2 * size, overlap=overlap)


def test_the_report_compares_steps_and_says_what_differences_save() -> None:
    """Ten rows of eight bytes are chosen in a step, and six of them were there."""
    nothing = RowSums()
    selected = RowSums(chosen=20, fetched=8, read=24, visible=200, link_bytes=64)
    anew = RowSums(chosen=24, fetched=24, read=24, visible=200, link_bytes=192)
    length = LengthResults(
        100,
        {
            FULL_LOAD: (run(1.0, 800, nothing), run(2.0, 800, nothing)),
            SELECTED: (run(0.2, 132, selected), run(0.4, 132, selected)),
            ANEW: (run(0.3, 196, anew, 0.5), run(0.4, 196, anew, 0.7)),
            RESIDENT: (run(0.1, 0, nothing), run(0.1, 0, nothing)),
        },
        SelectedStep(1.1, 0.3),
    )
    report = select_report_of(WORKLOAD, (length,), FACTS)
    (found,) = report["results"]
    assert found["contenders"][SELECTED]["step_over_full_load"] == 0.2
    assert found["contenders"][SELECTED]["read_share"] == 0.12
    assert found["contenders"][SELECTED]["fetched_share"] == 0.04
    assert found["speed_up"] == 5
    assert found["link_bytes_are_those_chosen"]
    assert found["fetching_differences"] == {
        "overlap": 0.6,
        "saved_rows_share": 0.6,
        "predicted_row_bytes_per_step": 32,
        "row_bytes_per_step": 32,
        "predicted_saved_seconds_per_step": 0.064,
        "saved_seconds_per_step": 0.05,
    }
    assert json.loads(json.dumps(report)) == report
    assert table_of(report).row_count == 4
    # A GPU does not say which of the chosen rows crossed the link.
    runs = {
        name: tuple(replace(each, expected_bytes=None) for each in all_runs)
        for name, all_runs in length.runs.items()
    }
    (found,) = select_report_of(WORKLOAD, (replace(length, runs=runs),), FACTS)["results"]
    assert found["link_bytes_are_those_chosen"] is None


def test_a_small_run_counts_what_crosses_the_link(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    offload(
        shape="smollm2-135m",
        layers=3,
        kv_heads=3,
        batch=1,
        new=8,
        link_rate="20MB/s",
        threads=1,
        repeats=1,
        select="columns:0.1",
        length=[300, 450],
        output=output,
    )
    report = json.loads(output.read_text())
    assert report["weights"] == "random"
    assert [each["cached"] for each in report["results"]] == [300, 450]
    for length in report["results"]:
        assert length["link_bytes_are_those_chosen"]
        contenders = length["contenders"]
        # Two layers read everything, one a tenth, in whole pages.
        ratio = (
            contenders[SELECTED]["link_bytes_per_step"]
            / contenders[FULL_LOAD]["link_bytes_per_step"]
        )
        assert 2 / 3 <= ratio < 0.75
        assert contenders[RESIDENT]["link_bytes_per_step"] == 0
        assert contenders[SELECTED]["fetched_share"] <= contenders[ANEW]["fetched_share"]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 6") as raised:
        offload(select="columns:0.1", new=4)
    assert raised.value.field == "new"
    for text in ("columns:1", "columns:0.1,verify", "infinigen:0.1"):
        with pytest.raises(InvalidArgument, match="is not measured here"):
            offload(select=text)
    with pytest.raises(InvalidArgument, match="has its own layers"):
        offload(select="columns:0.1", layers=16)
    with pytest.raises(FailedPrecondition, match="nothing was selected: rows and screens take"):
        offload(
            shape="smollm2-135m",
            layers=3,
            batch=1,
            prompt=70,
            new=8,
            select="columns:0.5",
            link_rate="20MB/s",
            threads=1,
            repeats=1,
        )
