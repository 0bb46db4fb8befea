"""Problems of a stack, and what to do about each: a pure function of its status.

docs/operations.md has the same list for people; keep both alike.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from splitpoint.client.answers import Worker
from splitpoint.config import counted, format_rate
from splitpoint.transport.statuses import NO_ANSWER
from splitpoint.v1 import kvstore_pb2
from splitpoint_cli.output import duration_text, plain_reason
from splitpoint_cli.request import tiers
from splitpoint_cli.request.observed import NO_ARENA_YET, Gateway, Status, Store
from splitpoint_cli.stack.notes import GivenUpWorker

# Refusals and losses longer ago are not reported.
_LATELY_SECONDS = 60.0
_RECENT_LOSS_SECONDS = 600.0
# Measured over predicted time: outside of this range plans use wrong costs. Too few seconds
# prove nothing, and a small share of the time in steps does not matter: with a small model,
# restores of a millisecond take several times as long as their copies.
_AS_PREDICTED = (0.67, 1.5)
_LEAST_SECONDS = 1.0
_LEAST_SHARE_OF_STEPS = 0.05
# Share of the rate that the link could reach.
_WORN_LINK = 0.5
# Connected, but no answer: the workers' earlier telemetry is out of date.
_SILENT = "DEADLINE_EXCEEDED"


class Severity(enum.StrEnum):
    """ERROR: a part does not serve. WARNING: it serves worse than it could, or soon will not
    serve. NOTE: an operator wanted it so, but it is unusual."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line each: the problem, its evidence, what to do."""

    severity: Severity
    what: str
    why: str
    do: str


def store_findings(store: Store) -> list[Finding]:
    """Return all findings about a store alone, the worst first."""
    return _worst_first([] if store.reason == NO_ARENA_YET else _store(store, ()))


def findings_of(status: Status) -> list[Finding]:
    """Return all findings, the worst first."""
    found = [*_away(status), *_scheduler(status), *_redis(status)]
    for worker in status.workers:
        given_up = status.given_up.get(worker.address)
        found += [_given_up(worker, given_up)] if given_up is not None else _readiness(worker)
        found += [*_link(worker), *_predictions(worker)]
    found += _numerics([worker for worker in status.workers if worker.ready])
    for store in status.stores:
        found += _store(store, _attached(store, status.workers))
    for gateway in status.gateways:
        found += _gateway(gateway, status.serving)
    return _worst_first(found)


def _worst_first(found: Iterable[Finding]) -> list[Finding]:
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _away(status: Status) -> Iterator[Finding]:
    for address, message in sorted(status.away.items()):
        yield Finding(
            Severity.ERROR,
            f"the scheduler {address} did not answer; {status.address} did, which this is from",
            plain_reason(message),
            "read the end of its log, start it again; clients that name both go on at the other",
        )


def _gateway(gateway: Gateway, serves: bool) -> Iterator[Finding]:
    """`serves`: the scheduler says so here. If it does not, that is a finding of its own."""
    if not gateway.is_up:
        yield Finding(
            Severity.ERROR,
            f"the gateway {gateway.url} does not answer",
            plain_reason(gateway.message),
            "`splitpoint up` starts it again if it died; its last lines are in the output of `up`",
        )
    elif serves and not gateway.is_serving:
        yield Finding(
            Severity.ERROR,
            f"the gateway {gateway.url} does not serve",
            plain_reason(gateway.message),
            "wait if it is stopping; if it stays, read its lines in the output of `splitpoint up`",
        )


def _scheduler(status: Status) -> Iterator[Finding]:
    if not status.workers:
        yield Finding(
            Severity.ERROR,
            "the scheduler knows no worker",
            "none was named, and none is found in Redis",
            "start a worker, and the scheduler with --worker ADDRESS or both with --redis URL",
        )
    waiting, capacity = len(status.queue.requests), status.queue.capacity
    if waiting and waiting >= capacity:
        yield Finding(
            Severity.WARNING,
            "the queue is full: more requests are turned away",
            f"{waiting} wait, room for {capacity}; "
            f"{status.scheduler.rejected_count:,} turned away since the start",
            "add workers or --device-memory, send less at a time, or raise --queue-capacity",
        )


def _redis(status: Status) -> Iterator[Finding]:
    """Yield one finding for all parts that miss Redis."""
    without, addresses = [], set()
    if status.scheduler.redis is not None and not status.scheduler.redis.is_up:
        without.append("the scheduler")
        addresses.add(status.scheduler.redis.address)
    for store in status.stores:
        if (
            store.stats is not None
            and store.stats.HasField("redis")
            and not store.stats.redis.is_up
        ):
            without.append(f"store {store.address}")
            addresses.add(store.stats.redis.address)
    for worker in status.workers:
        if worker.telemetry is not None and worker.telemetry.redis_is_up is False:
            without.append(f"worker {worker.id}")
    if without:
        at = f" at {', '.join(sorted(addresses))}" if addresses else ""
        yield Finding(
            Severity.WARNING,
            f"Redis{at} does not answer",
            f"reported by {', '.join(without)}",
            "start it again, or check the network to it; until then new workers, and prefixes on "
            "other hosts, are not found",
        )


