"""The store's metrics. Their names are in splitpoint/observe/metrics.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore_service.server import KvStoreServicer
from kvstore_service.stats import tier_stats, transfer_stats
from kvstore_service.store import KvStore
from splitpoint.arena.files import Loss
from splitpoint.arena.records import SlotState
from splitpoint.observe import metrics as m
from splitpoint.observe.meters import Reading
from splitpoint.transport.convert import tier_from_proto

# Labels of uses before eviction. The last one sums all higher classes of the store.
_USES = ("0", "1", "2-3", "4-7", "8-15", "16+")


def readings(servicer: KvStoreServicer) -> Iterator[Reading]:
    """Yield all readings at this moment. Call it on the event loop, like all of the store."""
    store = servicer.store
    yield from _arena(servicer)
    yield from _slots(store)
    yield from _prefixes(store)
    yield from _evictions(servicer)
    yield from _health(servicer)
    yield from _tiers(servicer)
    yield from _transfer(servicer)


def _arena(servicer: KvStoreServicer) -> Iterator[Reading]:
    arena = servicer.store.arena
    yield Reading(
        m.STORE_INFO,
        1,
        (
            arena.layout.encoding.value,
            servicer.info.policy_name,
            "0" if arena.layout.page_bytes else str(arena.layout.chunk_tokens),
            "yes" if arena.layout.has_activations else "no",
            servicer.info.memory_description,
        ),
    )
    yield Reading(m.STORE_ARENA_BYTES, arena.size_bytes)
    yield Reading(m.STORE_SLOT_BYTES, arena.layout.chunk_bytes)
    yield Reading(m.STORE_EPOCH, servicer.store.epoch)


def _slots(store: KvStore) -> Iterator[Reading]:
    for state in SlotState:
        yield Reading(m.STORE_SLOTS, store.pool.slots.count(state), (state.name.lower(),))
    yield Reading(m.STORE_LEASED_SLOTS, store.pool.leases.leased_slot_count)
    yield Reading(m.STORE_LEASES, len(store.pool.leases))
    yield Reading(m.STORE_SESSIONS, len(store.sessions))
    for name, count in store.sessions.outcomes.items():
        yield Reading(m.STORE_OUTCOMES, count, (name,))


def _prefixes(store: KvStore) -> Iterator[Reading]:
    counters = store.counters
    yield Reading(m.STORE_MATCHES, counters.matches)
    yield Reading(m.STORE_MATCH_HITS, counters.match_hits)
    yield Reading(m.STORE_QUERY_TOKENS, counters.query_tokens)
    yield Reading(m.STORE_HIT_TOKENS, counters.hit_tokens)
    yield Reading(m.STORE_SEALED_CHUNKS, store.pool.sealed_total)
    yield Reading(m.STORE_DUPLICATE_CHUNKS, counters.duplicates)
    kept_out = store.admission.kept_out_total if store.admission is not None else 0
    yield Reading(m.STORE_UNADMITTED_CHUNKS, kept_out)
    yield Reading(m.STORE_REMOTE_BYTES, counters.remote_read_bytes)


def _evictions(servicer: KvStoreServicer) -> Iterator[Reading]:
    store, policy = servicer.store, servicer.info.policy_name
    watermark = servicer.info.evictor.evicted_total if servicer.info.evictor is not None else 0
    request = store.counters.evicted_on_request
    room = store.pool.evicted_total - watermark - request
    for cause, count in (("room", room), ("watermark", watermark), ("request", request)):
        yield Reading(m.STORE_EVICTIONS, count, (policy, cause))
    yield Reading(m.STORE_EVICTED_AGE_SECONDS, store.evictions.age_seconds_sum)
    for uses, count in zip(_USES, _by_use(store.evictions.by_use_count), strict=True):
        yield Reading(m.STORE_EVICTED_BY_USE, count, (uses,))
    yield Reading(m.STORE_REFUSED_RESERVATIONS, store.counters.refused_reservations)


def _by_use(counts: Sequence[int]) -> list[int]:
    """Return one count for each of _USES."""
    last = len(_USES) - 1
    first = [*counts[:last], *[0] * (last - len(counts))]
    return [*first, sum(counts[last:])]


def _health(servicer: KvStoreServicer) -> Iterator[Reading]:
    store, recovered = servicer.store, servicer.store.recovered_state
    yield Reading(m.STORE_CHECKSUM_FAILURES, store.counters.checksum_failures)
    for finder, count in store.inspection.damaged.items():
        yield Reading(m.STORE_DAMAGED_CHUNKS, count, (finder.value,))
    scrubber = servicer.maintenance.scrubber
    yield Reading(m.STORE_SCRUBBED_BYTES, scrubber.byte_count if scrubber else 0)
    yield Reading(m.STORE_SCRUB_PROGRESS, scrubber.progress if scrubber else 0)
    last_pass = (scrubber.last_pass_seconds if scrubber else None) or 0
    yield Reading(m.STORE_SCRUB_PASS_SECONDS, last_pass)
    yield Reading(m.STORE_INTEGRITY_VIOLATIONS, len(servicer.maintenance.violations))
    for result, count in (
        ("adopted", len(recovered.chunks)),
        ("refused", len(recovered.damages)),
        ("quarantined", recovered.unsealed_count),
    ):
        yield Reading(m.STORE_RECOVERED_CHUNKS, count, (result,))
    yield Reading(m.STORE_RECOVERY_SECONDS, store.recovery_seconds)
    for loss in Loss:
        yield Reading(m.STORE_FORMER_ARENA_LOST, loss is servicer.info.former_loss, (loss.value,))
    if servicer.info.redis is not None:
        yield Reading(m.REDIS_UP, not servicer.info.redis.is_away)


# Metrics of each tier, and their fields of TierStats.
_TIER_FIELDS = (
    (m.STORE_TIER_UP, "is_up"),
    (m.STORE_TIER_CAPACITY_BYTES, "capacity_bytes"),
    (m.STORE_TIER_USED_BYTES, "used_bytes"),
    (m.STORE_TIER_CHUNKS, "chunk_count"),
    (m.STORE_TIER_WAITING_CHUNKS, "waiting_chunk_count"),
    (m.STORE_TIER_READ_RATE, "read_bytes_per_second"),
    (m.STORE_TIER_WRITTEN_CHUNKS, "written_chunk_count"),
    (m.STORE_TIER_WRITTEN_BYTES, "written_bytes"),
    (m.STORE_TIER_READ_CHUNKS, "read_chunk_count"),
    (m.STORE_TIER_READ_BYTES, "read_bytes"),
    (m.STORE_TIER_MISSED_CHUNKS, "missed_chunk_count"),
    (m.STORE_TIER_DAMAGED_CHUNKS, "damaged_chunk_count"),
    (m.STORE_TIER_EVICTED_CHUNKS, "evicted_chunk_count"),
    (m.STORE_TIER_DROPPED_CHUNKS, "dropped_chunk_count"),
)
# The same of TransferStats.
_TRANSFER_FIELDS = (
    (m.STORE_TRANSFER_UP, "is_up"),
    (m.STORE_TRANSFER_REGISTERED_BYTES, "registered_bytes"),
    (m.STORE_TRANSFER_READ_BYTES, "read_bytes"),
    (m.STORE_TRANSFER_READ_CHUNKS, "read_chunk_count"),
    (m.STORE_TRANSFER_FAILED_READS, "failed_read_count"),
    (m.STORE_TRANSFER_RESTARTS, "restart_count"),
)


def _tiers(servicer: KvStoreServicer) -> Iterator[Reading]:
    for stats in tier_stats(servicer.tiers):
        name = stats.engine or tier_from_proto(stats.tier).value
        for metric, field in _TIER_FIELDS:
            yield Reading(metric, getattr(stats, field), (name,))


def _transfer(servicer: KvStoreServicer) -> Iterator[Reading]:
    stats = transfer_stats(servicer.transfer)
    if stats is not None:
        for metric, field in _TRANSFER_FIELDS:
            yield Reading(metric, getattr(stats, field))
