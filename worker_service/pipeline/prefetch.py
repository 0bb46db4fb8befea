"""Keeps the next tiles of a step on the link while the device attends the present one.

The tiles that a forward pass reads are known before it begins: one list for each layer.
The prefetcher fills staging slots in that order as far ahead as there are slots, also
across layers: while layer i computes its MLP, the first tiles of layer i + 1 arrive. A
slot is filled again only after its content was read. The host never waits here; on a
GPU the lanes wait for each other (not confirmed on a GPU yet).

On lanes with schedule COLUMN a layer's first copy waits until the layer before has been
loaded and rebuilt: KVPR's order (Eq. 10 there), in which X of a layer crosses the link beside
the attention and the MLP of the layer before, and nothing beside a rebuild but K,V.

This module knows no requests, and not what attention does with a tile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes.lanes import Event, Lanes
from worker_service.lanes.work import Work
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.tiles import Tile
from worker_service.pipeline.transfer import CacheTransfer, Part

Result = TypeVar("Result")
Attend = Callable[[torch.Tensor, torch.Tensor], None]


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


class _SlotPool:
    """Free slots of one kind, each with the event after which it may be filled."""

    def __init__(self, count: int) -> None:
        self._free: deque[tuple[int, list[Event]]] = deque((slot, []) for slot in range(count))

    @property
    def is_empty(self) -> bool:
        return not self._free

    def acquire(self) -> tuple[int, list[Event]]:
        """Return a slot and the events to wait for before it is filled."""
        return self._free.popleft()

    def release(self, slot: int, reader: Event) -> None:
        self._free.append((slot, [reader]))


@dataclass(frozen=True, slots=True)
class _InFlight:
    """One layer's transfer of a tile: its slots, and the events before they may be read."""

    layer: int
    tile_transfer: TileTransfer
    kv_slot: int | None
    x_slot: int | None
    loaded: list[Event]
    sent: list[Event]


