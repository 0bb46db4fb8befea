"""Restores a prefix from both ends: recomputes from the front, loads from the back.

As in KVPR, the device recomputes one end while the link brings the other. Here the
front is prefilled from token ids, all layers of a block at a time, and whole chunks are
loaded from the last one on, until the two sides meet. No activations are needed, so
this works for every architecture. `splitpoint.planning.bidirectional` decides which side
gets which chunks; this module knows no requests and no calls of the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from splitpoint.planning.bidirectional import BidirectionalQueue, piece_sizes
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import chunks_of
from worker_service.device.copies import sent
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer
from worker_service.pipeline.restore import Prefix, RestoreRun, Target
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk


@dataclass(frozen=True, slots=True)
class BothEndsResult:
    """The outcome of a restore from both ends: [0, recomputed_tokens) was computed."""

    recomputed_tokens: int
    spans: list[Span]


class BothEndsRestore(RestoreRun):
    """A restore from both ends, in pieces. All but `draw` belongs to the owner's thread.

    The link draws the copies of the back, beside those of steps. The owner computes the front,
    `front_tokens` at a time.
    """

    def __init__(
        self,
        transfer: CacheTransfer,
        lanes: Lanes,
        prefix: Prefix,
        target: Target,
        *,
        block_tokens: int,
        expected_tokens: int,
        copies: Iterable[Work] = (),
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to bring `prefix` to `target`; its `split_tokens` do not matter.

        At most `block_tokens` are computed at once. The two sides are expected to meet at
        `expected_tokens`, which decides how much each begins with; the serial twin meets
        there. The link does further `copies` last. Nothing begins before `begin`.
        """
        super().__init__(lanes, on_change)
        self._transfer = transfer
        self._prefix = prefix
        self._target = target
        self._copies = list(copies)
        chunk, cached = transfer.chunk_tokens, prefix.cached_tokens
        self._first = prefix.first_chunk
        count = chunks_of(cached, chunk) - self._first
        begin = self._first * chunk
        front, back = piece_sizes(chunk, block_tokens)
        share = 1.0
        if count and expected_tokens < cached:
            share = max(0, expected_tokens - begin) / (count * chunk)
        self._queue = BidirectionalQueue(count, front=front, back=back, expected_share=share)
        # The end of the tokens that the front has claimed.
        self._claimed = begin
        self._front_ended = self._back_ended = not count
        self._works: deque[Work] = deque()
        self._left = 0
        self._loaded: list[StoredChunk] = []

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the front has claimed; [0, first_chunk) is on the device."""
        return self._claimed - self._first * self._transfer.chunk_tokens

    @property
    def loaded_chunks(self) -> list[StoredChunk]:
        """The chunks that the link was given."""
        with self.group.changed:
            return list(self._loaded)

    @property
    def is_done(self) -> bool:
        """True if both sides have met, and nothing is left to copy."""
        with self.group.changed:
            return self._is_loaded() and self._front_ended

    @property
    def left_tokens(self) -> tuple[int, int]:
        """Tokens times layers that neither side has claimed; the front's are no rebuilds."""
        with self.group.changed:
            chunks = self._queue.back - self._queue.front
            return chunks * self._transfer.chunk_tokens * len(self._target.keys), 0

    def front_tokens(self, computed: int) -> int:
        """Return how many tokens to compute next, after the first `computed`; 0: no more.

        The sides have met once there are no more and `is_done`.
        """
        if computed < self._claimed or self._front_ended:
            return max(0, self._claimed - computed)
        with self.group.changed:
            chunks = self._queue.pop_front()
            if chunks is None:
                self._front_ended = True
                return 0
        end = (self._first + chunks.stop) * self._transfer.chunk_tokens
        self._claimed = min(end, self._prefix.cached_tokens)
        return max(0, self._claimed - computed)

    def wait(self) -> None:
        """Wait until the link has loaded all that it has claimed, or failed."""
        with self.group.changed:
            self.group.changed.wait_for(lambda: self.group.error is not None or self._is_loaded())

    def _is_loaded(self) -> bool:
        return self._back_ended and not (self._left or self._works or self._copies)

    @property
    def wants_owner(self) -> bool:
        return True  # the two sides meet where either of them got to

    def _draw(self) -> Piece | None:
        if not self._works and not self._back_ended:
            self._claim_back()
        if self._works:
            work = self._works.popleft()
        elif self._copies:
            work = self._copies.pop(0)
        else:
            return None
        self._left += 1
        return Piece(work, self._end)

    def _end(self) -> None:
        self._left -= 1

    def _claim_back(self) -> None:
        """Claim chunks of the back: one copy for each layer."""
        pop = self._queue.pop_back if self._lanes.overlapping else self._queue.pop_back_in_turn
        chunks = pop()
        if chunks is None:
            self._back_ended = True
            return
        chunk = self._transfer.chunk_tokens
        mine = range(self._first + chunks.start, self._first + chunks.stop)
        last = min(mine.stop * chunk, self._prefix.cached_tokens)
        part = self._prefix.part(mine, last - mine.start * chunk)
        self._loaded += part.chunks
        self._works += [
            self._transfer.load(layer, part, keys, values)
            for layer, (keys, values) in enumerate(
                zip(self._target.keys, self._target.values, strict=True)
            )
        ]


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
    """Bring the whole prefix into cache pages alone, waiting for it.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`; see
    `BothEndsRestore`. Raises ChunkLost if a slot changed while it was read: the pages then
    hold nothing usable.
    """
    if prefix.first_chunk:
        raise ValueError("a restore from both ends needs the prefix's pages from the front on")
    run = BothEndsRestore(
        transfer,
        lanes,
        prefix,
        Target(keys, values),
        block_tokens=block_tokens,
        expected_tokens=expected_tokens,
    )
    front = _FrontPrefill(transfer, prefix, keys, values, block_tokens)
    run.begin()
    try:
        while count := run.front_tokens(front.computed_tokens):
            if not _computed(lanes, run.group, front.work(count)):
                break
        run.wait()
    finally:
        # The pages may be given to another request: no lane may touch them any more.
        run.close()
        run.group.wait_quiet()
    if run.group.error is not None:
        raise run.group.error
    # A slot's generation only grows: one that is current now was current all the time.
    transfer.tensors.check_current(run.loaded_chunks)
    return BothEndsResult(front.computed_tokens, lanes.count_spans(run.group.take_spans()))


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
        rotary = self._model.rotary(positions)
        hidden = self._model.embed(sent(ids, device), positions)
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
