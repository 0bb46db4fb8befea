"""Experts in one call: what their matrices make of each row, and the same bits whatever else is
computed. About 10 s, with a compilation for each type and format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from gemm_checks import drawn
from torch.nn import functional

from splitpoint.host.processor import compiler
from worker_service.checkpoint.quantized import Codes
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.kernels.panel_gemm import Gating, Operation, PanelTable, experts
from worker_service.weights.packing import Matrix

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

COUNT, CHOSEN, ROWS = 7, 3, 150
FORMATS = ("same", "int8", "int4", "mxfp4")
# Of rows and of what gates make, inputs and a group: parts of vectors, whole and shorter groups.
HIDDEN, INNER, GROUP = 96, 160, 32
_SILU = Gating(Operation.SILU)
_CLAMPED = Gating(Operation.SILU, 1.702, 0.5, 1.0)
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def panels() -> None:
    use(Choice(Decode.FUSED, Prefill.FUSED, Layout.PANELS))


def codes(form: str, out_features: int, in_features: int, seed: int) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    groups = (out_features, in_features // GROUP)
    if form == "int8":
        numbers = torch.randint(-127, 128, (out_features, in_features), generator=generator)
        scales = torch.rand((out_features, 1), generator=generator) / in_features**0.5 / 60
        zeros = torch.zeros((out_features, 1), dtype=torch.int8)
        return Codes(numbers.to(torch.int8), scales, zeros, in_features)
    words = torch.randint(-(2**31), 2**31, (out_features, in_features // 8), generator=generator)
    if form == "mxfp4":
        scales = torch.randint(118, 125, groups, generator=generator).to(torch.uint8)
        return Codes(words.to(torch.int32), scales, None, GROUP)
    scales = torch.rand(groups, generator=generator) / in_features**0.5 / 5
    zeros = torch.randint(0, 17, groups, generator=generator).to(torch.int8)
    return Codes(words.to(torch.int32), scales, zeros, GROUP)


class Layer:
    """Random experts of one format, and what they compute in float64."""

    def __init__(
        self, form: str, dtype: torch.dtype, gating: Gating, *, has_gate: bool = True
    ) -> None:
        self.dtype, self.gating = dtype, gating
        self._matrices: list[list[Matrix]] = []
        self._exact: list[list[torch.Tensor]] = []
        self._biases: list[torch.Tensor] = []
        sizes = [(INNER, HIDDEN)] * (2 if has_gate else 1) + [(HIDDEN, INNER)]
        tables = []
        for kind, size in enumerate(sizes):
            made, exact = [], []
            for expert in range(COUNT):
                seed = 100 * kind + expert
                if form == "same":
                    weight = drawn(*size, dtype=dtype, seed=seed) / size[1] ** 0.5
                    made.append(Matrix(weight))
                    exact.append(weight.double())
                else:
                    given = codes(form, *size, seed)
                    made.append(Matrix.of(given, dtype))
                    exact.append(given.dequantized().double())
            bias = drawn(COUNT, size[0], dtype=dtype, seed=kind) / 4
            group = made[0].group
            tables.append(PanelTable.of([e.weight for e in made], size, group, dtype, bias))
            self._matrices.append(made)
            self._exact.append(exact)
            self._biases.append(bias.double())
        self._tables: Any = (None if not has_gate else tables[0], tables[-2], tables[-1])

    def computed(
        self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        return experts(rows, chosen, shares, self.gating, *self._tables)

    def exact(self, row: torch.Tensor, expert: int) -> torch.Tensor:
        """Return what an expert makes of a row, with what is between rounded to the rows' type."""
        kinds = zip(self._exact, self._biases, strict=True)
        *first, (down, bias) = ((weights[expert], biases[expert]) for weights, biases in kinds)
        made = [row.double() @ weight.T + own for weight, own in first]
        inner = _between(self.gating, *made)
        return inner.to(self.dtype).double() @ down.T + bias


