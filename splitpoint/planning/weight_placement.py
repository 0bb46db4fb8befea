"""Which weights of a model are on the device and which on the host: pure arithmetic.

Streamed weights cost link time in every step, so all weights stay on the device if they
fit. If not, the layers on the host are spread evenly, so that the link brings one while
others compute.

The cache shares the budget. With W bytes of weights, F bytes free for weights and cache, and
c of them given to the cache, about W - F + c bytes cross the link in each step, which serves a
batch n that grows with c. A step takes

    t(n) = max(streamed bytes / link rate, base + n * seconds of a token)

The objective says which placement is best: the least t(1) (latency), the most tokens per
second n / t(n) (throughput), or the most n / (t(n) t(1)) (balanced: throughput over latency).
For throughput, sequences may also be streamed, so that every place of a batch is taken: q of
them pull q S bytes more in each step, S being the cache of the longest sequence or, as far as
the device has time to rebuild, its X. They keep only its last page on the device. This is
KVPR's Algorithm 1: weights cross the link once for the whole batch, whatever of its cache the
device has room for.

Where the link is the limit, balanced means c = W - F: the cache gets about as much as the
weights exceed the memory. Where computing takes longer, more bytes may cross the link for
nothing, and all objectives use that for a larger cache. The cache is never less than its
minimum, and there is no credit for more than full batches of the longest sequences.

Prompt tokens are computed beside the weights of a step, too: `prefill_budget` says how many
take no more time than the link does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import Profile
from splitpoint.planning.weight_schedule import LAYER_PIECES, WeightPiece
from splitpoint.shapes import ModelShape, WeightFormat

# One layer on the link, and one being read.
WEIGHT_SLOTS = 2
# The head crosses the link in pieces of at most this many bytes, and at least this many
# pieces, two of which are held at once.
HEAD_PIECE_BYTES = 32 << 20
HEAD_PIECES = 8
# Prompt tokens of a step grow to at most this many times their usual number.
MOST_GROWTH = 8


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights as a worker holds them; all layers have the same.

    Attributes:
        pieces: matrices of one layer, by piece.
        fixed: norms, biases, small projections: always on the device.
        table: rows by token id, and by position where they are learned.
        head: the output matrix.
        head_piece, head_pieces: bytes of each of its pieces, and their number.
        head_is_table: True if it is tied to the table and held once.
    """

    layer_count: int
    pieces: Mapping[WeightPiece, int]
    fixed: int
    table: int
    head: int
    head_piece: int
    head_pieces: int
    head_is_table: bool

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        weights: WeightFormat = WeightFormat.NATIVE,
        *,
        is_gpu: bool = True,
    ) -> WeightSizes:
        """Return the sizes of a shape's matrices, without padding, biases and norms.

        A CPU holds a head that is tied to the table by itself, in the layout of its kernels.
        """
        if shape.held_weight_bytes is not None:
            head = shape.embedding_bytes if shape.tied_embeddings and not is_gpu else 0
            return cls.held(shape.layer_count, shape.held_weight_bytes + head)
        hidden, inner, data_type = shape.hidden_size, shape.intermediate_size, shape.data_type
        head = weights.matrix_bytes(shape.vocabulary_size, hidden, data_type)
        count = head_piece_count(shape.embedding_bytes)
        up = weights.matrix_bytes(inner, hidden, data_type)
        return cls(
            layer_count=shape.layer_count,
            pieces={
                WeightPiece.KEY_VALUE: weights.matrix_bytes(2 * shape.kv_width, hidden, data_type),
                WeightPiece.QUERY: weights.matrix_bytes(shape.query_width, hidden, data_type),
                WeightPiece.OUTPUT: weights.matrix_bytes(hidden, shape.query_width, data_type),
                WeightPiece.MLP: (2 if shape.gated_mlp else 1) * up
                + weights.matrix_bytes(hidden, inner, data_type),
            },
            fixed=0,
            table=shape.embedding_bytes,
            head=head,
            head_piece=-(-head // count),
            head_pieces=count,
            head_is_table=shape.tied_embeddings and is_gpu and not weights.is_lossy,
        )

    @classmethod
    def held(cls, layer_count: int, size: int) -> WeightSizes:
        """Return the sizes of weights of which none can be on the host."""
        return cls(
            layer_count=layer_count,
            pieces=dict.fromkeys(LAYER_PIECES, 0),
            fixed=size,
            table=0,
            head=0,
            head_piece=0,
            head_pieces=1,
            head_is_table=True,
        )

    @property
    def layer(self) -> int:
        return sum(self.pieces.values())

    @property
    def can_stream(self) -> bool:
        """True if some of them may stay on the host."""
        return self.total > self.fixed

    @property
    def total(self) -> int:
        """Bytes of all weights on the device."""
        head = 0 if self.head_is_table else self.head
        return self.fixed + self.table + head + self.layer_count * self.layer


@dataclass(frozen=True, slots=True)
class OnHost:
    """Which weights are on the host.

    Attributes:
        layers: layers whose matrices cross the link in each step; ascending.
        table: embedding rows are gathered on the host.
        head: the output matrix crosses the link in pieces.
    """

    layers: tuple[int, ...] = ()
    table: bool = False
    head: bool = False


NOTHING_ON_HOST = OnHost()


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """A placement and its consequences.

    Attributes:
        device_bytes: memory that the weights occupy on the device, slots included.
        streamed_bytes: bytes over the link in a step that computes logits.
        reason: the placement in words.
    """

    on_host: OnHost
    device_bytes: int
    streamed_bytes: int
    reason: str


class WeightObjective(Enum):
    """The aim of a placement; see the module's text. The value is its name on command lines."""

    BALANCED = "balanced"
    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class StepRates:
    """What bounds a step whose weights cross the link.

    Attributes:
        link: bytes per second.
        base, token: compute seconds of a step, and of each of its tokens besides.
        rebuild: compute seconds of rebuilding K and V of a token in all layers.
    """

    link: float
    base: float = 0.0
    token: float = 0.0
    rebuild: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, profile: Profile) -> StepRates:
        """Return the rates of a measured or built-in profile."""
        return cls(
            profile.link_bytes_per_second,
            profile.prefill_overhead_seconds,
            shape.prefill_flops(1) / profile.prefill_flops_per_second,
            shape.layer_count
            * shape.rebuild_flops_per_token_layer
            / profile.rebuild_flops_per_second,
        )

    def step_seconds(self, streamed_bytes: int, tokens: float) -> float:
        """Return the seconds of a step with this many bytes on the link and this many tokens."""
        return max(streamed_bytes / self.link, self.base + tokens * self.token)

    def prefill_budget(self, streamed_bytes: int, tokens: int) -> int:
        """Return the prompt tokens that compute while the weights cross the link.

        At least the usual number `tokens`, at most MOST_GROWTH times as many.
        """
        most = MOST_GROWTH * tokens
        beside = streamed_bytes / self.link - self.base
        fitting = math.floor(beside / self.token) if self.token else most
        return max(tokens, min(fitting, most))


