"""Which selections a worker can serve, by the artefacts that it finds. About 2 s."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from selecting import maple_artifacts

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import DataType
from worker_service.retrieval.selector import ScreenSource
from worker_service.selection.artifacts import Artifacts, artifacts_path, encoded

CPU = torch.device("cpu")
MODEL = resolve_model(None)
CONFIG = read_decoder(MODEL, DataType.FLOAT32)
SHAPE = CONFIG.shape
RANK = 6


def made(method: SelectionMethod) -> Artifacts:
    """Return artefacts with the shapes of a calibration's."""
    if method is SelectionMethod.MAPLE:
        return maple_artifacts(SHAPE, RANK)
    skew = torch.zeros(SHAPE.kv_head_count, SHAPE.head_dim, SHAPE.head_dim)
    tensors = {f"layers.{index}.skew": skew.clone() for index in range(SHAPE.layer_count)}
    return Artifacts(method, tensors, {})


def write(method: SelectionMethod, model: Path, artifacts: Path | None) -> None:
    path = artifacts_path(method, model, artifacts)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encoded(made(method), model))


def test_a_worker_serves_what_needs_no_artefacts_and_what_it_has_them_for(tmp_path: Path) -> None:
    bare = ScreenSource.open(CONFIG, MODEL, tmp_path, CPU)
    assert set(bare.columns) == {"columns", "window"}
    assert bare.size_bytes == 0
    with pytest.raises(FailedPrecondition) as caught:
        bare.screens(Selection.parsed("infinigen:0.1"))
    assert caught.value.reason == "NO_ARTIFACTS"
    for method in (SelectionMethod.INFINIGEN, SelectionMethod.MAPLE):
        write(method, MODEL, tmp_path)
    able = ScreenSource.open(CONFIG, MODEL, tmp_path, CPU)
    trained = {SelectionMethod.INFINIGEN: 0, SelectionMethod.MAPLE: RANK}
    assert able.columns == bare.columns | trained
    each = (made(SelectionMethod.INFINIGEN), made(SelectionMethod.MAPLE))
    assert able.size_bytes == sum(made.nbytes for one in each for made in one.tensors.values())
    selection = Selection.parsed(f"maple:0.1,columns={RANK}")
    assert able.screens(selection).selection == selection
    # Without a number it would keep 0.3 of a head's columns: pages are counted for these.
    for other in ("maple:0.1,columns=8", "maple:0.1"):
        with pytest.raises(InvalidArgument, match="trained for 6"):
            able.screens(Selection.parsed(other))


def test_foreign_artefacts_are_refused_by_name_and_left_out_beside_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    tensors = next(other.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.chmod(0o644)
    tensors.write_bytes(content)
    (other / "screens").mkdir()
    path = artifacts_path(SelectionMethod.INFINIGEN, other, None)
    path.write_bytes(encoded(made(SelectionMethod.INFINIGEN), MODEL))
    with pytest.raises(FailedPrecondition, match="another model"):
        ScreenSource.open(CONFIG, other, path.parent, CPU)
    with caplog.at_level(logging.WARNING):
        beside = ScreenSource.open(CONFIG, other, None, CPU)
    assert SelectionMethod.INFINIGEN not in beside.columns
    assert "no selection by infinigen" in caplog.text
    path.write_bytes(b"damaged")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        ScreenSource.open(CONFIG, other, path.parent, CPU)
