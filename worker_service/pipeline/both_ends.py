"""Restores a prefix from both ends: prefill from the front, whole chunks from the back.

The front is computed from token ids by the real prefill, all layers of a block at a
time, while the link brings the chunks from the last one on, until they meet. Works
for every architecture, since no activations are needed. Who takes which chunks comes
from `splitpoint.planning.bidirectional`; requests and the store's calls are not known here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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
    """How a restore from both ends went: [0, recomputed_tokens) was computed."""

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
    `block_tokens` are computed at once. `expected_tokens`: where the two are expected
    to meet, which decides who begins with how much; the serial twin meets there.
    Raises ChunkLost when a slot changed while it was read: the pages then hold nothing
    usable.
    """
    if prefix.first_chunk:
        raise ValueError("who computes from the front needs pages from the front on")
    if not prefix.chunks:
        return BothEndsResult(0, [])
    ends = _Ends(transfer, lanes, prefix, block_tokens, expected_tokens)
    front = _Front(transfer, prefix, keys, values, block_tokens)
    back = _Back(transfer, prefix, keys, values)
    try:
        loads = lanes.run_on_demand(Lane.LINK_IN, lambda: back.works(ends.next_back()))
        begun: deque[Event] = deque()
        while (chunks := ends.next_front()) is not None:
            begun.append(lanes.run(Lane.COMPUTE, front.work(chunks)))
            if len(begun) > lanes.ahead:
                begun.popleft().wait()
            if loads.is_done:
                loads.wait()  # raises what ended it
        spans = lanes.finish()
    except BaseException:
        ends.close()
        # No lane may touch the pages once somebody else may have them.
        lanes.settle()
        raise
    # A slot's generation only grows: if it is current now, it was all the time.
    transfer.tensors.check_current(back.loaded)
    return BothEndsResult(front.computed_tokens, spans)


class _Ends:
    """Lets the thread that computes and the one that loads ask one at a time."""

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
        self._meeting = BidirectionalQueue(
            count,
            front=front,
            back=back,
            expected_share=1.0 if expected_tokens >= cached else expected_tokens / (count * chunk),
            ahead=lanes.ahead,
        )

    def next_front(self) -> range | None:
        with self._lock:
            return self._meeting.pop_front()

    def next_back(self) -> range | None:
        with self._lock:
            if self._overlapping:
                return self._meeting.pop_back()
            return self._meeting.pop_back_in_turn()

    def close(self) -> None:
        with self._lock:
            self._meeting.close()


class _Back:
    """Whole chunks over the link, all layers at once."""

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
        self.loaded: list[StoredChunk] = []

    def works(self, chunks: range | None) -> list[Work]:
        """A copy for each layer; none for no chunks."""
        if chunks is None:
            return []
        transfer, span = self._transfer, slice(chunks.start, chunks.stop)
        pages = [page for page in self._prefix.pages[span] if page is not None]
        stored = self._prefix.chunks[span]
        first, last = chunks.start * transfer.chunk_tokens, chunks.stop * transfer.chunk_tokens
        part = transfer.part(stored, pages, min(last, self._prefix.cached_tokens) - first)
        self.loaded += stored
        return [
            transfer.load(layer, part, keys, values)
            for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True))
        ]


class _Front:
    """The real prefill, a block of tokens at a time, its K and V into the prefix's pages."""

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
        """Chunks of the front, which begin where the ones before ended."""
        first = self.computed_tokens
        last = min(chunks.stop * self._chunk, self._prefix.cached_tokens)
        self.computed_tokens = last

        def call() -> None:
            for start in range(first, last, self._block_tokens):
                self._fill(range(start, min(start + self._block_tokens, last)))

        flops = self._model.shape.fill_flops(last - first, first)
        return Work("prefill", call, 0, flops, tokens=last - first)

    def _fill(self, block: range) -> None:
        """K and V of these tokens in every layer; those of all before them are there."""
        device, ids = self._device, self._prefix.token_ids[block.start : block.stop]
        positions = torch.arange(block.start, block.stop, device=device)
        pages = torch.tensor([self._pages[position // self._chunk] for position in block])
        step = _Step(
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
        # Of the last layer only K and V are needed: the rest of it would lead to logits.
        for last in layers:
            step.write(before_last, *last.project_kv(last.attention_input(hidden), rotary))


@dataclass(frozen=True, slots=True)
class _Step:
    """One block's rows: where K and V go, and what they attend to."""

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
