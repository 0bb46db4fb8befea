"""Tiers and transfer engine as messages of KvStoreService."""

from __future__ import annotations

from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.transfer import ChunkTransfer
from splitpoint.tiers import Tier
from splitpoint.transport.convert import tier_to_proto
from splitpoint.v1 import kvstore_pb2 as pb


def tier_stats(tiers: TierManager) -> list[pb.TierStats]:
    return [_tier_stats(tiers, name) for name in tiers.tiers]


def _tier_stats(tiers: TierManager, name: Tier) -> pb.TierStats:
    stats, writer = tiers.tiers[name].stats, tiers.writers[name]
    return pb.TierStats(
        tier=tier_to_proto(name),
        location=stats.location,
        is_up=stats.is_up,
        message=stats.message,
        capacity_bytes=stats.capacity_bytes,
        used_bytes=stats.used_bytes,
        chunk_count=stats.chunk_count,
        written_chunk_count=stats.written_chunks,
        written_bytes=stats.written_bytes,
        read_chunk_count=stats.read_chunks,
        read_bytes=stats.read_bytes,
        missed_chunk_count=stats.missed_chunks,
        damaged_chunk_count=stats.damaged_chunks,
        evicted_chunk_count=stats.evicted_chunks,
        dropped_chunk_count=writer.dropped_chunks,
        read_bytes_per_second=tiers.rates[name].bytes_per_second,
        waiting_chunk_count=writer.waiting_count,
    )


def transfer_stats(transfer: ChunkTransfer | None) -> pb.TransferStats | None:
    """Return None if the store has no transfer engine."""
    if transfer is None:
        return None
    stats = transfer.stats
    return pb.TransferStats(
        is_up=stats.is_up,
        message=stats.message,
        segment=stats.segment,
        interface=stats.interface,
        registered_bytes=stats.registered_bytes,
        read_bytes=stats.read_bytes,
        read_chunk_count=stats.read_chunks,
        failed_read_count=stats.failed_reads,
        restart_count=stats.restarts,
    )


def endpoint_message(transfer: ChunkTransfer | None) -> pb.TransferEndpoint | None:
    """Return None while other stores cannot read this arena."""
    endpoint = None if transfer is None else transfer.endpoint
    if endpoint is None:
        return None
    return pb.TransferEndpoint(segment=endpoint.segment, arena_address=endpoint.arena_address)
