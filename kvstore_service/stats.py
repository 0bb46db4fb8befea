"""The answer to GetStats: the pool, its sessions, tiers and transfer engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_service.eviction.watermarks import WatermarkEvictor
from kvstore_service.maintenance import Maintenance
from kvstore_service.sessions import Session
from kvstore_service.store import KvStore
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTransfer
from splitpoint.arena.files import Loss
from splitpoint.arena.records import SlotState
from splitpoint.options.store import EVICTION
from splitpoint.tiers import Tier
from splitpoint.transport.convert import layout_to_proto, tier_to_proto, to_message
from splitpoint.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink


def tier_stats(tiers: TierManager) -> list[pb.TierStats]:
    return [_tier_stats(tiers, name) for name in tiers.tiers]


def _tier_stats(tiers: TierManager, name: Tier) -> pb.TierStats:
    stats, writer = tiers.tiers[name].stats, tiers.writers[name]
    return to_message(
        pb.TierStats,
        stats,
        tier=tier_to_proto(name),
        dropped_chunk_count=writer.dropped_chunk_count,
        read_bytes_per_second=tiers.rates[name].bytes_per_second,
        waiting_chunk_count=writer.waiting_count,
    )


def _session_stats(session: Session) -> pb.SessionStats:
    return to_message(
        pb.SessionStats,
        session,
        lease_count=len(session.lease_ids),
        granted_slot_count=len(session.granted),
    )


def transfer_stats(transfer: ChunkTransfer | None) -> pb.TransferStats | None:
    """Return None if the store has no transfer engine."""
    return None if transfer is None else to_message(pb.TransferStats, transfer.stats)


def endpoint_message(transfer: ChunkTransfer | None) -> pb.TransferEndpoint | None:
    """Return None while other stores cannot read this arena."""
    endpoint = None if transfer is None else transfer.endpoint
    return None if endpoint is None else to_message(pb.TransferEndpoint, endpoint)


@dataclass(slots=True)
class StoreInfo:
    """What GetStats and the metrics report about a process besides its store.

    Attributes:
        page_reason: why chunks have their size; empty if a user gave it.
        former_loss: how the arena that an earlier store served here was lost, if it was.
        evictor: evicts in the background. None if it is off.
        redis: connection to the Redis that has this store's catalog. None without Redis.
    """

    policy_name: str = EVICTION.default
    memory_description: str = ""
    page_reason: str = ""
    former_loss: Loss | None = None
    evictor: WatermarkEvictor | None = None
    redis: RedisLink | None = None


def stats_response(
    store: KvStore,
    maintenance: Maintenance,
    info: StoreInfo,
    uptime_seconds: float,
    tiers: TierManager,
    transfer: ChunkTransfer | None,
) -> pb.GetStatsResponse:
    pool, counters, recovered = store.pool, store.counters, store.recovered_state
    scrubber = maintenance.scrubber
    return pb.GetStatsResponse(
        slot_count=store.arena.slot_count,
        free_slot_count=pool.slots.count(SlotState.FREE),
        writing_slot_count=pool.slots.count(SlotState.WRITING),
        sealed_slot_count=pool.slots.count(SlotState.SEALED),
        quarantined_slot_count=pool.slots.count(SlotState.QUARANTINED),
        session_count=len(store.sessions),
        lease_count=len(pool.leases),
        leased_slot_count=pool.leases.leased_slot_count,
        match_count=counters.matches,
        match_hit_count=counters.match_hits,
        query_token_count=counters.query_tokens,
        hit_token_count=counters.hit_tokens,
        sealed_chunk_count=pool.sealed_total,
        duplicate_chunk_count=counters.duplicates,
        evicted_chunk_count=pool.evicted_total,
        checksum_failure_count=counters.checksum_failures,
        epoch=store.epoch,
        instance_id=store.arena.superblock.instance_id,
        layout=layout_to_proto(store.arena.layout),
        arena_path=str(store.arena.path),
        arena_size_bytes=store.arena.size_bytes,
        eviction_policy=info.policy_name,
        unadmitted_chunk_count=(
            store.admission.kept_out_total if store.admission is not None else 0
        ),
        watermark_evicted_chunk_count=(
            info.evictor.evicted_total if info.evictor is not None else 0
        ),
        evicted_by_use_count=store.evictions.by_use_count,
        evicted_age_seconds_sum=store.evictions.age_seconds_sum,
        memory_description=info.memory_description,
        page_reason=info.page_reason,
        remote_read_bytes=counters.remote_read_bytes,
        integrity_violations=maintenance.violations,
        adopted_chunk_count=len(recovered.chunks),
        refused_chunk_count=len(recovered.damages),
        quarantined_at_start_count=recovered.unsealed_count,
        recovery_seconds=store.recovery_seconds,
        unverified_chunk_count=len(pool.unverified),
        refused_reservation_count=counters.refused_reservations,
        last_refused_seconds_ago=store.seconds_since_refusal(),
        redis=None if info.redis is None else info.redis.status,
        former_arena_loss=info.former_loss or "",
        uptime_seconds=uptime_seconds,
        damaged_chunk_count=store.inspection.damaged_count,
        scrub_pass_count=scrubber.pass_count if scrubber is not None else 0,
        last_scrub_pass_seconds=scrubber.last_pass_seconds if scrubber is not None else None,
        last_damage_seconds_ago=store.inspection.seconds_since_damage(),
        tiers=tier_stats(tiers),
        transfer=transfer_stats(transfer),
        sessions=[_session_stats(session) for session in store.sessions],
    )
