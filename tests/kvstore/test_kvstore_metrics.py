"""Compares the store's Prometheus metrics with GetStats."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest
from kvstore_client import Service
from kvstore_helpers import SLOTS, Bench
from redis_server import RedisServer
from tier_double import MemoryTier, MemoryTransfer
from waiting import until

from kvstore_service.eviction.watermarks import WatermarkEvictor, Watermarks
from kvstore_service.metrics import readings
from kvstore_service.server import KvStoreServicer
from kvstore_service.stats import tier_stats, transfer_stats
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import TierStats, TransferStats
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.discovery.redis_options import RedisOptions, read_redis_options
from splitpoint.errors import ResourceExhausted
from splitpoint.observe import metrics as m
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Metric, metrics_of
from splitpoint.tiers import Tier
from splitpoint.v1 import kvstore_pb2 as pb

BEHIND = (m.Needs.TIER, m.Needs.TRANSFER)
Values = dict[Metric, dict[tuple[str, ...], float]]


def values(service: Service) -> Values:
    found: Values = defaultdict(dict)
    for reading in readings(service.servicer):
        assert reading.labels not in found[reading.metric], "read twice"
        found[reading.metric][reading.labels] = float(reading.value)
    return found


def value(service: Service, metric: Metric, *labels: str) -> float:
    return values(service)[metric][labels]


async def store_chunks(service: Service, *starts: int) -> None:
    """Seal one chunk without children for each start."""
    for start in starts:
        await service.seal(await service.written((start, 2, 3, 4)))


# -- all of them ----------------------------------------------------------------------------


async def test_every_metric_of_the_store_is_read_from_the_start(service: Service) -> None:
    found = values(service)
    not_read_here = {m.BUILD_INFO, m.RPC_CALLS, m.REDIS_UP}
    wanted = {each for each in metrics_of(m.Service.KVSTORE) if each.needs not in BEHIND}
    assert set(found) == wanted - not_read_here
    for metric, by_labels in found.items():
        assert all(len(labels) == len(metric.labels) for labels in by_labels)
    meters = Meters(m.Service.KVSTORE)
    meters.read(lambda: readings(service.servicer))
    assert {family.name for family in meters.registry.collect()} >= {
        metric.name.removesuffix("_total") for metric in found
    }


async def test_all_label_values_are_there_at_0(service: Service) -> None:
    found = values(service)
    assert found[m.STORE_SLOTS] == {
        ("free",): SLOTS,
        ("writing",): 0,
        ("sealed",): 0,
        ("quarantined",): 0,
    }
    assert found[m.STORE_EVICTIONS] == {
        ("lru", cause): 0 for cause in ("room", "watermark", "request")
    }
    uses = ("0", "1", "2-3", "4-7", "8-15", "16+")
    assert found[m.STORE_EVICTED_BY_USE] == {(each,): 0 for each in uses}
    assert found[m.STORE_RECOVERED_CHUNKS] == {
        (each,): 0 for each in ("adopted", "refused", "quarantined")
    }
    assert found[m.STORE_REMOTE_BYTES] == {(): 0}


async def test_they_agree_with_get_stats(service: Service) -> None:
    service.servicer.info.memory_description = "4 KiB pages"
    await service.seal(await service.written((1, 2, 3, 4), (5, 6)), keep_leased=True)
    await service.seal(await service.written((1, 2, 3, 4)))  # a duplicate
    await service.match([1, 2, 3, 4, 5, 9])
    await service.match([7, 7])
    await service.written((9, 9, 9, 9))  # granted, not sealed
    stats, found = await service.stats(), values(service)

    def read(metric: Metric, *labels: str) -> float:
        return found[metric][labels]

    assert [
        *(read(m.STORE_SLOTS, state) for state in ("free", "writing", "sealed", "quarantined")),
        *(read(m.STORE_LEASED_SLOTS), read(m.STORE_LEASES), read(m.STORE_SESSIONS)),
        *(read(m.STORE_MATCHES), read(m.STORE_MATCH_HITS)),
        *(read(m.STORE_QUERY_TOKENS), read(m.STORE_HIT_TOKENS)),
        *(read(m.STORE_SEALED_CHUNKS), read(m.STORE_DUPLICATE_CHUNKS)),
        *(read(m.STORE_EPOCH), read(m.STORE_ARENA_BYTES)),
    ] == [
        *(stats.free_slot_count, stats.writing_slot_count),
        *(stats.sealed_slot_count, stats.quarantined_slot_count),
        *(stats.leased_slot_count, stats.lease_count, stats.session_count),
        *(stats.match_count, stats.match_hit_count),
        *(stats.query_token_count, stats.hit_token_count),
        *(stats.sealed_chunk_count, stats.duplicate_chunk_count),
        *(stats.epoch, stats.arena_size_bytes),
    ]
    assert (stats.match_count, stats.hit_token_count, stats.duplicate_chunk_count) == (2, 5, 1)
    assert found[m.STORE_INFO] == {("native", "lru", "4", "yes", "4 KiB pages"): 1}


# -- evictions and refusals -------------------------------------------------------------------


async def test_evictions_are_told_apart_by_their_cause(service: Service) -> None:
    evictor = WatermarkEvictor(service.bench.store.pool, Watermarks(0.5, 0.4))
    service.servicer.info.evictor = evictor
    await store_chunks(service, 1, 2, 3, 4, 5)
    await service.match([1, 2, 3, 4, 5])  # used once after sealing, and leased
    while evictor.step():
        pass
    [by_watermark] = [value(service, m.STORE_EVICTIONS, "lru", "watermark")]
    assert by_watermark == 2
    await store_chunks(service, 6, 7, 8, 9, 10, 11)  # one more than there is room for
    assert value(service, m.STORE_EVICTIONS, "lru", "room") == 1
    await service.stub.Evict(pb.EvictRequest())
    found = values(service)[m.STORE_EVICTIONS]
    assert found == {("lru", "room"): 1, ("lru", "watermark"): 2, ("lru", "request"): 7}
    stats = await service.stats()
    assert stats.evicted_chunk_count == sum(found.values())
    assert values(service)[m.STORE_EVICTED_BY_USE]["0",] == 10
    assert value(service, m.STORE_EVICTED_AGE_SECONDS) == stats.evicted_age_seconds_sum


async def test_uses_beyond_the_last_class_are_in_it(service: Service) -> None:
    service.bench.store.evictions.by_use_count = [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(values(service)[m.STORE_EVICTED_BY_USE].values()) == [1, 2, 3, 4, 5, 21]


async def test_only_reservations_that_found_no_room_count_as_refused(service: Service) -> None:
    stats = await service.stats()
    assert stats.refused_reservation_count == 0
    assert not stats.HasField("last_refused_seconds_ago")
    with pytest.raises(ResourceExhausted) as too_many:
        await service.reserve(SLOTS + 1)  # no arena of this size ever could
    assert too_many.value.reason == "ARENA_TOO_SMALL"
    assert value(service, m.STORE_REFUSED_RESERVATIONS) == 0

    await service.reserve(SLOTS)  # all of it is being written
    for expected in (1, 2):
        with pytest.raises(ResourceExhausted) as full:
            await service.reserve(1)
        assert full.value.reason == "ARENA_FULL"
        assert value(service, m.STORE_REFUSED_RESERVATIONS) == expected
    service.bench.clock.now += 7
    stats = await service.stats()
    assert stats.refused_reservation_count == 2
    assert stats.last_refused_seconds_ago == 7


# -- Redis --------------------------------------------------------------------------------------


async def test_redis_is_up_while_it_answers(service: Service, redis_server: RedisServer) -> None:
    assert not (await service.stats()).HasField("redis")
    assert m.REDIS_UP not in values(service)
    options = read_redis_options(redis_server.url)
    assert isinstance(options, RedisOptions)
    link = service.servicer.info.redis = RedisLink(options)

    async def ping() -> None:
        try:
            await link.run(lambda redis: redis.ping(), is_heartbeat=True)
        except Exception:  # away: that is what is looked at
            return

    async def is_told(up: bool) -> bool:
        await ping()
        status = (await service.stats()).redis
        assert value(service, m.REDIS_UP) == status.is_up
        assert status.address == options.name
        return status.is_up is up

    try:
        await until(lambda: is_told(True))
        redis_server.kill()
        await until(lambda: is_told(False))
        redis_server.start()
        await until(lambda: is_told(True))
    finally:
        await link.close()


# -- tiers and transfers --------------------------------------------------------------------


async def test_metrics_of_tiers_and_transfers_agree_with_get_stats(shm_folder: Path) -> None:
    bench = Bench(shm_folder, SLOTS)
    disk, pool = MemoryTier(bench.arena), MemoryTier(bench.arena, Tier.POOL)
    transfer = MemoryTransfer(disk)
    servicer = KvStoreServicer(
        bench.store, tiers=TierManager(bench.store.pool, [disk, pool]), transfer=transfer
    )
    # Every field has a value of its own.
    for number, field in enumerate(fields(TierStats)):
        if field.type == "int":
            setattr(disk.stats, field.name, 10 + number)
    for number, field in enumerate(fields(TransferStats)):
        if field.type == "int":
            setattr(transfer.stats, field.name, 100 + number)
    pool.go_away()
    found: Values = defaultdict(dict)
    for reading in readings(servicer):
        found[reading.metric][reading.labels] = float(reading.value)
    of_tiers, of_transfers = (
        {each for each in metrics_of(m.Service.KVSTORE) if each.needs is needs} for needs in BEHIND
    )
    assert of_tiers | of_transfers <= set(found)
    assert found[m.STORE_TIER_UP] == {("disk",): 1, ("weave",): 0}
    [stats, _], engine = tier_stats(servicer.tiers), transfer_stats(transfer)
    assert engine is not None
    told = {name: getattr(stats, name) for name in _counted(stats)}
    read = {metric.name: found[metric]["disk",] for metric in of_tiers}
    assert sorted(read.values()) == sorted(told.values())
    # A counter's name and its field's are alike, so that no two are confused.
    for name, value in told.items():
        [metric] = [
            each
            for each in of_tiers
            if set(each.name.split("_")) - {"total", "chunks", "splitpoint", "store", "tier"}
            == set(name.split("_")) - {"count", "chunk", "is"}
        ]
        assert found[metric]["disk",] == value, name
    assert sorted(found[metric][()] for metric in of_transfers) == sorted(
        float(getattr(engine, name)) for name in _counted(engine)
    )
    await servicer.close()
    bench.close()


def _counted(message: pb.TierStats | pb.TransferStats) -> list[str]:
    """Return the fields that are numbers or flags."""
    return [
        field.name
        for field in message.DESCRIPTOR.fields
        if field.type not in (field.TYPE_STRING, field.TYPE_ENUM)
    ]
