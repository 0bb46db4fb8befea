"""Pulls one layer of one tile of a streamed sequence into staging pages, in series.

Every copy and every GEMM waits for the one before it. Knows nothing of requests
or of the store's calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from worker_service.arena_tensors import ArenaTensors, StoredChunk
from worker_service.memory import STAGING_PAGES
from worker_service.model.decoder import Decoder
from worker_service.stage import Stage


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive chunks of one sequence, few enough to fit the staging buffers.

    `first_token` is the position of the first chunk's first row; rows below
    `split_tokens` are rebuilt, the others loaded.
    """

    chunks: tuple[StoredChunk, ...]
    first_token: int
    split_tokens: int

    def rebuilt_rows(self, chunk_tokens: int) -> int:
        """Rows of the tile below the split, from its first row on."""
        rows = min(self.split_tokens - self.first_token, len(self.chunks) * chunk_tokens)
        return max(rows, 0)


def tiles(
    chunks: Sequence[StoredChunk], first_chunk: int, split_tokens: int, chunk_tokens: int
) -> Iterator[Tile]:
    """The chunks of a prefix from `first_chunk` on in staging-sized pieces, front first."""
    for start in range(first_chunk, len(chunks), STAGING_PAGES):
        yield Tile(
            chunks=tuple(chunks[start : start + STAGING_PAGES]),
            first_token=start * chunk_tokens,
            split_tokens=split_tokens,
        )


class Puller:
    """Copies or rebuilds one layer of one tile into device pages.

    Attributes:
        keys, values: staging tiles `[STAGING_PAGES, n_kv, chunk_tokens, d]` for
            streamed attention; a restore writes into the cache instead.
    """

    def __init__(self, model: Decoder, tensors: ArenaTensors, device: torch.device) -> None:
        layout = tensors.layout
        self._model = model
        self.tensors = tensors
        self.chunk_tokens = layout.chunk_tokens
        self._device = device
        self._stage = Stage(tensors, device, STAGING_PAGES)
        # Zeros: rows past a partial chunk's tokens are masked, yet must be finite.
        self.keys, self.values = (
            tensors.codec.native_zeros(tensor, STAGING_PAGES, device) for tensor in ("K", "V")
        )
        self._inputs = (
            tensors.codec.native_zeros("X", STAGING_PAGES, device)
            if layout.has_activations
            else None
        )

    def pull(
        self,
        layer: int,
        tile: Tile,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: Sequence[int],
    ) -> None:
        """Fill `pages[i]` of keys and values with chunk i of the tile.

        Raises ChunkLost when a slot changed before or during the copy; the
        pages then hold nothing usable.
        """
        rebuilt = tile.rebuilt_rows(self.chunk_tokens)
        first_loaded = rebuilt // self.chunk_tokens
        self.tensors.check_current(tile.chunks)
        slots = [chunk.slot for chunk in tile.chunks[first_loaded:]]
        for tensor, target in (("K", keys), ("V", values)):
            self._stage.bring(layer, {tensor: target}, slots, pages[first_loaded:])
        if rebuilt:
            self._rebuild(layer, tile, rebuilt, keys, values, pages)
        self.tensors.check_current(tile.chunks)

    def _rebuild(
        self,
        layer: int,
        tile: Tile,
        rows: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: Sequence[int],
    ) -> None:
        """K,V[:l] of this tile from X: `K = RoPE(norm(X W_K + b_K))`, `V = X W_V + b_V`."""
        if self._inputs is None:
            raise RuntimeError("a split above zero was planned for an arena without activations")
        count = -(-rows // self.chunk_tokens)
        slots = [chunk.slot for chunk in tile.chunks[:count]]
        self._stage.bring(layer, {"X": self._inputs}, slots, range(count))
        inputs = self._inputs[:count].flatten(0, 1)[:rows]
        first = tile.first_token
        positions = torch.arange(first, first + rows, device=self._device)
        rebuilt_keys, rebuilt_values = self._model.layers[layer].project_kv(
            inputs, self._model.rotary(positions)
        )
        index = torch.arange(rows, device=self._device)
        page_of = torch.as_tensor(pages, device=self._device)[index // self.chunk_tokens]
        row_of = index % self.chunk_tokens
        keys[page_of, :, row_of] = rebuilt_keys
        values[page_of, :, row_of] = rebuilt_values
