"""The split, and the tile size, with the least predicted seconds; see `split_costs`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts, tiles_of


def best_split(
    costs: SplitCosts,
    cached: int,
    options: PipelineOptions,
    *,
    quantum: int = 1,
    cap: int | None = None,
) -> int:
    """Return the l with the least `seconds`; the smallest such l.

    Closed form: for a given number of tiles t(l) is the maximum of lines, so its least
    value lies at an end of the tile or next to a crossing of two of them. Only the first
    tiles, the last ones, and those where another line begins to lead can be best. 0 and
    `cached` are candidates of their own, since a part without tokens drops its overhead.

    Args:
        quantum: l is a multiple of it, or `cached`; tiles are multiples of it, too.
        cap: most tokens that are rebuilt. None: all may be.
    """
    limit = cached if cap is None else min(cap, cached)
    candidates = {0}
    if limit == cached:
        candidates.add(cached)
    # The largest multiple of the quantum that leaves something to load.
    last = (min(limit, cached - 1) // quantum) * quantum
    if last > 0:
        search = _Search(costs, cached, options, options.tile_tokens or cached, quantum, last)
        candidates.update(search.candidates())
    return min(candidates, key=lambda split: (costs.seconds(split, cached, options), split))


@dataclass(frozen=True, slots=True)
class _Search:
    """Candidates for the least t(l) with 0 < l <= last < cached."""

    costs: SplitCosts
    cached: int
    options: PipelineOptions
    tile: int
    quantum: int
    last: int

    def candidates(self) -> Iterator[int]:
        count = tiles_of(self.last, self.tile)
        tiles = {1, 2, count - 1, count}
        # At its end a tile is whole, at its start its last piece is least.
        for offset in (self.tile, self.quantum):
            for crossing in self._crossings(count, offset):
                tiles.update((crossing - 1, crossing, crossing + 1))
        for tile in tiles:
            if 1 <= tile <= count:
                yield from self._in_tile(tile)

    def _crossings(self, count: int, offset: int) -> Iterator[int]:
        """Yield, for any two bounds, the first tile where their order changes, by bisection."""
        first, final = self._at_tile(1, offset), self._at_tile(count, offset)
        for one in range(len(first)):
            for other in range(one):
                is_larger = first[one] > first[other]
                if is_larger == (final[one] > final[other]):
                    continue
                low, high = 1, count
                while high - low > 1:
                    middle = (low + high) // 2
                    bounds = self._at_tile(middle, offset)
                    if (bounds[one] > bounds[other]) == is_larger:
                        low = middle
                    else:
                        high = middle
                yield high

    def _in_tile(self, tile: int) -> Iterator[int]:
        """Yield both ends of the tile, and the multiples of the quantum next to crossings."""
        first = (tile - 1) * self.tile + self.quantum
        end = min(tile * self.tile, self.last)
        yield first
        yield end
        low, high = self._bounds(first, tile), self._bounds(end, tile)
        for one in range(len(low)):
            for other in range(one):
                left, right = low[one] - low[other], high[one] - high[other]
                if left * right < 0:
                    crossing = first + (end - first) * left / (left - right)
                    below = math.floor(crossing / self.quantum) * self.quantum
                    yield min(max(below, first), end)
                    yield min(max(below + self.quantum, first), end)

    def _at_tile(self, tile: int, offset: int) -> tuple[float, ...]:
        return self._bounds(min((tile - 1) * self.tile + offset, self.last), tile)

    def _bounds(self, split: int, pieces: int) -> tuple[float, ...]:
        return self.costs.bounds(split, pieces, self.cached, self.options)


def best_pipeline_options(
    costs: SplitCosts,
    cached: int,
    schedule: Schedule,
    *,
    chunk_tokens: int = 1,
    staging_tokens: int = 0,
) -> PipelineOptions:
    """Return the schedule's options with the tile size that serves its best split.

    Many small tiles cost overheads; with few large ones the rebuild of the last one is
    long, and begins when the link has finished. With o seconds of overhead a tile and f
    seconds of that rebuild a token, l / B * o + B * f is least at B = sqrt(l o / f). Only
    PIPELINED waits so; the other schedules want tiles as large as staging allows.

    Args:
        chunk_tokens: a tile is a multiple of it.
        staging_tokens: tokens of X that fit the staging memory; a tile takes at
            most half of it. 0: no bound.
    """
    most = tiles_of(max(cached, 1), chunk_tokens)
    if staging_tokens:
        most = min(most, max(staging_tokens // (2 * chunk_tokens), 1))

    def with_tile(chunks: int) -> PipelineOptions:
        tile = chunks * chunk_tokens
        slots = max(2, staging_tokens // tile) if staging_tokens else 0
        return PipelineOptions(schedule, tile, slots, chunk_tokens=chunk_tokens)

    def rank(options: PipelineOptions) -> tuple[float, int]:
        split = best_split(costs, cached, options, quantum=chunk_tokens)
        return costs.seconds(split, cached, options), options.tile_tokens

    if schedule is not Schedule.PIPELINED or not costs.can_pay:
        return with_tile(most)
    wanted = _tile_tokens(costs, cached) / chunk_tokens
    sizes = {min(max(size, 1), most) for size in (math.floor(wanted), math.ceil(wanted), most)}
    return min(map(with_tile, sizes), key=rank)


def _tile_tokens(costs: SplitCosts, cached: int) -> float:
    """Return B = sqrt(l o / f) at the split that is best without overheads."""
    layers, sends = costs.layer_count, costs.sending_layers
    spared = layers * costs.load - sends * costs.activation
    worked = layers * costs.rebuild
    split = cached * layers * costs.load / (spared + worked)
    copy, product = costs.copy_overhead + costs.operation, costs.rebuild_overhead + costs.operation
    if split >= cached:
        return math.sqrt(cached * sends * copy / costs.rebuild)
    # Link and device take equally long: the overhead that a tile costs either of them is
    # weighted by how much the other one changes with the split.
    link, device = (sends + layers) * copy, layers * product
    overhead = (worked * link + spared * device) / (spared + worked)
    return math.sqrt(split * overhead / costs.activation)
