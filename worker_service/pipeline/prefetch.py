"""Keeps the next tiles of a step on the link while the device attends the present one.

What a forward pass will read is known before it begins: one list of tiles for each
layer. The prefetcher fills staging slots in that order as far ahead as there are slots,
across the borders of layers: while layer i computes its MLP, the first tiles of layer
i + 1 arrive. A slot is filled again only after what was in it has been read. Nothing
here waits on the host; on a GPU lanes wait for each other (which no GPU has confirmed).

Knows nothing of requests, nor of what attention does with a tile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from splitpoint.planning.schedule import Lane
from worker_service.lanes.lanes import Event, Lanes, Work
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.tiles import Tile
from worker_service.pipeline.transfer import CacheTransfer, Part

Result = TypeVar("Result")
Attend = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class TileTransfer:
    """A tile with what its work needs; made once per step, used by every layer.

    `token_ids`: int64 `[rebuilt rows]` on the device, from which layer 0 makes its X;
    `copy_inputs`: where X is kept on the device, puts that of a layer into staging pages.
    """

    tile: Tile
    transfer: CacheTransfer
    loaded: Part | None
    rebuilt: Part | None
    token_ids: torch.Tensor | None
    copy_inputs: Callable[[int, torch.Tensor], None] | None = None

    def copies(self, layer: int) -> list[int]:
        """Bytes of each copy that brings it in this layer, in link order."""
        layout = self.transfer.tensors.layout
        sizes = []
        if self.rebuilt is not None and layer and self.copy_inputs is None:
            sizes.append(len(self.rebuilt.chunks) * layout.x_slot_bytes)
        if self.loaded is not None:
            sizes.append(2 * len(self.loaded.chunks) * layout.kv_slot_bytes)
        return sizes

    def rebuilds(self) -> list[int]:
        """FLOP of each product that it takes in a layer."""
        if self.rebuilt is None:
            return []
        return [self.rebuilt.rows * self.transfer.model.shape.rebuild_flops_per_token_layer]


@dataclass(slots=True)
class _Slots:
    """Free slots of one kind, each with the event after which it may be filled."""

    free: deque[tuple[int, Event | None]]

    @classmethod
    def of(cls, count: int) -> _Slots:
        return cls(deque((slot, None) for slot in range(count)))

    def acquire(self) -> tuple[int, list[Event]]:
        slot, reader = self.free.popleft()
        return slot, [] if reader is None else [reader]

    def release(self, slot: int, reader: Event) -> None:
        self.free.append((slot, reader))


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A tile_transfer of one layer: its slots, and what must be reached before they are read."""

    layer: int
    tile_transfer: TileTransfer
    kv_slot: int | None
    x_slot: int | None
    loaded: tuple[Event, ...]
    sent: tuple[Event, ...]


