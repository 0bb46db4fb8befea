"""Products in blocks of rows that agree depend on no other rows. Takes 2 seconds."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from splitpoint.checkpoint.decoder import Activation
from worker_service.kernels.choice import by_flags, use
from worker_service.kernels.compiled import CACHE_FOLDER
from worker_service.kernels.row_counts import blocks, row_counts, use_row_counts
from worker_service.model.linear import Linear
from worker_service.numerics.self_check import MOST_ROWS, Operator, difference
from worker_service.profiling.agreeing_rows import agreeing_counts, use_agreeing_rows
from worker_service.weights.packing import Matrix

# Many inputs in few sums: torch divides them otherwise at few rows.
SHAPE = (90, 2816)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("counts", [(1, 2, 4, 8, 512), (48, 64), (512,), (2, 4, 16, 64, 256)])
def test_blocks_have_all_rows_at_the_counts(counts: tuple[int, ...]) -> None:
    for count in [*range(1, 80), 300, 511, 512, 513, 1500]:
        cut = list(blocks(count, counts))
        assert sum(size for size, _ in cut) == count
        assert all(size <= padded and padded in counts for size, padded in cut)
        assert all(size == padded for size, padded in cut[:-1]), "only the last one is padded"
    assert list(blocks(0, counts)) == [(0, counts[0])]


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_at_these_counts_depend_on_no_other_rows(
    layout: str, dtype: torch.dtype, folder: Path
) -> None:
    """Also with what follows the product: bias, activation, a sum or a product with a tensor."""
    use(by_flags(dtype, []).parsed(f"linear={layout}"))
    use_agreeing_rows([SHAPE], dtype)
    assert row_counts(*SHAPE) is not None
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(SHAPE, generator=generator) / 50).to(dtype)
    linear = Linear(Matrix(weight), torch.randn(SHAPE[0], generator=generator).to(dtype))
    rows = torch.randn(MOST_ROWS, SHAPE[1], generator=generator).to(dtype)
    other = torch.randn(MOST_ROWS, SHAPE[0], generator=generator).to(dtype)
    calls = [Operator(str(each), (rows,), lambda r, a=each: linear(r, a)) for each in Activation]
    calls += [
        Operator("none", (rows,), linear),
        Operator("sum", (rows, other), linear.added_to),
        Operator("product", (rows, other), linear.times),
    ]
    with torch.inference_mode():
        assert [(each.name, difference(each)) for each in calls if difference(each)] == []
        exact = rows.double() @ weight.double().T + linear._bias.double()  # type: ignore[union-attr]
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(linear(rows).double(), exact, atol=tolerance, rtol=tolerance)
        for activation, reference in (
            (Activation.SILU, torch.nn.functional.silu(exact)),
            (Activation.GELU_TANH, torch.nn.functional.gelu(exact, approximate="tanh")),
        ):
            got = linear(rows, activation).double()
            torch.testing.assert_close(got, reference, atol=tolerance, rtol=tolerance)
        assert linear(rows[:0]).shape == (0, SHAPE[0])
        assert linear.added_to(rows[:0], other[:0]).shape == (0, SHAPE[0])


def test_counts_are_measured_once_and_a_damaged_file_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(by_flags(torch.float32, []).parsed("linear=plain"))
    use_agreeing_rows([SHAPE], torch.float32)
    counts = row_counts(*SHAPE)
    (file,) = folder.glob("rows-*.json")
    record = json.loads(file.read_text())
    assert record["counts"] == {"90x2816": list(counts or ())}
    # What is in the file counts, so that all workers of a host use the same.
    record["counts"]["90x2816"] = [64]
    file.write_text(json.dumps(record))
    use_agreeing_rows([SHAPE, (8, 16)], torch.float32)
    assert row_counts(*SHAPE) == (64,)
    assert set(json.loads(file.read_text())["counts"]) == {"90x2816", "8x16"}
    for damage in ("{", json.dumps({**record, "counts": {"90x2816": [3, 2]}}), "{}"):
        file.write_text(damage)
        use_agreeing_rows([SHAPE], torch.float32)
        assert row_counts(*SHAPE) == counts
    assert caplog.text.count("is damaged") == 3
    file.write_text(json.dumps({**record, "facts": {}}))
    use_agreeing_rows([SHAPE], torch.float32)
    assert row_counts(*SHAPE) == counts, "of another processor"


def test_counts_are_used_where_no_file_can_be_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    use(by_flags(torch.float32, []).parsed("linear=plain"))
    monkeypatch.setattr(Path, "rename", full)
    use_agreeing_rows([SHAPE], torch.float32)
    assert row_counts(*SHAPE) is not None
    assert "No space left" in caplog.text
    assert [each.name for each in folder.iterdir()] == ["calibrating.lock"]


def test_panels_need_no_counts(folder: Path) -> None:
    use_row_counts({SHAPE: (64,)})
    use(by_flags(torch.float32, []).parsed("linear=panels"))
    use_agreeing_rows([SHAPE], torch.float32)
    assert row_counts(*SHAPE) is None
    assert list(folder.iterdir()) == []


def test_agreeing_counts_are_usable_in_a_decode_step() -> None:
    use(by_flags(torch.float32, []).parsed("linear=packed"))
    with torch.inference_mode():
        counts = agreeing_counts(*SHAPE, torch.float32)
    assert counts == tuple(sorted(counts))
    assert counts[0] <= 64
