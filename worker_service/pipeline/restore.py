"""Brings a stored prefix onto the device: loads K,V[l:] and rebuilds K,V[:l] from X.

What is done in which order comes from `splitpoint.planning.schedule`; this carries it out on
lanes, where the serial twin is a matter of which lanes they are. Knows nothing of
requests or of the store's calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Bring the prefix into cache pages; returns what ran when.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`. Tiles are
    of `tile_tokens`, as far as the staging memory allows. Raises ChunkLost when a slot
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
    carrier = _Carrier(transfer, prefix, keys, values)
    spans: list[Span] = []
    try:
        tasks = restore_tasks(work, schedule)
        if any(task.kind is TaskKind.WEIGHTS for task in tasks):
            # What was on its way for the next step has the same slots.
            spans += lanes.finish()
        lanes.run_all(Step(task.lane, carrier.work_of(task), task.after) for task in tasks)
        spans += lanes.finish()
    except BaseException:
        # No lane may touch the pages once somebody else may have them.
        lanes.settle()
        raise
    # A slot's generation only grows: if it is current now, it was all the time.
    transfer.tensors.check_current(wanted)
    return spans


class _Carrier:
    """Turns tasks into work; what all layers share is made once."""

    def __init__(
        self,
        transfer: CacheTransfer,
        prefix: Prefix,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        self._transfer = transfer
        self._prefix = prefix
        self._keys = keys
        self._values = values
        self._parts: dict[tuple[bool, int, int], Part] = {}
        # In which slot a layer's W_K and W_V are, if they come over the link.
        self._weight_slots: dict[int, int] = {}

    def work_of(self, task: Task) -> Work:
        transfer, layer = self._transfer, task.layer
        keys, values = self._keys[layer], self._values[layer]
        if task.kind is TaskKind.LOAD:
            return transfer.load(layer, self._part(task), keys, values)
        if task.kind is TaskKind.WEIGHTS:
            return self._bring_weights(task)
        if task.kind is TaskKind.EMBED:
            ids = self._prefix.token_ids[task.first : task.last]
            token_ids = torch.tensor(ids, dtype=torch.int64, device=transfer.device)
            return transfer.embed(token_ids, self._positions(task), task.slot)
        if task.kind is TaskKind.SEND:
            if task.slot is None:
                raise RuntimeError("activations are sent into a staging slot")
            return transfer.send(layer, self._part(task), task.slot)
        work = transfer.rebuild(layer, self._part(task), task.slot, keys, values)
        return self._with_weights(work, layer)

    def _bring_weights(self, task: Task) -> Work:
        weights = self._transfer.model.layer_weights
        if weights is None or task.slot is None:
            raise RuntimeError("weights that are on the device are said to be on the host")
        self._weight_slots[task.layer] = task.slot
        return weights.piece_work(task.layer, WeightPiece.KEY_VALUE, task.slot)

    def _with_weights(self, work: Work, layer: int) -> Work:
        weights, slot = self._transfer.model.layer_weights, self._weight_slots.get(layer)
        if weights is None or slot is None:
            return work

        def call() -> None:
            with weights.lent(layer, WeightPiece.KEY_VALUE, slot):
                work.call()

        return replace(work, call=call)

    def _part(self, task: Task) -> Part:
        is_rebuilt = task.kind is not TaskKind.LOAD
        key = (is_rebuilt, task.first, task.last)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._make_part(task, is_rebuilt=is_rebuilt)
        return part

    def _make_part(self, task: Task, *, is_rebuilt: bool) -> Part:
        chunk = self._transfer.chunk_tokens
        span = slice(task.first // chunk, chunks_of(task.last, chunk))
        chunks = self._prefix.chunks[span]
        pages = [page for page in self._prefix.pages[span] if page is not None]
        if is_rebuilt:
            return self._transfer.rebuilt_part(chunks, pages, self._positions(task))
        return self._transfer.part(chunks, pages, task.tokens)

    def _positions(self, task: Task) -> torch.Tensor:
        return torch.arange(task.first, task.last, device=self._transfer.device)
