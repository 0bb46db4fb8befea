"""Read a checkpoint as numpy arrays, without torch: a peer's environment may have none.

Imported in the peer's own interpreter: nothing but the standard library and numpy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

Array = numpy.ndarray[Any, Any]

_TYPES = {"F32": "<f4", "BF16": "<u2"}


class Checkpoint:
    """The one `model.safetensors` of a folder, and its `config.json`.

    Attributes:
        config: the parsed `config.json`.
        is_bfloat16: tensors are bfloat16; `bits` has them as unsigned 16-bit numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        path = folder / "model.safetensors"
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self._entries = header
        self._data = numpy.memmap(path, dtype="u1", mode="r", offset=8 + size)
        self.is_bfloat16 = any(entry["dtype"] == "BF16" for entry in header.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def bits(self, name: str) -> Array:
        """Return a tensor as it is stored: float32, or the 16 bits of each bfloat16."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        array: Array = self._data[first:last].view(_TYPES[entry["dtype"]])
        return array.reshape(entry["shape"])

    def floats(self, name: str) -> Array:
        """Return a tensor as float32."""
        return widened(self.bits(name))


def widened(array: Array) -> Array:
    """Return float32 of float32, or of bfloat16 given as unsigned 16-bit numbers."""
    if array.dtype == numpy.uint16:
        return (array.astype("<u4") << 16).view("<f4")
    return array
