"""The rows of one sequence's stored tokens that its decode steps attend.

Of each stored token the screens keep a little on the device. Before a layer's attention they score
the tokens for a guessed query, and the rows that are wanted and missing are fetched into row pages,
over those that were unused for longest. The layer then attends rows in the row pages, and whatever
else of the sequence is on the device: order and place of rows do not matter behind RoPE. With a
ratio or a number of tokens it attends all rows in them: the few that it did not want this time
cost nothing to fetch. With alpha, whose budget varies, it attends those that it wanted alone.

Knows no requests and no steps. One thread uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.planning.schedule import Lane
from splitpoint.residency.selecting import wanted_rows
from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.copies import sent
from worker_service.device.pinning import piece_slots
from worker_service.lanes.lanes import Event, Lanes
from worker_service.lanes.work import Work
from worker_service.model.model import CarryOut, at_once
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.retrieval.bounded_pool import BoundedPool, Places
from worker_service.retrieval.gather_rows import RowPlane, gather_rows
from worker_service.retrieval.row_cache import RowCache
from worker_service.selection.screen import (
    OBSERVED_QUERIES,
    Guess,
    KeyScreen,
    LayerScreen,
    PooledScreen,
    TokenRows,
)
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import ChosenRows, choose, choose_near, choose_rows
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.pool_rows import row_numbers

# Tokens whose X is on the device at once while a screen is made from it.
INPUT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What `begin` did so far. Rows are those of one KV head in one layer, of all of them.

    Attributes:
        visible: stored tokens that there were.
        read: rows that attention read.
        wanted: rows that were chosen.
        fetched: of the wanted ones, those that crossed the link; the others were there.
        link_bytes: K and V of the fetched rows.
        evicted: tokens that left the pool, in one layer and KV head.
    """

    visible: int = 0
    read: int = 0
    wanted: int = 0
    fetched: int = 0
    link_bytes: int = 0
    evicted: int = 0

    def __sub__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(
            self.visible - other.visible,
            self.read - other.read,
            self.wanted - other.wanted,
            self.fetched - other.fetched,
            self.link_bytes - other.link_bytes,
            self.evicted - other.evicted,
        )

    @property
    def reused(self) -> int:
        """Rows that were chosen and on the device already."""
        return self.wanted - self.fetched


