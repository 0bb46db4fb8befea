"""int8 and int4 rows: error bounds, special values and widths, documented bytes."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitpoint.shapes import DataType, Encoding
from worker_service.store.quantization import INT4_LEVELS, INT8_LEVELS, Unencodable, decode, encode

LOSSY = (Encoding.INT8, Encoding.INT4)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place of the type, relative.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}
SMALLEST = 2.0**-24  # the least float16 above 0

widths = st.sampled_from([1, 2, 3, 7, 63, 64, 65, 80, 127, 128, 129, 200, 256])


def through(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    decoded = torch.full_like(values, float("nan"))
    decode(encode(values, encoding), encoding, decoded)
    return decoded


def groups(row: torch.Tensor, encoding: Encoding) -> list[torch.Tensor]:
    return list(torch.split(row, encoding.group_elements))


def allowed_error(group: torch.Tensor, encoding: Encoding, dtype: torch.dtype) -> float:
    """Return half a step plus the rounding of its parameters, as `encode` documents."""
    low, high = group.min().item(), group.max().item()
    largest = max(abs(low), abs(high))
    if encoding is Encoding.INT8:
        step = largest / INT8_LEVELS
    else:
        step = (high - low + 2.0**-10 * abs(low) + SMALLEST) / INT4_LEVELS
    step = step * (1 + 2.0**-10) + SMALLEST
    # A minimum below the smallest float16, or a result in a 16-bit type's own subnormals.
    return 0.5 * step * 1.001 + 2 * ROUNDING[dtype] * (largest + step) + SMALLEST


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Return a row whose groups differ in size and offset by orders of magnitude."""
    width = draw(widths)
    dtype = draw(st.sampled_from(TYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.floats(-9, 4))
    offset = draw(st.sampled_from([0.0, 1.0, -1.0, 100.0, -1e-3]))
    row = (torch.randn(width, generator=generator) + offset) * scale
    for index in draw(st.lists(st.integers(0, width - 1), max_size=3)):
        row[index] *= draw(st.sampled_from([0.0, -50.0, 1e3]))
    clamped: torch.Tensor = row.clamp(-60_000, 60_000).to(dtype)
    return clamped


@pytest.mark.parametrize("encoding", LOSSY)
@settings(max_examples=150)
@given(rows())
def test_every_value_comes_back_within_half_a_step(encoding: Encoding, row: torch.Tensor) -> None:
    decoded = through(row, encoding)
    assert decoded.isfinite().all()
    for before, after in zip(groups(row, encoding), groups(decoded, encoding), strict=True):
        error = (before.double() - after.double()).abs().max().item()
        assert error <= allowed_error(before.double(), encoding, row.dtype)


@pytest.mark.parametrize("encoding", LOSSY)
@settings(max_examples=80)
@given(rows())
def test_a_second_pass_moves_nothing_further_than_the_first(
    encoding: Encoding, row: torch.Tensor
) -> None:
    """A restored tail is encoded again each time it grows."""
    first = through(row, encoding)
    second = through(first, encoding)
    for before, after in zip(groups(first, encoding), groups(second, encoding), strict=True):
        error = (before.double() - after.double()).abs().max().item()
        assert error <= allowed_error(before.double(), encoding, row.dtype)


@pytest.mark.parametrize("encoding", LOSSY)
def test_decoded_values_are_encoded_to_the_same_bytes(encoding: Encoding) -> None:
    """It holds in float32, and for int8 in bfloat16, which keeps the largest value."""
    generator = torch.Generator().manual_seed(0)
    values = 3 * torch.randn((16, 4, 8, 128), generator=generator) + 1
    exact = {Encoding.INT8: (torch.float32, torch.bfloat16), Encoding.INT4: (torch.float32,)}
    for dtype in exact[encoding]:
        encoded = encode(values.to(dtype), encoding)
        decoded = torch.empty_like(values, dtype=dtype)
        decode(encoded, encoding, decoded)
        assert torch.equal(encode(decoded, encoding), encoded)


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -2.5, 1e-5, -1e-5, 60_000.0, -60_000.0, 65_024.0]
)
def test_constant_groups(encoding: Encoding, dtype: torch.dtype, value: float) -> None:
    values = torch.full((3, 130), value).to(dtype)
    decoded = through(values, encoding)
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, values, rtol=2.0**-8, atol=2 * SMALLEST)
    if value == 0:
        assert not decoded.any()
        assert not encode(values, encoding).any(), "a row of zeros is a row of zero bytes"


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("dtype", TYPES)
def test_values_too_small_for_any_step_become_zero_or_their_minimum(
    encoding: Encoding, dtype: torch.dtype
) -> None:
    values = torch.linspace(-1e-9, 1e-9, 64).to(dtype)
    decoded = through(values, encoding)
    assert (decoded.float().abs() <= 1.01 * SMALLEST).all()


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_whole_range_of_float16_stays_finite_in_float16(encoding: Encoding) -> None:
    largest = torch.finfo(torch.float16).max
    for low, high in ((-largest, largest), (0.0, largest), (-largest, 0.0), (largest / 2, largest)):
        values = torch.linspace(low, high, 64).to(torch.float16)
        decoded = through(values, encoding)
        assert decoded.isfinite().all()
        error = (decoded.double() - values.double()).abs().max().item()
        assert error <= allowed_error(values.double(), encoding, torch.float16)


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e7, -1e7, 3e38])
def test_what_the_parameters_cannot_say_is_refused(encoding: Encoding, value: float) -> None:
    values = torch.zeros((2, 3, 70))
    values[1, 2, 69] = value
    with pytest.raises(Unencodable):
        encode(values, encoding)


