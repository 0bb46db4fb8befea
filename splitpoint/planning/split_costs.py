"""Predicted seconds of a restore or a decode step, for every split and schedule.

A cached prefix of s tokens comes back layer by layer: [0, l) is rebuilt from stored
activations X, [l, s) is loaded. Rates and overheads come from the profile (C0 per copy,
G0 per GEMM). Per token and layer,

    a = X bytes / v_link      c = K and V bytes / v_link      g = 4 h d_kv / v_gpu

X crosses the link in n = ceil(l / tile) tiles, and K,V[l:s] in as many pieces (one when
l = 0). One of each takes

    send = C0 + a tile      rebuild = G0 + g tile      load = C0 + c (s - l) / n

S, R and P are the sums of sends, rebuilds and loads over all layers. Layer 0 sends
nothing, since its X is computed from token ids. A part without tokens costs nothing, its
overhead included. K and V of a layer count as one copy. Then t(l) is

    SERIAL     S + R + P                              nothing overlaps
    COLUMN     S + max(R, P)                          a barrier per layer: KVPR Eq. 10
    ROW        max(R, P)                              X is on the device already; a barrier
    PIPELINED  max(S + P, S + P - load + rebuild, R)  no barriers

A restore beside other work that computes Q seconds (SHARED_RESTORE) takes max(S + P, R + Q).
PIPELINED adds the delays of `Delays`: the last rebuild after the last load, the wait for a
staging slot, and the wait for the first X.

Each schedule has a function below, which returns the bounds whose largest is t(l).

A single restore (RESTORE) takes o seconds more for each copy, product and embedding, for
laying it out and handing it to its lane, and F seconds once. X of a partial last chunk that
will be sealed anew follows it, one copy of a whole chunk in each layer.

A restore moves whole chunks: P and S count the rows of the last chunk that are not part of
the prefix, and both parts of a chunk in which the split lies. A decode step has its partial
chunk on the device.

Weights on the host share the link. A restore that rebuilds anything sends W_K and W_V of
those layers once, which counts as part of S. A decode step sends all of their weights.

A decode step (DECODE_STEP) computes D seconds besides, D / L of them in a layer once its
keys and values have arrived. Meanwhile the part `ahead` of the next layer, as much as fits
the staging memory, may arrive:

    max(pipelined + D / L, R + D, P / L + R (L - 1) / L + D,
        D + (S - W + P) (1 - ahead (L - 1) / L))

W is the part of S that has memory of its own: weights.

With ROW a step has no S and no delays, and no barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from splitpoint.costs.profile import Profile
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape, chunks_of


class Scenario(Enum):
    """The work whose seconds are predicted."""

    # One restore that runs alone.
    RESTORE = "restore"
    # A decode step that streams the prefix: each layer computes once it has arrived.
    DECODE_STEP = "decode step"
    # One of many restores that keep device and link busy: its seconds are those for which
    # it occupies the busier of the two.
    SHARED_RESTORE = "shared restore"


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The settings of a restore, apart from its split.

    Attributes:
        tile_tokens: tokens of X in one copy; 0: all of them.
        slots: tiles that fit the staging memory; 0: all tiles fit.
        compute_seconds: the request's other work on the device: in each step
            (DECODE_STEP), or in total (SHARED_RESTORE).
        ahead: DECODE_STEP: the part of a layer that fits the staging memory, and so can
            arrive while the layer before computes.
        extra_operations: RESTORE: copies of X of one chunk that every split needs, for a
            partial last chunk.
        chunk_tokens: RESTORE, SHARED_RESTORE: copies are whole chunks of this many tokens.
    """

    schedule: Schedule
    tile_tokens: int = 0
    slots: int = 0
    scenario: Scenario = Scenario.RESTORE
    compute_seconds: float = 0.0
    ahead: float = 1.0
    extra_operations: int = 0
    chunk_tokens: int = 1

    def loaded_tokens(self, split: int, cached: int) -> int:
        """Return the rows that are loaded for tokens [split, cached)."""
        if split >= cached or self.scenario is Scenario.DECODE_STEP:
            return cached - split
        chunk = self.chunk_tokens
        return chunks_of(cached, chunk) * chunk - split // chunk * chunk

    def sent_tokens(self, split: int) -> int:
        """Return the rows of X that are sent for tokens [0, split)."""
        if self.scenario is Scenario.DECODE_STEP:
            return split
        return chunks_of(split, self.chunk_tokens) * self.chunk_tokens


class WorkSeconds(NamedTuple):
    """Seconds of each kind of work at one split, summed over all layers.

    Attributes:
        send: S, host weights included.
        rebuild, load: R, P.
        compute: other work on the device (D), and the overheads of a RESTORE.
    """

    send: float
    rebuild: float
    load: float
    compute: float


