"""Loads the backs of prefixes from a tier into slots, while steps compute their fronts.

A failed load costs time, never a request: the front goes on, as far as nothing is loaded. The
slots are sealed once write-back has sealed the front, since a chunk's key contains its parent's.
All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from splitpoint.costs.fetching import ROUND_TRIP_SECONDS, measured_rate
from splitpoint.errors import SplitpointError
from splitpoint.keys import chunk_keys
from splitpoint.observe.logs import for_request
from splitpoint.planning.bidirectional import BidirectionalQueue, PieceSize, piece_sizes
from splitpoint.shapes import ArenaLayout, chunks_of
from splitpoint.tasks import NamedTurns
from splitpoint.tiers import ChunkSource
from splitpoint.transport.cleanups import Cleanups
from worker_service.fetching.results import FetchResult, FetchSource
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.store.client import Match, StoreClient, WrittenChunk
from worker_service.store.session import Connection
from worker_service.store.write_back import BATCH_CHUNKS, SequenceKey

log = logging.getLogger(__name__)

# Bytes of one piece that a tier loads. A piece costs two calls of the store, some milliseconds;
# the front may have to wait for one piece at the end.
LEAST_PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 16 << 20
# The tier reads one while the slots of the next are reserved, and the last one is checked.
PIECES_UNDER_WAY = 2
# Chunks of the smallest piece at most: the sides of a short prefix meet somewhere, too.
LEAST_PIECE_CHUNKS = 4


def tier_ends(
    *,
    first_chunk: int,
    chunk_count: int,
    cached_tokens: int,
    chunk_tokens: int,
    chunk_bytes: int,
    expected_tokens: int,
    block_tokens: int,
    in_turn: bool,
) -> TwoEnds:
    """Return the ends of chunks [first_chunk, chunk_count) whose back a tier brings.

    Args:
        cached_tokens: tokens of these chunks and those before them that need not be prefilled.
        expected_tokens: where the plan lets the ends meet.
        block_tokens: most tokens of one step.
    """
    count = chunk_count - first_chunk
    front, _ = piece_sizes(chunk_tokens, block_tokens)
    least = min(chunks_of(LEAST_PIECE_BYTES, chunk_bytes), LEAST_PIECE_CHUNKS)
    back = PieceSize(least, max(least, MOST_PIECE_BYTES // chunk_bytes))
    expected = chunks_of(expected_tokens, chunk_tokens) - first_chunk
    queue = BidirectionalQueue(
        count,
        front=front,
        back=back,
        expected_share=min(max(expected / count, 0.0), 1.0),
        back_ahead=PIECES_UNDER_WAY - 1,
    )
    return TwoEnds(
        queue,
        first_chunk=first_chunk,
        cached_tokens=cached_tokens,
        chunk_tokens=chunk_tokens,
        in_turn=in_turn,
    )


@dataclass(slots=True, eq=False)
class _Load:
    """One load. `keys` and `pieces`: of each chunk of the sequence; `filled`: by chunk index."""

    key: SequenceKey
    place: ChunkSource
    connection: Connection
    salt: bytes
    keys: list[bytes]
    pieces: list[tuple[int, ...]]
    first_chunk: int
    ends: TwoEnds
    filled: dict[int, WrittenChunk] = field(default_factory=dict)
    result: FetchResult = field(default_factory=FetchResult)
    task: asyncio.Task[None] = field(init=False)


class TierLoader:
    """All loads of one worker that meet a front."""

    def __init__(
        self,
        store: StoreClient,
        layout: ArenaLayout,
        *,
        block_tokens: int,
        in_turn: bool,
        on_change: Callable[[], None],
        measured: Callable[[ChunkSource, FetchResult], None],
    ) -> None:
        """`block_tokens`: most tokens of one step. `in_turn`: see `TwoEnds`.

        `on_change` is called when a load got further, `measured` when one has ended.
        """
        self._store = store
        self._layout = layout
        self._block_tokens = block_tokens
        self._in_turn = in_turn
        self._on_change = on_change
        self._measured = measured
        self._cleanups = Cleanups()
        self._loads: dict[SequenceKey, _Load] = {}
        # By first chunk; loads of one prefix take turns, and the second finds it in the arena.
        self._turns = NamedTurns()
        self._turn_of: dict[SequenceKey, bytes] = {}

    async def wait_turn(self, key: SequenceKey, salt: bytes, tokens: Sequence[int]) -> None:
        """Wait until no other load of the first chunk of these tokens is under way.

        The turn lasts until `end_turn`, or until the load that begins under this key has ended.
        """
        (first,) = self._keys(salt, tokens[: self._layout.chunk_tokens]) or (b"",)
        await self._turns.begin(first, timeout=None)  # each load has a time limit
        self._turn_of[key] = first

    def end_turn(self, key: SequenceKey) -> None:
        """Let another load of the same first chunk begin; without a turn, nothing happens."""
        first = self._turn_of.pop(key, None)
        if first is not None:
            self._turns.end(first)

    def begin(
        self,
        key: SequenceKey,
        source: FetchSource,
        salt: bytes,
        tokens: Sequence[int],
        match: Match,
    ) -> TwoEnds | None:
        """Begin to load what the match lacks; None if there is nothing to load."""
        size = self._layout.chunk_tokens
        count = min(source.cached_tokens, len(tokens)) // size
        # The last token is always computed: its logits are needed.
        cached = min(count * size, len(tokens) - 1)
        first = match.cached_tokens // size
        if cached <= match.cached_tokens:
            return None
        ends = tier_ends(
            first_chunk=first,
            chunk_count=count,
            cached_tokens=cached,
            chunk_tokens=size,
            chunk_bytes=self._layout.chunk_bytes,
            expected_tokens=source.meeting_tokens,
            block_tokens=self._block_tokens,
            in_turn=self._in_turn,
        )
        parts = [tuple(tokens[start : start + size]) for start in range(0, count * size, size)]
        keys = self._keys(salt, tokens[: count * size])
        load = _Load(key, source.place, match.connection, salt, keys, parts, first, ends)
        self._loads[key] = load
        # Before a step can claim all of it.
        pieces = [ends.claim_back() for _ in range(PIECES_UNDER_WAY)]
        running = self._run(load, pieces, source.time_limit)
        with for_request(key[0]):
            load.task = asyncio.create_task(running, name=f"load {key[0]}")
        return ends

    @asynccontextmanager
    async def sealed(self, key: SequenceKey) -> AsyncIterator[FetchResult | None]:
        """Seal what was loaded of a sequence whose front is sealed; leased inside the block.

        What follows no sealed chunk is freed. Yields the result of the load; None if there is
        none.
        """
        load = self._loads.pop(key, None)
        if load is None:
            yield None
            return
        await self._stop(load)
        lease_ids: list[int] = []
        try:
            await self._seal(load, lease_ids)
        except SplitpointError as error:
            log.warning("what %s brought is not sealed: %s", load.place, error.message)
            load.result.tokens = 0
        try:
            yield load.result
        finally:
            await self._cleanups.finish(self._give_up(load, lease_ids))

    async def give_way(self, key: SequenceKey) -> bool:
        """End a load and free its slots: its front, which computes everything then, needs them.

        Return False if it held none.
        """
        load = self._loads.get(key)
        if load is None:
            return False
        held = bool(load.filled) or not load.task.done()
        await self._stop(load)
        load.ends.give_back()
        await self._free_computed(load)
        size = self._layout.chunk_tokens
        load.result.tokens = 0
        load.result.recomputed_tokens = (len(load.keys) - load.first_chunk) * size
        self._on_change()
        return held

    def drop(self, key: SequenceKey) -> None:
        """End the load of a request that ended; unknown keys are ignored."""
        load = self._loads.pop(key, None)
        if load is not None:
            self._cleanups.start(self._stop_and_give_up(load))

    async def close(self, timeout: float) -> None:
        """Give everything back within `timeout` seconds; the session's end frees the rest."""
        for key in list(self._loads):
            self.drop(key)
        await self._cleanups.wait(timeout)

    # -- one load -----------------------------------------------------------------------

    async def _run(self, load: _Load, pieces: Sequence[range | None], time_limit: float) -> None:
        """Load these pieces at the same time, and after each what can be claimed then."""
        began = load.result.began = time.monotonic()
        missing = len(load.keys) - load.first_chunk
        load.result.wanted_bytes = missing * self._layout.chunk_bytes
        try:
            async with asyncio.timeout(time_limit), asyncio.TaskGroup() as group:
                for chunks in pieces:
                    group.create_task(self._load_pieces(load, chunks))
        except TimeoutError:
            log.warning("loading from %s took too long", load.place)
            load.result.is_late()
        except Exception:
            # The front can compute everything.
            log.exception("loading from %s failed", load.place)
        finally:
            load.ends.end_back()
            self.end_turn(load.key)
            self._end(load, time.monotonic() - began)
            self._on_change()

    async def _load_pieces(self, load: _Load, chunks: range | None) -> None:
        """Load claimed chunks, and after them what can be claimed then. Raises nothing."""
        while chunks is not None:
            begin = chunks.stop
            try:
                begin = await self._fill(load, chunks)
            except SplitpointError as error:
                log.warning("not loaded from %s: %s", load.place, error.message)
            finally:
                load.ends.loaded(chunks, begin)
                self._on_change()
            await self._free_computed(load)
            chunks = load.ends.claim_back()

    def _end(self, load: _Load, seconds: float) -> None:
        """Sum up what was loaded, and let the rates learn from it."""
        result, size = load.result, self._layout.chunk_tokens
        begin = load.ends.first_loaded_chunk
        result.seconds = seconds
        result.tokens = sum(index >= begin for index in load.filled) * size
        result.recomputed_tokens = (begin - load.first_chunk) * size
        if result.bytes:
            # Pieces overlap: only all of them together have a rate.
            result.rate = measured_rate(result.bytes, seconds, seconds - ROUND_TRIP_SECONDS)
        self._measured(load.place, result)

    async def _fill(self, load: _Load, chunks: range) -> int:
        """Load chunks into slots. Return the first chunk from which on all are loaded."""
        connection = load.connection
        granted = await self._cleanups.obtain(
            self._store.reserve(connection, load.salt, len(chunks)),
            lambda slots: self._store.release(connection, slots=slots),
        )
        begin = chunks.stop
        try:
            keys = load.keys[chunks.start : chunks.stop]
            checksums = await self._store.fill(connection, load.place.tier, granted, keys)
            for index in reversed(chunks):
                checksum = checksums[index - chunks.start]
                if checksum is None:
                    log.warning("%s lacks chunk %d, or had it damaged", load.place, index)
                    break
                slot, generation = granted[index - chunks.start]
                parent = load.keys[index - 1] if index else b""
                load.filled[index] = WrittenChunk(
                    slot, generation, parent, load.pieces[index], checksum
                )
                begin = index
                load.result.bytes += self._layout.chunk_bytes
        finally:
            # The store keeps a slot until its own copy into it has ended.
            unused = granted[: begin - chunks.start]
            if unused:
                await self._cleanups.finish(self._store.release(connection, slots=unused))
        return begin

    async def _free_computed(self, load: _Load) -> None:
        """Free the slots of chunks that the front computes, too: write-back needs as many."""
        begin = load.ends.first_loaded_chunk
        computed = [load.filled.pop(index) for index in sorted(load.filled) if index < begin]
        if computed:
            slots = [(chunk.slot, chunk.generation) for chunk in computed]
            await self._cleanups.finish(self._store.release(load.connection, slots=slots))

    async def _seal(self, load: _Load, lease_ids: list[int]) -> None:
        """Seal what was loaded behind the front in sequence order, batch by batch."""
        begin = load.ends.first_loaded_chunk
        written = [load.filled[index] for index in sorted(load.filled) if index >= begin]
        for start in range(0, len(written), BATCH_CHUNKS):
            batch = written[start : start + BATCH_CHUNKS]
            lease_id = lease_ids[-1] if lease_ids else 0
            sealed = await self._store.seal(load.connection, load.salt, batch, lease_id)
            if sealed.lease_id not in lease_ids:
                lease_ids.append(sealed.lease_id)

    async def _stop(self, load: _Load) -> None:
        """Let the load end; nothing is loaded for it any more."""
        if not load.task.done():
            load.task.cancel()
            await asyncio.wait({load.task})
        self.end_turn(load.key)

    async def _stop_and_give_up(self, load: _Load) -> None:
        await self._stop(load)
        await self._give_up(load, [])

    async def _give_up(self, load: _Load, lease_ids: Sequence[int]) -> None:
        # Sealed slots among them are no longer granted: releasing is idempotent.
        slots = [(chunk.slot, chunk.generation) for chunk in load.filled.values()]
        await self._store.release(load.connection, lease_ids=lease_ids, slots=slots)

    def _keys(self, salt: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of full chunks."""
        layout = self._layout
        return list(chunk_keys(layout.layout_hash, salt, tokens, layout.chunk_tokens))
