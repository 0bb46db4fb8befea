"""What a whole stack of processes tells Prometheus: all that is documented, nothing else, and true.

One `splitpoint up --metrics` with a Redis, an emulated link and a small arena. It has served
whole and streamed requests, a reused prefix, evictions, a rejection and a caller that left;
then it rests, and every service is scraped once. Each test looks at that.
"""

from __future__ import annotations

import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest
from own_names import free_ports, instance_name
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from redis_server import RedisServer
from small_model import WIDE, small_model
from test_e2e_cli import assert_nothing_left
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.client.answers import Completion, SchedulerStatus
from splitpoint.errors import ResourceExhausted
from splitpoint.observe import metrics as m
from splitpoint.observe.metrics import Kind, Metric, Needs, Service, metrics_of
from splitpoint.planning.plan import Residency
from splitpoint.transport.access import Caller, Role
from splitpoint.transport.channels import open_sync_channel
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from splitpoint_cli.security.token import add_token

SECONDS = 60
LINK_RATE = 2_000_000_000
# Words of clients: none of them may be in the metrics.
PROMPT, TENANT, CALLER, REQUEST, SALT, METHOD = (
    f"canary{word}" for word in ("prompt", "tenant", "caller", "request", "salt", "method")
)
# What every one of these machines may lack, whatever the stack was asked for; and tiers, whose
# readings tests/kvstore/test_kvstore_metrics.py compares.
MAY_BE_ABSENT = {Needs.GPU, Needs.RAPL, Needs.TIER, Needs.TRANSFER}

Labels = tuple[str, ...]


# tests/gateway scrapes the gateway.
SCRAPED = (Service.SCHEDULER, Service.KVSTORE, Service.WORKER)


@dataclass(frozen=True)
class Scraped:
    """Return the text of each service, and its families by their documented name."""

    texts: dict[Service, str]
    families: dict[Service, dict[str, Family]]
    # Asked for just before and just after the scrape, and the same.
    stats: kvstore_pb2.GetStatsResponse
    scheduler: SchedulerStatus
    completions: list[Completion]

    def values(self, service: Service, metric: Metric, suffix: str = "") -> dict[Labels, float]:
        """By label values, in the order of the metric's labels."""
        family = self.families[service][metric.name]
        return {
            tuple(sample.labels[label] for label in metric.labels): sample.value
            for sample in family.samples
            if sample.name == metric.name + suffix
        }

    def value(self, service: Service, metric: Metric, *labels: str) -> float:
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        return self.values(service, metric, suffix)[labels]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("metrics")
    tokens = folder / "tokens.toml"
    client = add_token(tokens, Caller(CALLER, Role.CLIENT, TENANT))
    admin = add_token(tokens, Caller("root", Role.ADMIN))
    redis = RedisServer(folder)
    redis.start()
    instance, port = instance_name("metrics"), free_ports(3)
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        # Room for some 40 chunks.
        *("--dtype", "float32", "--chunk-tokens", "16", "--host-memory", "4MiB"),
        *("--model", str(small_model(**WIDE))),
        *("--device-memory", "128MiB", "--link-rate", f"{LINK_RATE}", "--redis", redis.url),
        *("--tokens", str(tokens), "--tenant-requests", "1"),
        *("--listen", "127.0.0.1:0", "--instance", instance, "--metrics", str(port)),
    ]
    try:
        with up_process(command) as process:
            printed = wait_until_up(process)
            address = printed.partition("scheduler  ")[2].splitlines()[0]
            store = printed.partition("store      ")[2].splitlines()[0]
            places = {Service.SCHEDULER: port, Service.KVSTORE: port + 1, Service.WORKER: port + 2}
            for place in places.values():
                assert str(place) in printed
            completions = serve_some(address, client)
            yield scrape(places, store, address, admin, completions)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
        assert_nothing_left(instance)
    finally:
        redis.stop()


