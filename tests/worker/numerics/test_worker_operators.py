"""The comparison of rows finds what depends on other rows, and names it. Takes 2 seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from splitpoint.host.processor import compiler
from worker_service.kernels.choice import by_flags, use
from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.numerics.self_check import (
    COUNTS,
    MOST_ROWS,
    Operator,
    attention_operators,
    dependence,
    difference,
    model_operators,
    sampling_operator,
)

CPU = torch.device("cpu")
ROWS = torch.randn(MOST_ROWS, 8, generator=torch.Generator().manual_seed(1))
LAST_BIT = torch.finfo(torch.float32).eps


def of_count(wrong: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an operator that computes another last bit in a call of this many rows."""

    def call(rows: torch.Tensor) -> torch.Tensor:
        doubled = 2 * rows
        if len(rows) == wrong:
            doubled[-1, 3] = torch.nextafter(doubled[-1, 3], torch.tensor(torch.inf))
        return doubled

    return call


def test_rows_by_themselves_are_invariant() -> None:
    assert difference(Operator("doubled", (ROWS,), lambda rows: 2 * rows)) is None
    two = Operator("two", (ROWS, ROWS), lambda a, b: (a + b, a.to(torch.bfloat16)))
    assert difference(two) is None
    few = Operator("few", (ROWS[:4],), lambda rows: rows.exp())
    assert difference(few) is None


@pytest.mark.parametrize("count", [*COUNTS, MOST_ROWS])
def test_one_bit_of_one_row_is_found_at_every_count(count: int) -> None:
    found = difference(Operator("doubled", (ROWS,), of_count(count)))
    assert found is not None
    assert "in a call of" in found


def test_a_result_by_the_place_in_the_call_is_found() -> None:
    def by_place(rows: torch.Tensor) -> torch.Tensor:
        result = rows.clone()
        result[1::2] *= 1 + LAST_BIT
        return result

    assert difference(Operator("by place", (ROWS,), by_place)) is not None


def test_a_result_by_the_neighbour_is_found() -> None:
    """Every call begins with its smallest row, so only the opposite order shows it."""
    rows = torch.arange(1.0, 18.0).unsqueeze(1)
    growing = Operator("growing", (rows,), lambda rows: rows * (1 + (rows.diff(dim=0) < 0).any()))
    found = difference(growing)
    assert found is not None
    assert "reversed" in found


def test_a_nan_equals_itself_and_zero_is_not_minus_zero() -> None:
    assert difference(Operator("nan", (ROWS,), lambda rows: rows * torch.nan)) is None

    def signed(rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows) * (-1.0 if len(rows) == 8 else 1.0)

    assert difference(Operator("signed", (ROWS,), signed)) is not None


@pytest.mark.parametrize("case", ["opt", "llama", "gemma2"])
def test_the_first_layer_operator_that_is_not_invariant_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of a model are seen: each of them, once spoiled, is the one that is named."""
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    names = [operator.name for operator in model_operators(model)]
    for part in ("the embedding", "norm", "key_value", "query", "output", "up", "down", "head"):
        assert any(part in name for name in names), part
    assert ("gate" in " ".join(names)) == (case != "opt")
    original = DecoderLayer.add_mlp

    def spoiled(layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        result = original(layer, hidden)
        return result * (1 + LAST_BIT) if len(hidden) == 17 else result

    monkeypatch.setattr(DecoderLayer, "add_mlp", spoiled)
    found = [difference(operator) for operator in model_operators(model)]
    named = {name for name, each in zip(names, found, strict=True) if each is not None}
    assert {name for name in named if "MLP" in name and "norm" not in name} != set()


def test_sampling_is_by_row() -> None:
    assert difference(sampling_operator(1031, CPU)) is None


def test_the_check_names_a_product_that_depends_on_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder.load(write_tiny("llama", tmp_path), CPU, torch.float32)
    query = model.layers[0].query
    monkeypatch.setattr(
        type(query),
        "__call__",
        lambda self, rows, activation=None: rows.new_full((len(rows), 64), float(len(rows))),
    )
    found = dependence(model, 16)
    assert found is not None
    assert found.startswith("layer 0: the product key_value [128, 64] computes row ")


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("kernels", "parts"),
    [
        ("decode=fused,prefill=sdpa", ["in pieces of a prompt and one by one"]),
        ("decode=products,prefill=sdpa", ["decoding", "in pieces of a prompt and one by one"]),
    ],
)
def test_attention_by_kernels_of_several_orders_is_found(
    kernels: str, parts: list[str], tmp_path: Path
) -> None:
    """torch sums the rows of a page, and of a prompt, in orders of their own."""
    use(by_flags(torch.float32, []).parsed(kernels))
    model = Decoder.load(write_tiny("llama", tmp_path), CPU, torch.float32)
    operators = list(attention_operators(model, 16))
    found = [each.name for each in operators if difference(each) is not None]
    assert [name.rstrip(",") for name in found] == [f"layer 0: attention, {each}" for each in parts]


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen2-windows"])
def test_a_model_with_kernels_of_one_order_is_invariant(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Heads of 16, too: their scores are no chain that a compiler could keep apart."""
    use(by_flags(dtype, []).parsed("decode=fused,prefill=fused,linear=panels"))
    assert dependence(Decoder.load(write_tiny(case, tmp_path), CPU, dtype), 16) is None
