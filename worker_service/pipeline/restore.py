"""Brings a stored prefix onto the device: loads K,V[l:] and rebuilds K,V[:l] from X.

`splitpoint.planning.schedule` decides the tasks and their order; `restore` gives them to
lanes, of which `SerialLanes` are the serial twin. This module knows no requests and no
calls of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from splitpoint.planning.schedule import RestoreWork, Schedule, Task, TaskKind, restore_tasks
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import chunks_of
from worker_service.lanes.lanes import Lanes, Step, Work
from worker_service.lanes.timeline import Span
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import StoredChunk


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


def restore(
    transfer: CacheTransfer,
    lanes: Lanes,
    prefix: Prefix,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    schedule: Schedule = Schedule.PIPELINED,
    tile_tokens: int,
) -> list[Span]:
    """Bring the prefix into cache pages; return the spans of the work.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`. Tiles have
    `tile_tokens`, as far as the staging memory allows. Raises ChunkLost if a slot
    changed while it was read: the pages then hold nothing usable.
    """
    wanted = prefix.chunks[prefix.first_chunk :]
    if not wanted:
        return []
    transfer.divide(tile_tokens)
    weights = transfer.model.layer_weights
    work = RestoreWork(
        layer_count=len(keys),
        first=prefix.first_chunk * transfer.chunk_tokens,
        split=prefix.split_tokens,
        cached=prefix.cached_tokens,
        chunk_tokens=transfer.chunk_tokens,
        tile_tokens=transfer.tile_tokens,
        slots=transfer.slot_count,
        host_layers=frozenset() if weights is None else frozenset(weights.keys),
        weight_slots=0 if weights is None else weights.slot_count,
    )
    maker = _WorkMaker(transfer, prefix, keys, values)
    spans: list[Span] = []
    try:
        tasks = restore_tasks(work, schedule)
        if any(task.kind is TaskKind.WEIGHTS for task in tasks):
            # Weights on their way for the next step use the same slots.
            spans += lanes.finish()
        lanes.run_all(Step(task.lane, maker.work_of(task), task.after) for task in tasks)
        spans += lanes.finish()
    except BaseException:
        # The pages may be given to another request: no lane may touch them any more.
        lanes.finish_after_error()
        raise
    # A slot's generation only grows: one that is current now was current all the time.
    transfer.tensors.check_current(wanted)
    return spans


@dataclass(slots=True)
class _WorkMaker:
    """Makes the work of tasks; all layers share what depends on the tokens alone."""

    transfer: CacheTransfer
    prefix: Prefix
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    parts: dict[tuple[bool, int, int], Part] = field(default_factory=dict)
    # The slot of each layer's W_K and W_V that come over the link.
    weight_slots: dict[int, int] = field(default_factory=dict)

    def work_of(self, task: Task) -> Work:
        transfer, layer = self.transfer, task.layer
        keys, values = self.keys[layer], self.values[layer]
        match task.kind:
            case TaskKind.LOAD:
                return transfer.load(layer, self._part(task), keys, values)
            case TaskKind.WEIGHTS:
                return self._load_weights(task)
            case TaskKind.EMBED:
                ids = self.prefix.token_ids[task.first : task.last]
                token_ids = torch.tensor(ids, dtype=torch.int64, device=transfer.device)
                return transfer.embed(token_ids, self._positions(task), task.slot)
            case TaskKind.SEND:
                if task.slot is None:
                    raise RuntimeError("activations are sent into a staging slot")
                return transfer.send(layer, self._part(task), task.slot)
            case TaskKind.REBUILD:
                work = transfer.rebuild(layer, self._part(task), task.slot, keys, values)
                return self._with_weights(work, layer)

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