class Prefetcher:
    """The tiles of one step. `start`, then `take` each in order.

    Whoever runs the step finishes the lanes at its end, or settles them on an error:
    none of it may be under way between steps.
    """

    def __init__(
        self,
        lanes: Lanes,
        staging: Staging,
        tile_pages: int,
        layers: Sequence[Sequence[TileTransfer]],
    ) -> None:
        self._lanes = lanes
        self._staging = staging
        self._tile_pages = tile_pages
        self._order = [
            (layer, tile_transfer)
            for layer, tile_transfers in enumerate(layers)
            for tile_transfer in tile_transfers
        ]
        self._next = 0
        self._under_way: deque[_UnderWay] = deque()
        slots = staging.page_count // tile_pages
        # What is rebuilt needs no slot that the link fills, but a place all the same.
        rebuilds = any(not tile_transfer.tile.is_loaded for _, tile_transfer in self._order)
        self._rebuilt_slot = slots - 1
        self._kv_slots = _Slots.of(slots - 1 if rebuilds else slots)
        self._x_slots = _Slots.of(slots)

    def start(self) -> None:
        """Fill the slots with the first tiles."""
        for transfer in {
            id(tile_transfer.transfer): tile_transfer.transfer for _, tile_transfer in self._order
        }.values():
            transfer.divide(self._tile_pages * transfer.chunk_tokens)
        self._fill()

    def consume(self, layer: int, tile_transfer: TileTransfer, attend: Attend) -> None:
        """Once the tile is there, rebuild what is to be rebuilt, and attend it.

        `attend` gets K and V `[tile pages, n_kv, chunk_tokens, d]`, the tile's pages
        first, and runs as work of the compute lane.
        """
        under_way = self._under_way.popleft()
        if under_way.layer != layer or under_way.tile_transfer is not tile_transfer:
            raise RuntimeError("tiles are taken in another order than they come")
        kv_slot = self._rebuilt_slot if under_way.kv_slot is None else under_way.kv_slot
        keys, values = self._kv_slot(kv_slot)
        after = list(under_way.loaded)
        if under_way.x_slot is not None:
            after = [self._rebuild(under_way, under_way.x_slot, keys, values)]
            # The next X can be on its way while this tile is attended.
            self._fill()
        tokens = sum(page.chunk.token_count for page in tile_transfer.tile.pages)
        work = Work("attend", lambda: attend(keys, values), layer=layer, tokens=tokens)
        attended = self._lanes.run(Lane.COMPUTE, work, after)
        if under_way.kv_slot is not None:
            self._kv_slots.release(under_way.kv_slot, attended)
        self._fill()

    def compute(self, name: str, layer: int, call: Callable[[], Result]) -> Result:
        """Any other part of the forward pass, so that it leaves a span, too."""
        results: list[Result] = []
        work = Work(name, lambda: results.append(call()), layer=layer)
        self._lanes.run(Lane.COMPUTE, work)
        return results[0]

    # -- below --------------------------------------------------------------------------

    def _fill(self) -> None:
        """Send what is next, in order, until a slot is missing."""
        while self._next < len(self._order):
            layer, tile_transfer = self._order[self._next]
            needs_kv, needs_x = tile_transfer.loaded is not None, tile_transfer.rebuilt is not None
            if (needs_kv and not self._kv_slots.free) or (needs_x and not self._x_slots.free):
                return
            self._next += 1
            self._under_way.append(self._send(layer, tile_transfer))

    def _send(self, layer: int, tile_transfer: TileTransfer) -> _UnderWay:
        kv_slot = x_slot = None
        loaded: list[Event] = []
        sent: list[Event] = []
        if tile_transfer.rebuilt is not None:
            x_slot, sent = self._x_slots.acquire()
            # Layer 0's X comes from token ids, when it is its turn.
            if layer and tile_transfer.copy_inputs is None:
                work = tile_transfer.transfer.send(layer, tile_transfer.rebuilt, x_slot)
                sent = [self._lanes.run(Lane.LINK_IN, work, sent)]
        if tile_transfer.loaded is not None:
            kv_slot, loaded = self._kv_slots.acquire()
            work = tile_transfer.transfer.load(layer, tile_transfer.loaded, *self._kv_slot(kv_slot))
            loaded = [self._lanes.run(Lane.LINK_IN, work, loaded)]
        return _UnderWay(layer, tile_transfer, kv_slot, x_slot, tuple(loaded), tuple(sent))

    def _rebuild(
        self, under_way: _UnderWay, x_slot: int, keys: torch.Tensor, values: torch.Tensor
    ) -> Event:
        """K,V of the tile's rebuilt rows, over what was loaded if anything was."""
        layer, tile_transfer = under_way.layer, under_way.tile_transfer
        part, token_ids = tile_transfer.rebuilt, tile_transfer.token_ids
        if part is None or part.positions is None or token_ids is None:
            raise RuntimeError("a tile with nothing to rebuild has a slot of X")
        transfer, after = tile_transfer.transfer, [*under_way.sent, *under_way.loaded]
        if layer == 0:
            work = transfer.embed(token_ids, part.positions, x_slot)
            after.append(self._lanes.run(Lane.COMPUTE, work, under_way.sent))
        elif tile_transfer.copy_inputs is not None:
            work = transfer.copy_inputs(layer, part, x_slot, tile_transfer.copy_inputs)
            after.append(self._lanes.run(Lane.COMPUTE, work, under_way.sent))
        work = transfer.rebuild(layer, part, x_slot, keys, values)
        rebuilt = self._lanes.run(Lane.COMPUTE, work, after)
        self._x_slots.release(x_slot, rebuilt)
        return rebuilt

    def _kv_slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = slice(slot * self._tile_pages, (slot + 1) * self._tile_pages)
        return self._staging.keys[pages], self._staging.values[pages]


def compute(
    prefetcher: Prefetcher | None, name: str, layer: int, call: Callable[[], Result]
) -> Result:
    """Part of a forward pass, on a lane when the step has a prefetcher."""
    return call() if prefetcher is None else prefetcher.compute(name, layer, call)
