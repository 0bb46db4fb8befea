"""Makes the work of tasks: which pieces of a transfer carry out a task of a restore or a step.

`splitpoint.planning.schedule` lays out the tasks; `executor` gives their work to lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from splitpoint.planning.schedule import Task, TaskKind, TileShape
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import chunks_of
from worker_service.device.copies import sent
from worker_service.lanes.work import Work
from worker_service.pipeline.staging import InputSlots, Staging
from worker_service.pipeline.tiles import Tile
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import StoredChunk

# -- restores -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored prefix and where it goes.

    Attributes:
        chunks: all of it, front first; restored from `first_chunk` on.
        pages: `pages[j]` receives chunk j; None before `first_chunk`.
        token_ids: of at least the rebuilt tokens: layer 0's X comes from them.
        cached_tokens: what is wanted of it; the last chunk may hold more.
        split_tokens: [0, split) is rebuilt, the rest loaded.
    """

    chunks: Sequence[StoredChunk]
    first_chunk: int
    pages: Sequence[int | None]
    token_ids: Sequence[int]
    cached_tokens: int
    split_tokens: int

    def part(self, chunks: range, rows: int, positions: torch.Tensor | None = None) -> Part:
        """Return these chunks, of which `rows` token rows are meant, with their pages."""
        span = slice(chunks.start, chunks.stop)
        pages = [page for page in self.pages[span] if page is not None]
        return Part(self.chunks[span], pages, rows, positions)


