"""A row's attention has the same bits however it comes to be computed on a CPU.

As a decoded row, as the rows of a step with guesses, in a prefill of any pieces, and from tiles
of a streamed step. A few seconds, and some for each kernel that is compiled the first time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_sequence import Sequence, Shape

from splitpoint.host.processor import compiler
from worker_service.kernels.choice import by_flags, use
from worker_service.model.attention import decode_partial
from worker_service.model.attention_plan import DecodePlan, PrefillPlan

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

CPU = torch.device("cpu")
FUSED = by_flags(torch.float32, set()).parsed("decode=fused,prefill=fused")


@pytest.fixture(autouse=True)
def fused() -> None:
    use(FUSED)


SHAPES = [
    Shape(),
    Shape(heads=6, kv_heads=2, window=21),
    Shape(heads=5, kv_heads=1, head_dim=128, cap=3.0),
    Shape(heads=3, kv_heads=1, head_dim=20, chunk=8, window=50, cap=2.0),
    Shape(heads=2, kv_heads=1, head_dim=256, chunk=33),
    Shape(heads=4, kv_heads=2, chunk=300, window=140),
    Shape(heads=2, kv_heads=1, head_dim=80),
]
# Each type and width is a kernel of its own, compiled for seconds; `make chaos` has them all.
COMPILED = {
    torch.float32: (64, 20, 256),
    torch.bfloat16: (64, 20, 128),
    torch.float16: (64,),
}
each_kernel = pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(
            dtype,
            shape,
            id=f"{str(dtype).removeprefix('torch.')}-{number}",
            marks=[] if shape.head_dim in widths else pytest.mark.chaos,
        )
        for dtype, widths in COMPILED.items()
        for number, shape in enumerate(SHAPES)
    ],
)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Both have the same numbers, and NaN at the same places."""
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@each_kernel
def test_a_prefill_is_attention_and_has_the_bits_of_decoded_rows(
    dtype: torch.dtype, shape: Shape
) -> None:
    sequence = Sequence(205, dtype, shape)
    whole = sequence.prefilled(range(205))
    near = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(whole.double(), sequence.expected(), rtol=near, atol=near)
    assert torch.equal(whole, sequence.decoded(range(205)))
    for row in (0, 15, 16, 204):
        assert torch.equal(whole[row : row + 1], sequence.decoded(range(row, row + 1)))


@each_kernel
def test_pieces_of_any_size_and_places_give_the_bits_of_the_whole(
    dtype: torch.dtype, shape: Shape
) -> None:
    sequence = Sequence(205, dtype, shape)
    whole = sequence.prefilled(range(205))
    generator = np.random.default_rng(3)
    for _ in range(3):
        cuts = np.sort(generator.choice(np.arange(1, 205), size=4, replace=False)).tolist()
        for first, last in zip([0, *cuts], [*cuts, 205], strict=True):
            assert torch.equal(sequence.prefilled(range(first, last)), whole[first:last])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(sequence.prefilled(range(205)), whole)


@each_kernel
def test_poison_in_rows_that_are_not_seen_changes_nothing(dtype: torch.dtype, shape: Shape) -> None:
    whole = Sequence(205, dtype, shape, poison=0.0).prefilled(range(205))
    for poison in (6e4, -6e4, torch.nan):
        assert torch.equal(Sequence(205, dtype, shape, poison=poison).prefilled(range(205)), whole)
    # Rows of the sequence itself that come later: those of a page that it wrote before.
    sequence = Sequence(205, dtype, shape)
    before = sequence.prefilled(range(100))
    for plane in (sequence.keys, sequence.values):
        for position in range(100, 205):
            page, row = divmod(position, shape.chunk)
            plane[sequence.pages[page], :, row] = 6e4
    assert torch.equal(before, whole[:100])
    assert torch.equal(sequence.prefilled(range(100)), whole[:100])


@each_kernel
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_reaches_those_who_see_it(
    dtype: torch.dtype, shape: Shape, value: float
) -> None:
    """No earlier row, and none behind its window: they are computed beside those that do."""
    whole = Sequence(205, dtype, shape).prefilled(range(205))
    sequence, place = Sequence(205, dtype, shape), 100
    page, row = divmod(place, shape.chunk)
    sequence.values[sequence.pages[page], :, row] = value
    sequence.rows[1][place] = value
    found = sequence.prefilled(range(205))
    end = 205 if shape.window is None else min(205, place + shape.window)
    assert not found[place:end].isfinite().any()
    for some in (slice(0, place), slice(end, 205)):
        assert torch.equal(found[some], whole[some])
    decoded = sequence.decoded(range(205))
    assert_same(found, decoded)


@each_kernel
def test_rows_behind_those_of_infinite_scores_weigh_nothing(
    dtype: torch.dtype, shape: Shape
) -> None:
    """A query that sees only scores of -infinity has NaN, also beside rows that it does not see."""
    sequence = Sequence(37, dtype, shape)
    sequence.keys[:, :, :, 0] = -torch.inf
    sequence.rows[0][:, :, 0] = -torch.inf
    whole = sequence.prefilled(range(37))
    # A cap makes scores finite.
    assert whole.isnan().any() == (shape.cap is None)
    pieces = torch.cat([sequence.prefilled(range(first, first + 1)) for first in range(37)])
    for found in (pieces, sequence.decoded(range(37))):
        assert_same(found, whole)


@each_kernel
def test_streamed_tiles_give_the_bits_of_pages_on_the_device(
    dtype: torch.dtype, shape: Shape
) -> None:
    sequence = Sequence(205, dtype, shape)
    rows = range(max(0, (len(sequence.pages) - 1) * shape.chunk), 205)
    whole = sequence.prefilled(range(205))[rows.start :]
    for found in sequence.streamed(rows):
        assert torch.equal(found, whole)


def test_sinks_take_the_same_weight_of_a_row_however_it_is_computed() -> None:
    sequence = Sequence(205, torch.float32, Shape(heads=6, kv_heads=2, window=41, has_sinks=True))
    whole = sequence.prefilled(range(205))
    torch.testing.assert_close(whole.double(), sequence.expected(), rtol=3e-6, atol=3e-6)
    assert torch.equal(whole, sequence.decoded(range(205)))
    for found in sequence.streamed(range(192, 205)):
        assert torch.equal(found, whole[192:])


def test_other_sequences_in_a_step_change_no_bit() -> None:
    shape = Shape(heads=6, kv_heads=2)
    alone = Sequence(205, torch.bfloat16, shape)
    wanted = alone.decoded(range(204, 205))
    plan = DecodePlan.of_sequences(
        [alone.pages[:3], alone.pages, alone.pages[:9]],
        [33, 205, 140],
        chunk_tokens=16,
        windows=[None],
        device=CPU,
    )
    queries = alone.queries[[32, 204, 139]]
    part = decode_partial(
        queries,
        alone.keys,
        alone.values,
        plan,
        window=None,
        **alone.options,  # type: ignore[arg-type]
    )
    assert torch.equal(part.attended(torch.bfloat16)[1:2], wanted)


def test_a_prompt_needs_the_pages_of_its_own_tokens() -> None:
    """Without them its queries would have no keys, and NaN for a result."""
    with pytest.raises(ValueError, match="1 pages where queries read 2"):
        PrefillPlan.of_prefix([0], 16, 5, chunk_tokens=16, windows=[None], device=CPU)
