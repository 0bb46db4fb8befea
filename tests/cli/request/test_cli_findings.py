"""What `splitpoint status` finds wrong: each trouble alone, and a stack that is well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitpoint.client.answers import (
    Queue,
    QueuedRequest,
    RedisStatus,
    SchedulerStatus,
    Telemetry,
    Worker,
)
from splitpoint.costs.profile import Profile
from splitpoint.shapes import Numerics
from splitpoint.transport.statuses import NO_ANSWER
from splitpoint.v1 import kvstore_pb2, types_pb2
from splitpoint_cli.request.findings import Finding, Severity, findings_of
from splitpoint_cli.request.observed import Status, Store
from splitpoint_cli.request.status import status_exit_code
from splitpoint_cli.request.stores import memory_line
from splitpoint_cli.stack.notes import GivenUpWorker, read_given_up, write_given_up

TELEMETRY = Telemetry(
    uptime_seconds=100,
    step_count=10,
    step_seconds=5,
    prefilled_token_count=10,
    generated_token_count=10,
    link_in_bytes=10,
    link_out_bytes=10,
    link_in_busy_seconds=1,
    link_out_busy_seconds=1,
    compute_busy_seconds=1,
    loaded_token_count=1,
    rebuilt_token_count=1,
    recomputed_token_count=1,
    predicted_seconds=10,
    measured_seconds=11,
    cache_used_bytes=1,
    store_is_up=True,
    redis_is_up=True,
    link_ceiling_bytes_per_second=64e9,
)
WORKER = Worker(
    id="0",
    address="unix:/w0",
    ready=True,
    draining=False,
    device="cuda:0",
    cache_capacity_bytes=1,
    cache_charged_bytes=0,
    running_count=0,
    profile=Profile(50e9, 0, 1e12, 0, 1e12),
    kvstore_address="unix:/kv",
    message="",
    telemetry=TELEMETRY,
)
SCHEDULER = SchedulerStatus(
    uptime_seconds=100,
    running_count=0,
    waiting_count=0,
    completed_count=5,
    failed_count=0,
    rejected_count=3,
    failover_count=0,
    prompt_token_count=0,
    cached_token_count=0,
    generated_token_count=0,
    ttft_count=0,
    ttft_seconds_sum=0,
    itl_count=0,
    itl_seconds_sum=0,
    redis=RedisStatus("redis://cache:6379/0", is_up=True),
)


def stats(**fields: object) -> kvstore_pb2.GetStatsResponse:
    """A store whose arena is full of cached chunks, some of them in use."""
    message = kvstore_pb2.GetStatsResponse(slot_count=8, sealed_slot_count=8, leased_slot_count=2)
    message.redis.CopyFrom(types_pb2.RedisStatus(address="redis://cache:6379/0", is_up=True))
    message.MergeFrom(kvstore_pb2.GetStatsResponse(**fields))  # type: ignore[arg-type]
    return message


def status(
    *workers: Worker,
    queue: Queue | None = None,
    scheduler: SchedulerStatus = SCHEDULER,
    store: kvstore_pb2.GetStatsResponse | None = None,
) -> Status:
    return Status(
        address="unix:/s",
        serving=True,
        models=(),
        workers=workers or (WORKER,),
        queue=queue or Queue((), 4),
        stores=(Store("unix:/kv", store or stats()),),
        scheduler=scheduler,
    )


def the_only(found: Status) -> Finding:
    [finding] = findings_of(found)
    assert finding.do
    assert "\n" not in finding.what + finding.why + finding.do
    return finding


def test_nothing_is_wrong_with_a_stack_that_is_well() -> None:
    assert findings_of(status()) == []
    # Nor with one that measures little: no Redis, no link to compare with, an old store.
    quiet = replace(TELEMETRY, store_is_up=None, redis_is_up=None, predicted_seconds=0)
    quiet = replace(quiet, link_ceiling_bytes_per_second=None)
    bare = Status(
        address="unix:/s",
        serving=True,
        models=(),
        workers=(replace(WORKER, telemetry=quiet), replace(WORKER, id="1", telemetry=None)),
        queue=Queue((), 0),
        stores=(Store("unix:/kv", kvstore_pb2.GetStatsResponse(slot_count=4)),),
        scheduler=replace(SCHEDULER, redis=None),
    )
    assert findings_of(bare) == []


def test_workers_that_take_no_requests() -> None:
    away = replace(WORKER, ready=False, message="Connection refused", telemetry=None)
    finding = the_only(status(replace(away, loss_count=2, last_lost_seconds_ago=200)))
    assert finding.severity is Severity.ERROR
    assert finding.what == "worker 0 was lost 3 min ago and is not back"
    assert finding.why == "Connection refused"
    assert "unix:/w0" in finding.do
    never = the_only(status(replace(away, id="")))
    assert never.severity is Severity.ERROR
    assert never.what == "the worker at unix:/w0 is not ready"
    draining = the_only(status(replace(WORKER, ready=False, draining=True, running_count=3)))
    assert (draining.severity, draining.what) == (Severity.NOTE, "worker 0 is draining")
    assert "3 requests" in draining.why
    without = replace(status(), workers=())
    assert the_only(without).what == "the scheduler knows no worker"
    assert "start it again at" in finding.do
    silent = replace(away, loss_count=2, last_lost_seconds_ago=200, message=NO_ANSWER)
    assert the_only(status(silent)).do.startswith("if it hangs, end it (kill -9)")


def test_workers_that_compute_other_bits() -> None:
    first = replace(WORKER, numerics_digest="aa", numerics=Numerics.INVARIANT)
    alike, unlike = replace(first, id="1"), replace(first, id="2", numerics_digest="bb")
    fast = replace(WORKER, id="3")
    assert findings_of(status(first, alike)) == []
    assert findings_of(status(fast, replace(fast, id="4"))) == []
    finding = the_only(status(first, alike, unlike, fast))
    assert finding.severity is Severity.WARNING
    assert finding.why.startswith(
        "worker 0, 1: invariant, digest aa; worker 2: invariant, digest bb; worker 3: fast;"
    )
    assert finding.what.endswith(": their numerics, kernels, torch or processors differ")
    numerics = the_only(status(first, alike, fast))
    assert numerics.what.endswith(": their numerics differ")
    assert "--cpu-kernels" not in numerics.do
    kernels = the_only(status(first, unlike))
    assert kernels.what.endswith(": their kernels, torch or processors differ")
    # A worker that is away computes nothing.
    away = replace(unlike, ready=False, draining=True)
    assert [each.what for each in findings_of(status(first, away))] == ["worker 2 is draining"]


def test_an_arena_that_was_lost_lately() -> None:
    finding = the_only(status(store=stats(former_arena_loss="removed", uptime_seconds=200.0)))
    assert finding.severity is Severity.WARNING
    assert finding.what == "store unix:/kv lost its arena 3 min ago"
    assert finding.why == "its file was removed; the cache began empty"
    assert findings_of(status(store=stats(former_arena_loss="removed", uptime_seconds=601.0))) == []


def test_exit_codes_tell_serving_from_complete() -> None:
    lost = replace(WORKER, id="1", address="unix:/w1", ready=False)
    part = status(WORKER, lost)
    given_up = replace(part, given_up={"unix:/w1": GivenUpWorker("unix:/w1", "5 deaths", 60.0)})
    away = replace(given_up, serving=False)
    codes = [
        tuple(status_exit_code(found, has_waited=waited) for waited in (False, True))
        for found in (status(), part, given_up, away)
    ]
    assert codes == [(0, 0), (0, 4), (6, 6), (1, 1)]


@pytest.mark.parametrize(("ago", "is_found"), [(5.0, True), (600.0, True), (601.0, False)])
def test_a_worker_that_was_lost_and_is_back(ago: float, is_found: bool) -> None:
    found = status(replace(WORKER, loss_count=3, last_lost_seconds_ago=ago))
    assert bool(findings_of(found)) is is_found
    if is_found:
        assert the_only(found).severity is Severity.WARNING
        assert "was lost 3 times" in the_only(found).what


def test_an_arena_that_is_full_of_what_is_in_use() -> None:
    # All slots held: by leases, by writers, by workers that may still be alive.
    held = stats(
        sealed_slot_count=5, leased_slot_count=5, writing_slot_count=2, quarantined_slot_count=1
    )
    finding = the_only(status(store=held))
    assert finding.what == "the arena of store unix:/kv is full"
    assert "8 of 8 slots" in finding.why
    assert "--host-memory" in finding.do
    refusing = stats(refused_reservation_count=4, last_refused_seconds_ago=3.0)
    finding = the_only(status(store=refusing))
    assert "4 reservations were refused, the last 3 s ago" in finding.why
    assert findings_of(status(store=stats(last_refused_seconds_ago=61.0))) == []


def test_redis_away_is_one_finding_of_all_services() -> None:
    down = RedisStatus("redis://cache:6379/0", is_up=False)
    finding = the_only(
        status(
            replace(WORKER, telemetry=replace(TELEMETRY, redis_is_up=False)),
            scheduler=replace(SCHEDULER, redis=down),
            store=_without_redis(),
        )
    )
    assert finding.severity is Severity.WARNING
    assert finding.what == "Redis at redis://cache:6379/0 does not answer"
    assert finding.why == "reported by the scheduler, store unix:/kv, worker 0"
    only_one = the_only(status(replace(WORKER, telemetry=replace(TELEMETRY, redis_is_up=False))))
    assert (only_one.what, only_one.why) == ("Redis does not answer", "reported by worker 0")


def _without_redis() -> kvstore_pb2.GetStatsResponse:
    message = stats()
    message.redis.is_up = False
    return message


def test_damage_in_the_store() -> None:
    finding = the_only(status(store=stats(checksum_failure_count=2)))
    assert finding.severity is Severity.WARNING
    assert "2 chunks that differ from their checksum" in finding.what
    changed = the_only(status(store=stats(damaged_chunk_count=3, last_damage_seconds_ago=90)))
    assert changed.severity is Severity.WARNING
    assert changed.what == "3 chunks of store unix:/kv changed while it ran"
    assert "90 s ago" in changed.why
    broken = the_only(status(store=stats(integrity_violations=["slot 3 is in two runs"])))
    assert broken.severity is Severity.ERROR
    assert broken.why == "slot 3 is in two runs"


def test_a_store_that_does_not_answer() -> None:
    # Its worker, where there is one, is lost or has lost it; or it hangs.
    unknown = replace(WORKER, telemetry=None)
    elsewhere = replace(WORKER, kvstore_address="unix:/another")
    for worker, message in (
        (unknown, "UNAVAILABLE: gone"),
        (elsewhere, "UNAVAILABLE: gone"),
        (WORKER, "DEADLINE_EXCEEDED: no answer"),
    ):
        found = replace(status(worker), stores=(Store("unix:/kv", None, message),))
        assert the_only(found).severity is Severity.ERROR
        assert the_only(found).why == message
    away = replace(WORKER, telemetry=replace(TELEMETRY, store_is_up=False))
    assert the_only(status(away)).what == "worker 0 has no store"


def test_a_store_that_cannot_be_asked_from_here_but_serves() -> None:
    """As of a stack in containers, whose sockets mean nothing on the host."""
    found = replace(status(), stores=(Store("unix:/kv", None, "UNAVAILABLE: no such file"),))
    finding = the_only(found)
    assert finding.severity is Severity.NOTE
    assert finding.what == "store unix:/kv cannot be asked from here"
    assert finding.why == "UNAVAILABLE: no such file; it serves worker 0"


def test_a_full_queue() -> None:
    waiting = QueuedRequest("r", 0, 1, 2.0, "memory")
    assert findings_of(status(queue=Queue((waiting,), 2))) == []
    finding = the_only(status(queue=Queue((waiting, waiting), 2)))
    assert "the queue is full" in finding.what
    assert "3 turned away" in finding.why


def test_links_that_are_slower_than_they_could_be() -> None:
    emulated = the_only(status(replace(WORKER, emulated_link_bytes_per_second=184e6)))
    assert emulated.what == "worker 0 EMULATES a link of 184 MB/s"
    slow = replace(WORKER, profile=Profile(31e9, 0, 1e12, 0, 1e12))
    assert the_only(status(slow)).what == "worker 0's link reaches 31 GB/s of 64 GB/s"
    assert findings_of(status(replace(WORKER, profile=Profile(33e9, 0, 1e12, 0, 1e12)))) == []


@pytest.mark.parametrize(
    ("predicted", "measured", "is_found"),
    [(10, 15.1, True), (10, 6.6, True), (10, 14.9, False), (0.1, 0.9, False), (0.1, 2, True)],
)
def test_predictions_that_are_far_off(predicted: float, measured: float, is_found: bool) -> None:
    telemetry = replace(TELEMETRY, predicted_seconds=predicted, measured_seconds=measured)
    found = status(replace(WORKER, telemetry=telemetry))
    assert bool(findings_of(found)) is is_found
    if is_found:
        assert "what its plans predict" in the_only(found).what


@pytest.mark.parametrize(("in_steps", "is_found"), [(39.0, True), (41.0, False)])
def test_predictions_that_are_off_for_too_short_to_matter(in_steps: float, is_found: bool) -> None:
    telemetry = replace(
        TELEMETRY, step_seconds=in_steps, predicted_seconds=0.4, measured_seconds=2.0
    )
    assert bool(findings_of(status(replace(WORKER, telemetry=telemetry)))) is is_found


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (
            "cannot connect to 127.0.0.1:1: Connection refused",
            "cannot connect: Connection refused",
        ),
        (
            "UNAVAILABLE: cannot connect to unix:/w: No such file or directory",
            "UNAVAILABLE: cannot connect: No such file or directory",
        ),
        ("the model is loading", "the model is loading"),
        ("no TLS connection: (handshake: bad)", "no TLS connection: (handshake: bad)"),
    ],
)
def test_reasons_are_plain(message: str, plain: str) -> None:
    found = the_only(status(replace(WORKER, ready=False, message=message)))
    assert found.why == plain


def test_the_worst_comes_first() -> None:
    found = status(
        replace(WORKER, draining=True, ready=False),
        replace(WORKER, id="1", emulated_link_bytes_per_second=184e6),
        replace(WORKER, id="2", ready=False, message="gone"),
    )
    severities = [finding.severity for finding in findings_of(found)]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"17",
        b'["unix:/w"]',
        b'[{"address": "unix:/w"}]',
        b'[{"address": "unix:/w", "why": "", "retry_at": 1e999}]',
        b'[{"address": "unix:/w", "why": "", "retry_at": 1' + 400 * b"0" + b"}]",
        30_000 * b"[",
    ],
    ids=range(9),
)
def test_a_damaged_file_of_given_up_workers_says_nothing(tmp_path: Path, content: bytes) -> None:
    address = f"unix:{tmp_path}/worker-0.sock"
    write_given_up(tmp_path, [GivenUpWorker(address, "5 deaths", 250.0)])
    assert list(read_given_up([address])) == [address]
    (tmp_path / "given-up.json").write_bytes(content)
    assert read_given_up([address]) == {}


def test_a_tier_that_is_away_is_a_warning() -> None:
    tier = kvstore_pb2.TierStats(tier=types_pb2.TIER_DISK, location="/t", message="it is read-only")
    finding = the_only(status(store=stats(tiers=[tier])))
    assert finding.severity is Severity.WARNING
    assert finding.what == "the disk tier of store unix:/kv is away"
    assert finding.why == "it is read-only"


def test_the_stores_line_says_why_its_chunks_have_their_size() -> None:
    assert "chunks of" not in memory_line(stats())
    message = stats(page_reason="auto: a page costs 4.0 rows")
    message.layout.chunk_tokens = 128
    assert memory_line(message).endswith("chunks of 128 tokens (auto: a page costs 4.0 rows)")
