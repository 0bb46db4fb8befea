"""Single pieces of a transfer: X or K,V over the link, and K,V rebuilt from X.

A `CacheTransfer` makes `Work` for lanes. Its callers decide the order, what is rebuilt,
and which work waits for which; they check afterwards that the chunks are still current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker_service.device.copies import runs
from worker_service.lanes.work import Work
from worker_service.model.model import Model
from worker_service.pipeline.chunk_loader import ChunkLoader
from worker_service.pipeline.gather import Gatherer
from worker_service.pipeline.staging import Staging
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk


@dataclass(frozen=True, slots=True)
class Part:
    """The chunks of one copy or product, and the device pages they belong to.

    Attributes:
        chunks: in sequence order.
        pages: page `pages[i]` belongs to chunk i.
        rows: token rows, from the first chunk's first row on; only the last chunk may be
            used in part.
        positions: int64 `[rows]` for RoPE; None for parts that are only loaded. Each layer
            computes its angles anew, because those of a long prefix need more memory than
            the tile itself.
    """

    chunks: Sequence[StoredChunk]
    pages: Sequence[int]
    rows: int
    positions: torch.Tensor | None = None


class CacheTransfer:
    """Makes the pieces of work that bring one arena's chunks to one device."""

    def __init__(
        self,
        model: Model,
        tensors: ArenaTensors,
        staging: Staging,
        gatherer: Gatherer | None = None,
    ) -> None:
        self.model = model
        self.tensors = tensors
        self.chunk_tokens = tensors.layout.chunk_tokens
        self.device = staging.device
        self.staging = staging
        self._loader = ChunkLoader(tensors, staging.device, staging.page_count, gatherer)
        self._embedded: torch.Tensor | None = None

    # -- over the link --------------------------------------------------------------

    def load(self, layer: int, part: Part, keys: torch.Tensor, values: torch.Tensor) -> Work:
        """Load K and V of whole chunks into `part.pages` of `[pages, n_kv, C, d]`."""
        slots = [chunk.slot for chunk in part.chunks]
        size = 2 * len(slots) * self.tensors.layout.kv_slot_bytes

        def call() -> None:
            self._loader.load(layer, {"K": keys, "V": values}, slots, part.pages)

        return Work("load K,V", call, size, size, layer, part.rows)

    def send(self, layer: int, part: Part, slot: torch.Tensor) -> Work:
        """Copy X of the part's chunks into a staging slot, `[slot_pages, C, h]`."""
        return self._send(layer, part.chunks, slot, range(len(part.chunks)), part.rows)

    def send_inputs(
        self, chunks: Sequence[StoredChunk], inputs: Sequence[torch.Tensor], pages: Sequence[int]
    ) -> list[Work]:
        """Copy X of some chunks, layer by layer, into pages of `inputs[layer]`, `[pages, C, h]`."""
        tokens = sum(chunk.token_count for chunk in chunks)
        return [
            self._send(layer, chunks, target, pages, tokens) for layer, target in enumerate(inputs)
        ]

    def _send(
        self,
        layer: int,
        chunks: Sequence[StoredChunk],
        target: torch.Tensor,
        pages: Sequence[int],
        tokens: int,
    ) -> Work:
        slots = [chunk.slot for chunk in chunks]
        size = len(slots) * self.tensors.layout.x_slot_bytes

        def call() -> None:
            self._loader.load(layer, {"X": target}, slots, pages)

        return Work("send X", call, size, size, layer, tokens)

    # -- on the device ----------------------------------------------------------------

    def embed(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slot: torch.Tensor | None = None
    ) -> Work:
        """Compute layer 0's X, norm(embed(ids)), of int64 `[rows]` token ids.

        The result goes to a staging slot, or, if `slot` is None, to the `rebuild` that
        comes next on the compute lane.
        """

        def call() -> None:
            inputs = self.model.first_inputs(token_ids, positions)
            if slot is None:
                self._embedded = inputs
            else:
                slot.flatten(0, 1)[: len(token_ids)].copy_(inputs)

        return Work("embed", call, layer=0, tokens=len(token_ids))

    def copy_inputs(
        self,
        layer: int,
        part: Part,
        slot: torch.Tensor,
        copy: Callable[[int, torch.Tensor], None],
    ) -> Work:
        """Copy X that is on the device into a staging slot by `copy(layer, slot)`."""
        return Work("copy X", lambda: copy(layer, slot), layer=layer, tokens=part.rows)

    def rebuild(
        self,
        layer: int,
        part: Part,
        slot: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> Work:
        """Compute K,V of the part's rows from X (KVPR Eq. 7) into its pages.

        `K = RoPE(norm(X W_K + b_K))`, `V = X W_V + b_V`. X is in a staging slot, or, if
        `slot` is None, what was embedded last.
        """
        flops = part.rows * self.model.shape.rebuild_flops_per_token_layer

        def call() -> None:
            inputs = self._pop_embedded() if slot is None else slot.flatten(0, 1)[: part.rows]
            rotary = None if part.positions is None else self.model.rotary(part.positions)
            built = self.model.layers[layer].project_kv(inputs, rotary)
            for rows, plane in zip(built, (keys, values), strict=True):
                put_rows(plane, part.pages, rows)

        return Work("rebuild", call, 0, flops, layer, part.rows)

    def _pop_embedded(self) -> torch.Tensor:
        inputs, self._embedded = self._embedded, None
        if inputs is None:
            raise RuntimeError("nothing was embedded for this rebuild")
        return inputs


def put_rows(plane: torch.Tensor, pages: Sequence[int], rows: torch.Tensor) -> None:
    """Copy rows `[N, n_kv, d]` into pages of `[pages, n_kv, C, d]`, the last page in part."""
    chunk = plane.shape[2]
    whole = len(rows) // chunk
    for start, length in runs(pages[:whole], pages[:whole]):
        page, first = pages[start], start * chunk
        block = rows[first : first + length * chunk]
        target = plane[page : page + length]
        target.copy_(block.view(length, chunk, *rows.shape[1:]).transpose(1, 2))
    rest = len(rows) - whole * chunk
    if rest:
        plane[pages[whole], :, :rest].copy_(rows[whole * chunk :].transpose(0, 1))
