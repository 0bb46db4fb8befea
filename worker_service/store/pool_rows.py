"""Rows of a bounded pool in the arena: moved out of stored chunks, and written over others.

A row is K or V of one token in one layer and KV head, in the arena's encoding. On the copier's
thread; see `write_back.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_service.device.cache import DeviceCache
from worker_service.store.arena_tensors import ArenaTensors, as_rows

# int64 `[n_kv, n]` for each layer: numbers of rows in a plane `[slots, n_kv, C, d]`.
RowNumbers = Sequence[npt.NDArray[np.int64]]


def row_numbers(
    places: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], chunk_tokens: int
) -> npt.NDArray[np.int64]:
    """Return the rows of places `[n_kv, n]`, which count through chunks in these slots."""
    heads = np.arange(len(places), dtype=np.int64)[:, None]
    chunks, rows = np.divmod(places, chunk_tokens)
    return (slots[chunks] * len(places) + heads) * chunk_tokens + rows


def rows_of_slot(slot: int, kv_heads: int, chunk_tokens: int) -> npt.NDArray[np.int64]:
    """Return the rows of a whole slot, `[n_kv, C]`."""
    rows = np.arange(kv_heads * chunk_tokens, dtype=np.int64).reshape(kv_heads, chunk_tokens)
    return rows + slot * rows.size


def move_rows(tensors: ArenaTensors, sources: RowNumbers, slots: Sequence[int]) -> None:
    """Copy rows into whole slots, which they fill in their order."""
    chunk = tensors.layout.chunk_tokens
    for layer, of_layer in enumerate(sources):
        for plane in (tensors.keys[layer], tensors.values[layer]):
            rows = as_rows(plane)
            for place, slot in enumerate(slots):
                moved = of_layer[:, place * chunk : (place + 1) * chunk]
                rows[rows_of_slot(slot, len(of_layer), chunk)] = rows[moved]


def write_rows(cache: DeviceCache, tensors: ArenaTensors, page: int, targets: RowNumbers) -> None:
    """Write the rows of a page over others: `targets` `[n_kv, C]` of each layer."""
    for layer, of_layer in enumerate(targets):
        for plane, pages in (
            (tensors.keys[layer], cache.keys[layer]),
            (tensors.values[layer], cache.values[layer]),
        ):
            native = pages[page : page + 1]
            stored = native if tensors.codec.is_native else tensors.codec.encode(native)
            as_rows(plane)[of_layer] = as_rows(stored[0].cpu()).reshape(of_layer.shape)