class Delays(NamedTuple):
    """Seconds for which a lane of the PIPELINED schedule idles; below 0: it does not.

    Attributes:
        last_rebuild: of the last tile, beyond the last load, once the link has finished.
        free_slot: the link waits for a staging slot while layer 0 is rebuilt, beyond what
            layer 0's loads hide.
        first_send: the device waits for the first X.
    """

    last_rebuild: float = 0.0
    free_slot: float = 0.0
    first_send: float = 0.0


NO_DELAYS = Delays()


def serial_bounds(work: WorkSeconds) -> tuple[float, ...]:
    """Return the only bound where nothing overlaps."""
    return (work.send + work.rebuild + work.load + work.compute,)


def column_bounds(work: WorkSeconds) -> tuple[float, ...]:
    """Return the bounds where each layer sends X first, then rebuilds while it loads."""
    link = work.send + work.load + work.compute
    device = work.send + work.rebuild + work.compute
    return link, device


def shared_bounds(work: WorkSeconds) -> tuple[float, ...]:
    """Return for how long one of many overlapping restores occupies link and device."""
    return work.send + work.load, work.rebuild + work.compute


def pipelined_bounds(work: WorkSeconds, delays: Delays) -> tuple[float, ...]:
    """Return the bounds of a restore without barriers."""
    device = work.rebuild + work.compute
    link = work.send + work.load + work.compute
    return (*_link_bounds(link, delays), device, device + delays.first_send)


def step_bounds(
    work: WorkSeconds, delays: Delays, *, layers: int, ahead: float, weights: float
) -> tuple[float, ...]:
    """Return the bounds of a decode step that streams the prefix.

    `weights`: the part of `work.send` that has memory of its own.
    """
    link = work.send + work.load + work.compute / layers
    device = work.rebuild + work.compute + delays.first_send
    other_layers = (layers - 1) / layers
    # The first layer computes once its keys and values have arrived.
    first_layer_load = work.load / layers + other_layers * work.rebuild + work.compute
    # What does not fit the staging memory arrives after the layer before has computed.
    streamed = work.send + work.load - weights
    staging = work.compute + (1 - other_layers * ahead) * streamed
    return (*_link_bounds(link, delays), device, first_layer_load, staging)