def _name(worker: Worker) -> str:
    return f"worker {worker.id}" if worker.id else f"the worker at {worker.address}"


def _given_up(worker: Worker, given_up: GivenUpWorker) -> Finding:
    return Finding(
        Severity.ERROR,
        f"{_name(worker)} was given up; the other workers serve",
        given_up.why,
        "read its last lines in the output of `splitpoint up`, which tries it again in "
        f"{duration_text(given_up.retry_seconds)}; to have it sooner, start the stack again",
    )


def _readiness(worker: Worker) -> Iterator[Finding]:
    name = _name(worker)
    ago = worker.last_lost_seconds_ago
    if worker.draining:
        yield Finding(
            Severity.NOTE,
            f"{name} is draining",
            "it was told to stop, and "
            f"{counted(worker.running_count, 'request still runs', 'requests still run')} there",
            "wait until it has stopped, then start it again",
        )
    elif not worker.ready and ago is not None:
        yield Finding(
            Severity.ERROR,
            f"{name} was lost {duration_text(ago)} ago and is not back",
            plain_reason(worker.message),
            _way_back(worker),
        )
    elif not worker.ready:
        yield Finding(
            Severity.ERROR,
            f"{name} is not ready",
            plain_reason(worker.message),
            f"wait if it is loading; else see that it runs at {worker.address} and read its log",
        )
    elif ago is not None and ago <= _RECENT_LOSS_SECONDS:
        times = "once" if worker.loss_count == 1 else f"{worker.loss_count} times"
        yield Finding(
            Severity.WARNING,
            f"{name} was lost {times}, last {duration_text(ago)} ago, and is back",
            "its requests went on from the last stored chunk",
            "read its log, and the kernel's (dmesg) for an out-of-memory kill; if it had only hung "
            "or was cut off, it lives on",
        )
    if worker.telemetry is not None and worker.telemetry.store_is_up is False:
        yield Finding(
            Severity.WARNING,
            f"{name} has no store",
            f"it is not attached to {worker.kvstore_address}: nothing is reused, streamed "
            "requests wait",
            "`splitpoint up` starts the store again by itself; elsewhere start it at its address; "
            "the worker attaches by itself",
        )


def _way_back(worker: Worker) -> str:
    """Return what brings a lost worker back."""
    if worker.message == NO_ANSWER:
        return (
            "if it hangs, end it (kill -9): `splitpoint up` then starts it again; if it was "
            "stopped or cut off, it is found again once it answers"
        )
    return (
        f"read the end of its log, then start it again at {worker.address} (`splitpoint up` does "
        "so by itself)"
    )


def _link(worker: Worker) -> Iterator[Finding]:
    if worker.emulated_link_bytes_per_second is not None:
        rate = format_rate(worker.emulated_link_bytes_per_second)
        yield Finding(
            Severity.WARNING,
            f"worker {worker.id} EMULATES a link of {rate}",
            "it is slower than it could be",
            "start it without --link-rate, unless this is an experiment",
        )
    telemetry, profile = worker.telemetry, worker.profile
    ceiling = telemetry.link_ceiling_bytes_per_second if telemetry is not None else None
    if not worker.ready or profile is None or not ceiling:
        return
    if profile.link_bytes_per_second < _WORN_LINK * ceiling:
        yield Finding(
            Severity.WARNING,
            f"worker {worker.id}'s link reaches {format_rate(profile.link_bytes_per_second)} "
            f"of {format_rate(ceiling)}",
            "less than half of what it could",
            "see that the arena is page-locked (--pin-limit, ulimit -l), that store and GPU share "
            "a NUMA node (--numa-node), and what else uses the link",
        )


def _predictions(worker: Worker) -> Iterator[Finding]:
    telemetry = worker.telemetry
    if telemetry is None or not telemetry.predicted_seconds:
        return
    least = max(_LEAST_SECONDS, _LEAST_SHARE_OF_STEPS * telemetry.step_seconds)
    if max(telemetry.predicted_seconds, telemetry.measured_seconds) < least:
        return
    ratio = telemetry.measured_seconds / telemetry.predicted_seconds
    low, high = _AS_PREDICTED
    if not low <= ratio <= high:
        yield Finding(
            Severity.WARNING,
            f"worker {worker.id} takes {ratio:.2g} x what its plans predict",
            f"{telemetry.measured_seconds:.3g} s measured, {telemetry.predicted_seconds:.3g} s "
            "predicted: splits are chosen from wrong costs",
            "see what else runs on its host and on its link; a worker that was started beside "
            "other load is measured anew when it is started again",
        )


