"""What a limit of host memory leaves of one sequence's stored tokens (InfiniGen, section 4.4).

Until it starts, a pool only learns what is read. Its start leaves out, in each layer and KV head,
the tokens that exceed the limit: the others move into slots that no other sequence knows. From
then on a chunk that leaves the device is written over the tokens that leave the pool, row by row,
or into one slot more where the limit grows by that. Chunks that other sequences use, too, are no
memory of this one: they stay whole, in front, and nothing is written over them.

A place is a row of a KV head in the chunks that are read, counted from the first one's first.
Decides, and knows no bytes, no slots and no keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.residency.selecting import pool_chunks
from splitpoint.selection import PoolPolicy, Selection
from worker_service.selection.pool import TokenPool

# int64 `[n_kv, n]` for each layer.
Places = dict[int, npt.NDArray[np.int64]]


class PoolStage(Enum):
    """How far a pool is."""

    WHOLE = "whole"  # all tokens are left, in chunks as any other sequence has
    STARTING = "starting"  # those that stay are on their way into slots of its own
    BOUND = "bound"  # what leaves the device is written over what leaves the pool
    LOST = "lost"  # the screens are gone, and no step can build them of what is left


@dataclass(frozen=True, slots=True)
class Moving:
    """What stays of the chunks behind the shared ones.

    Attributes:
        places: where it lies, in the order of the places that it comes to.
        chunk_count: slots that it fills.
        used_chunks: those of which more stays than of the mean chunk, if reading decided it;
            numbers count through all chunks.
    """

    places: Places
    chunk_count: int
    used_chunks: tuple[int, ...]


class BoundedPool:
    """The places of one sequence. Used by the engine's thread only.

    Attributes:
        stage: see `PoolStage`.
        shared_chunks: chunks in front that are not written over, once it starts.
        chunk_count: slots of its own, once it starts; with one that is asked for.
        evicted_tokens: stored tokens that have left each layer and KV head, as many everywhere;
            not those whose successors are on their way.
    """

    def __init__(
        self, selection: Selection, kv_heads: int, chunk_tokens: int, device: torch.device
    ) -> None:
        self.stage = PoolStage.WHOLE
        self.shared_chunks = 0
        self.chunk_count = 0
        self.evicted_tokens = 0
        self._selection = selection
        self._kv_heads = kv_heads
        self._chunk = chunk_tokens
        self._device = device
        self._layers: dict[int, TokenPool] = {}
        # Chunks behind the shared ones that have left the device, or are about to.
        self._own_chunks = 0
        self._moving: Moving | None = None
        # Chunks at the next attempt to start, and the limit at the last one to grow that failed.
        self._next_try = 0
        self._refused_limit = 0
        # For each chunk on its way: the places that it is written over; None: a slot more.
        self._writing: deque[Places | None] = deque()

    @property
    def is_whole(self) -> bool:
        return self.stage is PoolStage.WHOLE

    @property
    def is_bound(self) -> bool:
        return self.stage is PoolStage.BOUND

    @property
    def empty_places(self) -> int:
        """Places of each KV head whose tokens have left, and whose next ones are on their way."""
        if self.stage is PoolStage.STARTING:
            return self._chunk * (self._own_chunks - self.chunk_count)
        return self._chunk * sum(each is not None for each in self._writing)

    # -- what is read -------------------------------------------------------------------

    def begin(self, layer: int, count: int, first_position: int) -> None:
        """Begin with a layer's stored tokens, all left."""
        pool = TokenPool(
            self._selection,
            self._kv_heads,
            first_position=first_position,
            device=self._device,
        )
        pool.admit(count)
        self._layers[layer] = pool

    def extend(self) -> None:
        """Give a chunk behind the others places of its own, in all layers."""
        for pool in self._layers.values():
            pool.admit(self._chunk)

    def held(self, layer: int) -> torch.Tensor:
        """Return the places whose tokens are left, bool `[n_kv, places]`."""
        return self._layers[layer].held

    def positions(self, layer: int) -> torch.Tensor:
        """Return the position of the token in each place, int64 `[n_kv, places]`."""
        return self._layers[layer].tokens

    def read(self, layer: int, chosen: torch.Tensor, first_position: int) -> None:
        """Learn the places that consecutive queries chose, bool `[T, n_kv, places]`."""
        self._layers[layer].read(chosen, first_position)

    # -- the limit ----------------------------------------------------------------------

    def is_due(self, chunk_count: int) -> bool:
        """Return True once for each number of chunks, if the limit is below them.

        After a refusal not before there are twice as many: the store would count every attempt.
        """
        if chunk_count < self._next_try:
            return False
        self._next_try = chunk_count + 1
        return pool_chunks(self._selection, chunk_count, self._chunk) < chunk_count

    def start(self, shared_chunks: int, chunk_count: int, first_recent: int) -> Moving | None:
        """Choose what stays of the chunks so far, of which the first are shared.

        Return None, and change nothing, while all of it may stay. Tokens from position
        `first_recent` on stay in any case. What does not stay is read no more from now on, unless
        it is `refused`.
        """
        own = chunk_count - shared_chunks
        kept = pool_chunks(self._selection, own, self._chunk)
        if kept == own:
            return None
        self.shared_chunks, self.chunk_count, self._own_chunks = shared_chunks, kept, own
        self.stage = PoolStage.STARTING
        first = shared_chunks * self._chunk
        places: Places = {}
        for layer, pool in self._layers.items():
            pool.evict_oldest(
                (own - kept) * self._chunk, first_place=first, first_recent=first_recent
            )
            # As many in each head, in ascending order.
            held = pool.held[:, first:].to(torch.uint8)
            order = held.argsort(dim=-1, stable=True, descending=True)
            places[layer] = (order[:, : kept * self._chunk] + first).cpu().numpy()
        self._moving = Moving(places, kept, self._used_chunks(first))
        return self._moving

    def _used_chunks(self, first: int) -> tuple[int, ...]:
        if self._selection.policy is PoolPolicy.FIFO:
            return ()
        counts = sum(pool.held[:, first:].sum(0) for pool in self._layers.values())
        of_chunk = torch.as_tensor(counts).view(-1, self._chunk).sum(-1).double()
        used = (of_chunk > of_chunk.mean()).nonzero().flatten() + self.shared_chunks
        return tuple(used.tolist())

    @property
    def used_chunks(self) -> tuple[int, ...]:
        """See `Moving`, while what stays is on its way."""
        return () if self._moving is None else self._moving.used_chunks

    def started(self) -> dict[int, torch.Tensor]:
        """Leave out what does not stay; return the former places, `[n_kv, n]` of each layer."""
        if self._moving is None:
            raise RuntimeError("a pool that was not started has started")
        first = self.shared_chunks * self._chunk
        shared = torch.arange(first).expand(self._kv_heads, -1)
        kept = {}
        for layer, places in self._moving.places.items():
            kept[layer] = torch.cat((shared, torch.from_numpy(places)), -1).to(self._device)
            self._layers[layer].keep(kept[layer])
        self.evicted_tokens += (self._own_chunks - self.chunk_count) * self._chunk
        self._moving, self.stage = None, PoolStage.BOUND
        return kept

    def refused(self) -> None:
        """Go on with everything: there is no room to move what stays."""
        for pool in self._layers.values():
            pool.restore()
        self._next_try = 2 * (self.shared_chunks + self._own_chunks)
        self._moving, self.stage = None, PoolStage.WHOLE

    @property
    def has_room(self) -> bool:
        """False while another chunk would have to be written over what is on its way.

        Or while one is on its way into a slot more, which the store may refuse.
        """
        if None in self._writing:
            return False
        held = self.chunk_count * self._chunk - self.empty_places
        return held - self._selection.sinks - self._selection.recent >= self._chunk

    def make_room(self, first_recent: int) -> Places | None:
        """Return the places that the next chunk is written over; None: it gets a slot more.

        Call it only while `has_room`.
        """
        self._own_chunks += 1
        limit = pool_chunks(self._selection, self._own_chunks, self._chunk)
        places: Places | None = None
        if limit > max(self.chunk_count, self._refused_limit):
            self.chunk_count += 1
        else:
            first = self.shared_chunks * self._chunk
            places = {
                layer: pool.evict_oldest(self._chunk, first_place=first, first_recent=first_recent)
                .cpu()
                .numpy()
                for layer, pool in self._layers.items()
            }
        self._writing.append(places)
        return places

    def written(self) -> Places | None:
        """Note that the first chunk on its way has arrived; return what `make_room` did."""
        places = self._writing.popleft()
        if places is not None:
            # Not before: until now the newer tokens were none of the stored ones.
            self.evicted_tokens += self._chunk
        for layer, pool in self._layers.items():
            if places is None:
                pool.admit(self._chunk)
            else:
                pool.overwrite(torch.from_numpy(places[layer]).to(self._device))
        return places

    def growth_refused(self) -> None:
        """Take the chunk back that was to get a slot more: the next one is written over others.

        It tries to grow again once its limit does.
        """
        if self._writing.popleft() is not None or self._writing:
            raise RuntimeError("a chunk that needs no slot was refused one")
        self._refused_limit = pool_chunks(self._selection, self._own_chunks, self._chunk)
        self._own_chunks -= 1
        self.chunk_count -= 1

    def drop(self) -> None:
        """Forget all tokens: a pool that had started is lost."""
        self._layers, self._moving = {}, None
        self._writing.clear()
        if self.stage is not PoolStage.WHOLE:
            self.stage = PoolStage.LOST
