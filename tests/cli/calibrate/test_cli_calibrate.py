"""`splitpoint calibrate`: artefacts of tiny models, the report, and inputs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny
from typer.testing import CliRunner, Result

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.selection import Selection, SelectionMethod
from splitpoint_cli.bench.calibration import HELD_OUT, calibration_passages
from splitpoint_cli.calibrate import table_of
from splitpoint_cli.main import app
from splitpoint_cli.output import print_table
from worker_service.selection.screen_factory import Screens

SMALL = ("--tokens", "256", "--length", "64", "--epochs", "1", "--columns", "4")


@pytest.fixture
def folder(tmp_path: Path, bundled_model: Path) -> Path:
    """A tiny model that has the bundled one's tokenizer, and so its vocabulary."""
    made = write_tiny("qwen2", tmp_path / "model", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model / name, made / name)
    return made


def calibrated(*words: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *words, *SMALL, "--device", "cpu"])


def opened(folder: Path, method: str, artifacts: Path | None = None) -> Screens:
    return Screens.open(
        read_decoder(folder),
        Selection.parsed(f"{method}:0.1"),
        folder,
        artifacts=artifacts,
        device=torch.device("cpu"),
    )


def test_artefacts_lie_beside_the_model(folder: Path) -> None:
    result = calibrated(str(folder), "--screen", "maple", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["path"] == str(folder / "screens" / "maple.safetensors")
    assert (report["tokens"], report["rank"]) == (256, 4)
    assert len(report["layers"]) == 3
    for layer in report["layers"]:
        assert min(layer["losses"]) < layer["losses"][0]
    assert report["peak_memory_bytes"] > 1 << 20
    assert opened(folder, "maple").layer(2) is not None
    # The model's own files are as they were: safetensors in a folder of their own are not its.
    assert opened(folder, "maple").selection.method is SelectionMethod.MAPLE


def test_text_and_folder_can_be_named(folder: Path, tmp_path: Path) -> None:
    text, artifacts = tmp_path / "text.txt", tmp_path / "made" / "here"
    text.write_text("a tale of two cities, told again and again\n" * 200)
    result = calibrated(
        *(str(folder), "--screen", "infinigen", "--text", str(text)),
        *("--artifacts", str(artifacts), "--output", str(tmp_path / "report.json")),
    )
    assert result.exit_code == 0, result.output
    assert "guessed top tenth" in result.stdout
    assert opened(folder, "infinigen", artifacts).layer(2) is not None
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(layer["losses"] == [] for layer in report["layers"])
    print_table(table_of(report))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--screen", "columns"), "'columns' needs no calibration"),
        (("--screen", "best"), "'best' is no screen"),
        (("--screen", "maple", "--length", "4097"), "longer than the context"),
    ],
)
def test_wrong_input_is_refused_before_any_work(
    bundled_model: Path, words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(app, ["calibrate", str(bundled_model), *words])
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_a_folder_that_cannot_be_made_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = calibrated(str(folder), "--screen", "maple", "--artifacts", str(file / "below"))
    assert "--artifacts" in str(result.exception)


def test_the_librarys_text_is_not_what_quality_is_measured_on(bundled_model: Path) -> None:
    one = calibration_passages(bundled_model, None, 2048, 512, seed=0)
    assert one == calibration_passages(bundled_model, None, 2048, 512, seed=0)
    assert [len(passage) for passage in one] == [512] * 4
    assert {"asyncio", "unittest"} <= HELD_OUT