@dataclass(frozen=True, slots=True)
class StreamedCache:
    """What a streamed sequence as long as the context needs.

    Attributes:
        kept_bytes: device memory.
        room_bytes: device memory that all streamed sequences share besides.
        loaded_bytes: over the link in each step, if all K and V are loaded.
        sent_bytes: the same, if all are rebuilt from X; at most `loaded_bytes`.
        rebuild_seconds: of computing them then.
    """

    kept_bytes: int
    room_bytes: int
    loaded_bytes: int
    sent_bytes: int
    rebuild_seconds: float

    def step_seconds(
        self, weight_bytes: int, resident: float, streamed: float, rates: StepRates
    ) -> float:
        """Return a step in which the best part of each streamed cache is rebuilt.

        That keeps link and device busy for equally long, if all or nothing is not better.
        """
        load = (weight_bytes + streamed * self.loaded_bytes) / rates.link
        saved = streamed * (self.loaded_bytes - self.sent_bytes) / rates.link
        compute = rates.base + (resident + streamed) * rates.token
        rebuild = streamed * self.rebuild_seconds
        gap, shift = load - compute, saved + rebuild
        part = min(1.0, max(0.0, gap / shift)) if saved and shift else 0.0
        return max(load - part * saved, compute + part * rebuild)


# Where only bytes count.
LINK_ONLY = StepRates(1.0)


