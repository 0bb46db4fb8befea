"""A store's statistics for people, and as JSON: slots, hits, tiers, and the engines that use it."""

from __future__ import annotations

from collections.abc import Iterator

from splitpoint.config import counted, format_size
from splitpoint.transport import convert
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint_cli.output import plain_reason
from splitpoint_cli.request.observed import Store
from splitpoint_cli.request.tiers import tier_lines, tiers_json

_SESSION_FIELDS = (
    "client_name",
    "is_remote",
    "is_orphaned",
    "lease_count",
    "granted_slot_count",
    "query_count",
    "hit_count",
)
_FIELDS = (
    "slot_count",
    "free_slot_count",
    "writing_slot_count",
    "sealed_slot_count",
    "quarantined_slot_count",
    "session_count",
    "lease_count",
    "leased_slot_count",
    "match_count",
    "match_hit_count",
    "query_token_count",
    "hit_token_count",
    "sealed_chunk_count",
    "duplicate_chunk_count",
    "evicted_chunk_count",
    "eviction_policy",
    "unadmitted_chunk_count",
    "watermark_evicted_chunk_count",
    "evicted_age_seconds_sum",
    "memory_description",
    "page_reason",
    "checksum_failure_count",
    "refused_reservation_count",
    "former_arena_loss",
    "arena_path",
    "arena_size_bytes",
)


def store_json(store: Store) -> dict[str, object]:
    """Return the object that `--json` prints of a store."""
    if store.stats is None:
        return {"address": store.address, "message": store.message, "reason": store.reason}
    return {
        "address": store.address,
        "data_type": convert.data_type_from_proto(store.stats.layout.data_type).value,
        "chunk_tokens": store.stats.layout.chunk_tokens,
        "page_bytes": store.stats.layout.page_bytes,
        "has_activations": store.stats.layout.has_activations,
        "kv_encoding": convert.encoding_from_proto(store.stats.layout.encoding).value,
        **{name: getattr(store.stats, name) for name in _FIELDS},
        "evicted_by_use_count": list(store.stats.evicted_by_use_count),
        "integrity_violations": list(store.stats.integrity_violations),
        "sessions": [
            {
                **{name: getattr(session, name) for name in _SESSION_FIELDS},
                "outcomes": dict(session.outcomes),
            }
            for session in _sessions(store.stats)
        ],
        **tiers_json(store.stats),
    }


def _sessions(stats: pb.GetStatsResponse) -> list[pb.SessionStats]:
    return sorted(stats.sessions, key=lambda session: session.client_name)


def store_lines(store: Store) -> Iterator[str]:
    """Yield what there is to say about a store: slots and hits, eviction, tiers."""
    stats = store.stats
    if stats is None and store.is_serving:
        yield f"store {store.address}: serves, no engine has attached yet"
        return
    if stats is None:
        yield f"store {store.address}: {plain_reason(store.message)}"
        return
    page_bytes = stats.layout.page_bytes
    unit = "page" if page_bytes else "token"
    hits = f"{stats.hit_token_count:,} of {counted(stats.query_token_count, unit)} found"
    arena = f"arena {format_size(stats.arena_size_bytes)}"
    if page_bytes:
        arena += f" for pages of {format_size(page_bytes)}"
    yield (
        f"store {store.address}\n  {stats.sealed_slot_count:,} of "
        f"{counted(stats.slot_count, 'slot')} sealed, "
        f"{stats.leased_slot_count:,} leased, {hits}, {arena}{_lossy_note(stats)}"
    )
    yield memory_line(stats)
    yield from tier_lines(stats)


def engine_lines(store: Store) -> Iterator[str]:
    """Yield a line for each engine or worker that is attached to a store."""
    if store.stats is None:
        return
    unit = "page" if store.stats.layout.page_bytes else "token"
    for session in _sessions(store.stats):
        parts = []
        if session.is_orphaned:
            parts.append("ended, and may still use what it holds")
        if session.query_count:
            parts.append(f"{session.hit_count:,} of {counted(session.query_count, unit)} found")
        if session.lease_count:
            parts.append(counted(session.lease_count, "lease"))
        if session.granted_slot_count:
            parts.append(f"writes {counted(session.granted_slot_count, 'slot')}")
        # The most frequent first, and those of equal counts by name.
        told = sorted(session.outcomes.items(), key=lambda each: (-each[1], each[0]))
        parts += [f"{count:,} {name}" for name, count in told]
        yield f"  {session.client_name}: {', '.join(parts) or 'attached'}"


def _lossy_note(stats: pb.GetStatsResponse) -> str:
    """Return a note for a store with a lossy encoding; empty for others."""
    encoding = convert.encoding_from_proto(stats.layout.encoding)
    return f" in {encoding.value}: what is reused is approximate" if encoding.is_lossy else ""


def memory_line(stats: pb.GetStatsResponse) -> str:
    """Return the store's policy, its evictions, and the chunks that it did not admit."""
    parts = [f"  eviction {stats.eviction_policy or 'unknown'}"]
    if stats.evicted_chunk_count:
        unused = stats.evicted_by_use_count[0] if stats.evicted_by_use_count else 0
        age = stats.evicted_age_seconds_sum / stats.evicted_chunk_count
        parts.append(
            f"{counted(stats.evicted_chunk_count, 'chunk')} evicted, {unused:,} of them never used "
            f"again, after {age:,.0f} s on average"
        )
    if stats.unadmitted_chunk_count:
        parts.append(f"{stats.unadmitted_chunk_count:,} kept out")
    if stats.memory_description:
        parts.append(stats.memory_description)
    if stats.page_reason:
        tokens = counted(stats.layout.chunk_tokens, "token")
        parts.append(f"chunks of {tokens} ({stats.page_reason})")
    return ", ".join(parts)
