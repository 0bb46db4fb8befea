"""The scheduler's metrics: histograms are filled as events happen, the rest is read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scheduler_service.cluster.registry import Registry
from scheduler_service.requests.admission import AdmissionQueue
from scheduler_service.requests.counters import Counters
from scheduler_service.requests.lifecycle import RequestManager
from scheduler_service.requests.tenants import TenantFacts
from splitpoint.costs.bottleneck import kappa_crit
from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink


class Distributions:
    """Puts each sample of `Counters` into its histogram."""

    def __init__(self, meters: Meters) -> None:
        self._histograms = {
            metric: meters.histogram(metric)
            for metric in metrics.metrics_of(metrics.Service.SCHEDULER)
            if metric.kind is metrics.Kind.HISTOGRAM
        }

    def observe(self, metric: metrics.Metric, value: float, *labels: str) -> None:
        histogram = self._histograms[metric]
        (histogram.labels(*labels) if labels else histogram).observe(value)


def readings(manager: RequestManager, model_name: str, link: RedisLink | None) -> Iterator[Reading]:
    """Yield everything that a scrape reads. `link` is None without Redis."""
    yield Reading(metrics.MODEL_INFO, 1, (model_name,))
    yield from _counts(manager.counters)
    yield from _queue(manager)
    yield from _policy(manager)
    yield from _accounts(manager.admission)
    yield from _workers(manager.registry, manager.admission)
    if link is not None:
        yield Reading(metrics.REDIS_UP, not link.is_away)


def _counts(counters: Counters) -> Iterator[Reading]:
    for outcome, count in counters.finished_counts.items():
        yield Reading(metrics.REQUESTS_FINISHED, count, (outcome.value,))
    for reason, count in counters.rejected_counts.items():
        yield Reading(metrics.REQUESTS_REJECTED, count, (reason,))
    for (residency, method), count in counters.plan_counts.items():
        yield Reading(metrics.PLANS, count, (residency.value, method.value))
    yield Reading(metrics.PROMPT_TOKENS, counters.prompt_tokens)
    yield Reading(metrics.CACHED_TOKENS, counters.cached_tokens)
    yield Reading(metrics.GENERATED_TOKENS, counters.generated_tokens)
    yield Reading(metrics.FAILOVERS, counters.failover_count)
    for how, count in counters.resumed_counts.items():
        yield Reading(metrics.RESUMES, count, (how.value,))
    yield Reading(metrics.DROPPED_RESULTS, counters.late_count, ("late",))
    yield Reading(metrics.DROPPED_RESULTS, counters.duplicate_count, ("duplicate",))


def _queue(manager: RequestManager) -> Iterator[Reading]:
    admission = manager.admission
    yield Reading(metrics.REQUESTS_RUNNING, admission.running_count)
    yield Reading(metrics.REQUESTS_WAITING, admission.waiting_count)
    yield Reading(metrics.OLDEST_WAIT_SECONDS, manager.oldest_wait_seconds())
    yield Reading(metrics.QUEUE_CAPACITY, admission.capacity)


def _policy(manager: RequestManager) -> Iterator[Reading]:
    policy = manager.admission.policy
    for decision, count in policy.decision_counts.items():
        yield Reading(metrics.POLICY_DECISIONS, count, (decision.value,))
    for worker_id in policy.workers.open:
        account = policy.workers.accounts[worker_id]
        yield Reading(metrics.WORKER_BOUND_TOKENS, account.bound_tokens, (worker_id,))
        yield Reading(metrics.WORKER_RESTORING_BYTES, account.link_bytes, (worker_id,))
    by_label: dict[str, TenantFacts] = {}
    for facts in manager.tenants():
        label = manager.tenant_labels.label(facts.tenant)
        by_label[label] = facts.joined(by_label.get(label))
    for label, facts in by_label.items():
        yield Reading(metrics.TENANT_SERVICE, facts.service, (label,))
        yield Reading(metrics.TENANT_WAITING, facts.waiting_count, (label,))
        yield Reading(metrics.TENANT_OLDEST_WAIT, facts.oldest_wait_seconds, (label,))


def _accounts(admission: AdmissionQueue) -> Iterator[Reading]:
    stores: dict[str, tuple[int, int]] = {}
    for account in admission.accounts():
        facts = account.facts
        yield Reading(metrics.WORKER_KAPPA_RATIO, account.kappa.ratio, (facts.worker_id,))
        yield Reading(metrics.LEDGER_BYTES, account.charged_bytes, (facts.worker_id, "charged"))
        capacity = facts.cache_capacity_bytes
        yield Reading(metrics.LEDGER_BYTES, capacity, (facts.worker_id, "capacity"))
        if facts.store_slot_count is not None:
            stores[facts.kvstore_address] = account.store.promised_count, facts.store_slot_count
    for address, (promised, slot_count) in stores.items():
        yield Reading(metrics.LEDGER_SLOTS, promised, (address, "charged"))
        yield Reading(metrics.LEDGER_SLOTS, slot_count, (address, "capacity"))


def _workers(registry: Registry, admission: AdmissionQueue) -> Iterator[Reading]:
    """Yield the readings of each worker; 0 if lost, and its address if it never answered."""
    losses = registry.losses.counts()
    for worker in registry.connections:
        yield Reading(metrics.WORKER_KNOWN, 1, (worker.worker_id or worker.address,))
        if not worker.worker_id:
            continue
        losses.setdefault(worker.worker_id, 0)
        yield Reading(metrics.WORKER_READY, worker.takes_requests, (worker.worker_id,))
        if worker.ready is not None:
            facts = worker.ready.facts
            limit = kappa_crit(facts.shape, facts.profile, facts.encoding)
            yield Reading(metrics.KAPPA_CRIT, limit, (worker.worker_id,))
            account = admission.account(worker.worker_id)
            advice = account.advise_power(worker.telemetry) if account is not None else None
            if advice is not None:
                yield Reading(metrics.WORKER_POWER_ADVISED, advice.watts, (worker.worker_id,))
    for worker_id, count in losses.items():
        yield Reading(metrics.WORKER_LOSSES, count, (worker_id,))
