"""Tiers and transfers of a store in words: for `splitpoint status`, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from splitpoint.config import counted, format_rate, format_size
from splitpoint.options.store import TIER_POOL_MEMORY
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

_NAMES = {types_pb2.TIER_DISK: "disk", types_pb2.TIER_POOL: "pool"}
# Share of the chunks bound for a tier: a larger share of dropped ones is a finding.
_DROPPED_SHARE = 0.1
_LEAST_DROPPED = 100


def tier_name(tier: pb.TierStats) -> str:
    """Return the tier's name as plans have it: "disk" or "pool"."""
    return _NAMES.get(tier.tier, "unknown")


def tier_title(tier: pb.TierStats) -> str:
    """Return what people call the tier."""
    titles = {"disk": "disk tier", "pool": f"{tier.engine.capitalize()} pool".strip()}
    return titles.get(tier_name(tier), "unknown tier")


def tiers_json(stats: pb.GetStatsResponse) -> dict[str, object]:
    """Return the parts of a store's object in `status --json`."""
    return {
        "tiers": [
            {
                "tier": tier_name(tier),
                "engine": tier.engine,
                "location": tier.location,
                "is_up": tier.is_up,
                "message": tier.message,
                **{name: getattr(tier, name) for name in _TIER_FIELDS},
            }
            for tier in stats.tiers
        ],
        "transfer": (
            {name: getattr(stats.transfer, name) for name in _TRANSFER_FIELDS}
            if stats.HasField("transfer")
            else None
        ),
    }


_TIER_FIELDS = (
    "capacity_bytes",
    "used_bytes",
    "chunk_count",
    "waiting_chunk_count",
    "written_chunk_count",
    "written_bytes",
    "read_chunk_count",
    "read_bytes",
    "read_bytes_per_second",
    "missed_chunk_count",
    "damaged_chunk_count",
    "evicted_chunk_count",
    "dropped_chunk_count",
)
_TRANSFER_FIELDS = (
    "engine",
    "is_up",
    "message",
    "segment",
    "interface",
    "registered_bytes",
    "read_bytes",
    "read_chunk_count",
    "failed_read_count",
    "restart_count",
)


def tier_lines(stats: pb.GetStatsResponse) -> Iterator[str]:
    """Yield a line for each tier of a store, and one for its transfers."""
    for tier in stats.tiers:
        yield f"  {tier_title(tier)} {tier.location}: {', '.join(_tier_parts(tier))}"
    if stats.HasField("transfer"):
        engine = stats.transfer.engine.capitalize()
        yield f"  {engine} transfers: {', '.join(_transfer_parts(stats))}"


def _tier_parts(tier: pb.TierStats) -> Iterator[str]:
    if not tier.is_up:
        yield f"away ({tier.message})" if tier.message else "away"
    elif tier.message:
        yield tier.message
    if tier.capacity_bytes:
        yield (
            f"{counted(tier.chunk_count, 'chunk')}, {format_size(tier.used_bytes)} of "
            f"{format_size(tier.capacity_bytes)}"
        )
    elif tier.chunk_count:
        yield counted(tier.chunk_count, "chunk")
    rate = ""
    if tier.read_bytes_per_second:
        rate = f" at {format_rate(tier.read_bytes_per_second)}"
    yield f"{tier.written_chunk_count:,} written, {tier.read_chunk_count:,} read{rate}"
    for count, word in (
        (tier.waiting_chunk_count, "waiting"),
        (tier.dropped_chunk_count, "dropped"),
        (tier.evicted_chunk_count, "evicted"),
        (tier.missed_chunk_count, "missed"),
        (tier.damaged_chunk_count, "damaged"),
    ):
        if count:
            yield f"{count:,} {word}"


def _transfer_parts(stats: pb.GetStatsResponse) -> Iterator[str]:
    transfer = stats.transfer
    if not transfer.is_up:
        yield f"away ({transfer.message})" if transfer.message else "away"
    if transfer.segment:
        yield f"{transfer.segment} on {transfer.interface}"
    # The engine registers the payload of the arena, which is less than the file.
    yield f"{format_size(transfer.registered_bytes)} of the arena registered"
    yield f"{counted(transfer.read_chunk_count, 'chunk')} read"
    if transfer.failed_read_count:
        yield counted(transfer.failed_read_count, "failed read")
    if transfer.restart_count:
        yield counted(transfer.restart_count, "restart")


def problems(address: str, stats: pb.GetStatsResponse) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with a store's tiers and transfers, its evidence, and what to do."""
    for tier in stats.tiers:
        yield from _tier_problems(address, tier)
    if stats.HasField("transfer") and not stats.transfer.is_up:
        yield (
            f"store {address} cannot transfer by {stats.transfer.engine.capitalize()}",
            stats.transfer.message,
            "nothing fails: chunks come by gRPC until it is back, which it tries by itself; "
            "the store's log says what is missing",
        )


def _tier_problems(address: str, tier: pb.TierStats) -> Iterator[tuple[str, str, str]]:
    title, is_disk = tier_title(tier), tier.tier == types_pb2.TIER_DISK
    if not tier.is_up:
        look = (
            f"look at the folder and its disk (df {tier.location}, dmesg)"
            if is_disk
            else f"look at the master at {tier.location}, and at the network to it"
        )
        yield (
            f"the {title} of store {address} is away",
            tier.message,
            f"requests go on without it, and it comes back by itself; {look}",
        )
    elif tier.message:
        yield (
            f"the {title} of store {address} takes no chunks for now",
            tier.message,
            "nothing fails: what it has is still loaded, and it tries again by itself; look at "
            + (f"its disk (df {tier.location}, dmesg)" if is_disk else "the pool's memory"),
        )
    if tier.damaged_chunk_count:
        yield (
            f"the {title} of store {address} had "
            f"{counted(tier.damaged_chunk_count, 'damaged chunk')}",
            "they were dropped and are computed again; no such byte was served",
            "if the number grows, look for a failing disk (dmesg, smartctl) or a program that "
            "writes there"
            if is_disk
            else "if the number grows, look for failing memory or links of the pool's hosts",
        )
    leaving = tier.written_chunk_count + tier.dropped_chunk_count
    if tier.dropped_chunk_count >= max(_LEAST_DROPPED, _DROPPED_SHARE * leaving):
        yield (
            f"the {title} of store {address} takes too few of the chunks that leave the arena",
            f"{tier.dropped_chunk_count:,} of {counted(leaving, 'chunk')} were dropped, since it "
            "was away, full or too slow",
            "a faster or larger disk, --evict-above so that chunks are written earlier, or "
            "--tier-admission second-use so that fewer are"
            if is_disk
            else f"more memory in the pool ({TIER_POOL_MEMORY.flag}), or --tier-admission "
            "second-use",
        )
