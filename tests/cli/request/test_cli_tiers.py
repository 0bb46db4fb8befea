"""What `splitpoint status` says of tiers and transfers."""

from __future__ import annotations

import pytest

from splitpoint.options.store import TIER_POOL_MEMORY
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from splitpoint_cli.request.tiers import problems, tier_lines, tiers_json

MIB = 1 << 20


def disk(**fields: object) -> pb.TierStats:
    tier = pb.TierStats(
        tier=types_pb2.TIER_DISK,
        location="/var/lib/chunks",
        is_up=True,
        capacity_bytes=1024 * MIB,
        used_bytes=256 * MIB,
        chunk_count=128,
        written_chunk_count=1_500,
        written_bytes=3_000 * MIB,
        read_chunk_count=7,
        read_bytes=14 * MIB,
        read_bytes_per_second=1.5e9,
    )
    tier.MergeFrom(pb.TierStats(**fields))  # type: ignore[arg-type]
    return tier


def pool(**fields: object) -> pb.TierStats:
    tier = pb.TierStats(
        tier=types_pb2.TIER_POOL, location="master:50051", engine="weave", is_up=True
    )
    tier.MergeFrom(pb.TierStats(**fields))  # type: ignore[arg-type]
    return tier


def away(tier: pb.TierStats, message: str) -> pb.TierStats:
    tier.is_up, tier.message = False, message
    return tier


def transfer(**fields: object) -> pb.TransferStats:
    return pb.TransferStats(
        segment="10.0.0.2:15000",
        interface="eth1",
        engine="weave",
        registered_bytes=64 * MIB,
        **fields,  # type: ignore[arg-type]
    )


def test_each_tier_and_the_transfers_have_a_line() -> None:
    stats = pb.GetStatsResponse(
        tiers=[disk(waiting_chunk_count=3, dropped_chunk_count=2), pool(written_chunk_count=5)],
        transfer=transfer(is_up=True, read_chunk_count=1, failed_read_count=2),
    )
    assert list(tier_lines(stats)) == [
        "  disk tier /var/lib/chunks: 128 chunks, 256 MiB of 1 GiB, 1,500 written, 7 read at "
        "1.5 GB/s, 3 waiting, 2 dropped",
        "  Weave pool master:50051: 5 written, 0 read",
        "  Weave transfers: 10.0.0.2:15000 on eth1, 64 MiB of the arena registered, 1 chunk "
        "read, 2 failed reads",
    ]
    assert list(problems("unix:/kv", stats)) == []


def test_a_store_without_tiers_says_nothing_of_them() -> None:
    stats = pb.GetStatsResponse()
    assert list(tier_lines(stats)) == []
    assert list(problems("unix:/kv", stats)) == []
    assert tiers_json(stats) == {"tiers": [], "transfer": None}


def test_programs_get_every_field_of_the_protocol() -> None:
    stats = pb.GetStatsResponse(tiers=[disk(), pool()], transfer=transfer(is_up=True))
    told = tiers_json(stats)
    tiers = told["tiers"]
    assert isinstance(tiers, list)
    assert [each["tier"] for each in tiers] == ["disk", "pool"]
    for each in tiers:
        assert set(each) == {field.name for field in pb.TierStats.DESCRIPTOR.fields}
    assert told["transfer"] == {
        field.name: getattr(stats.transfer, field.name)
        for field in pb.TransferStats.DESCRIPTOR.fields
    }


@pytest.mark.parametrize(
    ("tier", "what", "why", "do"),
    [
        (
            away(disk(), "No space left on device"),
            "the disk tier of store unix:/kv is away",
            "No space left on device",
            "df /var/lib/chunks",
        ),
        (
            away(pool(), "the master does not answer"),
            "the Weave pool of store unix:/kv is away",
            "the master does not answer",
            "the master at master:50051",
        ),
        (
            disk(message="writes pause for 8 s: No space left on device"),
            "the disk tier of store unix:/kv takes no chunks for now",
            "writes pause for 8 s: No space left on device",
            "df /var/lib/chunks",
        ),
        (
            disk(damaged_chunk_count=1),
            "the disk tier of store unix:/kv had 1 damaged chunk",
            "no such byte was served",
            "smartctl",
        ),
        (
            disk(dropped_chunk_count=500),
            "the disk tier of store unix:/kv takes too few of the chunks that leave the arena",
            "500 of 2,000 chunks were dropped",
            "--evict-above",
        ),
        (
            pool(dropped_chunk_count=200),
            "the Weave pool of store unix:/kv takes too few of the chunks that leave the arena",
            "200 of 200 chunks were dropped",
            TIER_POOL_MEMORY.flag,
        ),
    ],
)
def test_problems_of_a_tier(tier: pb.TierStats, what: str, why: str, do: str) -> None:
    [found] = problems("unix:/kv", pb.GetStatsResponse(tiers=[tier]))
    assert found[0] == what
    assert why in found[1]
    assert do in found[2]


@pytest.mark.parametrize("dropped", [99, 160])
def test_few_dropped_chunks_are_no_problem(dropped: int) -> None:
    """Fewer than 100, and fewer than a tenth of those that left."""
    stats = pb.GetStatsResponse(tiers=[disk(dropped_chunk_count=dropped)])
    assert list(problems("unix:/kv", stats)) == []


def test_transfers_that_are_away() -> None:
    stats = pb.GetStatsResponse(transfer=transfer(message="its process ended", restart_count=3))
    [(what, why, do)] = problems("unix:/kv", stats)
    assert what == "store unix:/kv cannot transfer by Weave"
    assert why == "its process ended"
    assert "chunks come by gRPC" in do
    [line] = tier_lines(stats)
    assert line.startswith("  Weave transfers: away (its process ended), 10.0.0.2:15000 on eth1")
    assert line.endswith("3 restarts")