class Prefetcher:
    """The tiles of one step: `start`, then `consume` each in order.

    The caller of the step collects the lanes at its end, or calls their `finish_after_error`:
    no transfer of a step may be under way between steps.
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
        self._order = [(layer, tile) for layer, tiles in enumerate(layers) for tile in tiles]
        self._next = 0
        self._in_flight: deque[_InFlight] = deque()
        slots = staging.page_count // tile_pages
        # Rebuilt K and V need a slot, too, though the link does not fill it.
        rebuilds = any(not each.tile.is_loaded for _, each in self._order)
        self._rebuilt_slot = slots - 1
        self._inputs = staging.step_slots(tile_pages)
        self._kv_slots = _SlotPool(slots - 1 if rebuilds else slots)
        self._x_slots = _SlotPool(slots)
        # With COLUMN: the only layer whose tiles may be sent, the events before them, and
        # those after which the next layer's may be.
        self._in_turn = lanes.schedule is Schedule.COLUMN
        self._open_layer = self._order[0][0] if self._order else 0
        self._barrier: list[Event] = []
        self._arrivals: list[Event] = []

    def start(self) -> None:
        """Fill the slots with the first tiles."""
        self._fill()

    def consume(self, layer: int, tile_transfer: TileTransfer, attend: Attend) -> None:
        """Rebuild the rebuilt rows of the tile once it is there, and attend it.

        `attend` receives K and V `[tile pages, n_kv, chunk_tokens, d]`, the tile's pages
        first, and runs as work of the compute lane.
        """
        arriving = self._in_flight.popleft()
        if arriving.layer != layer or arriving.tile_transfer is not tile_transfer:
            raise RuntimeError("tiles are taken in another order than they come")
        kv_slot = self._rebuilt_slot if arriving.kv_slot is None else arriving.kv_slot
        keys, values = self._kv_tensors(kv_slot)
        after = arriving.loaded
        if arriving.x_slot is not None:
            after = [self._rebuild(arriving, arriving.x_slot, keys, values)]
            # The next X can be on its way while this tile is attended.
            self._fill()
        if self._in_turn:
            self._arrivals += after
            self._open_next_layer()
        tokens = sum(page.chunk.token_count for page in tile_transfer.tile.pages)
        work = Work("attend", lambda: attend(keys, values), layer=layer, tokens=tokens)
        attended = self._lanes.run(Lane.COMPUTE, work, after)
        if arriving.kv_slot is not None:
            self._kv_slots.release(arriving.kv_slot, attended)
        self._fill()

    def compute(
        self, name: str, layer: int, call: Callable[[], Result], after: Sequence[Event] = ()
    ) -> Result:
        """Run another part of the forward pass on the compute lane, so that it leaves a span.

        It begins once all of `after` are reached.
        """
        results: list[Result] = []
        work = Work(name, lambda: results.append(call()), layer=layer)
        self._lanes.run(Lane.COMPUTE, work, after)
        return results[0]

    # -- below --------------------------------------------------------------------------

    def _fill(self) -> None:
        """Send the next tiles, in order, until a slot is missing."""
        while self._next < len(self._order):
            layer, tile_transfer = self._order[self._next]
            if self._in_turn and layer != self._open_layer:
                return
            if tile_transfer.loaded is not None and self._kv_slots.is_empty:
                return
            if tile_transfer.rebuilt is not None and self._x_slots.is_empty:
                return
            self._next += 1
            self._in_flight.append(self._send(layer, tile_transfer))

    def _open_next_layer(self) -> None:
        """Send the next layer's first tiles once all of the present layer's have arrived."""
        if self._in_flight or self._next == len(self._order):
            return
        layer = self._order[self._next][0]
        if layer != self._open_layer:
            self._open_layer = layer
            self._barrier, self._arrivals = self._arrivals, []
            self._fill()

    def _send(self, layer: int, tile_transfer: TileTransfer) -> _InFlight:
        kv_slot = x_slot = None
        loaded: list[Event] = []
        sent: list[Event] = []
        transfer = tile_transfer.transfer
        if tile_transfer.rebuilt is not None:
            x_slot, sent = self._x_slots.acquire()
            sent = [*sent, *self._barrier]
            # Layer 0's X is computed from token ids when the tile is consumed.
            if layer and tile_transfer.copy_inputs is None:
                work = transfer.send(layer, tile_transfer.rebuilt, self._inputs[x_slot])
                sent = [self._lanes.run(Lane.LINK_IN, work, sent)]
        if tile_transfer.loaded is not None:
            kv_slot, free = self._kv_slots.acquire()
            work = transfer.load(layer, tile_transfer.loaded, *self._kv_tensors(kv_slot))
            loaded = [self._lanes.run(Lane.LINK_IN, work, [*free, *self._barrier])]
        return _InFlight(layer, tile_transfer, kv_slot, x_slot, loaded, sent)

    def _rebuild(
        self, arriving: _InFlight, x_slot: int, keys: torch.Tensor, values: torch.Tensor
    ) -> Event:
        """Compute K,V of the tile's rebuilt rows, overwriting loaded rows, if there are any."""
        layer, tile_transfer = arriving.layer, arriving.tile_transfer
        part, token_ids = tile_transfer.rebuilt, tile_transfer.token_ids
        if part is None or part.positions is None or token_ids is None:
            raise RuntimeError("a tile with nothing to rebuild has a slot of X")
        transfer, after = tile_transfer.transfer, [*arriving.sent, *arriving.loaded]
        inputs = self._inputs[x_slot]
        if layer == 0:
            work = transfer.embed(token_ids, part.positions, inputs)
            after.append(self._lanes.run(Lane.COMPUTE, work, arriving.sent))
        elif tile_transfer.copy_inputs is not None:
            work = transfer.copy_inputs(layer, part, inputs, tile_transfer.copy_inputs)
            after.append(self._lanes.run(Lane.COMPUTE, work, arriving.sent))
        work = transfer.rebuild(layer, part, inputs, keys, values)
        rebuilt = self._lanes.run(Lane.COMPUTE, work, after)
        self._x_slots.release(x_slot, rebuilt)
        return rebuilt

    def _kv_tensors(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = slice(slot * self._tile_pages, (slot + 1) * self._tile_pages)
        return self._staging.keys[pages], self._staging.values[pages]


def compute(
    prefetcher: Prefetcher | None, name: str, layer: int, call: Callable[[], Result]
) -> Result:
    """Run a part of a forward pass, on a lane if the step has a prefetcher."""
    return call() if prefetcher is None else prefetcher.compute(name, layer, call)
