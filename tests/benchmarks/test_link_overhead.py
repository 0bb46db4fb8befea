"""`benchmarks.link_overhead`: its arithmetic by hand, and a real sweep of a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import link_overhead
from benchmarks.link_overhead import (
    BY_LAYERS,
    PLANNED,
    SERIAL,
    WAYS,
    crossing,
    link_rate_for,
    measured_alpha,
)
from splitpoint.costs.bottleneck import Bottleneck
from splitpoint.shapes import BUILT_IN_SHAPES


def test_alpha_is_that_of_eq_4() -> None:
    """Loading takes 3 s, prefilling 2 s."""
    limits = Bottleneck(2.0, 3.0, 1.0, 1.0)
    for alpha in (0.0, 0.25, 1.0):
        overlapped = limits.ttft(1, 1, overlap=alpha)
        assert measured_alpha(5.0, overlapped, 3.0, 2.0) == pytest.approx(alpha)


def test_alpha_of_requests_beside_each_other() -> None:
    """The link works for 9 s without a pause, and the last of three prefills follows: 11 s."""
    assert measured_alpha(5.0, 11 / 3, 3.0, 2.0, requests=3) == pytest.approx(1.0)
    # Prefills are the limit: the first load, then three of them.
    assert measured_alpha(5.0, 11 / 3, 2.0, 3.0, requests=3) == pytest.approx(1.0)
    assert measured_alpha(5.0, 5.0, 3.0, 2.0, requests=3) == 0.0


def test_kappa_crit_is_where_the_measured_overhead_is_1() -> None:
    limits = Bottleneck(6.0, 2.0, 4.0, 3.5)
    points = [(kappa, limits.link_overhead(kappa, 1)) for kappa in (0.5, 2.0, 8.0, 32.0)]
    assert crossing(points) == pytest.approx(limits.kappa_crit)
    assert crossing([(1.0, -0.5), (2.0, 1.5)]) == pytest.approx(1.75), "noise below 0"
    assert crossing([(1.0, 0.2), (2.0, 0.9)]) is None
    assert crossing([(1.0, 1.2), (2.0, 2.0)]) is None


def test_the_link_is_as_fast_as_the_critical_ratio_asks() -> None:
    shape = BUILT_IN_SHAPES["opt-125m"]
    rate = link_rate_for(3.26, shape, 168e9)
    limits = Bottleneck(shape.prefill_flops_per_token, shape.kv_bytes_per_token, rate, 168e9)
    assert limits.kappa_crit == pytest.approx(3.26)


def test_a_sweep_measures_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    arguments = ["--layers", "2", "--cached", "64,512", "--new", "32", "--kappa-crit", "1"]
    assert link_overhead.main([*arguments, "--rounds", "2", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(output.read_text())
    [link] = result["links"]
    # The profile measures the emulated link, and the device a second time.
    assert link["link_bytes_per_second"] == pytest.approx(link["link_rate"], rel=0.2)
    assert [cell["kappa_ratio"] for cell in link["cells"]] == [2, 16]
    for cell in link["cells"]:
        assert set(cell["ways"]) == set(WAYS)
        _check_cell(cell, link)
    few, many = (cell["ways"][SERIAL]["link_overhead"] for cell in link["cells"])
    assert many > few
    # At sixteen times kappa_crit the planner leaves much of the prefix to the idle device.
    planned = link["cells"][1]["ways"][PLANNED]
    assert planned["method"] != "load"
    assert planned["link_seconds"] < 0.9 * link["cells"][1]["ways"][SERIAL]["link_seconds"]
    assert planned["utilisation"] > link["cells"][1]["ways"][SERIAL]["utilisation"]
    assert "| 32 | 512 | 16 |" in shown
    again = ["--measured", str(output), "--png", str(picture)]
    assert link_overhead.main(again) == 0
    assert capsys.readouterr().out == shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def _check_cell(cell: dict[str, Any], link: dict[str, Any]) -> None:
    """Compare what was measured with what must hold on any machine, however busy."""
    least = cell["cached_tokens"] * link["kv_bytes_per_token"] / link["link_rate"]
    for way in (SERIAL, BY_LAYERS):
        assert cell["ways"][way]["link_seconds"] >= 0.99 * least, way
    serial = cell["ways"][SERIAL]
    assert min(serial["runs"]) > least, "nothing overlaps"
    assert serial["ttft_seconds"] > 0.9 * (serial["link_seconds"] + serial["device_seconds"])
    for way, found in cell["ways"].items():
        assert found["link_overhead_least"] <= found["link_overhead"], way
        assert found["link_overhead"] <= found["link_overhead_most"], way
        assert found["utilisation"] == pytest.approx(1 / (1 + found["link_overhead"])), way
        assert 0 < found["device_share"] <= 1.01, way


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cached", "100"], "whole chunks of 64 tokens"),
        (["--new", "0"], "1 to 512 tokens"),
        (["--new", "513"], "1 to 512 tokens"),
    ],
)
def test_wrong_lengths_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        link_overhead.main(arguments)
    assert text in capsys.readouterr().err
