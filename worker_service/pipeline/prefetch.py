"""Keeps the next tiles of a step on the link while the device attends the present one.

The tiles that a forward pass reads are known before it begins: one list for each layer.
`step_tasks` (splitpoint/planning/schedule.py) lays them out as tasks: which staging slot a tile
fills, and what that waits for. While layer i computes its MLP, the first tiles of layer i + 1
arrive. The prefetcher gives the tasks to their lanes in that order; the host never waits here.
On a GPU the lanes wait for each other (not confirmed on a GPU yet).

This module knows no requests, and not what attention does with a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from splitpoint.planning.schedule import Lane, Task, TaskKind, TileShape, step_tasks
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
        self._layers = layers
        self._inputs = staging.step_slots(tile_pages)
        shapes = {id(each): each.shape for tiles in layers for each in tiles}
        self._tasks = step_tasks(
            [[shapes[id(each)] for each in tiles] for tiles in layers],
            staging.page_count // tile_pages,
            lanes.schedule,
        )
        self._task = next(self._tasks, None)
        # The ends of the tasks that their lanes were given.
        self._ends: list[Event] = []

    def start(self) -> None:
        """Fill the slots with the first tiles."""
        self._copy_ahead()

    def consume(self, layer: int, tile_transfer: TileTransfer, attend: Attend) -> None:
        """Rebuild the rebuilt rows of the tile once it is there, and attend it.

        `attend` receives K and V `[tile pages, n_kv, chunk_tokens, d]`, the tile's pages
        first, and runs as work of the compute lane.
        """
        while (task := self._task) is not None and task.kind is not TaskKind.ATTEND:
            self._give(task, self._work_of(task))
        if task is None or task.layer != layer or self._tile_of(task) is not tile_transfer:
            raise RuntimeError("tiles are taken in another order than they come")
        keys, values = self._kv_tensors(task)
        work = Work("attend", lambda: attend(keys, values), layer=layer, tokens=task.tokens)
        self._give(task, work)
        self._copy_ahead()

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

    def _copy_ahead(self) -> None:
        """Give the link the copies that wait for no product of the next tile."""
        while self._task is not None and self._task.lane is Lane.LINK_IN:
            self._give(self._task, self._work_of(self._task))

    def _give(self, task: Task, work: Work) -> None:
        """Give a task to its lane, behind the tasks that it waits for."""
        after = [self._ends[index] for index in task.after]
        self._ends.append(self._lanes.run(task.lane, work, after))
        self._task = next(self._tasks, None)

    def _tile_of(self, task: Task) -> TileTransfer:
        return self._layers[task.layer][task.tile]

    def _work_of(self, task: Task) -> Work:
        """Return the work of a task that brings a tile."""
        layer, tile = task.layer, self._tile_of(task)
        transfer = tile.transfer
        if task.kind is TaskKind.LOAD and tile.loaded is not None:
            return transfer.load(layer, tile.loaded, *self._kv_tensors(task))
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
                return transfer.rebuild(layer, rebuilt, inputs, *self._kv_tensors(task))
        raise RuntimeError(f"nothing of a tile is brought by {task.kind.value}")

    def _kv_tensors(self, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
        first = task.kv_slot * self._tile_pages
        pages = slice(first, first + self._tile_pages)
        return self._staging.keys[pages], self._staging.values[pages]


def compute(
    prefetcher: Prefetcher | None, name: str, layer: int, call: Callable[[], Result]
) -> Result:
    """Run a part of a forward pass, on a lane if the step has a prefetcher."""
    return call() if prefetcher is None else prefetcher.compute(name, layer, call)
