"""Validates the headers of safetensors files against the file's size, without reading weights.

It detects incomplete downloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.files import is_there, parse_object
from splitpoint.errors import InvalidArgument

# Limits of the format.
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 8
_MOST_BYTES = 1 << 50
# Element types that the worker loads.
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The header and size of one file."""

    header: bytes
    tensor_count: int
    file_bytes: int


def read_header(path: Path, *, floats_only: bool = True) -> TensorFile:
    """Read and validate the header. Raises InvalidArgument.

    `floats_only`: refuse tensors of other types, as in quantized checkpoints.
    """
    if not is_there(path):
        raise _bad(path, "it is missing")
    try:
        header, size = _header_and_size(path)
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error.strerror}") from error
    try:
        entries = parse_object(path, header)
    except InvalidArgument as error:
        raise InvalidArgument(f"the header of {error.message}", field="model") from None
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in entries.items():
        try:
            kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            count = prod(_sizes(shape))
        except (KeyError, TypeError, ValueError):
            raise _bad(path, f"its header says nothing usable of {name}") from None
        if not isinstance(kind, str):
            raise _bad(path, f"its header says nothing usable of {name}")
        if floats_only and kind not in _FLOAT_BYTES:
            raise _bad(path, f"{name} is stored as {kind}: quantized checkpoints are not supported")
        if not (type(first) is type(last) is int and 0 <= first <= last):
            raise _bad(path, f"its header says nothing usable of {name}")
        if kind in _FLOAT_BYTES and last - first != count * _FLOAT_BYTES[kind]:
            raise _bad(path, f"{name} has {last - first:,} bytes, another size than its shape")
        end = max(end, last)
    length = len(header)
    if size != 8 + length + end:
        what = "cut off" if size < 8 + length + end else "longer than its tensors"
        raise _bad(path, f"it is {what}: {size:,} bytes, its header speaks of {8 + length + end:,}")
    return TensorFile(header, len(entries), size)


def _header_and_size(path: Path) -> tuple[bytes, int]:
    """Return the header's JSON and the size of the file. Raises InvalidArgument, OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _MOST_HEADER_BYTES:
            raise _bad(path, "it is no safetensors file")
        if 8 + length > size:
            raise _bad(path, f"it is cut off within its header, at {size:,} bytes")
        return file.read(length), size


def _sizes(shape: Any) -> list[int]:
    """Return a short list of sizes. Raises ValueError for anything else."""
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError
    if not all(type(size) is int and 0 <= size <= _MOST_BYTES for size in shape):
        raise ValueError
    return shape


def _bad(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(f"{path.name}: {what}", field="model")
