"""Cuts the pages that a step reads from the store into tiles, and orders them.

A tile fits one slot of staging memory, and one product attends it. Its pages are loaded
(K,V cross the link) or rebuilt (from X, which crosses the link unless it is kept on the
device). The two kinds alternate in proportion, so that link and device share the work
evenly within a layer. This module is pure: it knows no tensors, lanes or requests.
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

    Attributes:
        reader: row of the query that attends the chunk.
        first_position: position of its first token.
        rebuilt_rows: `[0, rebuilt_rows)` of its rows are rebuilt, the others loaded.
        is_kept: all rows are rebuilt, from X that is kept on the device.
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
        pages: all rebuilt whole, or all loaded; a page that the split divides is alone.
        is_loaded: K,V come over the link.
        is_kept: X is on the device: nothing comes over the link.
        rebuilt_rows: rebuilt rows from the front: all, none, or some of a single page,
            which are rebuilt over its loaded rows.
    """

    pages: tuple[StoredPage, ...]
    is_loaded: bool
    rebuilt_rows: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """The tokens that one step reads from the store.

    Attributes:
        loaded: tokens whose K and V come over the link.
        rebuilt: tokens whose K and V are computed from X.
        split: the largest split of a sequence: the end of its rebuilt tokens.
    """

    loaded: int
    rebuilt: int
    split: int

    @classmethod
    def of(cls, tiles: Iterable[Tile], chunk_tokens: int) -> StreamedTokens:
        """Count the tokens of one layer's tiles."""
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
    """Cut pages of any sequences into tiles of at most `tile_pages`.

    Pages are ordered by slot, so that neighbours in the arena are one copy even if they
    belong to different sequences; the order of keys does not matter to the softmax.
    """
    return _tiles(_by_slot(pages), tile_pages, chunk_tokens)


def prefill_tiles(pages: Sequence[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    """Cut one sequence's pages, which are in order, into tiles of consecutive tokens."""
    return _tiles(list(pages), tile_pages, chunk_tokens)


def ordered_tiles(pages: Sequence[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    """Cut pages of any sequences, each one's in order, so that each one's tokens stay in order.

    Link and device then share a layer's work less evenly: what a sequence has to load comes
    after what it has to rebuild, and beside what the next one has to rebuild.
    """
    kinds = _Kinds.of(list(pages), tile_pages, chunk_tokens)
    return _following(
        _following(kinds.kept, kinds.rebuilt), _following(kinds.divided, kinds.loaded)
    )


def in_turn(first: Sequence[Tile], second: Sequence[Tile]) -> list[Tile]:
    """Merge both into one order, each spread evenly; `first` begins."""
    places = [((2 * index + 1) / len(first), 0, tile) for index, tile in enumerate(first)]
    places += [((2 * index + 1) / len(second), 1, tile) for index, tile in enumerate(second)]
    return [tile for *_, tile in sorted(places, key=lambda place: place[:2])]


def _following(first: Sequence[Tile], second: Sequence[Tile]) -> list[Tile]:
    """Merge both as `in_turn`, but no tile of `second` before those of `first` it continues."""
    continued = {page.reader: index for index, tile in enumerate(first) for page in tile.pages}
    places = [((2 * index + 1) / len(first), 0, tile) for index, tile in enumerate(first)]
    earliest = 0.0
    for index, tile in enumerate(second):
        ends = [continued[page.reader] for page in tile.pages if page.reader in continued]
        earliest = max(earliest, (2 * index + 1) / len(second), *(places[end][0] for end in ends))
        places.append((earliest, 1, tile))
    return [tile for *_, tile in sorted(places, key=lambda place: place[:2])]


def _tiles(pages: list[StoredPage], tile_pages: int, chunk_tokens: int) -> list[Tile]:
    kinds = _Kinds.of(pages, tile_pages, chunk_tokens)
    return in_turn(in_turn(kinds.rebuilt, kinds.kept), [*kinds.divided, *kinds.loaded])


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Tiles of pages that are kept, rebuilt, divided by the split, or loaded.

    A sequence's pages are of these kinds in this order.
    """

    kept: list[Tile]
    rebuilt: list[Tile]
    divided: list[Tile]
    loaded: list[Tile]

    @classmethod
    def of(cls, pages: list[StoredPage], tile_pages: int, chunk_tokens: int) -> _Kinds:
        kept = [page for page in pages if page.is_kept]
        pages = [page for page in pages if not page.is_kept]
        rebuilt = [page for page in pages if page.rebuilt_rows == chunk_tokens]
        loaded = [page for page in pages if page.rebuilt_rows == 0]
        divided = [page for page in pages if 0 < page.rebuilt_rows < chunk_tokens]
        return cls(
            [_rebuilt(cut, chunk_tokens, is_kept=True) for cut in _cuts(kept, tile_pages)],
            [_rebuilt(cut, chunk_tokens) for cut in _cuts(rebuilt, tile_pages)],
            [Tile((page,), is_loaded=True, rebuilt_rows=page.rebuilt_rows) for page in divided],
            [Tile(cut, is_loaded=True, rebuilt_rows=0) for cut in _cuts(loaded, tile_pages)],
        )


def _rebuilt(pages: tuple[StoredPage, ...], chunk_tokens: int, *, is_kept: bool = False) -> Tile:
    return Tile(pages, is_loaded=False, rebuilt_rows=len(pages) * chunk_tokens, is_kept=is_kept)


def _cuts(pages: Sequence[StoredPage], most: int) -> list[tuple[StoredPage, ...]]:
    """Cut into as few pieces as possible, all of nearly the same size."""
    count = -(-len(pages) // most)
    edges = [len(pages) * piece // count for piece in range(count + 1)] if count else [0]
    return [tuple(pages[start:stop]) for start, stop in pairwise(edges)]


def _by_slot(pages: Sequence[StoredPage]) -> list[StoredPage]:
    """Order by slot; repeated reads of a shared chunk come after all first reads."""
    seen: Counter[int] = Counter()
    places = []
    for page in pages:
        places.append((seen[page.chunk.slot], page.chunk.slot, page))
        seen[page.chunk.slot] += 1
    return [page for *_, page in sorted(places, key=lambda place: place[:2])]