def place_weights(
    sizes: WeightSizes,
    *,
    free_bytes: int,
    least_cache_bytes: int,
    most_cache_bytes: int,
    most_sequences: int = 1,
    streamed: StreamedCache | None = None,
    rates: StepRates = LINK_ONLY,
    objective: WeightObjective = WeightObjective.BALANCED,
) -> WeightPlacement:
    """Return the best placement for a device with `free_bytes` for weights and cache.

    If no placement fits, return the one that needs the least memory; the caller compares
    its `device_bytes`.

    Args:
        least_cache_bytes, most_cache_bytes: what the cache must have, and what it can use.
        most_sequences: the batch that `most_cache_bytes` hold.
        streamed: what a streamed sequence as long as the context needs; None: none can be
            streamed.
    """
    if sizes.total + least_cache_bytes <= free_bytes:
        return _placement(sizes, NOTHING_ON_HOST)
    # The table goes first: a step reads only rows of it.
    candidates = [
        _placement(
            sizes,
            OnHost(spread(count, sizes.layer_count), head or not sizes.head_is_table, head),
        )
        for head in (False, True)
        # As many layers as there are slots might as well stay.
        for count in (0, *range(WEIGHT_SLOTS + 1, sizes.layer_count + 1))
    ]
    fitting = [one for one in candidates if one.device_bytes + least_cache_bytes <= free_bytes]
    if not fitting:
        return min(candidates, key=lambda one: one.device_bytes)

    room = _CacheRoom(most_cache_bytes, most_sequences, streamed)

    def merit(one: WeightPlacement) -> tuple[float, int]:
        cache = free_bytes - one.device_bytes
        if objective is WeightObjective.THROUGHPUT:
            return room.best(cache, one.streamed_bytes, rates).rate, -one.device_bytes
        resident = room.residents(cache)
        alone = rates.step_seconds(one.streamed_bytes, 1)
        seconds = rates.step_seconds(one.streamed_bytes, resident)
        if not seconds:
            return math.inf, -one.device_bytes
        is_balanced = objective is WeightObjective.BALANCED
        return (resident / seconds if is_balanced else 1.0) / alone, -one.device_bytes

    best = max(fitting, key=merit)
    if objective is not WeightObjective.THROUGHPUT:
        return best
    batch = room.best(free_bytes - best.device_bytes, best.streamed_bytes, rates)
    return replace(best, reason=f"{best.reason}; {batch}")


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of sequences as long as the context, and its tokens per second.

    Attributes:
        resident: sequences, or parts of one, whose cache is on the device.
        streamed: sequences that pull theirs in every step.
    """

    resident: float
    streamed: float
    rate: float

    def __str__(self) -> str:
        count = math.floor(self.resident + self.streamed + 1e-6)
        streamed = f", {math.ceil(self.streamed)} of them streamed," if self.streamed else ""
        return (
            f"for throughput: {counted(count, 'request')} as long as the context at once"
            f"{streamed} have the most tokens/s"
        )


def tokens_per_second(count: float, step_seconds: float) -> float:
    """Return the rate of a batch: 0 if it is empty, infinite if its step takes no time."""
    if not count:
        return 0.0
    return count / step_seconds if step_seconds else math.inf


def residents_beside_others(
    memory: float, places: int, resident_size: float, streamed_size: float
) -> float:
    """Return how many residents leave memory to stream a sequence at every other place.

    In bytes or pages, (C - N t) / (P - t) of splitpoint/residency/full_batch.py. 0 if every place
    could be streamed only without residents, or if a resident needs no more than a streamed one.
    """
    more = resident_size - streamed_size
    return max(0.0, (memory - places * streamed_size) / more) if more > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _CacheRoom:
    """What sequences as long as the context need of the cache; see `place_weights`."""

    most_bytes: int
    most_sequences: int
    streamed: StreamedCache | None

    def residents(self, cache_bytes: int) -> float:
        """Return how many sequences this much memory holds, at most a batch."""
        return self.most_sequences * min(cache_bytes, self.most_bytes) / self.most_bytes

    def best(self, cache_bytes: int, weight_bytes: int, rates: StepRates) -> _Batch:
        """Return the better of two batches: residents alone, or every place taken."""
        residents = self.residents(cache_bytes)
        seconds = rates.step_seconds(weight_bytes, residents)
        alone = _Batch(residents, 0.0, tokens_per_second(residents, seconds))
        if self.streamed is None or residents >= self.most_sequences:
            return alone
        residents, count = self._every_place(cache_bytes, self.streamed)
        seconds = self.streamed.step_seconds(weight_bytes, residents, count, rates)
        full = _Batch(residents, count, tokens_per_second(residents + count, seconds))
        return max(alone, full, key=lambda batch: batch.rate)

    def _every_place(self, cache_bytes: int, each: StreamedCache) -> tuple[float, float]:
        """Return residents and streamed sequences, which have their pages first."""
        left, places = max(0, cache_bytes - each.room_bytes), self.most_sequences
        longest = self.most_bytes / places
        residents = residents_beside_others(left, places, longest, each.kept_bytes)
        if not residents:
            return 0.0, float(min(places, left // each.kept_bytes))
        return residents, places - residents


def spread(count: int, layer_count: int) -> tuple[int, ...]:
    """Return `count` of the layers, spread as evenly as possible, the last one among them.

    The first layers stay on the device: while they compute, the link brings the first layer
    from the host.
    """
    return tuple(
        layer
        for layer in range(layer_count)
        if (layer + 1) * count // layer_count > layer * count // layer_count
    )


def head_piece_count(head_bytes: int) -> int:
    """Return the number of pieces in which a head crosses the link."""
    return max(HEAD_PIECES, -(-head_bytes // HEAD_PIECE_BYTES))


def _placement(sizes: WeightSizes, on_host: OnHost) -> WeightPlacement:
    count = len(on_host.layers)
    layers = (sizes.layer_count - count + min(WEIGHT_SLOTS, count)) * sizes.layer
    head = WEIGHT_SLOTS * sizes.head_piece
    if not on_host.head:
        head = 0 if sizes.head_is_table else sizes.head
    table = 0 if on_host.table else sizes.table
    streamed = count * sizes.layer
    streamed += sizes.head_pieces * sizes.head_piece if on_host.head else 0
    return WeightPlacement(
        on_host=on_host,
        device_bytes=sizes.fixed + table + head + layers,
        streamed_bytes=streamed,
        reason=_reason(sizes, on_host, streamed),
    )


def _reason(sizes: WeightSizes, on_host: OnHost, streamed: int) -> str:
    total = format_size(sizes.total)
    if on_host == NOTHING_ON_HOST:
        return f"all {total} of weights are on the device"
    parts = [f"{len(on_host.layers)} of {sizes.layer_count} layers"] if on_host.layers else []
    parts += ["the head"] * on_host.head + ["the embedding table"] * on_host.table
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    moved = f", {format_size(streamed)} over the link in each step" if streamed else ""
    return f"{total} of weights do not fit with a cache: {listed} on the host{moved}"
