"""Which weights stay on the device: what must fit, what is spread, and what it is best for."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpoint.planning.weight_placement import (
    LINK_ONLY,
    MOST_GROWTH,
    NOTHING_ON_HOST,
    WEIGHT_SLOTS,
    OnHost,
    StepRates,
    StreamedCache,
    WeightObjective,
    WeightPlacement,
    WeightSizes,
    place_weights,
    spread,
)
from splitpoint.planning.weight_schedule import LAYER_PIECES, WeightPiece
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

MIB = 1 << 20


# A placement's merit is (batch / seconds) ** first / alone ** second.
POWERS = {
    WeightObjective.LATENCY: (0, 1),
    WeightObjective.BALANCED: (1, 1),
    WeightObjective.THROUGHPUT: (1, 0),
}


def sizes_of(layers: int = 12, *, tied: bool = False, head: int = 8) -> WeightSizes:
    """Layers of 10 MiB."""
    return WeightSizes(
        layer_count=layers,
        pieces=dict(zip(LAYER_PIECES, (2 * MIB, MIB, MIB, 6 * MIB), strict=True)),
        fixed=MIB,
        table=head * MIB,
        head=head * MIB,
        head_piece=MIB,
        head_pieces=head,
        head_is_table=tied,
    )


def place(sizes: WeightSizes, free: int, least: int = 5, most: int = 10_000) -> WeightPlacement:
    """In MiB."""
    return place_weights(
        sizes, free_bytes=free * MIB, least_cache_bytes=least * MIB, most_cache_bytes=most * MIB
    )


def test_bytes_of_a_shapes_weights_worked_out_by_hand() -> None:
    """OPT-6.7B in 16 bits: h = 4096, MLP 4 h, tied. Llama-3-8B: 8 KV heads of 128, gated."""
    opt = WeightSizes.of(BUILT_IN_SHAPES["opt-6.7b"])
    assert [opt.pieces[piece] for piece in LAYER_PIECES] == [
        64 * MIB,
        32 * MIB,
        32 * MIB,
        256 * MIB,
    ]
    assert opt.head == opt.table == 50272 * 4096 * 2
    llama = WeightSizes.of(BUILT_IN_SHAPES["llama-3-8b"])
    assert llama.pieces[WeightPiece.KEY_VALUE] == 2 * 4096 * 1024 * 2
    assert llama.pieces[WeightPiece.MLP] == 3 * 4096 * 14336 * 2


@pytest.mark.parametrize("shape", BUILT_IN_SHAPES.values(), ids=lambda shape: shape.name)
def test_the_parts_are_the_whole(shape: ModelShape) -> None:
    sizes = WeightSizes.of(shape)
    assert sizes.total == shape.weight_bytes
    assert sizes.layer_count * sizes.layer < sizes.total
    assert sizes.head <= sizes.head_pieces * sizes.head_piece


def test_what_fits_stays_on_the_device() -> None:
    sizes = sizes_of()
    placement = place(sizes, free=137 + 5)
    assert placement.on_host == NOTHING_ON_HOST
    assert (placement.device_bytes, placement.streamed_bytes) == (137 * MIB, 0)


def test_the_table_goes_first_and_costs_no_link_time() -> None:
    placement = place(sizes_of(), free=137 + 4)
    assert placement.on_host.table
    assert not placement.on_host.layers
    assert not placement.on_host.head
    assert placement.on_host == OnHost(table=True)
    assert placement.streamed_bytes == 0
    assert "the embedding table on the host" in placement.reason
    assert "over the link" not in placement.reason


def test_a_tied_table_goes_only_with_its_head() -> None:
    # 129 MiB in all; a head of 8 pieces with two slots frees 6 MiB.
    placement = place(sizes_of(tied=True), free=129 + 4)
    assert placement.on_host.table
    assert placement.on_host.head
    assert not placement.on_host.layers
    assert placement.device_bytes == (129 - 6) * MIB
    assert placement.streamed_bytes == 8 * MIB


def test_a_quarter_of_the_weights_holds_slots_and_cache() -> None:
    placement = place(sizes_of(48), free=124, least=40)
    assert len(placement.on_host.layers) == 48
    assert placement.device_bytes <= (124 - 40) * MIB
    assert placement.device_bytes >= WEIGHT_SLOTS * 10 * MIB
    assert placement.reason == (
        "497 MiB of weights do not fit with a cache: 48 of 48 layers, the head and the "
        "embedding table on the host, 488 MiB over the link in each step"
    )


def test_the_cache_gets_about_what_the_weights_exceed_the_memory_by() -> None:
    sizes = sizes_of(100, head=1)
    for free in (950, 900, 800, 600):
        placement = place(sizes, free)
        cache = free * MIB - placement.device_bytes
        exceeds = sizes.total - free * MIB
        # To the slots and one layer: layers are placed whole.
        assert abs(cache - exceeds) <= 35 * MIB
    # More than full batches can use counts for nothing.
    few = place(sizes, 600, most=100)
    assert 600 * MIB - few.device_bytes < 120 * MIB
    assert len(few.on_host.layers) < len(place(sizes, 600).on_host.layers)


def test_the_objective_and_the_rates_choose_among_what_fits() -> None:
    """By brute force over every number of layers on the host; a layer brings 10 MiB."""
    sizes, free, most, batch = sizes_of(100, head=1), 600, 2000, 64
    for link, token in ((1.0, 0.0), (1.0, 2.0), (1.0, 50.0), (10.0, 5.0)):
        rates = StepRates(link * MIB, base=1.0, token=token)
        best: dict[WeightObjective, float] = {}
        for count in range(WEIGHT_SLOTS + 1, 101):
            for head in (0, 1):
                on_device = 1 + (0 if head else 1) + 2 * head / 8 + (100 - count + 2) * 10
                cache = min(free - on_device, most)
                if cache < 5:
                    continue
                streamed = 10 * count + head
                seconds = max(streamed / link, 1.0 + batch * cache / most * token)
                alone = max(streamed / link, 1.0 + token)
                for objective, (first, second) in POWERS.items():
                    merit = (batch * cache / most / seconds) ** first / alone**second
                    best[objective] = max(best.get(objective, 0.0), merit)
        for objective, (first, second) in POWERS.items():
            chosen = place_weights(
                sizes,
                free_bytes=free * MIB,
                least_cache_bytes=5 * MIB,
                most_cache_bytes=most * MIB,
                most_sequences=batch,
                rates=rates,
                objective=objective,
            )
            tokens = batch * min(free - chosen.device_bytes / MIB, most) / most
            seconds = rates.step_seconds(chosen.streamed_bytes, tokens)
            alone = rates.step_seconds(chosen.streamed_bytes, 1)
            merit = (tokens / seconds) ** first / alone**second
            assert merit >= 0.98 * best[objective], (objective, rates)


def test_a_throughput_placement_streams_more_than_one_for_latency() -> None:
    streamed = [
        place_weights(
            sizes_of(100, head=1),
            free_bytes=600 * MIB,
            least_cache_bytes=5 * MIB,
            most_cache_bytes=2000 * MIB,
            most_sequences=64,
            rates=StepRates(MIB, token=0.1),
            objective=objective,
        ).streamed_bytes
        for objective in (
            WeightObjective.LATENCY,
            WeightObjective.BALANCED,
            WeightObjective.THROUGHPUT,
        )
    ]
    assert streamed == sorted(set(streamed))


def test_for_throughput_streamed_sequences_fill_the_batch() -> None:
    """By brute force over layers on the host and residents; a layer has 10 MiB, a tail 1.

    Sequences of 100 MiB: of 300 MiB beside the weights three are resident, or all 16 streamed.
    """
    sizes, free, longest, batch, tail, room = sizes_of(100, head=1), 600, 100, 16, 1, 6
    placed = partial(
        place_weights,
        sizes,
        free_bytes=free * MIB,
        least_cache_bytes=5 * MIB,
        most_cache_bytes=batch * longest * MIB,
        most_sequences=batch,
        objective=WeightObjective.THROUGHPUT,
    )
    # Loaded only; rebuilt from X of half the bytes in no time, or as long as loading takes.
    for link, sent, rebuild in ((1.0, 100, 0.0), (100.0, 100, 0.0), (1.0, 50, 0.0), (1.0, 50, 90)):
        streamed_cache = StreamedCache(tail * MIB, room * MIB, longest * MIB, sent * MIB, rebuild)
        rates = StepRates(link * MIB, base=0.01, token=0.001)
        best = 0.0
        for count in range(WEIGHT_SLOTS + 1, 101):
            for head in (0, 1):
                on_device = 1 + (0 if head else 1) + 2 * head / 8 + (100 - count + 2) * 10
                for resident in range(int((free - on_device) // longest) + 1):
                    left = free - on_device - room - resident * longest
                    streamed = max(0, min(batch - resident, int(left // tail)))
                    weights, sequences = (10 * count + head) * MIB, resident + streamed
                    seconds = min(
                        max(
                            (weights / MIB + streamed * (longest - part * (longest - sent))) / link,
                            0.01 + sequences * 0.001 + streamed * part * rebuild,
                        )
                        for part in (step / 100 for step in range(101))
                    )
                    best = max(best, sequences / seconds)
        chosen = placed(streamed=streamed_cache, rates=rates)
        left = free - chosen.device_bytes / MIB - room
        resident = max(0, int((left - batch * tail) // (longest - tail)))
        streamed = min(batch - resident, int((left - resident * longest) // tail))
        seconds = streamed_cache.step_seconds(chosen.streamed_bytes, resident, streamed, rates)
        rate = (resident + streamed) / seconds
        # Parts of a resident sequence count for the planner.
        assert rate >= 0.95 * best
        assert resident + streamed == batch
        assert (
            f"16 requests as long as the context at once, {streamed} of them streamed"
            in chosen.reason
        )
    without = placed(rates=StepRates(MIB))
    assert "streamed" not in without.reason
    assert without.reason.endswith(
        "5 requests as long as the context at once have the most tokens/s"
    )


def test_prompts_grow_to_what_computes_while_the_weights_cross() -> None:
    """100 bytes take 10 s, of which 2 s are a step's own: 16 tokens of half a second."""
    rates = StepRates(10.0, base=2.0, token=0.5)
    assert rates.prefill_budget(100, 4) == 16
    assert rates.prefill_budget(100, 20) == 20
    assert rates.prefill_budget(10_000, 4) == 4 * MOST_GROWTH
    assert rates.prefill_budget(0, 4) == 4
    assert LINK_ONLY.prefill_budget(1, 4) == 4 * MOST_GROWTH