def _numerics(ready: Sequence[Worker]) -> Iterator[Finding]:
    """Yield a finding if workers compute other bits than others, of which some are invariant."""
    alike: dict[str, list[str]] = {}
    for worker in ready:
        alike.setdefault(worker.numerics_digest, []).append(worker.id)
    if len(alike) < 2:
        return
    kinds = (
        f"worker {', '.join(names)}: {f'invariant, digest {digest}' if digest else 'fast'}"
        for digest, names in alike.items()
    )
    differing, do = [], []
    if "" in alike:
        differing.append("numerics")
        do.append("give all workers one --numerics; `splitpoint status` tells why one is fast")
    if len(alike) > 1 + ("" in alike):
        differing.append("kernels, torch or processors")
        do.append(
            "give all workers one version and --cpu-kernels, and hosts with one processor and "
            "compiler; their logs list what each digest is of"
        )
    yield Finding(
        Severity.WARNING,
        f"a prompt's answer depends on the worker: their {', '.join(differing)} differ",
        f"{'; '.join(kinds)}; unlike workers share no cached prefixes",
        "; ".join(do),
    )


def _attached(store: Store, workers: Iterable[Worker]) -> list[str]:
    """Return the workers that report this store as attached."""
    return [
        worker.id
        for worker in workers
        if worker.kvstore_address == store.address
        and worker.telemetry is not None
        and worker.telemetry.store_is_up
    ]


def _store(store: Store, attached: Sequence[str]) -> Iterator[Finding]:
    if store.stats is None and attached and not store.message.startswith(_SILENT):
        # A socket of another host or container, or one that refuses this command.
        yield Finding(
            Severity.NOTE,
            f"store {store.address} cannot be asked from here",
            f"{plain_reason(store.message)}; it serves worker {', '.join(attached)}",
            "for its numbers ask from where its workers run (docker-compose exec scheduler "
            "splitpoint status ...), or with a token and an authority that it accepts",
        )
    elif store.stats is None:
        yield Finding(
            Severity.ERROR,
            f"store {store.address} does not answer",
            plain_reason(store.message),
            "`splitpoint up` starts it again by itself; elsewhere start it with the same "
            "arguments: it adopts its arena; if it refuses this command, name a token or an "
            "authority that it accepts",
        )
    else:
        yield from _room(store.address, store.stats)
        yield from _former_arena(store.address, store.stats)
        yield from _damage(store.address, store.stats)
        for what, why, do in tiers.problems(store.address, store.stats):
            yield Finding(Severity.WARNING, what, why, do)


def _room(address: str, stats: kvstore_pb2.GetStatsResponse) -> Iterator[Finding]:
    """Yield a finding if slots that cannot be evicted fill the arena; cached chunks may."""
    held = stats.leased_slot_count + stats.writing_slot_count + stats.quarantined_slot_count
    is_refusing = (
        stats.HasField("last_refused_seconds_ago")
        and stats.last_refused_seconds_ago <= _LATELY_SECONDS
    )
    all_held = stats.slot_count > 0 and held >= stats.slot_count
    if not (is_refusing or all_held):
        return
    numbers = (
        f"{held:,} of {counted(stats.slot_count, 'slot is', 'slots are')} held by running requests"
    )
    if is_refusing:
        numbers += (
            f"; {counted(stats.refused_reservation_count, 'reservation was', 'reservations were')}"
            " refused, the last "
            f"{duration_text(stats.last_refused_seconds_ago)} ago"
        )
    yield Finding(
        Severity.WARNING,
        f"the arena of store {address} is full",
        numbers,
        "give the store more --host-memory, or run fewer and shorter streamed requests at a time",
    )


def _former_arena(address: str, stats: kvstore_pb2.GetStatsResponse) -> Iterator[Finding]:
    """Yield a finding if the store lost its arena lately."""
    if not stats.former_arena_loss or stats.uptime_seconds > _RECENT_LOSS_SECONDS:
        return
    yield Finding(
        Severity.WARNING,
        f"store {address} lost its arena {duration_text(stats.uptime_seconds)} ago",
        f"its file was {stats.former_arena_loss}; the cache began empty",
        "look for what cleans up shared memory (a job, or RemoveIPC= of systemd-logind), and do "
        "without it",
    )


def _damage(address: str, stats: kvstore_pb2.GetStatsResponse) -> Iterator[Finding]:
    if stats.checksum_failure_count:
        yield Finding(
            Severity.WARNING,
            f"store {address} found "
            f"{counted(stats.checksum_failure_count, 'chunk that differs', 'chunks that differ')} "
            "from their checksum",
            "they were dropped and are computed again; no such byte was served",
            "run `splitpoint arena verify`; if the number grows, look for failing memory "
            "(dmesg, EDAC)",
        )
    if stats.damaged_chunk_count:
        ago = duration_text(stats.last_damage_seconds_ago)
        yield Finding(
            Severity.WARNING,
            f"{counted(stats.damaged_chunk_count, 'chunk')} of store {address} changed while "
            "it ran",
            f"the last was found {ago} ago; they were dropped and are computed again, and "
            "requests may have read them before",
            "look for failing memory (dmesg, EDAC), and for a process that writes into the arena",
        )
    if stats.integrity_violations:
        yield Finding(
            Severity.ERROR,
            f"store {address} violates {len(stats.integrity_violations)} of its own invariants",
            stats.integrity_violations[0],
            "run `splitpoint arena verify`, start the store again, and report this as a bug",
        )
