"""`splitpoint what-pays`, for built-in machines and for one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.main import app
from splitpoint_cli.planning.what_pays import tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lab" / "what-pays.md"


def rows(text: str) -> dict[str, list[str]]:
    """Cells of each model's row, in the first table that has one."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].lower() in BUILT_IN_SHAPES:
            found.setdefault(cells[0], cells[1:])
    return found


def test_grouped_queries_never_send_activations_and_multi_head_attention_does() -> None:
    cells = rows(PAGE.read_text())
    assert set(cells) == {shape.name for shape in BUILT_IN_SHAPES.values()}
    for shape in BUILT_IN_SHAPES.values():
        if not shape.activations_can_pay:
            assert not any(cell.startswith("X") for cell in cells[shape.name])
    native = cells["Llama-2-7B"][1:3]
    assert all(cell.startswith("X") for cell in native)


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    """On a slow link everything is rebuilt or recomputed; on a slow device all is loaded."""
    base = replace(BUILT_IN_PROFILES["a100-pcie4"], description="mine")
    slow_link, slow_device = tmp_path / "link.json", tmp_path / "device.json"
    slow_link.write_text(replace(base, link_bytes_per_second=1e8).to_json())
    slow_device.write_text(
        replace(base, rebuild_flops_per_second=1e11, prefill_flops_per_second=1e11).to_json()
    )
    arguments = ["what-pays", "--profile", str(slow_link), "--profile", str(slow_device)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    _, link, device = done.output.split("\n## ")
    assert "mine" in link
    for cells in rows(link).values():
        assert "load" not in cells
    for cells in rows(device).values():
        assert set(cells[1:]) <= {"load", "–"}


def test_an_unknown_machine_is_refused() -> None:
    done = CliRunner().invoke(app, ["what-pays", "--profile", "abacus"])
    assert done.exit_code != 0
    assert "abacus" in str(done.exception)


@pytest.mark.parametrize("name", BUILT_IN_PROFILES)
def test_a_page_has_a_section_for_each_machine(name: str) -> None:
    assert f"## {name}\n" in tables([(name, BUILT_IN_PROFILES[name])])