@dataclass(frozen=True, slots=True)
class Target:
    """Where K and V of restored chunks go: layer i's pages `[pages, n_kv, chunk_tokens, d]`."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


@dataclass(slots=True)
class RestoreWorks:
    """Makes the work of a restore's tasks; layers share what depends on the tokens alone."""

    transfer: CacheTransfer
    prefix: Prefix
    target: Target
    slots: InputSlots
    parts: dict[tuple[bool, int, int], Part] = field(default_factory=dict)
    # The slot of each layer's W_K and W_V that come over the link.
    weight_slots: dict[int, int] = field(default_factory=dict)

    def work_of(self, task: Task) -> Work:
        """Return the work of a task."""
        transfer, layer, slot = self.transfer, task.layer, task.slot
        keys, values = self.target.keys[layer], self.target.values[layer]
        match task.kind:
            case TaskKind.LOAD:
                return transfer.load(layer, self._part(task), keys, values)
            case TaskKind.WEIGHTS:
                return self._load_weights(task)
            case TaskKind.EMBED:
                ids = self.prefix.token_ids[task.first : task.last]
                token_ids = sent(ids, transfer.device)
                return transfer.embed(token_ids, self._positions(task))
            case TaskKind.SEND:
                if slot is None:
                    raise RuntimeError("activations are sent into a staging slot")
                return transfer.send(layer, self._part(task), self.slots[slot])
            case TaskKind.REBUILD:
                inputs = None if slot is None else self.slots[slot]
                work = transfer.rebuild(layer, self._part(task), inputs, keys, values)
                return self._with_weights(work, layer)
            case TaskKind.COPY | TaskKind.ATTEND:
                raise RuntimeError(f"no restore has a task {task.kind.value}")

    @property
    def layer_count(self) -> int:
        return len(self.target.keys)

    def is_on_host(self, layer: int) -> bool:
        weights = self.transfer.model.layer_weights
        return weights is not None and layer in weights

    def _load_weights(self, task: Task) -> Work:
        weights = self.transfer.model.layer_weights
        if weights is None or task.slot is None:
            raise RuntimeError("weights that are on the device are said to be on the host")
        self.weight_slots[task.layer] = task.slot
        return weights.piece_work(task.layer, WeightPiece.KEY_VALUE, task.slot)

    def _with_weights(self, work: Work, layer: int) -> Work:
        weights, slot = self.transfer.model.layer_weights, self.weight_slots.get(layer)
        if weights is None or slot is None:
            return work

        def call() -> None:
            with weights.lent(layer, WeightPiece.KEY_VALUE, slot):
                work.call()

        return replace(work, call=call)

    def _part(self, task: Task) -> Part:
        is_rebuilt = task.kind is not TaskKind.LOAD
        key = (is_rebuilt, task.first, task.last)
        if key not in self.parts:
            chunk = self.transfer.chunk_tokens
            chunks = range(task.first // chunk, chunks_of(task.last, chunk))
            positions = self._positions(task) if is_rebuilt else None
            self.parts[key] = self.prefix.part(chunks, task.tokens, positions)
        return self.parts[key]

    def _positions(self, task: Task) -> torch.Tensor:
        return torch.arange(task.first, task.last, device=self.transfer.device)


# -- streamed steps ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TileTransfer:
    """A tile with the inputs of its work; made once per step, used by every layer.

    Attributes:
        token_ids: int64 `[rebuilt rows]` on the device, from which layer 0's X is computed.
        copy_inputs: copies a layer's X, which is kept on the device, into staging pages;
            None if X is in the store.
    """

    tile: Tile
    transfer: CacheTransfer
    loaded: Part | None
    rebuilt: Part | None
    token_ids: torch.Tensor | None
    copy_inputs: Callable[[int, torch.Tensor], None] | None = None

    @property
    def shape(self) -> TileShape:
        """What is brought of it, and how."""
        return TileShape(
            rows=sum(page.chunk.token_count for page in self.tile.pages),
            rebuilt_rows=0 if self.rebuilt is None else self.rebuilt.rows,
            is_loaded=self.loaded is not None,
            is_kept=self.copy_inputs is not None,
        )

    def copies(self, layer: int) -> list[int]:
        """Return the bytes of each copy that this layer needs, in link order."""
        layout = self.transfer.tensors.layout
        sizes = []
        if self.rebuilt is not None and layer and self.copy_inputs is None:
            sizes.append(len(self.rebuilt.chunks) * layout.x_slot_bytes)
        if self.loaded is not None:
            sizes.append(2 * len(self.loaded.chunks) * layout.kv_slot_bytes)
        return sizes

    def rebuilds(self) -> list[int]:
        """Return the FLOP of each product that a layer needs."""
        if self.rebuilt is None:
            return []
        return [self.rebuilt.rows * self.transfer.model.shape.rebuild_flops_per_token_layer]


class StepWorks:
    """Makes the work of a streamed step's tasks.

    `layers`: the tiles of each layer, in the order in which it attends them.
    """

    def __init__(
        self, staging: Staging, tile_pages: int, layers: Sequence[Sequence[TileTransfer]]
    ) -> None:
        self._staging = staging
        self._tile_pages = tile_pages
        self._layers = layers
        self._inputs = staging.step_slots(tile_pages)

    def tile_of(self, task: Task) -> TileTransfer:
        return self._layers[task.layer][task.tile]

    def work_of(self, task: Task) -> Work:
        """Return the work of a task that brings a tile."""
        layer, tile = task.layer, self.tile_of(task)
        transfer = tile.transfer
        if task.kind is TaskKind.LOAD and tile.loaded is not None:
            return transfer.load(layer, tile.loaded, *self.kv_tensors(task))
        rebuilt = tile.rebuilt
        if task.slot is None or rebuilt is None or rebuilt.positions is None:
            raise RuntimeError(f"nothing of a tile is brought by {task.kind.value}")
        inputs = self._inputs[task.slot]
        match task.kind:
            case TaskKind.SEND:
                return transfer.send(layer, rebuilt, inputs)
            case TaskKind.EMBED if tile.token_ids is not None:
                return transfer.embed(tile.token_ids, rebuilt.positions, inputs)
            case TaskKind.COPY if tile.copy_inputs is not None:
                return transfer.copy_inputs(layer, rebuilt, inputs, tile.copy_inputs)
            case TaskKind.REBUILD:
                return transfer.rebuild(layer, rebuilt, inputs, *self.kv_tensors(task))
        raise RuntimeError(f"nothing of a tile is brought by {task.kind.value}")

    def kv_tensors(self, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
        first = task.kv_slot * self._tile_pages
        pages = slice(first, first + self._tile_pages)
        return self._staging.keys[pages], self._staging.values[pages]