def serve_some(address: str, token: str) -> list[Completion]:
    """One request after the other; the completions of those that were not left."""
    text = f"{PROMPT} = [\n" + "".join(f"    {number},\n" for number in range(30))
    done: list[Completion] = []
    with Client(address, token=token) as client:

        def ask(prompt: str, residency: Residency = Residency.RESIDENT) -> None:
            stream = client.generate(
                prompt,
                max_tokens=12,
                ignore_eos=True,
                residency=residency,
                request_id=f"{REQUEST}-{len(done)}",
                cache_salt=SALT.encode(),
            )
            done.append(stream.complete())

        ask(text)
        until(lambda: asked_again(ask, text, done), "the prefix is found")
        ask(text + "]\n", Residency.STREAMED)
        for number in range(8):  # more than there is room for
            ask(f"{number} {text}")
        with client.generate(text, max_tokens=1500, ignore_eos=True) as running:
            next(running)
            with pytest.raises(ResourceExhausted) as refused:
                client.generate("x", max_tokens=1).complete()
            assert refused.value.reason == "TENANT_QUOTA"
        # And what a caller makes up.
        with open_sync_channel(address, client.identity) as channel:
            for path in (f"/{METHOD}.Service/{METHOD}", f"/splitpoint.v1.AdminService/{METHOD}"):
                send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
                with pytest.raises(grpc.RpcError):
                    send(b"", timeout=SECONDS)
    return done


def asked_again(ask: Callable[[str], None], text: str, done: list[Completion]) -> bool:
    """Whether a repeated prompt was found: the first one's write-back may still be under way."""
    ask(text)
    return done[-1].usage.cached_tokens > 0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        assert answer.status == 200
        text: str = answer.read().decode()
        return text


def scrape(
    places: dict[Service, int],
    store: str,
    address: str,
    admin: str,
    completions: list[Completion],
) -> Scraped:
    """Once the stack rests: what it says by gRPC is the same before and after."""
    found: list[Scraped] = []
    with open_sync_channel(store) as channel, Client(address, token=admin) as client:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)

        def rests() -> bool:
            before = stub.GetStats(kvstore_pb2.GetStatsRequest(check_integrity=True))
            status = client.scheduler_status()
            if before.writing_slot_count or before.lease_count or status.running_count:
                return False
            texts = {service: read(port) for service, port in places.items()}
            after = stub.GetStats(kvstore_pb2.GetStatsRequest())
            families = {service: parsed(text) for service, text in texts.items()}
            found.append(Scraped(texts, families, after, status, completions))
            for each in (before, after):
                each.ClearField("last_refused_seconds_ago")
                each.ClearField("uptime_seconds")
            return bool(before == after)

        until(rests, "the stack rests")
    return found[-1]


def parsed(text: str) -> dict[str, Family]:
    """By documented name: the parser leaves `_total` off a counter's family."""
    families: dict[str, Family] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in families, "a family comes twice"
        families[name] = family
    return families


# -- all that is documented, and nothing else -----------------------------------------------------


@pytest.mark.parametrize("service", SCRAPED)
def test_every_documented_metric_is_there(scraped: Scraped, service: Service) -> None:
    families = scraped.families[service]
    missing = [
        metric.name
        for metric in metrics_of(service)
        if metric.needs not in MAY_BE_ABSENT
        and not (metric.name in families and families[metric.name].samples)
    ]
    assert missing == []


def test_what_a_cpu_worker_has_no_gpu_for_is_absent(scraped: Scraped) -> None:
    of_gpus = {metric.name for metric in metrics_of(Service.WORKER) if metric.needs is Needs.GPU}
    assert len(of_gpus) > 10
    assert not of_gpus & set(scraped.families[Service.WORKER])


