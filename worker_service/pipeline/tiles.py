"""Cuts what a step reads from the store into tiles, and puts them into an order.

A tile is what one piece of staging memory holds and one product attends. Its pages
are loaded (K,V cross the link) or rebuilt (X crosses it, if anything does). Both kinds
take turns in proportion, so that neither the link nor the device ends a layer with
all the work left to the other. Pure: knows no tensors, lanes or requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from worker_service.store.arena_tensors import StoredChunk


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A full chunk of a sequence that a step reads from the store.

    `reader` is the row of the query that attends it, `first_position` that of its first
    token, and `[0, rebuilt_rows)` of its rows are rebuilt. `is_kept`: all of them, from X
    that is on the device.
    """

    reader: int
    chunk: StoredChunk
    first_position: int
    rebuilt_rows: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """Pages that are attended at once.

    Attributes:
        pages: all rebuilt whole, or all loaded; a page in which the split lies is alone.
        is_loaded: K,V come over the link.
        is_kept: X is on the device: nothing comes over the link.
        rebuilt_rows: of the pages' rows, front first: all, none, or some of a single
            page, which are rebuilt over what was loaded.
    """

    pages: tuple[StoredPage, ...]
    is_loaded: bool
    rebuilt_rows: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """What one step reads from the store, in tokens of the sequences that it is of.

    Attributes:
        loaded: K and V come over the link.
        rebuilt: from X, wherever that is.
        split: behind the last token that is rebuilt, of the sequence where it is furthest.
    """

    loaded: int
    rebuilt: int
    split: int

    @classmethod
    def of(cls, tiles: Iterable[Tile], chunk_tokens: int) -> StreamedTokens:
        """`tiles`: of one layer."""
        loaded = rebuilt = split = 0
        for tile in tiles:
            rebuilt += tile.rebuilt_rows
            if tile.is_loaded:
                loaded += len(tile.pages) * chunk_tokens - tile.rebuilt_rows
            for page in tile.pages:
                if page.rebuilt_rows:
                    split = max(split, page.first_position + page.rebuilt_rows)
        return cls(loaded, rebuilt, split)


def decode_tiles(pages: Sequence[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    """Tiles of any sequences' pages, none larger than `tile_pages`.

    By slot, so that neighbours in the arena are one copy, whoever they belong to; the
    order of keys does not matter to the softmax.
    """
    return _tiles(_by_slot(pages), tile_pages, chunk_tokens)


def prefill_tiles(pages: Sequence[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    """Tiles of one sequence's pages, which are in order: each has consecutive tokens."""
    return _tiles(list(pages), tile_pages, chunk_tokens)


def in_turn(first: Sequence[Tile], second: Sequence[Tile]) -> list[Tile]:
    """Both in one order, each spread evenly; `first` begins."""
    places = [((2 * index + 1) / len(first), 0, tile) for index, tile in enumerate(first)]
    places += [((2 * index + 1) / len(second), 1, tile) for index, tile in enumerate(second)]
    return [tile for *_, tile in sorted(places, key=lambda place: place[:2])]


def _tiles(pages: list[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    kept = [page for page in pages if page.is_kept]
    pages = [page for page in pages if not page.is_kept]
    rebuilt = [page for page in pages if page.rebuilt_rows == chunk_tokens]
    loaded = [page for page in pages if page.rebuilt_rows == 0]
    mixed = [page for page in pages if 0 < page.rebuilt_rows < chunk_tokens]
    return in_turn(
        in_turn(
            [_rebuilt(cut, chunk_tokens) for cut in _cuts(rebuilt, tile_pages)],
            [_rebuilt(cut, chunk_tokens, is_kept=True) for cut in _cuts(kept, tile_pages)],
        ),
        [
            *(Tile((page,), is_loaded=True, rebuilt_rows=page.rebuilt_rows) for page in mixed),
            *(Tile(cut, is_loaded=True, rebuilt_rows=0) for cut in _cuts(loaded, tile_pages)),
        ],
    )


def _rebuilt(pages: tuple[StoredPage, ...], chunk_tokens: int, *, is_kept: bool = False) -> Tile:
    return Tile(pages, is_loaded=False, rebuilt_rows=len(pages) * chunk_tokens, is_kept=is_kept)


def _cuts(pages: Sequence[StoredPage], most: int) -> list[tuple[StoredPage, ...]]:
    """In as few pieces as can be, all of nearly the same size."""
    count = -(-len(pages) // most)
    edges = [len(pages) * piece // count for piece in range(count + 1)] if count else [0]
    return [tuple(pages[start:stop]) for start, stop in pairwise(edges)]


def _by_slot(pages: Sequence[StoredPage]) -> list[StoredPage]:
    """By slot; what several sequences share comes again after all that is read once."""
    seen: Counter[int] = Counter()
    places = []
    for page in pages:
        places.append((seen[page.chunk.slot], page.chunk.slot, page))
        seen[page.chunk.slot] += 1
    return [page for *_, page in sorted(places, key=lambda place: place[:2])]
