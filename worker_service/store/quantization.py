"""Stored chunks as the tensors that the device computes with, and back: native, int8 or int4.

Rows of elements are encoded as in docs/arena-format.md, section Rows: pure torch on any device,
vectorised over all leading dimensions, rounded to nearest in groups along the last dimension,
symmetric for int8, asymmetric for int4, as is usual for keys and values (per token: KIVI, FlexGen).

One codec per layout knows the stored shapes, the bytes that cross the link, and both directions of
the encoding. Native chunks are stored as they are. The codec knows no slots and no lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from splitpoint.errors import FailedPrecondition
from splitpoint.shapes import ArenaLayout, DataType, Encoding
from worker_service.device.cache import TORCH_TYPES


class ChunkCodec:
    """The encoding of one arena's K, V and X.

    A stored tensor of n chunks is `[n, n_kv, chunk_tokens, r]` for "K" and "V" and
    `[n, chunk_tokens, r]` for "X": natively in elements of `data_type`, encoded in
    uint8. A native tensor of n chunks is the same with d or h for r.

    Attributes:
        stored_type: element type of stored tensors.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._encoding = layout.encoding
        self._native_type = TORCH_TYPES[layout.data_type]
        self.stored_type = self._native_type if self.is_native else torch.uint8

    @property
    def is_native(self) -> bool:
        """True if stored tensors are native tensors and can be copied as they are."""
        return self._encoding is Encoding.NATIVE

    def stored_shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of one chunk of "K", "V" or "X", in elements of `stored_type`."""
        layout = self._layout
        if tensor == "X":
            return layout.chunk_tokens, layout.x_row_bytes // self.stored_type.itemsize
        row = layout.kv_row_bytes // self.stored_type.itemsize
        return layout.kv_head_count, layout.chunk_tokens, row

    def link_bytes(self, tensor: str, chunk_count: int) -> int:
        """Return the bytes on the link for `chunk_count` chunks of a tensor in one layer."""
        layout = self._layout
        return chunk_count * (layout.x_slot_bytes if tensor == "X" else layout.kv_slot_bytes)

    def room(self, tensor: str, chunk_count: int, device: torch.device) -> torch.Tensor:
        """Return uninitialized memory for stored chunks that come over the link."""
        shape = (chunk_count, *self.stored_shape(tensor))
        return torch.empty(shape, dtype=self.stored_type, device=device)

    def native_zeros(self, tensor: str, chunk_count: int, device: torch.device) -> torch.Tensor:
        """Return zeroed pages, `[n, n_kv, chunk_tokens, d]` or `[n, chunk_tokens, h]`."""
        layout = self._layout
        rows = (layout.kv_head_count, layout.chunk_tokens, layout.head_dim)
        page = (layout.chunk_tokens, layout.hidden_size) if tensor == "X" else rows
        return torch.zeros((chunk_count, *page), dtype=self._native_type, device=device)

    def decode(self, stored: torch.Tensor, native: torch.Tensor) -> None:
        """Fill `native` from stored chunks on the same device."""
        if self.is_native:
            native.copy_(stored)
        else:
            decode(stored, self._encoding, native)

    def encode(self, native: torch.Tensor) -> torch.Tensor:
        """Return the stored form of native chunks, on the same device.

        Raises Unencodable for a value that the encoding cannot represent.
        """
        return native if self.is_native else encode(native, self._encoding)

    def round(self, native: torch.Tensor) -> None:
        """Replace native chunks by what their stored form decodes to. Raises Unencodable."""
        if not self.is_native:
            decode(self.encode(native), self._encoding, native)


INT8_LEVELS = 127
INT4_LEVELS = 15
# The largest finite float16: what a scale or minimum can be.
_FINITE = 65504.0


class Unencodable(FailedPrecondition):
    """A value is not finite, or larger than the encoding can represent."""


@dataclass(frozen=True, slots=True)
class _Group:
    """`count` groups of `size` elements: elements from `first` on, parameters from `index` on."""

    first: int
    size: int
    count: int
    index: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a view `[..., count, size]` of elements `[..., width]`."""
        part = rows[..., self.first : self.first + self.count * self.size]
        return part.view(*rows.shape[:-1], self.count, self.size)

    def packed(self, data: torch.Tensor) -> torch.Tensor:
        """Return a view `[..., count, ceil(size / 2)]` of int4 bytes `[..., ceil(width / 2)]`.

        Elements 0, 2, 4, ... are the low halves, 1, 3, 5, ... the high ones. A group begins at
        a whole byte, since the size of the groups before it is even.
        """
        size, first = (self.size + 1) // 2, self.first // 2
        part = data[..., first : first + self.count * size]
        return part.view(*data.shape[:-1], self.count, size)

    def scales(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return a view `[..., count]` of int8 parameters."""
        return parameters[..., self.index : self.index + self.count]

    def pairs(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return a view `[..., count, 2]` of int4 parameters: scale, minimum."""
        part = parameters[..., 2 * self.index : 2 * (self.index + self.count)]
        return part.view(*parameters.shape[:-1], self.count, 2)


def encode(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Encode rows `[..., width]` of any float type as uint8 `[..., row bytes]`, same device.

    The largest error is half a step: for int8 max|x| / 254 of the group, for int4
    (max - min) / 30. Rounding the parameters to float16 adds 2^-10 of the step (for int4 also
    2^-10 |min| / 30 if the minimum is far from 0). Decoding adds the rounding to the element
    type.

    Encoding decoded values again gives the same bytes in float32, unless a group's values lie
    closer together than float16 resolves at its minimum. In 16-bit types a value may move by
    one more step.

    Raises Unencodable for NaN and infinity, and for magnitudes above 65,504 (int4) or 8.3
    million (int8). This check waits for the device.
    """
    width = values.shape[-1]
    parameter_bytes = encoding.parameter_bytes(width)
    # The size of an encoded row does not depend on the element type.
    row_bytes = encoding.row_bytes(width, DataType.FLOAT32)
    encoded = values.new_zeros((*values.shape[:-1], row_bytes), dtype=torch.uint8)
    parameters = encoded[..., :parameter_bytes].view(torch.float16)
    data = encoded[..., parameter_bytes:]
    largest = _largest_decoded(values.dtype, encoding)
    for group in _groups(width, encoding):
        part = group.of(values).float()
        low, high = part.aminmax(dim=-1)
        _check_range(low, high, encoding)
        if encoding is Encoding.INT8:
            scale = _scale(torch.maximum(high, -low), INT8_LEVELS, largest)
            group.scales(parameters).copy_(scale)
            level = _steps(part, scale).clamp_(-INT8_LEVELS, INT8_LEVELS)
            group.of(data.view(torch.int8)).copy_(level)
        else:
            minimum = _at_most(low)
            scale = _scale(high - minimum.float(), INT4_LEVELS, largest - minimum.float())
            group.pairs(parameters).copy_(torch.stack((scale, minimum), dim=-1))
            level = _steps(part - minimum.float().unsqueeze(-1), scale).clamp_(0, INT4_LEVELS)
            nibbles, packed = level.to(torch.uint8), group.packed(data)
            packed.copy_(nibbles[..., 0::2])
            packed[..., : group.size // 2] |= nibbles[..., 1::2] << 4
    return encoded


def decode(encoded: torch.Tensor, encoding: Encoding, target: torch.Tensor) -> None:
    """Fill `target` `[..., width]`, of any float type, from uint8 `[..., row bytes]`.

    Both are on one device. Values are computed in float32 and rounded once. The inner stride of
    `encoded` is 1 and all other strides are even, as in an arena.
    """
    width = target.shape[-1]
    parameter_bytes = encoding.parameter_bytes(width)
    parameters = encoded[..., :parameter_bytes].view(torch.float16).float()
    data = encoded[..., parameter_bytes:]
    for group in _groups(width, encoding):
        into = group.of(target)
        if encoding is Encoding.INT8:
            level = group.of(data.view(torch.int8))
            torch.mul(level, group.scales(parameters).unsqueeze(-1), out=into)
        else:
            scale, minimum = group.pairs(parameters).unsqueeze(-2).unbind(-1)
            packed = group.packed(data)
            high = packed[..., : group.size // 2] >> 4
            torch.addcmul(minimum, packed & 15, scale, out=into[..., 0::2])
            torch.addcmul(minimum, high, scale, out=into[..., 1::2])


def _groups(width: int, encoding: Encoding) -> Iterator[_Group]:
    """Yield the full groups of a row, then the rest of it."""
    size = encoding.group_elements
    count, rest = divmod(width, size)
    if count:
        yield _Group(0, size, count, 0)
    if rest:
        yield _Group(count * size, rest, 1, count)


def _largest_decoded(dtype: torch.dtype, encoding: Encoding) -> torch.Tensor | float:
    """Return the bound that keeps every decoded value finite in its type."""
    if encoding is Encoding.INT4 or dtype is torch.float16:
        return _FINITE
    return INT8_LEVELS * _FINITE


def _check_range(low: torch.Tensor, high: torch.Tensor, encoding: Encoding) -> None:
    limit = _FINITE if encoding is Encoding.INT4 else INT8_LEVELS * _FINITE
    # Comparisons with NaN are false.
    if not bool(((low >= -limit) & (high <= limit)).all()):
        raise Unencodable(
            f"a value is not finite, or beyond the {limit:,.0f} that {encoding.value} can represent"
        )


def _scale(span: torch.Tensor, levels: int, room: torch.Tensor | float) -> torch.Tensor:
    """Return the float16 step that covers `span` in `levels` steps, but not more than `room`."""
    # A tensor: a GPU multiplies by the rounded inverse of a plain number, which gives other bytes.
    count = torch.full((1,), float(levels), device=span.device)
    most = _at_most(torch.as_tensor(room, device=span.device) / count)
    return torch.minimum(_at_least(span / count), most)


def _steps(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest whole number of steps. 0 where the step is 0."""
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    return (values * inverse.unsqueeze(-1)).round_()


def _at_least(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest float16 not below each finite value; never -0."""
    nearest = values.to(torch.float16)
    # Adjacent float16 values have adjacent bit patterns, in sign and magnitude.
    away = torch.where(nearest < 0, -1, 1).to(torch.int16)
    above = (nearest.view(torch.int16) + away).view(torch.float16)
    return torch.where(nearest.float() < values, above, nearest) + 0.0


def _at_most(values: torch.Tensor) -> torch.Tensor:
    """Return the largest float16 not above each finite value; never -0."""
    return 0.0 - _at_least(-values)