@pytest.mark.parametrize("service", SCRAPED)
def test_every_metric_that_is_there_is_documented(scraped: Scraped, service: Service) -> None:
    documented = {metric.name: metric for metric in metrics_of(service)}
    seen = set()
    for name, family in scraped.families[service].items():
        if not name.startswith("splitpoint_"):
            assert name.startswith("process_"), name
            continue
        metric = documented[name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        suffixes = {""} if metric.kind is not Kind.HISTOGRAM else {"_bucket", "_sum", "_count"}
        for sample in family.samples:
            assert sample.name.removeprefix(name) in suffixes
            assert set(sample.labels) - {"le"} == set(metric.labels)
            assert sample.value >= 0
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen, "a sample comes twice"
            seen.add(key)
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(
        scraped.families[service]
    )


@pytest.mark.parametrize("service", SCRAPED)
def test_nothing_of_anybody_is_in_them(scraped: Scraped, service: Service) -> None:
    assert sum(done.usage.prompt_tokens for done in scraped.completions) > 500
    text = scraped.texts[service]
    for word in (PROMPT, TENANT, CALLER, REQUEST, SALT, METHOD, "root"):
        assert word not in text, word
    assert "canary" not in text.lower()
    for done in scraped.completions:
        assert len(done.text) > 8
        assert done.text not in text


# -- that it is true ------------------------------------------------------------------------------


def test_the_store_says_what_get_stats_says(scraped: Scraped) -> None:
    stats = scraped.stats

    def value(metric: Metric, *labels: str) -> float:
        return scraped.value(Service.KVSTORE, metric, *labels)

    assert {
        m.STORE_ARENA_BYTES: value(m.STORE_ARENA_BYTES),
        m.STORE_EPOCH: value(m.STORE_EPOCH),
        m.STORE_LEASED_SLOTS: value(m.STORE_LEASED_SLOTS),
        m.STORE_LEASES: value(m.STORE_LEASES),
        m.STORE_SESSIONS: value(m.STORE_SESSIONS),
        m.STORE_MATCHES: value(m.STORE_MATCHES),
        m.STORE_MATCH_HITS: value(m.STORE_MATCH_HITS),
        m.STORE_QUERY_TOKENS: value(m.STORE_QUERY_TOKENS),
        m.STORE_HIT_TOKENS: value(m.STORE_HIT_TOKENS),
        m.STORE_SEALED_CHUNKS: value(m.STORE_SEALED_CHUNKS),
        m.STORE_DUPLICATE_CHUNKS: value(m.STORE_DUPLICATE_CHUNKS),
        m.STORE_UNADMITTED_CHUNKS: value(m.STORE_UNADMITTED_CHUNKS),
        m.STORE_EVICTED_AGE_SECONDS: value(m.STORE_EVICTED_AGE_SECONDS),
        m.STORE_REFUSED_RESERVATIONS: value(m.STORE_REFUSED_RESERVATIONS),
        m.STORE_CHECKSUM_FAILURES: value(m.STORE_CHECKSUM_FAILURES),
        m.STORE_RECOVERY_SECONDS: value(m.STORE_RECOVERY_SECONDS),
    } == {
        m.STORE_ARENA_BYTES: stats.arena_size_bytes,
        m.STORE_EPOCH: stats.epoch,
        m.STORE_LEASED_SLOTS: stats.leased_slot_count,
        m.STORE_LEASES: stats.lease_count,
        m.STORE_SESSIONS: stats.session_count,
        m.STORE_MATCHES: stats.match_count,
        m.STORE_MATCH_HITS: stats.match_hit_count,
        m.STORE_QUERY_TOKENS: stats.query_token_count,
        m.STORE_HIT_TOKENS: stats.hit_token_count,
        m.STORE_SEALED_CHUNKS: stats.sealed_chunk_count,
        m.STORE_DUPLICATE_CHUNKS: stats.duplicate_chunk_count,
        m.STORE_UNADMITTED_CHUNKS: stats.unadmitted_chunk_count,
        m.STORE_EVICTED_AGE_SECONDS: stats.evicted_age_seconds_sum,
        m.STORE_REFUSED_RESERVATIONS: stats.refused_reservation_count,
        m.STORE_CHECKSUM_FAILURES: stats.checksum_failure_count,
        m.STORE_RECOVERY_SECONDS: stats.recovery_seconds,
    }
    slots = scraped.values(Service.KVSTORE, m.STORE_SLOTS)
    assert slots == {
        ("free",): stats.free_slot_count,
        ("writing",): stats.writing_slot_count,
        ("sealed",): stats.sealed_slot_count,
        ("quarantined",): stats.quarantined_slot_count,
    }
    assert sum(slots.values()) == stats.slot_count
    evictions = scraped.values(Service.KVSTORE, m.STORE_EVICTIONS)
    assert evictions["lru", "room"] == stats.evicted_chunk_count > 0
    by_use = scraped.values(Service.KVSTORE, m.STORE_EVICTED_BY_USE)
    assert sum(by_use.values()) == stats.evicted_chunk_count
    assert stats.match_hit_count > 0


def test_the_model_has_one_name(scraped: Scraped) -> None:
    for service in (Service.SCHEDULER, Service.WORKER):
        assert scraped.values(service, m.MODEL_INFO) == {(small_model(**WIDE).name,): 1}


def test_all_three_know_redis(scraped: Scraped) -> None:
    for service in SCRAPED:
        assert scraped.value(service, m.REDIS_UP) == 1
    assert scraped.stats.redis.is_up


def test_calls_are_counted_where_they_arrive(scraped: Scraped) -> None:
    calls = scraped.values(Service.SCHEDULER, m.RPC_CALLS)
    assert calls["InferenceService/Generate", "OK"] == len(scraped.completions)
    assert calls["InferenceService/Generate", "RESOURCE_EXHAUSTED"] == 1
    assert calls["InferenceService/Generate", "CANCELLED"] == 1
    assert calls["unknown", "PERMISSION_DENIED"] == 2
    assert calls["InferenceService/Tokenize", "OK"] == 0
    assert scraped.value(Service.WORKER, m.RPC_CALLS, "WorkerService/GetInfo", "OK") >= 1
    store = scraped.values(Service.KVSTORE, m.RPC_CALLS)
    assert store["KvStoreService/Attach", "OK"] == 1
    assert store["KvStoreService/Seal", "OK"] >= 1


def test_the_scheduler_counts_what_its_clients_got(scraped: Scraped) -> None:
    usages = [done.usage for done in scraped.completions]

    def value(metric: Metric, *labels: str) -> float:
        return scraped.value(Service.SCHEDULER, metric, *labels)

    assert value(m.PROMPT_TOKENS) == sum(usage.prompt_tokens for usage in usages)
    assert value(m.CACHED_TOKENS) == sum(usage.cached_tokens for usage in usages) > 0
    assert value(m.REQUESTS_REJECTED, "TENANT_QUOTA") == 1
    assert value(m.REQUESTS_RUNNING) == value(m.REQUESTS_WAITING) == 0
    assert value(m.TTFT_SECONDS) == len(usages) + 1  # and the one that was left
    assert value(m.REQUEST_SECONDS) == len(usages)
    for metric in (m.PREFILL_SECONDS, m.DECODE_SECONDS, m.TPOT_SECONDS):
        assert value(metric) == len(usages)
    lengths = scraped.values(Service.SCHEDULER, m.REQUEST_PROMPT_TOKENS, "_sum")
    assert lengths[()] == value(m.PROMPT_TOKENS)
    lengths = scraped.values(Service.SCHEDULER, m.REQUEST_GENERATED_TOKENS, "_sum")
    assert lengths[()] == sum(usage.completion_tokens for usage in usages)
    finished = scraped.values(Service.SCHEDULER, m.REQUESTS_FINISHED)
    assert finished["length",] == len(usages)
    assert sum(finished.values()) == len(usages) + 1
    generated = sum(usage.completion_tokens for usage in usages)
    assert value(m.GENERATED_TOKENS) > generated
    status = scraped.scheduler
    assert status.cached_token_count == value(m.CACHED_TOKENS)
    assert status.generated_token_count == value(m.GENERATED_TOKENS)
    assert scraped.values(Service.SCHEDULER, m.WORKER_READY) == {("0",): 1}
    assert scraped.values(Service.SCHEDULER, m.WORKER_KNOWN) == {("0",): 1}


def test_the_worker_counts_what_it_did(scraped: Scraped) -> None:
    def value(metric: Metric, *labels: str) -> float:
        return scraped.value(Service.WORKER, metric, *labels)

    assert value(m.WORKER_STORE_UP) == 1
    assert value(m.LINK_CEILING) == LINK_RATE
    assert value(m.LINK_BYTES, "in", "kv") > 0
    assert value(m.LINK_BYTES, "out", "write_back") > 0
    assert value(m.LINK_BUSY_SECONDS, "in") > 0
    assert sum(scraped.values(Service.WORKER, m.RESTORES).values()) > 0
    steps = scraped.values(Service.WORKER, m.WORKER_STEPS)
    assert sum(steps.values()) == value(m.WORKER_STEP_SECONDS) > 0
    assert value(m.WORKER_GENERATED_TOKENS) >= scraped.value(Service.SCHEDULER, m.GENERATED_TOKENS)
    written = scraped.values(Service.WORKER, m.WORKER_WRITE_BACK_CHUNKS)
    assert written["stored",] == scraped.stats.sealed_chunk_count + (
        scraped.stats.duplicate_chunk_count
    )
    cached = scraped.values(Service.WORKER, m.CACHE_TOKENS)
    assert sum(cached.values()) > 0