class SequenceReads:
    """What one sequence keeps on the device to read its stored tokens by a selection.

    A layer takes part if `selects` says so: full layers, and those whose sliding window hides
    stored tokens, read everything as ever (no window hides what is in the row pages).

    Attributes:
        row_pages: the pages whose rows are attended (`row_count` rows); grows with the stored
            tokens. Empty before the screens are built.
        chunks: the stored chunks that rows are read from, in order. Each step checks at its end
            that they are current, as for tiles.
        pool: what a limit leaves of them; None: there is no limit. Once it is bound, `chunks` are
            those with what is left, and the rows of the last ones are in no order.
    """

    def __init__(
        self,
        screens: Screens,
        config: AttentionConfig,
        cache: DeviceCache,
        lanes: Lanes,
        *,
        row_pages: Sequence[int],
        screen_pages: Sequence[int],
        final_tokens: int,
    ) -> None:
        """Use pages as `selection_pages` counts them, which the caller owns and frees.

        Args:
            final_tokens: of the whole sequence at last; a layer whose window is smaller reads
                everything.
        """
        self.selection = screens.selection
        self.row_pages: list[int] = []
        self.chunks: list[StoredChunk] = []
        self._screens = screens
        self._config = config
        self._cache = cache
        self._lanes = lanes
        self._chunk = cache.layout.chunk_tokens
        self._all_row_pages = list(row_pages)
        self._screen_pages = list(screen_pages)
        self._layers = [
            index
            for index in range(cache.layout.layer_count)
            if _selects(screens, config, index, final_tokens)
        ]
        self._transfer: CacheTransfer | None = None
        self._first_position = 0
        # int64 on the device: slots of the chunks, and the row pages in use.
        self._slots = self._pages = torch.empty(0, dtype=torch.int64, device=cache.device)
        self._heads = torch.arange(cache.layout.kv_head_count, device=cache.device).unsqueeze(1)
        # A slot in each piece of the arena that chunks lie in.
        self._piece_slots: list[int] = []
        # K and V of a row on the link.
        self._row_bytes = 2 * cache.layout.kv_row_bytes
        # Sums of `counts`; those of rows lie on the device, which may be behind the host: read,
        # wanted, fetched.
        self._visible = 0
        self._rows = torch.zeros(3, dtype=torch.int64, device=cache.device)
        self._told = ReadCounts()
        self._observed: dict[int, torch.Tensor] = {}
        self._built: dict[int, LayerScreen] = {}
        self._caches: dict[int, RowCache] = {}
        self.pool: BoundedPool | None = None
        if self.selection.pool is not None:
            heads = cache.layout.kv_head_count
            self.pool = BoundedPool(self.selection, heads, self._chunk, cache.device)

    @property
    def counts(self) -> ReadCounts:
        """Sums since it was made; on a GPU this waits for the device."""
        read, wanted, fetched = self._rows.tolist()
        evicted = 0 if self.pool is None else self.pool.evicted_tokens
        return ReadCounts(self._visible, read, wanted, fetched, fetched * self._row_bytes, evicted)

    def new_counts(self) -> ReadCounts:
        """Return `counts` since the last call."""
        counts, told = self.counts, self._told
        self._told = counts
        return counts - told

    @property
    def stored_tokens(self) -> int:
        """Tokens that rows are chosen from, and those that have left the pool."""
        return self._place_count + (0 if self.pool is None else self.pool.evicted_tokens)

    @property
    def _place_count(self) -> int:
        """Rows of the chunks, each with a stored token that is or was."""
        return len(self.chunks) * self._chunk

    def building_bytes(self, tokens: int) -> int:
        """See `building_bytes`."""
        return building_bytes(self._cache.layout, self.selection, tokens)

    @property
    def pool_bytes(self) -> int:
        """Host memory of what the pool keeps in slots of its own."""
        if self.pool is None or not self.pool.is_bound:
            return 0
        own = len(self.chunks) - self.pool.shared_chunks
        return own * self._cache.layout.chunk_bytes

    @property
    def first_position(self) -> int:
        """Position of the first of these tokens."""
        return self._first_position

    @property
    def building_room(self) -> int:
        """Bytes that all sequences together may take to build screens in one step."""
        return self._cache.plan.collected_bytes

    @property
    def row_count(self) -> int:
        """Rows of the row pages in use, the same in all layers and KV heads."""
        return len(self.row_pages) * self._chunk

    @property
    def layers(self) -> Sequence[int]:
        """The layers that read by the selection, ascending."""
        return self._layers

    def selects(self, layer: int) -> bool:
        """Return True if a layer reads by the selection once screens are built."""
        return layer in self._layers

    @property
    def is_dynamic(self) -> bool:
        """True if each step attends other rows of its row pages, `seen`; otherwise all."""
        return self.selection.alpha is not None or self.pool is not None

    def tokens(self, layer: int) -> torch.Tensor:
        """Return the stored tokens in the rows that a layer attends, int64 `[n_kv, rows]`.

        They count from 0 on; -1: the row is not attended.
        """
        rows = self._caches[layer]
        if not self.is_dynamic:
            return rows.tokens.long()
        return torch.where(rows.is_wanted, rows.tokens, -1).long()

    def seen(self, layer: int) -> torch.Tensor:
        """Return which rows a layer attends since its last `begin`, `[row pages, n_kv, C]`.

        uint8, 0 where a row is not attended.
        """
        rows = self._caches[layer]
        seen = rows.is_wanted if self.is_dynamic else torch.ones_like(rows.is_wanted)
        by_page = seen.view(len(seen), len(self.row_pages), self._chunk).transpose(0, 1)
        return by_page.to(torch.uint8, memory_format=torch.contiguous_format)

    # -- building ---------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        """True if every layer that selects has its screen."""
        return bool(self.chunks) and len(self._built) == len(self._layers)

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Remember the newest queries `[T, n_q, d]` of a layer, which a screen learns from."""
        if self.selects(layer) and layer not in self._built:
            newest = queries[-OBSERVED_QUERIES:]
            before = self._observed.get(layer)
            if before is not None and len(newest) < OBSERVED_QUERIES:
                newest = torch.cat((before, newest))[-OBSERVED_QUERIES:]
            self._observed[layer] = newest.clone()

    def build(
        self,
        layer: int,
        keys: torch.Tensor,
        transfer: CacheTransfer,
        chunks: Sequence[StoredChunk],
        first_position: int,
        *,
        position: int | None = None,
    ) -> None:
        """Make a layer's screen of all stored tokens; call it once for each in `layers`.

        It is made from K, or from X, which then comes over the link first.

        Args:
            keys: `[S, n_kv, d]` in the order of tokens; may be empty for a screen made from X.
            transfer, chunks: where the same S tokens lie; the same in all calls.
            first_position: of the first of them.
            position: of the newest query that was observed; None: of the last of these tokens.
        """
        screen = self._screens.layer(layer, self._blocks(layer, self._screen_pages))
        if screen is None:
            raise ValueError(f"layer {layer} reads everything")
        observed = self._observed.get(layer)
        if observed is None:
            raise ValueError(f"no query of layer {layer} was observed")
        if not self.chunks:
            self._transfer = transfer
            self._first_position = first_position
            self.chunks = list(chunks)
            self._grow()
        if self.selection.method.keeps_inputs:
            self._extend_by_inputs(layer, screen, 0)
        else:
            screen.extend(TokenRows(observed[:0], observed, keys, first_position))
        self._built[layer] = screen
        self._caches[layer] = RowCache(self._cache.layout.kv_head_count, self._cache.device)
        if self.pool is not None:
            if position is None:
                position = first_position + self._place_count - 1
            self._begin_pool(self.pool, layer, observed, position)

    def _begin_pool(
        self, pool: BoundedPool, layer: int, queries: torch.Tensor, position: int
    ) -> None:
        """Let a layer's pool learn what queries up to this position choose, as in evaluations.

        One by one: fp32 scores of all 32 take 410 MB for 32 heads and 100,000 tokens.
        """
        pool.begin(layer, self._place_count, self._first_position)
        for at, query in enumerate(torch.split(queries, 1), position + 1 - len(queries)):
            chosen = choose(
                self._built[layer].scores(Guess(query, query, at)),
                self.selection,
                first_position=at - self._first_position,
                tokens=self._place_count,
                kv_heads=len(self._heads),
            )
            pool.read(layer, chosen, at)

    def extend(self, page: int, chunk: StoredChunk) -> None:
        """Add a stored chunk behind the others; `page` still has its K, and leaves the device."""
        place = len(self.chunks)
        self.chunks.append(chunk)
        for layer, screen in self._built.items():
            if self.selection.method.keeps_inputs:
                self._extend_by_inputs(layer, screen, place)
                continue
            keys = self._cache.keys[layer][page].transpose(0, 1)
            first_position = self._first_position + place * self._chunk
            screen.extend(TokenRows(keys[:0], keys[:0], keys, first_position))
        if self.pool is not None:
            self.pool.extend()
        self._grow()

    def _extend_by_inputs(self, layer: int, screen: LayerScreen, place: int) -> None:
        """Give a screen X of the chunks from this place on, which comes from the store in pieces.

        The link's work is issued here, behind what it has to do already; compute waits for it.
        """
        if self._transfer is None:
            raise RuntimeError("layer inputs are wanted before the screens are built")
        layout = self._cache.layout
        most = INPUT_TOKENS // self._chunk or 1
        room = self._cache.keys[layer].new_empty(
            (min(most, len(self.chunks) - place), self._chunk, layout.hidden_size)
        )
        for first in range(place, len(self.chunks), most):
            chunks = self.chunks[first : first + most]
            part = Part(chunks, range(len(chunks)), len(chunks) * self._chunk)
            send = self._transfer.send(layer, part, room)
            # Compute is done with what was in the room before.
            arrived = self._lanes.run(Lane.LINK_IN, send, [self._lanes.record_event()])
            self._lanes.wait_event(arrived)
            inputs = room[: len(chunks)].flatten(0, 1)
            position = self._first_position + first * self._chunk
            screen.extend(TokenRows(inputs, inputs[:0], inputs[:0], position))

    # -- the pool ---------------------------------------------------------------------

    def pool_started(self, pool: BoundedPool, chunks: Sequence[StoredChunk]) -> None:
        """Read what stays from these chunks, to which it was moved, and forget the rest."""
        for layer, places in pool.started().items():
            self._pooled(layer).keep(places)
            self._caches[layer] = RowCache(len(self._heads), self._cache.device)
        self.chunks = [*self.chunks[: pool.shared_chunks], *chunks]
        self._grow()

    def pool_written(self, pool: BoundedPool, page: int, chunk: StoredChunk | None) -> None:
        """Add a chunk that was written over others, or into one more; `page` still has its K."""
        places = pool.written()
        for layer in self._layers:
            keys = self._cache.keys[layer][page].transpose(0, 1)
            screen = self._pooled(layer)
            if places is None:
                first_position = self._first_position + self.stored_tokens
                screen.extend(TokenRows(keys[:0], keys[:0], keys, first_position))
            else:
                screen.overwrite(places[layer], keys)
                written = torch.from_numpy(places[layer]).to(self._cache.device)
                self._caches[layer].forget(written, self._place_count)
        if chunk is not None:
            self.chunks.append(chunk)
        self._grow()

    def row_numbers(self, places: Places) -> list[npt.NDArray[np.int64]]:
        """Return the numbers of places in planes of the store, for each layer."""
        slots = np.array([chunk.slot for chunk in self.chunks], dtype=np.int64)
        return [row_numbers(places[layer], slots, self._chunk) for layer in self._layers]

    def _pooled(self, layer: int) -> PooledScreen:
        screen = self._built[layer]
        if not isinstance(screen, PooledScreen):
            raise ValueError(f"no token leaves the screens of {self.selection}")
        return screen

    def drop(self) -> None:
        """Forget screens and rows: the next step must be exact, and builds them again.

        The queries that were observed stay, for the screens that follow. Zeroes its pages, of which
        it must be the last user: what their next owner masks has to be finite, and a screen's bytes
        may be anything. Call it before they are freed, too.
        """
        pages = sent([*self._all_row_pages, *self._screen_pages], self._cache.device)
        for plane in (*self._cache.keys, *self._cache.values):
            plane.index_fill_(0, pages, 0)
        self.row_pages, self.chunks = [], []
        self._transfer = None
        self._built, self._caches = {}, {}
        if self.pool is not None:
            self.pool.drop()

    def _grow(self) -> None:
        """Use as many row pages as the stored tokens want."""
        wanted = chunks_of(wanted_rows(self.selection, self.stored_tokens), self._chunk)
        self.row_pages = self._all_row_pages[:wanted]
        slots = [chunk.slot for chunk in self.chunks]
        self._slots, self._pages = (
            sent(each, self._cache.device) for each in (slots, self.row_pages)
        )
        cut = piece_slots(self._cache.layout.kv_slot_bytes)
        self._piece_slots = list({slot // cut: slot for slot in slots}.values())

    def _blocks(self, layer: int, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes of a layer's planes of pages, one plane after the other."""
        planes = (self._cache.keys[layer], self._cache.values[layer])
        return [plane[page].view(-1).view(torch.uint8) for page in pages for plane in planes]

    # -- reading ------------------------------------------------------------------------

    def begin(
        self,
        layer: int,
        guess: Guess,
        carry_out: CarryOut = at_once,
        on_device: torch.Tensor | None = None,
    ) -> Event:
        """Choose a layer's tokens for one query, and begin to fetch what is missing.

        `carry_out` runs what chooses; the rows come on the link, after compute issued so far.
        Attention of this layer must wait for the event that is returned. If a step fails
        after this, `drop`: what it was to fetch may be missing.

        Args:
            guess: of one token; its queries are those of the layer, or a guess of them.
            on_device: int64, the pages of the sequence's other tokens in order, at least up to
                the page of the guess's own token. `is_dynamic` ones rank these, too.
        """
        found = carry_out("screen", layer, partial(self._moves, layer, guess, on_device))
        planes, slots = self._planes(layer), self._piece_slots
        size = found.most * self._row_bytes
        work = Work(
            "fetch rows",
            lambda: gather_rows(planes, found.sources, found.targets, slots),
            size,
            size,
            layer,
            found.most,
        )
        return self._lanes.run(Lane.LINK_IN, work, [self._lanes.record_event()])

    def _moves(self, layer: int, guess: Guess, on_device: torch.Tensor | None) -> _Moves:
        """Choose, and return the rows to fetch."""
        rows, heads, stored = self._caches[layer], self._heads, self.stored_tokens
        has_grown = rows.row_count < self.row_count
        if has_grown:
            rows.grow(self.row_count)
        scores, forced = self._built[layer].scores(guess), None
        most = wanted_rows(self.selection, stored)
        if self.pool is not None:
            scores, forced = self._of_pool(self.pool, layer, guess, scores)
            most = min(most, self._place_count - self.pool.empty_places)
        elif has_grown and not self.is_dynamic:
            # Every row is attended, so none may stay empty.
            most = self.row_count
        if most > self.row_count:
            # Some would be written over others that are wanted, too.
            raise RuntimeError(f"{most} rows are wanted in row pages of {self.row_count}")
        if self.selection.alpha is not None:
            chosen = self._choose_near(layer, guess, on_device, scores, forced, most)
        else:
            chosen = self._choose(layer, guess.first_position, scores, forced, most)
        if self.pool is not None:
            self._learn(self.pool, layer, chosen, guess.first_position)
        placed = rows.place(chosen.tokens, chosen.is_wanted, self._place_count)
        self._visible += len(heads) * stored
        if chosen.is_wanted is None:
            attended = chosen.tokens.numel() if self.is_dynamic else len(heads) * self.row_count
            self._rows[0] += attended
            self._rows[1] += chosen.tokens.numel()
        else:
            self._rows[:2] += chosen.is_wanted.sum()
        self._rows[2] += placed.is_new.sum()
        sources = self._numbered(self._slots, chosen.tokens)
        targets = self._numbered(self._pages, placed.rows)
        if self._cache.device.type == "cpu":
            sources, targets = sources[placed.is_new], targets[placed.is_new]
        else:
            # Only the device knows how many there are.
            targets = torch.where(placed.is_new, targets, -1).flatten()
            sources = sources.flatten()
        return _Moves(sources, targets)

    def _of_pool(
        self, pool: BoundedPool, layer: int, guess: Guess, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores with -inf where no token is left, and the places that are always read."""
        held, positions = pool.held(layer), pool.positions(layer)
        group = scores.shape[1] // len(held)
        recent = positions > guess.first_position - self.selection.recent
        forced = held & (recent | (positions < self.selection.sinks))
        return scores.masked_fill(~held.repeat_interleave(group, 0), -math.inf), forced

    def _learn(self, pool: BoundedPool, layer: int, chosen: ChosenRows, position: int) -> None:
        """Let the pool count what a query chose."""
        is_wanted = chosen.is_wanted
        if is_wanted is None:
            is_wanted = torch.ones_like(chosen.tokens, dtype=torch.bool)
        # What is not wanted may have the number of what is.
        read = torch.zeros_like(pool.positions(layer))
        read.scatter_add_(1, chosen.tokens, is_wanted.long())
        pool.read(layer, (read > 0).unsqueeze(0), position)

    def _choose(
        self,
        layer: int,
        position: int,
        scores: torch.Tensor,
        forced: torch.Tensor | None,
        most: int,
    ) -> ChosenRows:
        """Choose so many of the stored tokens, whatever else is on the device."""
        stored = self._place_count
        return choose_rows(
            scores,
            most,
            len(self._heads),
            first=self.selection.sinks - self._first_position,
            newest=self._first_position + stored - position - 1 + self.selection.recent,
            forced=forced,
        )

    def _choose_near(
        self,
        layer: int,
        guess: Guess,
        on_device: torch.Tensor | None,
        scores: torch.Tensor,
        forced: torch.Tensor | None,
        most: int,
    ) -> ChosenRows:
        """Choose by alpha among all earlier tokens: those on the device take part in the rule."""
        screen, places, first = self._built[layer], self._place_count, self._first_position
        others = guess.first_position - self.stored_tokens
        if others:
            if on_device is None or not isinstance(screen, KeyScreen):
                raise ValueError(f"{self.selection} ranks tokens on the device, too")
            pages = self._cache.keys[layer].index_select(0, on_device)
            keys = pages.transpose(0, 1).flatten(1, 2)[:, :others].transpose(0, 1)
            theirs = screen.scores_of(guess, keys)
            scores = torch.cat((theirs[..., :first], scores, theirs[..., first:]), -1)
            if forced is not None:
                at = torch.arange(others, device=forced.device)
                at = torch.where(at < first, at, at + self.stored_tokens)
                always = (at < self.selection.sinks) | (
                    at > guess.first_position - self.selection.recent
                )
                always = always.expand(len(forced), -1)
                forced = torch.cat((always[:, :first], forced, always[:, first:]), -1)
        return choose_near(
            scores,
            self.selection,
            len(self._heads),
            range(first, first + places),
            most,
            forced=forced,
        )

    def _numbered(self, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the number in a plane `[slots, n_kv, C, d]` of row `rows[h, i]` of head h."""
        count = self._chunk
        places = slots[torch.div(rows, count, rounding_mode="floor")] * len(self._heads)
        return (places + self._heads) * count + rows % count

    def _planes(self, layer: int) -> tuple[RowPlane, ...]:
        if self._transfer is None:
            raise RuntimeError("rows are wanted before the screens are built")
        stored, cache = self._transfer.tensors, self._cache
        return (
            RowPlane(stored.keys[layer], cache.keys[layer], stored.layout.encoding),
            RowPlane(stored.values[layer], cache.values[layer], stored.layout.encoding),
        )


@dataclass(frozen=True, slots=True)
class _Moves:
    """Rows to fetch: their numbers in planes of store and device; see `gather_rows`."""

    sources: torch.Tensor
    targets: torch.Tensor

    @property
    def most(self) -> int:
        """Rows that are fetched; on a GPU, where the host does not know, all that are wanted."""
        return len(self.sources)


def building_bytes(layout: ArenaLayout, selection: Selection, tokens: int) -> int:
    """Return the bytes beside the pages in which a layer's screen of this many tokens is built.

    They hold K, or a piece of X at a time where screens are made from X.
    """
    if selection.method.keeps_inputs:
        piece = max(INPUT_TOKENS, layout.chunk_tokens)
        return min(tokens, piece) * layout.hidden_size * layout.data_type.size
    return tokens * layout.kv_head_count * layout.head_dim * layout.data_type.size


def _selects(screens: Screens, config: AttentionConfig, layer: int, final_tokens: int) -> bool:
    window = config.windows[layer]
    is_whole = window is None or window >= final_tokens
    return is_whole and screens.layer(layer) is not None
