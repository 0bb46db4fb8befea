"""Restores a prefix from both ends alone, with a prefill of its own for the front.

Benchmarks, and a worker at its start, measure with it. A request's front is computed by steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from splitpoint.planning.schedule import Lane
from worker_service.device.copies import sent
from worker_service.kernels.row_wise import write
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.model import Layer
from worker_service.pipeline.executor import RestoreRun
from worker_service.pipeline.task_work import Prefix, Target
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.pipeline.two_ends import TwoEnds


def restore_from_both_ends(
    transfer: CacheTransfer,
    lanes: Lanes,
    prefix: Prefix,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    block_tokens: int,
    expected_tokens: int,
) -> list[Span]:
    """Bring the whole prefix into cache pages alone, waiting for it; return the spans of the work.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`; see `TwoEnds`. Raises
    ChunkLost if a slot changed while it was read: the pages then hold nothing usable.
    """
    if prefix.first_chunk:
        raise ValueError("a restore from both ends needs the prefix's pages from the front on")
    ends = TwoEnds.over_link(
        first_chunk=0,
        cached_tokens=prefix.cached_tokens,
        chunk_tokens=transfer.chunk_tokens,
        block_tokens=block_tokens,
        expected_tokens=expected_tokens,
        in_turn=not lanes.overlapping,
    )
    run = RestoreRun(
        transfer, lanes, prefix, Target(keys, values), tile_tokens=block_tokens, ends=ends
    )
    front = _FrontPrefill(transfer, prefix, keys, values, block_tokens)
    run.begin()
    try:
        while count := ends.front_tokens(front.computed_tokens):
            if not _computed(lanes, run.group, front.work(count)):
                break
        with run.group.changed:
            run.group.changed.wait_for(lambda: run.group.error is not None or run.is_done)
    finally:
        # The pages may be given to another request: no lane may touch them any more.
        run.close()
        run.group.wait_quiet()
    if run.group.error is not None:
        raise run.group.error
    # A slot's generation only grows: one that is current now was current all the time.
    transfer.tensors.check_current(prefix.chunks[ends.first_loaded_chunk :])
    return lanes.count_spans(run.group.take_spans())


def _computed(lanes: Lanes, group: Group, work: Work) -> bool:
    """Compute a piece of the front and wait for it; return False if the group has an error."""
    ended: list[None] = []
    lanes.run_piece(Lane.COMPUTE, group, Piece(work, lambda: ended.append(None)))
    with group.changed:
        group.changed.wait_for(lambda: ended or group.error is not None)
    return group.error is None


class _FrontPrefill:
    """Prefills blocks of tokens, whose K and V go to the prefix's pages."""

    def __init__(
        self,
        transfer: CacheTransfer,
        prefix: Prefix,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        block_tokens: int,
    ) -> None:
        self._model = transfer.model
        self._device = transfer.device
        self._chunk = transfer.chunk_tokens
        self._prefix = prefix
        self._pages = [page for page in prefix.pages if page is not None]
        self._keys = keys
        self._values = values
        self._block_tokens = block_tokens
        self._windows = {layer.window for layer in transfer.model.layers}
        self.computed_tokens = 0

    def work(self, count: int) -> Work:
        """Return the prefill of this many tokens, which begin where the last ones ended."""
        first = self.computed_tokens
        last = self.computed_tokens = first + count

        def call() -> None:
            for start in range(first, last, self._block_tokens):
                self._prefill(range(start, min(start + self._block_tokens, last)))

        flops = self._model.shape.fill_flops(last - first, first)
        return Work("prefill", call, 0, flops, tokens=last - first)

    def _prefill(self, block: range) -> None:
        """Compute K and V of a block in every layer, after all blocks before it."""
        device, ids = self._device, self._prefix.token_ids[block.start : block.stop]
        positions = torch.arange(block.start, block.stop, device=device)
        pages = torch.tensor([self._pages[position // self._chunk] for position in block])
        step = _BlockAttention(
            self._keys,
            self._values,
            pages.to(device),
            positions % self._chunk,
            PrefillPlan.of_prefix(
                self._pages,
                block.start,
                len(block),
                chunk_tokens=self._chunk,
                windows=self._windows,
                device=device,
            ),
        )
        write_last = partial(step.write, len(self._keys) - 1)
        self._model.fill(sent(ids, device), positions, step.attend, write_last)


@dataclass(frozen=True, slots=True)
class _BlockAttention:
    """Where one block's K and V go, and what its rows attend to."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    pages: torch.Tensor
    rows: torch.Tensor
    plan: PrefillPlan

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        write(self.keys[layer], self.values[layer], self.pages, self.rows, keys, values)

    def attend(
        self,
        index: int,
        layer: Layer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        self.write(index, keys, values)
        return prefill(
            queries,
            keys,
            values,
            self.keys[index],
            self.values[index],
            self.plan,
            window=layer.window,
            scale=layer.scale,
            cap=layer.cap,
            sinks=layer.sinks,
        )