def test_int8_reaches_further_than_float16() -> None:
    values = torch.tensor([[-8e6, 8e6, 70_000.0, 0.0]])
    decoded = through(values, Encoding.INT8)
    assert (decoded - values).abs().max() <= 8e6 / 254 * 1.01
    with pytest.raises(Unencodable):
        encode(values, Encoding.INT4)


def test_the_bytes_of_the_document() -> None:
    """Scale 0.5 for int8; scale 1 and minimum -3 for int4."""
    row = torch.tensor([63.5, -63.5, 0.5, -1.0, 0.2])
    assert encode(row, Encoding.INT8).tolist() == [
        *struct.pack("<e5bx", 0.5, 127, -127, 1, -2, 0),
    ]
    row = torch.tensor([-3.0, 12.0, 0.0, 1.4, -1.6])
    assert encode(row, Encoding.INT4).tolist() == [
        *struct.pack("<ee", 1.0, -3.0),
        *(0 | 15 << 4, 3 | 4 << 4, 1),
        0,
    ]
    assert through(row, Encoding.INT4).tolist() == [-3.0, 12.0, 0.0, 1.0, -2.0]


@pytest.mark.parametrize("encoding", LOSSY)
def test_groups_do_not_touch_each_other(encoding: Encoding) -> None:
    """A group of large values does not change the error of another group."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(3 * encoding.group_elements + 5, generator=generator)
    louder = row.clone()
    louder[: encoding.group_elements] *= 1e4
    assert torch.equal(
        through(row, encoding)[encoding.group_elements :],
        through(louder, encoding)[encoding.group_elements :],
    )


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=25)
@given(width=widths)
def test_rows_are_encoded_one_by_one_into_their_size(
    encoding: Encoding, dtype: torch.dtype, width: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    values = torch.randn((2, 3, 5, width), generator=generator).to(dtype)
    encoded = encode(values, encoding)
    assert encoded.shape == (2, 3, 5, encoding.row_bytes(width, DataType.FLOAT16))
    for index in ((0, 0, 0), (1, 2, 4)):
        assert torch.equal(encoded[index], encode(values[index], encoding))
    # Into a view of a larger tensor, as pages of the cache are.
    pages = torch.zeros((2, 3, 9, width), dtype=dtype)
    decode(encoded, encoding, pages[:, :, 2:7])
    assert torch.equal(pages[:, :, 2:7], through(values, encoding))
    assert not pages[:, :, :2].any()
    assert not pages[:, :, 7:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_gpu_makes_the_same_bytes_and_reads_them_alike(
    encoding: Encoding, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn((4, 8, 64, 200), generator=generator) + 1).to(dtype)
    encoded = encode(values, encoding)
    assert torch.equal(encode(values.cuda(), encoding).cpu(), encoded)
    decoded = torch.empty_like(values, device="cuda")
    decode(encoded.cuda(), encoding, decoded)
    wanted = through(values, encoding)
    # A fused multiply and add may round another way.
    torch.testing.assert_close(decoded.cpu(), wanted, rtol=2 * ROUNDING[dtype], atol=1e-6)
