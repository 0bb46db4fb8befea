"""Read a checkpoint as numpy arrays, without torch: a peer's environment may have none.

Imported in the peer's own interpreter: nothing but the standard library and numpy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

from splitpoint_cli.bench.decode.peers.messages import Unsupported

Array = numpy.ndarray[Any, Any]

_DEFAULT_ROPE_BASE = 10_000.0
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


def rope_base(config: dict[str, Any]) -> float:
    """Return the base of a Llama's rotary positions. Raises Unsupported if they are scaled."""
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise Unsupported(f"rotary positions of the type {kind!r} are not converted here")
    return float(rope.get("rope_theta", config.get("rope_theta", _DEFAULT_ROPE_BASE)))