def _between(gating: Gating, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    if gating == _CLAMPED and up is not None:
        gate = gate.clamp(max=gating.limit)
        up = up.clamp(-gating.limit, gating.limit) + gating.offset
        return gate * (gating.alpha * gate).sigmoid() * up
    activations: dict[Operation, Callable[[torch.Tensor], torch.Tensor]] = {
        Operation.SILU: functional.silu,
        Operation.RELU: torch.relu,
        Operation.GELU_TANH: lambda each: functional.gelu(each, approximate="tanh"),
    }
    made = activations[gating.operation](gate)
    return made if up is None else made * up


def asked(count: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and shares of rows; no row chooses the last expert."""
    generator = torch.Generator().manual_seed(4)
    chosen = torch.stack(
        [torch.randperm(COUNT - 1, generator=generator)[:CHOSEN] for _ in range(count)]
    )
    return chosen, torch.rand(count, CHOSEN, generator=generator)


def check(layer: Layer, counts: Sequence[int] = (1, 2, 3, 6, 7, 17, 64)) -> None:
    """Compare with float64; each row has the same bits in parts, and with other threads."""
    rows = drawn(ROWS, HIDDEN, dtype=layer.dtype, seed=9)
    chosen, shares = asked()
    every = layer.computed(rows, chosen, shares)
    wanted = torch.stack(
        [
            sum(share * layer.exact(row, int(expert)) for expert, share in zip(*own, strict=True))
            for row, *own in zip(rows, chosen, shares.double(), strict=True)
        ]
    )
    off = (every.double() - wanted).abs().amax()
    assert off <= 3 * _CLOSE[layer.dtype] * wanted.abs().amax()
    for count in counts:
        for first in (0, 5, ROWS - count):
            part = slice(first, first + count)
            assert torch.equal(layer.computed(rows[part], chosen[part], shares[part]), every[part])
    # Rows that are far apart in memory.
    spread = torch.cat((rows, rows), dim=1)[:, :HIDDEN]
    assert torch.equal(layer.computed(spread, chosen, shares), every)
    for threads in (1, 5):
        torch.set_num_threads(threads)
        assert torch.equal(layer.computed(rows, chosen, shares), every)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.chaos)],
    ids=str,
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gating", [_SILU, _CLAMPED], ids=["SILU", "clamped"])
def test_rows_are_what_their_experts_make_of_them(
    form: str, dtype: torch.dtype, gating: Gating
) -> None:
    check(Layer(form, dtype, gating))


@pytest.mark.parametrize("operation", [Operation.RELU, Operation.GELU_TANH])
def test_experts_without_a_gate(operation: Operation) -> None:
    check(Layer("same", torch.float32, Gating(operation), has_gate=False), counts=(1, 17))


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_at_a_time_is_what_many_rows_are(form: str) -> None:
    """One row takes several panels at once; many take codes that are unpacked before."""
    layer = Layer(form, torch.float32, _SILU)
    rows, chosen = drawn(ROWS, HIDDEN, dtype=torch.float32), torch.zeros(ROWS, 1, dtype=torch.int64)
    shares = torch.full((ROWS, 1), 0.5)
    every = layer.computed(rows, chosen, shares)
    for row in range(0, ROWS, 31):
        part = slice(row, row + 1)
        assert torch.equal(layer.computed(rows[part], chosen[part], shares[part]), every[part])


@pytest.mark.parametrize("form", FORMATS)
def test_one_row_of_an_expert_beside_many_of_another(form: str) -> None:
    """Those of many rows are divided among threads; a thread computes the one row."""
    layer = Layer(form, torch.float32, _SILU)
    rows, chosen = drawn(800, HIDDEN, dtype=torch.float32), torch.zeros(800, 1, dtype=torch.int64)
    chosen[-1] = 1
    shares = torch.ones(800, 1)
    torch.set_num_threads(1)
    alone = layer.computed(rows[-1:], chosen[-1:], shares[-1:])
    torch.set_num_threads(16)
    for _ in range(50):
        assert torch.equal(layer.computed(rows, chosen, shares)[-1:], alone)


def test_no_rows_and_no_experts() -> None:
    layer = Layer("same", torch.float32, _SILU)
    chosen, shares = asked(2)
    none = layer.computed(torch.empty(0, HIDDEN), chosen[:0], shares[:0])
    assert none.shape == (0, HIDDEN)
    rows = drawn(2, HIDDEN, dtype=torch.float32)
    for wrong in (COUNT, -1):
        chosen[1, 2] = wrong
        with pytest.raises(IndexError, match=f"there are {COUNT} experts"):
            layer.computed(rows, chosen, shares)
    with pytest.raises(ValueError, match="experts do not go with"):
        layer.computed(rows, chosen[:1], shares[:1])
    with pytest.raises(ValueError, match="do not fit rows"):
        layer.computed(rows[:, : HIDDEN // 2], chosen, shares)


def test_numbers_that_are_not_finite_stay_so() -> None:
    """A clamp of a NaN is one."""
    layer = Layer("same", torch.float32, _CLAMPED)
    rows = drawn(3, HIDDEN, dtype=torch.float32)
    rows[1, 5] = math.nan
    chosen, shares = asked(3)
    found = layer.computed(rows, chosen, shares)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_a_copy_has_panels_of_its_own() -> None:
    """A table holds what its addresses point to; that of a copy points to the copy."""
    layer = Layer("int4", torch.float32, _SILU)
    rows = drawn(ROWS, HIDDEN, dtype=torch.float32)
    chosen, shares = asked()
    wanted = layer.computed(rows, chosen, shares)
    made = deepcopy(layer)
    for table in layer._tables:
        for panels in table.panels:
            panels.zero_()
    assert torch.equal(made.computed(rows, chosen, shares), wanted)
    for matrices, table in zip(made._matrices, made._tables, strict=True):
        for each, panels, address in zip(matrices, table.panels, table.addresses, strict=True):
            assert each.weight is panels
            assert panels.data_ptr() == address


def test_panels_of_another_shape_are_refused() -> None:
    panels = [Matrix(torch.randn(INNER, HIDDEN)).weight for _ in range(2)]
    with pytest.raises(ValueError, match="not all of"):
        PanelTable.of(panels, (INNER, 2 * HIDDEN), 0, torch.float32, None)
    with pytest.raises(ValueError, match="not one of 2 experts"):
        PanelTable.of(panels, (INNER, HIDDEN), 0, torch.float32, torch.zeros(2, 5))
