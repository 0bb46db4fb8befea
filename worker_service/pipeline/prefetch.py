"""Keeps the next tiles of a step on the link while the device attends the present one.

What a forward pass will read is known before it begins: one list of tiles for each
layer. The feed fills staging slots in that order as far ahead as there are slots,
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
from worker_service.pipeline.transfer import Mover, Part

Result = TypeVar("Result")
Attend = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A tile with what its work needs; made once per step, used by every layer.

    `token_ids`: int64 `[rebuilt rows]` on the device, from which layer 0 makes its X;
    `take_inputs`: where X is kept on the device, puts that of a layer into staging pages.
    """

    tile: Tile
    mover: Mover
    loaded: Part | None
    rebuilt: Part | None
    token_ids: torch.Tensor | None
    take_inputs: Callable[[int, torch.Tensor], None] | None = None

    def copies(self, layer: int) -> list[int]:
        """Bytes of each copy that brings it in this layer, in link order."""
        layout = self.mover.tensors.layout
        sizes = []
        if self.rebuilt is not None and layer and self.take_inputs is None:
            sizes.append(len(self.rebuilt.chunks) * layout.x_slot_bytes)
        if self.loaded is not None:
            sizes.append(2 * len(self.loaded.chunks) * layout.kv_slot_bytes)
        return sizes

    def rebuilds(self) -> list[int]:
        """FLOP of each product that it takes in a layer."""
        if self.rebuilt is None:
            return []
        return [self.rebuilt.rows * self.mover.model.shape.rebuild_flops_per_token_layer]


@dataclass(slots=True)
class _Slots:
    """Free slots of one kind, each with the event after which it may be filled."""

    free: deque[tuple[int, Event | None]]

    @classmethod
    def of(cls, count: int) -> _Slots:
        return cls(deque((slot, None) for slot in range(count)))

    def take(self) -> tuple[int, list[Event]]:
        slot, reader = self.free.popleft()
        return slot, [] if reader is None else [reader]

    def give(self, slot: int, reader: Event) -> None:
        self.free.append((slot, reader))


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A shipment of one layer: its slots, and what must be reached before they are read."""

    layer: int
    shipment: Shipment
    kv_slot: int | None
    x_slot: int | None
    loaded: tuple[Event, ...]
    sent: tuple[Event, ...]


class Feed:
    """The tiles of one step. `start`, then `take` each in order.

    Whoever runs the step finishes the lanes at its end, or settles them on an error:
    none of it may be under way between steps.
    """

    def __init__(
        self,
        lanes: Lanes,
        staging: Staging,
        tile_pages: int,
        layers: Sequence[Sequence[Shipment]],
    ) -> None:
        self._lanes = lanes
        self._staging = staging
        self._tile_pages = tile_pages
        self._order = [
            (layer, shipment) for layer, shipments in enumerate(layers) for shipment in shipments
        ]
        self._next = 0
        self._under_way: deque[_UnderWay] = deque()
        slots = staging.page_count // tile_pages
        # What is rebuilt needs no slot that the link fills, but a place all the same.
        rebuilds = any(not shipment.tile.is_loaded for _, shipment in self._order)
        self._rebuilt_slot = slots - 1
        self._kv_slots = _Slots.of(slots - 1 if rebuilds else slots)
        self._x_slots = _Slots.of(slots)

    def start(self) -> None:
        """Fill the slots with the first tiles."""
        for mover in {id(shipment.mover): shipment.mover for _, shipment in self._order}.values():
            mover.divide(self._tile_pages * mover.chunk_tokens)
        self._fill()

    def take(self, layer: int, shipment: Shipment, attend: Attend) -> None:
        """Once the tile is there, rebuild what is to be rebuilt, and attend it.

        `attend` gets K and V `[tile pages, n_kv, chunk_tokens, d]`, the tile's pages
        first, and runs as work of the compute lane.
        """
        under_way = self._under_way.popleft()
        if under_way.layer != layer or under_way.shipment is not shipment:
            raise RuntimeError("tiles are taken in another order than they come")
        kv_slot = self._rebuilt_slot if under_way.kv_slot is None else under_way.kv_slot
        keys, values = self._kv_slot(kv_slot)
        after = list(under_way.loaded)
        if under_way.x_slot is not None:
            after = [self._rebuild(under_way, under_way.x_slot, keys, values)]
            # The next X can be on its way while this tile is attended.
            self._fill()
        tokens = sum(page.chunk.token_count for page in shipment.tile.pages)
        work = Work("attend", lambda: attend(keys, values), layer=layer, tokens=tokens)
        attended = self._lanes.run(Lane.COMPUTE, work, after)
        if under_way.kv_slot is not None:
            self._kv_slots.give(under_way.kv_slot, attended)
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
            layer, shipment = self._order[self._next]
            needs_kv, needs_x = shipment.loaded is not None, shipment.rebuilt is not None
            if (needs_kv and not self._kv_slots.free) or (needs_x and not self._x_slots.free):
                return
            self._next += 1
            self._under_way.append(self._send(layer, shipment))

    def _send(self, layer: int, shipment: Shipment) -> _UnderWay:
        kv_slot = x_slot = None
        loaded: list[Event] = []
        sent: list[Event] = []
        if shipment.rebuilt is not None:
            x_slot, sent = self._x_slots.take()
            # Layer 0's X comes from token ids, when it is its turn.
            if layer and shipment.take_inputs is None:
                work = shipment.mover.send(layer, shipment.rebuilt, x_slot)
                sent = [self._lanes.run(Lane.LINK_IN, work, sent)]
        if shipment.loaded is not None:
            kv_slot, loaded = self._kv_slots.take()
            work = shipment.mover.load(layer, shipment.loaded, *self._kv_slot(kv_slot))
            loaded = [self._lanes.run(Lane.LINK_IN, work, loaded)]
        return _UnderWay(layer, shipment, kv_slot, x_slot, tuple(loaded), tuple(sent))

    def _rebuild(
        self, under_way: _UnderWay, x_slot: int, keys: torch.Tensor, values: torch.Tensor
    ) -> Event:
        """K,V of the tile's rebuilt rows, over what was loaded if anything was."""
        layer, shipment = under_way.layer, under_way.shipment
        part, token_ids = shipment.rebuilt, shipment.token_ids
        if part is None or part.positions is None or token_ids is None:
            raise RuntimeError("a tile with nothing to rebuild has a slot of X")
        mover, after = shipment.mover, [*under_way.sent, *under_way.loaded]
        if layer == 0:
            work = mover.embed(token_ids, part.positions, x_slot)
            after.append(self._lanes.run(Lane.COMPUTE, work, under_way.sent))
        elif shipment.take_inputs is not None:
            work = mover.take(layer, part, x_slot, shipment.take_inputs)
            after.append(self._lanes.run(Lane.COMPUTE, work, under_way.sent))
        work = mover.rebuild(layer, part, x_slot, keys, values)
        rebuilt = self._lanes.run(Lane.COMPUTE, work, after)
        self._x_slots.give(x_slot, rebuilt)
        return rebuilt

    def _kv_slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = slice(slot * self._tile_pages, (slot + 1) * self._tile_pages)
        return self._staging.keys[pages], self._staging.values[pages]


def compute(feed: Feed | None, name: str, layer: int, call: Callable[[], Result]) -> Result:
    """Part of a forward pass, on a lane when the step has a feed."""
    return call() if feed is None else feed.compute(name, layer, call)
