"""Restores a prefix from both ends: recomputes from the front, loads from the back.

As in KVPR, the device recomputes one end while the link brings the other. Here the
front is prefilled from token ids, all layers of a block at a time, and whole chunks are
loaded from the last one on, until the two sides meet. No activations are needed, so
this works for every architecture. `splitpoint.planning.bidirectional` decides which side
gets which chunks; this module knows no requests and no calls of the store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from splitpoint.planning.bidirectional import BidirectionalQueue, piece_sizes
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import chunks_of
from worker_service.lanes.lanes import Event, Lanes, Work
from worker_service.lanes.timeline import Span
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer
from worker_service.pipeline.restore import Prefix
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk


@dataclass(frozen=True, slots=True)
class BothEndsResult:
    """The outcome of a restore from both ends: [0, recomputed_tokens) was computed."""

    recomputed_tokens: int
    spans: list[Span]


def restore_from_both_ends(
    transfer: CacheTransfer,
    lanes: Lanes,
    prefix: Prefix,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    block_tokens: int,
    expected_tokens: int,
) -> BothEndsResult:
    """Bring the whole prefix into cache pages; its `split_tokens` do not matter.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`. At most
    `block_tokens` are computed at once. The two sides are expected to meet at
    `expected_tokens`, which decides how much each begins with; the serial twin meets
    there. Raises ChunkLost if a slot changed while it was read: the pages then hold
    nothing usable.
    """
    if prefix.first_chunk:
        raise ValueError("a restore from both ends needs the prefix's pages from the front on")
    if not prefix.chunks:
        return BothEndsResult(0, [])
    queue = _LockedQueue(transfer, lanes, prefix, block_tokens, expected_tokens)
    front = _FrontPrefill(transfer, prefix, keys, values, block_tokens)
    back = _BackLoader(transfer, prefix, keys, values)
    try:
        loads = lanes.run_on_demand(Lane.LINK_IN, lambda: back.works(queue.pop_back()))
        begun: deque[Event] = deque()
        while (chunks := queue.pop_front()) is not None:
            begun.append(lanes.run(Lane.COMPUTE, front.work(chunks)))
            if len(begun) > lanes.unfinished_batches:
                begun.popleft().wait()
            if loads.is_done:
                loads.wait()  # raises the error that ended it
        spans = lanes.finish()
    except BaseException:
        queue.close()
        # The pages may be given to another request: no lane may touch them any more.
        lanes.finish_after_error()
        raise
    # A slot's generation only grows: one that is current now was current all the time.
    transfer.tensors.check_current(back.loaded)
    return BothEndsResult(front.computed_tokens, spans)


class _LockedQueue:
    """Lets the thread that computes and the one that loads use the queue one at a time."""

    def __init__(
        self,
        transfer: CacheTransfer,
        lanes: Lanes,
        prefix: Prefix,
        block_tokens: int,
        expected_tokens: int,
    ) -> None:
        chunk, cached = transfer.chunk_tokens, prefix.cached_tokens
        count = chunks_of(cached, chunk)
        front, back = piece_sizes(chunk, block_tokens)
        self._lock = threading.Lock()
        self._overlapping = lanes.overlapping
        self._queue = BidirectionalQueue(
            count,
            front=front,
            back=back,
            expected_share=1.0 if expected_tokens >= cached else expected_tokens / (count * chunk),
            ahead=lanes.unfinished_batches,
        )

    def pop_front(self) -> range | None:
        with self._lock:
            return self._queue.pop_front()

    def pop_back(self) -> range | None:
        with self._lock:
            if self._overlapping:
                return self._queue.pop_back()
            return self._queue.pop_back_in_turn()

    def close(self) -> None:
        with self._lock:
            self._queue.close()


@dataclass(slots=True)
class _BackLoader:
    """Loads whole chunks over the link, all layers of them at once."""

    transfer: CacheTransfer
    prefix: Prefix
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    loaded: list[StoredChunk] = field(default_factory=list)

    def works(self, chunks: range | None) -> list[Work]:
        """Return a copy for each layer; no copies if there are no chunks."""
        if chunks is None:
            return []
        chunk = self.transfer.chunk_tokens
        last = min(chunks.stop * chunk, self.prefix.cached_tokens)
        part = self.prefix.part(chunks, last - chunks.start * chunk)
        self.loaded += part.chunks
        return [
            self.transfer.load(layer, part, keys, values)
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
        ]


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

    def work(self, chunks: range) -> Work:
        """Return the prefill of these chunks, which begin where the last ones ended."""
        first = self.computed_tokens
        last = min(chunks.stop * self._chunk, self._prefix.cached_tokens)
        self.computed_tokens = last

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
        rotary = self._model.rotary(positions)
        hidden = self._model.embed(torch.tensor(ids, device=device), positions)
        layers, before_last = self._model.visit(), len(self._keys) - 1
        hidden = through_layers(islice(layers, before_last), hidden, rotary, step.attend)
        # Only K and V of the last layer are needed: the rest of it leads to logits.
        for last in layers:
            step.write(before_last, *last.project_kv(last.attention_input(hidden), rotary))


@dataclass(frozen=True, slots=True)
class _BlockAttention:
    """Where one block's K and V go, and what its rows attend to."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    pages: torch.Tensor
    rows: torch.Tensor
    plan: PrefillPlan

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer][self.pages, :, self.rows] = keys
        self.values[layer][self.pages, :, self.rows] = values

    def attend(
        self,
        index: int,
        layer: DecoderLayer,
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
        )
