"""The headers of safetensors files: whole, and in agreement with the size of the file.

Reads the header only, however large the weights are. A download that broke off shows here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from splitpoint.errors import InvalidArgument

# What the format allows.
_MOST_HEADER_BYTES = 100_000_000
# Element types that the worker loads.
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What one file holds."""

    tensor_count: int
    file_bytes: int


def read_header(path: Path) -> TensorFile:
    """Raises InvalidArgument, which says what is wrong with the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _MOST_HEADER_BYTES:
            raise _bad(path, "it is no safetensors file")
        if 8 + length > size:
            raise _bad(path, f"it is cut off within its header, at {size:,} bytes")
        header = file.read(length)
    try:
        entries = json.loads(header)
    except ValueError:
        raise _bad(path, "its header is no JSON") from None
    if not isinstance(entries, dict):
        raise _bad(path, "its header is no table of tensors")
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in entries.items():
        try:
            kind, (first, last) = entry["dtype"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _bad(path, f"its header says nothing usable of {name}") from None
        if kind not in _FLOATS:
            raise _bad(path, f"{name} is stored as {kind}: quantized checkpoints are not supported")
        if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last):
            raise _bad(path, f"its header says nothing usable of {name}")
        end = max(end, last)
    if size != 8 + length + end:
        what = "cut off" if size < 8 + length + end else "longer than its tensors"
        raise _bad(path, f"it is {what}: {size:,} bytes, its header speaks of {8 + length + end:,}")
    return TensorFile(len(entries), size)


def _bad(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(f"{path.name}: {what}", field="model")
