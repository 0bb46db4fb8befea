"""Seconds of a restore for every split and schedule, and the split that takes the least.

A cached prefix of s tokens comes back layer by layer: [0, l) is rebuilt from
stored activations X, [l, s) is loaded. Per layer, with rates and overheads of the
profile (C0 per copy, G0 per GEMM),

    a = X bytes / v_link      c = K and V bytes / v_link      g = 4 h d_kv / v_gpu

X goes in n = ceil(l / tile) pieces, and K,V[l:s] in as many (one when l = 0), so
that a piece of either takes

    send = C0 + a tile      rebuild = G0 + g tile      load = C0 + c (s - l) / n

and all of a layer n times that. Layer 0 sends nothing: its X is computed from
token ids. S, R and P are the sums over all layers of sends, rebuilds and loads:

    SERIAL     S + R + P                              nothing overlaps
    COLUMN     S + max(R, P)                          a barrier per layer: KVPR Eq. 10
    ROW        max(R, P)                              X is on the device already; a barrier
    PIPELINED  max(S + P, S + P - load + rebuild, R)  no barriers

The middle term of PIPELINED is its fill: the last tile can only be rebuilt once it
has come, which the last load alone hides. At the start the device has one tile of layer
0, whose X needs no link, and then waits for the first X behind a load: where that takes
longer, the difference is added to R. In a decode step layer 0 comes whole before layer
1, and its tiles take staging slots, so the first X waits until all but slots - 1 of them
are rebuilt; where layer 0's loads are not enough for that time, the link idles. A part
without tokens costs nothing, its overhead included. K and V of a layer count as one
copy.

A restore by itself (RESTORE) takes, whatever its schedule, o seconds more for each copy,
product and embedding, which have to be laid out and handed over, and F once. How many
there are depends on the tiles and on which parts have tokens, so o counts for where the
best split lies.

Weights on the host share the link: a restore that rebuilds anything sends W_K and W_V
of those layers once, which counts as part of S, and a decode step all of their weights.

A decode step that pulls the prefix computes D seconds beside, D / L of them in a layer
once its keys and values are there. While it does, the next layer may come as far as it
fits the staging memory (`ahead`, a part of it):

    max(pipelined + D / L, R + D, P / L + R (L - 1) / L + D,
        D + (S + P) (1 - ahead (L - 1) / L))

With ROW such a step has no S and no fill, and its layers wait for each other no more
than pipelined ones.

Knows no shapes' names, no requests and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from splitpoint.costs.profile import Profile
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape


class Scenario(Enum):
    """What the seconds are for."""

    # One restore by itself.
    RESTORE = "restore"
    # A decode step that pulls the prefix: each layer computes once it is there.
    DECODE_STEP = "decode step"
    # One of many that keep the device and the link busy: what counts is how long
    # it occupies whichever of the two it occupies longer.
    SHARED_RESTORE = "shared restore"


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a prefix comes back: what the seconds depend on beside the split.

    Attributes:
        tile_tokens: of X on the link at once; 0: all of it.
        slots: tiles that fit the staging memory; 0: all do.
        compute_seconds: seconds of other work that the same device does for this request: in
            each step (DECODE_STEP), or in all (SHARED_RESTORE).
        ahead: DECODE_STEP: the part of a layer that fits the staging memory, so that it can
            come while the layer before computes.
        extra_operations: RESTORE: copies that any split needs, such as X of a partial chunk.
    """

    schedule: Schedule
    tile_tokens: int = 0
    slots: int = 0
    scenario: Scenario = Scenario.RESTORE
    compute_seconds: float = 0.0
    ahead: float = 1.0
    extra_operations: int = 0


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Seconds per token and per operation in one layer; see the module's formulas.

    `embeds`: layer 0's X comes from token ids (False: it is sent, as in KVPR).
    `weights`, `kv_weights`: seconds of the link, over all layers, for weights on the
    host, and for W_K and W_V of these. `fixed`: once per restore (F).
    """

    layer_count: int
    activation: float  # a
    load: float  # c
    rebuild: float  # g
    copy_overhead: float  # C0
    rebuild_overhead: float  # G0
    embeds: bool = True
    weights: float = 0.0
    kv_weights: float = 0.0
    operation: float = 0.0  # o
    fixed: float = 0.0

    @classmethod
    def of(
        cls, shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE
    ) -> SplitCosts:
        """`encoding`: how the store keeps what crosses the link."""
        link = profile.link_bytes_per_second
        return cls(
            layer_count=shape.layer_count,
            activation=shape.stored_activation_bytes_per_token_layer(encoding) / link,
            load=shape.stored_kv_bytes_per_token_layer(encoding) / link,
            rebuild=shape.rebuild_flops_per_token_layer / profile.rebuild_flops_per_second,
            copy_overhead=profile.link_overhead_seconds,
            rebuild_overhead=profile.rebuild_overhead_seconds,
            weights=profile.weight_seconds,
            kv_weights=profile.host_kv_weight_bytes / link,
            operation=profile.operation_overhead_seconds,
            fixed=profile.restore_overhead_seconds,
        )

    @property
    def sending_layers(self) -> int:
        return self.layer_count - 1 if self.embeds else self.layer_count

    @property
    def can_pay(self) -> bool:
        """Whether a token's X takes less of the link than its K and V, over all layers."""
        return self.sending_layers * self.activation < self.layer_count * self.load

    def link_seconds(
        self, split: int, cached: int, tile_tokens: int = 0, *, sends: bool = True
    ) -> float:
        """How long the link is busy with X of [0, split) and K,V of [split, cached)."""
        pieces = tiles_of(split, tile_tokens)
        send = pieces * self.copy_overhead + self.activation * split
        total = self.sending_layers * send if sends else 0.0
        total += self.kv_weights if split else 0.0
        if split < cached:
            load = max(1, pieces) * self.copy_overhead + self.load * (cached - split)
            total += self.layer_count * load
        return total

    def rebuild_seconds(self, split: int, tile_tokens: int = 0) -> float:
        """How long the device is busy rebuilding K,V of [0, split)."""
        pieces = tiles_of(split, tile_tokens)
        return self.layer_count * (pieces * self.rebuild_overhead + self.rebuild * split)

    def operations(self, pieces: int, rest: int, *, sends: bool = True) -> int:
        """Copies, products and embeddings of so many tiles, with `rest` tokens to load."""
        rebuilds = self.layer_count * pieces
        embeds = pieces if self.embeds else 0
        loads = self.layer_count * max(1, pieces) if rest else 0
        return rebuilds + embeds + loads + (self.sending_layers * pieces if sends else 0)

    def overhead_seconds(self, operations: float) -> float:
        """Of a restore with so many, beside what they themselves take."""
        return self.fixed + self.operation * operations if operations else 0.0

    def seconds(self, split: int, cached: int, options: PipelineOptions) -> float:
        """t(l) over all layers."""
        return max(self.terms(split, tiles_of(split, options.tile_tokens), cached, options))

    def slope(self, schedule: Schedule, tile_tokens: int = 0) -> float:
        """By how much the split grows with the prefix, where rebuilding and the link take
        equally long: in [0, 1]. Every tile has its overheads."""
        layers, sends = self.layer_count, self.sending_layers
        copy = self.copy_overhead / tile_tokens if tile_tokens else 0.0
        product = self.rebuild_overhead / tile_tokens if tile_tokens else 0.0
        grows = layers * (self.rebuild + product)
        shrinks = layers * (self.load - copy)
        if schedule is Schedule.PIPELINED:
            shrinks -= sends * (self.activation + copy)
        if grows + shrinks <= 0:
            return 1.0
        return min(1.0, layers * self.load / (grows + shrinks))

    def terms(
        self, split: int, pieces: int, cached: int, options: PipelineOptions
    ) -> tuple[float, ...]:
        """What t(l) is the maximum of: for given pieces lines in `split` between 0 and cached."""
        layers, copy, compute = self.layer_count, self.copy_overhead, options.compute_seconds
        rest = cached - split
        is_step = options.scenario is Scenario.DECODE_STEP
        weights = self.weights if is_step else self.kv_weights if split else 0.0
        send = weights + self.sending_layers * (pieces * copy + self.activation * split)
        rebuild = layers * (pieces * self.rebuild_overhead + self.rebuild * split)
        load = layers * (max(1, pieces) * copy + self.load * rest) if rest else 0.0
        is_row = options.schedule is Schedule.ROW
        if is_row:
            send = weights
        if options.scenario is Scenario.RESTORE and cached:
            operations = self.operations(pieces, rest, sends=not is_row)
            compute += self.overhead_seconds(operations + options.extra_operations)
        if options.schedule is Schedule.SERIAL:
            return (send + rebuild + load + compute,)
        if options.schedule is Schedule.COLUMN or (is_row and options.scenario is Scenario.RESTORE):
            return (send + load + compute, send + rebuild + compute)
        if options.scenario is Scenario.SHARED_RESTORE:
            return (send + load, rebuild + compute)
        link, fill, late, head = send + load, 0.0, 0.0, 0.0
        tile = options.tile_tokens or cached
        # X that is there needs no slot, and nobody waits for it.
        if split and not is_row:
            last_rebuild = self.rebuild_overhead + self.rebuild * (split - (pieces - 1) * tile)
            fill = last_rebuild - load / (layers * max(1, pieces))
            first_tile = tile if pieces > 1 else split
            if not self.embeds:
                head = copy + self.activation * first_tile
            elif is_step or self.kv_weights:
                waits = max(0, pieces - options.slots + 1) if options.slots else 0
                late = waits * (self.rebuild_overhead + self.rebuild * tile) - load / layers
            elif self.sending_layers:
                # The first X, behind a load, against the one tile of layer 0.
                arrives = load / (layers * pieces) + copy + self.activation * first_tile
                head = arrives - self.rebuild_overhead - self.rebuild * first_tile
            # The first layer's weights come before anything is rebuilt with them.
            head += self.kv_weights / layers
        after = compute / layers if is_step else compute
        terms = tuple(link + after + more for more in (0.0, fill, late, late + fill))
        busy = rebuild + compute
        if not is_step:
            return (*terms, busy, busy + head)
        others = (layers - 1) / layers
        return (
            *terms,
            busy + head,
            # The first layer computes once its keys and values are there.
            load / layers + others * rebuild + compute,
            # What does not fit the staging memory comes when the layer before is done;
            # weights have memory of their own.
            compute + (1 - others * options.ahead) * (link - weights),
        )


