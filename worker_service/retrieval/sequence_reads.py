"""The rows of one sequence's stored tokens that its decode steps attend.

Of each stored token the screens keep a little on the device. Before a layer's attention they score
the tokens for a guessed query, and the rows that are wanted and missing are fetched into row pages,
over those that were unused for longest. The layer then attends every row in the row pages, and
whatever else of the sequence is on the device: order and place of rows do not matter behind RoPE.

Knows no requests and no steps. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitpoint.planning.schedule import Lane
from splitpoint.residency.selecting import wanted_rows
from worker_service.checkpoint.config import DecoderConfig
from worker_service.device.cache import DeviceCache
from worker_service.lanes.lanes import Event, Lanes
from worker_service.lanes.work import Work
from worker_service.retrieval.gather_rows import RowPlane, gather_rows
from worker_service.retrieval.row_cache import RowCache
from worker_service.selection.choose import choose_rows
from worker_service.selection.screen import AttentionShape, Guess, LayerScreen, TokenRows
from worker_service.selection.screens import Screens
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk

# The newest queries of a layer from which a screen learns its columns.
OBSERVED_QUERIES = 32


@dataclass(slots=True)
class ReadCounts:
    """What `begin` did so far, in rows of one KV head in one layer, over all of them.

    Attributes:
        visible: rows of stored tokens.
        wanted: rows that were chosen.
        fetched: of the wanted ones, those that crossed the link; the others were there.
        read: rows that attention read: all in the row pages.
        link_bytes: K and V of the fetched rows.
    """

    visible: int = 0
    wanted: int = 0
    fetched: int = 0
    read: int = 0
    link_bytes: int = 0

    @property
    def reused(self) -> int:
        """Rows that were chosen and on the device already."""
        return self.wanted - self.fetched


class SequenceReads:
    """What one sequence keeps on the device to read its stored tokens by a selection.

    A layer takes part if `selects` says so: full layers, and those whose sliding window hides
    stored tokens, read everything as ever (all rows in the row pages are attended).

    Attributes:
        row_pages: the pages whose rows are attended, each whole (`row_count` rows); grows with the
            stored tokens. Empty before the screens are built.
        chunks: the stored chunks that rows are read from, in order. Whoever ends a step checks that
            they are current, as for tiles.
        counts: sums since it was made.
    """

    def __init__(
        self,
        screens: Screens,
        config: DecoderConfig,
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
        self._counts = ReadCounts()
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
        self._tensors: ArenaTensors | None = None
        self._first_position = 0
        self._observed: dict[int, torch.Tensor] = {}
        self._built: dict[int, LayerScreen] = {}
        self._caches: dict[int, RowCache] = {}

    @property
    def counts(self) -> ReadCounts:
        """On a GPU this waits for the device."""
        return self._counts

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

    def tokens(self, layer: int) -> torch.Tensor:
        """Return the stored tokens in a layer's rows, int64 `[n_kv, rows]`, from 0 on."""
        return self._caches[layer].tokens

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
        tensors: ArenaTensors,
        chunks: Sequence[StoredChunk],
        first_position: int,
    ) -> None:
        """Make a layer's screen from K of all stored tokens; call it once for each in `layers`.

        Args:
            keys: `[S, n_kv, d]` in the order of tokens.
            tensors, chunks: where the same S tokens lie; the same in all calls.
            first_position: of the first of them.
        """
        screen = self._screens.layer(layer)
        if screen is None:
            raise ValueError(f"layer {layer} reads everything")
        observed = self._observed.pop(layer, None)
        if observed is None:
            raise ValueError(f"no query of layer {layer} was observed")
        if not self.chunks:
            self._tensors = tensors
            self._first_position = first_position
            self.chunks = list(chunks)
            self._grow()
        screen.extend(TokenRows(inputs=observed, queries=observed, keys=keys))
        self._built[layer] = screen
        self._caches[layer] = RowCache(self._cache.layout.kv_head_count, self._cache.device)

    def extend(self, page: int, chunk: StoredChunk) -> None:
        """Add a stored chunk behind the others; `page` still has its K, and leaves the device."""
        self.chunks.append(chunk)
        for layer, screen in self._built.items():
            keys = self._cache.keys[layer][page].transpose(0, 1)
            screen.extend(TokenRows(inputs=keys[:0], queries=keys[:0], keys=keys))
        self._grow()

    def drop(self) -> None:
        """Forget screens and rows: the next step must be exact, and builds them again."""
        self.row_pages, self.chunks = [], []
        self._tensors = None
        self._built, self._caches, self._observed = {}, {}, {}

    def _grow(self) -> None:
        """Use as many row pages as the stored tokens want."""
        wanted = wanted_rows(self.selection, len(self.chunks) * self._chunk)
        self.row_pages = self._all_row_pages[: -(-wanted // self._chunk)]

    # -- reading ------------------------------------------------------------------------

    def begin(self, layer: int, guess: Guess) -> Event:
        """Choose a layer's tokens for one query, and begin to fetch what is missing.

        What chooses runs on the compute lane; the rows come on the link, after compute issued so
        far. Attention of this layer must wait for the event that is returned. If a step fails
        after this, `drop`: what it was to fetch may be missing.

        Args:
            guess: of one token; its queries are those of the layer, or a guess of them.
        """
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lanes.run(
            Lane.COMPUTE,
            Work("screen", lambda: moves.append(self._moves(layer, guess)), layer=layer),
        )
        sources, targets = moves[0]
        planes = self._planes(layer)
        size = len(sources) * 2 * self._cache.keys[layer][0, 0, 0].nbytes
        work = Work(
            "fetch rows",
            lambda: gather_rows(planes, sources, targets),
            size,
            size,
            layer,
            len(sources),
        )
        return self._lanes.run(Lane.LINK_IN, work, [self._lanes.record_event()])

    def _planes(self, layer: int) -> tuple[RowPlane, ...]:
        if self._tensors is None:
            raise RuntimeError("rows are wanted before the screens are built")
        return (
            RowPlane(self._tensors.keys[layer], self._cache.keys[layer]),
            RowPlane(self._tensors.values[layer], self._cache.values[layer]),
        )

    def _moves(self, layer: int, guess: Guess) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows to fetch: where they are in the store, and where they go."""
        screen, rows = self._built[layer], self._caches[layer]
        stored = len(self.chunks) * self._chunk
        wanted = wanted_rows(self.selection, stored)
        if rows.row_count < self.row_count:
            # Empty rows must not be attended: fill all of them.
            rows.grow(self.row_count)
            wanted = self.row_count
        shape = AttentionShape.of(self._config, layer)
        chosen = choose_rows(
            screen.scores(guess),
            wanted,
            shape.kv_heads,
            stored,
            first=self.selection.sinks - self._first_position,
            newest=self._first_position + stored - guess.first_position - 1 + self.selection.recent,
            block_tokens=screen.block_tokens,
        )
        placed = rows.place(chosen, None, stored)
        counts = self._counts
        counts.visible += shape.kv_heads * stored
        counts.wanted += chosen.numel()
        counts.read += shape.kv_heads * self.row_count
        heads = torch.arange(shape.kv_heads, device=chosen.device).unsqueeze(1)
        slots = torch.tensor([chunk.slot for chunk in self.chunks], device=chosen.device)
        pages = torch.tensor(self.row_pages, device=chosen.device)
        sources = self._flat(slots, heads, chosen)[placed.is_new]
        targets = self._flat(pages, heads, placed.rows)[placed.is_new]
        counts.fetched += len(sources)
        counts.link_bytes += len(sources) * 2 * self._cache.keys[layer][0, 0, 0].nbytes
        return sources, targets

    def _flat(self, slots: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the number of each row through a plane `[slots, n_kv, C, d]`."""
        return (slots[rows // self._chunk] * len(heads) + heads) * self._chunk + rows % self._chunk


def _selects(screens: Screens, config: DecoderConfig, layer: int, final_tokens: int) -> bool:
    window = config.windows[layer]
    is_whole = window is None or window >= final_tokens
    return is_whole and screens.layer(layer) is not None