def _link_bounds(link: float, delays: Delays) -> tuple[float, ...]:
    drain, wait = delays.last_rebuild, delays.free_slot
    return link, link + drain, link + wait, link + (wait + drain)


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Seconds per token and per operation in one layer; see the module's formulas.

    Attributes:
        embeds: layer 0's X is computed from token ids; False: it is sent, as in KVPR.
        weights: seconds of the link, over all layers, for weights on the host.
        kv_weights: the part of them for W_K and W_V.
        operation, fixed: overheads of a restore, per operation (o) and once (F).
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
    operation: float = 0.0
    fixed: float = 0.0

    @classmethod
    def of(
        cls, shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE
    ) -> SplitCosts:
        """Return the costs of a model on a worker whose store keeps K, V and X so encoded."""
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
        """True if a token's X takes less of the link than its K and V, over all layers."""
        return self.sending_layers * self.activation < self.layer_count * self.load

    def link_seconds(
        self, split: int, cached: int, tile_tokens: int = 0, *, sends: bool = True
    ) -> float:
        """Return how long the link is busy with X of [0, split) and K,V of [split, cached).

        `sends` False: X is on the device already.
        """
        pieces = tiles_of(split, tile_tokens)
        total = self._send(split, pieces) if sends else 0.0
        total += self.kv_weights if split else 0.0
        return total + self._load(cached - split, pieces)

    def rebuild_seconds(self, split: int, tile_tokens: int = 0) -> float:
        """Return how long the device is busy rebuilding K,V of [0, split)."""
        return self._rebuild(split, tiles_of(split, tile_tokens))

    def operations(self, pieces: int, rest: int, *, sends: bool = True) -> int:
        """Return the copies, products and embeddings of `pieces` tiles and `rest` loaded tokens."""
        rebuilds = self.layer_count * pieces
        embeds = pieces if self.embeds else 0
        loads = self.layer_count * max(1, pieces) if rest else 0
        return rebuilds + embeds + loads + (self.sending_layers * pieces if sends else 0)

    def send_seconds(self, tokens: int) -> float:
        """Return one copy of X of this many tokens in one layer."""
        return self.copy_overhead + self.activation * tokens

    def overhead_seconds(self, operations: float) -> float:
        """Return what a restore with this many operations takes besides the operations."""
        return self.fixed + self.operation * operations if operations else 0.0

    def seconds(self, split: int, cached: int, options: PipelineOptions) -> float:
        """Return t(l)."""
        return max(self.bounds(split, tiles_of(split, options.tile_tokens), cached, options))

    def slope(self, schedule: Schedule, tile_tokens: int = 0) -> float:
        """Return by how much the best split grows with each token of the prefix, in [0, 1].

        Along that line rebuilding and the link take equally long; every tile has its
        overheads.
        """
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

    def bounds(
        self, split: int, pieces: int, cached: int, options: PipelineOptions
    ) -> tuple[float, ...]:
        """Return lower bounds of t(l), the largest of which is t(l).

        For a given number of tiles each is linear in `split`, for 0 < split < cached.
        """
        schedule, scenario = options.schedule, options.scenario
        work, weights = self._work(split, pieces, cached, options)
        if schedule is Schedule.SERIAL:
            return serial_bounds(work)
        is_row = schedule is Schedule.ROW
        if schedule is Schedule.COLUMN or (is_row and scenario is Scenario.RESTORE):
            return column_bounds(work)
        if scenario is Scenario.SHARED_RESTORE:
            return shared_bounds(work)
        delays = NO_DELAYS
        if split and not is_row:
            delays = self._delays(split, pieces, work.load, options.tile_tokens or cached, options)
        if scenario is Scenario.RESTORE:
            return pipelined_bounds(work, delays)
        return step_bounds(
            work, delays, layers=self.layer_count, ahead=options.ahead, weights=weights
        )

    def _work(
        self, split: int, pieces: int, cached: int, options: PipelineOptions
    ) -> tuple[WorkSeconds, float]:
        """Return the work, and the seconds of its sends that host weights take."""
        is_row = options.schedule is Schedule.ROW
        kv_weights = self.kv_weights if split else 0.0
        weights = self.weights if options.scenario is Scenario.DECODE_STEP else kv_weights
        compute = options.compute_seconds
        if options.scenario is Scenario.RESTORE and cached:
            operations = self.operations(pieces, cached - split, sends=not is_row)
            compute += self.overhead_seconds(operations + options.extra_operations)
            compute += options.extra_operations * self.send_seconds(options.chunk_tokens)
        work = WorkSeconds(
            weights if is_row else weights + self._send(options.sent_tokens(split), pieces),
            self._rebuild(split, pieces),
            self._load(options.loaded_tokens(split, cached), pieces),
            compute,
        )
        return work, weights

    def _delays(
        self, split: int, pieces: int, load: float, tile: int, options: PipelineOptions
    ) -> Delays:
        """Return the delays of X that is sent in tiles; `load` is P."""
        layers = self.layer_count
        last_tile = split - (pieces - 1) * tile
        last_rebuild = self._rebuild_tile(last_tile) - load / (layers * max(1, pieces))
        first_tile = tile if pieces > 1 else split
        first_copy = self.send_seconds(tile if pieces > 1 else options.sent_tokens(split))
        free_slot = first_send = 0.0
        if not self.embeds:
            first_send = first_copy
        elif options.scenario is Scenario.DECODE_STEP or self.kv_weights:
            # Layer 0's tiles take staging slots, too: the first X waits until all but
            # slots - 1 of them are rebuilt.
            waits = max(0, pieces - options.slots + 1) if options.slots else 0
            free_slot = waits * self._rebuild_tile(tile) - load / layers
        elif self.sending_layers:
            # The first X arrives after one load; meanwhile layer 0 rebuilds one tile.
            arrival = load / (layers * pieces) + first_copy
            first_send = arrival - self._rebuild_tile(first_tile)
        # The first layer's weights arrive before anything is rebuilt with them.
        return Delays(last_rebuild, free_slot, first_send + self.kv_weights / layers)

    def _send(self, split: int, pieces: int) -> float:
        """Return S without weights."""
        return self.sending_layers * (pieces * self.copy_overhead + self.activation * split)

    def _rebuild(self, split: int, pieces: int) -> float:
        """Return R."""
        return self.layer_count * (pieces * self.rebuild_overhead + self.rebuild * split)

    def _load(self, tokens: int, pieces: int) -> float:
        """Return P for this many tokens, in as many pieces as there are tiles."""
        if not tokens:
            return 0.0
        return self.layer_count * (max(1, pieces) * self.copy_overhead + self.load * tokens)

    def _rebuild_tile(self, tokens: int) -> float:
        return self.rebuild_overhead + self.rebuild * tokens


def tiles_of(tokens: int, tile_tokens: int) -> int:
    """Return the tiles that hold this many tokens; a tile size of 0 means one tile."""
    if tile_tokens <= 0:
        return min(tokens, 1)
    return -(-tokens // tile_tokens)