def tiles_of(tokens: int, tile_tokens: int) -> int:
    """Tiles that hold so many tokens; a tile size of 0 means one tile."""
    if tile_tokens <= 0:
        return min(tokens, 1)
    return -(-tokens // tile_tokens)


def best_split(
    costs: SplitCosts,
    cached: int,
    options: PipelineOptions,
    *,
    quantum: int = 1,
    cap: int | None = None,
) -> int:
    """The l with the least `seconds`; the smallest such l.

    Closed form: for a given number of tiles t(l) is the maximum of lines, so its
    least value lies at an end of the tile or beside a crossing of two of them; and
    of the tiles only the first, the last, and those about where another line begins
    to lead can be best. 0 and `cached` stand alone, since a part without tokens
    drops its overhead, too.

    Args:
        quantum: l is a multiple of it, or `cached`; tiles are multiples of it, too.
        cap: no more than so many tokens are rebuilt. None: all may be.
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
    """Where t(l) may be least for 0 < l <= last < cached."""

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
            for turn in self._turns(count, offset):
                tiles.update((turn - 1, turn, turn + 1))
        for tile in tiles:
            if 1 <= tile <= count:
                yield from self._in_tile(tile)

    def _turns(self, count: int, offset: int) -> Iterator[int]:
        """For any two terms, the first tile where the other one is larger, by bisection."""

        def at(tile: int) -> tuple[float, ...]:
            return self._terms(min((tile - 1) * self.tile + offset, self.last), tile)

        first, final = at(1), at(count)
        for one in range(len(first)):
            for other in range(one):
                is_larger = first[one] > first[other]
                if is_larger == (final[one] > final[other]):
                    continue
                low, high = 1, count
                while high - low > 1:
                    middle = (low + high) // 2
                    terms = at(middle)
                    if (terms[one] > terms[other]) == is_larger:
                        low = middle
                    else:
                        high = middle
                yield high

    def _in_tile(self, tile: int) -> Iterator[int]:
        """Both ends of the tile, and the multiples of the quantum beside each crossing."""
        first = (tile - 1) * self.tile + self.quantum
        end = min(tile * self.tile, self.last)
        yield first
        yield end
        low, high = self._terms(first, tile), self._terms(end, tile)
        for one in range(len(low)):
            for other in range(one):
                left, right = low[one] - low[other], high[one] - high[other]
                if left * right < 0:
                    crossing = first + (end - first) * left / (left - right)
                    below = math.floor(crossing / self.quantum) * self.quantum
                    yield min(max(below, first), end)
                    yield min(max(below + self.quantum, first), end)

    def _terms(self, split: int, pieces: int) -> tuple[float, ...]:
        return self.costs.terms(split, pieces, self.cached, self.options)


def best_pipeline_options(
    costs: SplitCosts,
    cached: int,
    schedule: Schedule,
    *,
    chunk_tokens: int = 1,
    staging_tokens: int = 0,
) -> PipelineOptions:
    """The schedule with the tile size that serves its best split.

    Many small tiles cost overheads, few large ones fill: the last one is rebuilt
    when nothing is on the link any more. With o seconds of overhead a tile and f
    seconds of fill a token, l / B * o + B * f is least at B = sqrt(l o / f). Only
    PIPELINED has that fill; the others want tiles as large as staging allows.

    Args:
        chunk_tokens: a tile is a multiple of it.
        staging_tokens: tokens of X that fit the staging memory; a tile takes at
            most half of it. 0: no bound.
    """
    most = tiles_of(max(cached, 1), chunk_tokens)
    if staging_tokens:
        most = min(most, max(staging_tokens // (2 * chunk_tokens), 1))

    def options(chunks: int) -> PipelineOptions:
        tile = min(max(chunks, 1), most) * chunk_tokens
        return PipelineOptions(
            schedule, tile, max(2, staging_tokens // tile) if staging_tokens else 0
        )

    if schedule is not Schedule.PIPELINED or not costs.can_pay:
        return options(most)

    def seconds(options: PipelineOptions) -> float:
        return costs.seconds(
            best_split(costs, cached, options, quantum=chunk_tokens), cached, options
        )

    wanted = _tile_tokens(costs, cached) / chunk_tokens
    sizes = (options(chunks) for chunks in (math.floor(wanted), math.ceil(wanted), most))
    return min(sizes, key=lambda options: (seconds(options), options.tile_tokens))


def _tile_tokens(costs: SplitCosts, cached: int) -> float:
    """B = sqrt(l o / f) at the split that is best without overheads."""
    layers, sends = costs.layer_count, costs.sending_layers
    spared = layers * costs.load - sends * costs.activation
    worked = layers * costs.rebuild
    split = cached * layers * costs.load / (spared + worked)
    copy, product = costs.copy_overhead + costs.operation, costs.rebuild_overhead + costs.operation
    if split >= cached:
        return math.sqrt(cached * sends * copy / costs.rebuild)
    # Link and device take equally long: what either pays for a tile counts by how
    # little the other one gives way.
    link, device = (sends + layers) * copy, layers * product
    overhead = (worked * link + spared * device) / (spared + worked)
    return math.sqrt(split * overhead / costs.activation)