def test_too_little_memory_is_answered_with_what_it_would_take() -> None:
    placement = place(sizes_of(), free=10)
    assert placement.device_bytes > 5 * MIB
    assert len(placement.on_host.layers) == 12
    assert placement.on_host.head


@given(
    st.integers(1, 80),
    st.booleans(),
    st.integers(1, 1200),
    st.integers(0, 60),
    st.integers(60, 2000),
)
def test_what_fits_is_never_refused_and_no_other_placement_is_better(
    layers: int, tied: bool, free: int, least: int, most: int
) -> None:
    sizes = sizes_of(layers, tied=tied)
    placement = place(sizes, free, least, most)
    fixed = MIB + 2 * MIB + min(layers, WEIGHT_SLOTS) * 10 * MIB
    if layers > WEIGHT_SLOTS and fixed + least * MIB <= free * MIB:
        assert placement.device_bytes + least * MIB <= free * MIB
    assert placement.device_bytes <= sizes.total + 2 * MIB
    host = placement.on_host.layers
    assert placement.streamed_bytes == 10 * MIB * len(host) + 8 * MIB * placement.on_host.head
    assert host == spread(len(host), layers)
    # A layer more on the device would not fit, or be of less use.
    if len(host) > WEIGHT_SLOTS + 1 and placement.device_bytes + least * MIB <= free * MIB:
        cache = min(free * MIB - placement.device_bytes, most * MIB)
        less = min(free * MIB - placement.device_bytes - 10 * MIB, most * MIB)
        streamed = placement.streamed_bytes
        assert less < least * MIB or less / (streamed - 10 * MIB) ** 2 <= cache / streamed**2


@given(st.integers(1, 100), st.data())
def test_host_layers_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, layers))
    host = spread(count, layers)
    assert len(host) == count == len(set(host))
    assert all(0 <= layer < layers for layer in host)
    gaps = [after - before for before, after in itertools.pairwise((-1, *host))]
    if gaps:
        assert max(gaps) - min(gaps) <= 1
        assert host[-1] == layers - 1
