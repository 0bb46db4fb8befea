"""Read the status of a running stack: its scheduler, its stores and its gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from splitpoint.client import Client
from splitpoint.client.answers import Model, Queue, SchedulerStatus, Worker
from splitpoint.config import check_address, is_local_address
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.transport import channels, statuses
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from splitpoint_cli.output import code_name
from splitpoint_cli.stack.notes import GatewayNote, GivenUpWorker, read_gateways, read_given_up

_SECONDS = 3.0
_MOST_BYTES = 1 << 20
# Endpoints of the API: others are for operators and browsers.
_API = ("/v1/", "/tokenize", "/detokenize")
# The status of a client that left before its answer.
_LEFT = 499
# Something else may listen there by now, and answer anything.
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_SAMPLE = re.compile(r"splitpoint_gateway_(\w+?)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class GatewayCounts:
    """What a gateway has counted since its start, and what is open in it now.

    Attributes:
        request_count: requests of its API that have ended, those below included.
        refused_count: those that ended with a status from 400 to 498.
        left_count: those whose client left before the answer was whole.
        failed_count: those that ended with a status of 500 or more.
        stream_count: generations that are open at the scheduler.
    """

    request_count: int = 0
    refused_count: int = 0
    left_count: int = 0
    failed_count: int = 0
    open_count: int = 0
    stream_count: int = 0
    connection_count: int = 0


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway.

    Attributes:
        is_up: it answers.
        is_serving: it says that requests can be served.
        message: why it does not serve, or tells no counts; empty if it does both.
        counts: None if it tells none.
    """

    url: str
    is_up: bool
    is_serving: bool
    message: str = ""
    counts: GatewayCounts | None = None


def read_gateway(note: GatewayNote, identity: Identity) -> Gateway:
    """Return what the gateway answers; one that does not answer is no error here."""
    from http.client import HTTPException  # takes long to load

    try:
        health, body = _get(note, "/health", "")
        message = "" if health == 200 else _message(health, body)
        is_private = note.certificate or is_local_address(note.url.partition("://")[2])
        status, text = _get(note, "/metrics", identity.token if is_private else "")
        counts = counts_of(text.decode("utf-8", "replace")) if status == 200 else None
        if counts is None and not message:
            message = f"it tells no counts: {_message(status, text)}"
    except (OSError, HTTPException, SplitpointError, *_UNREADABLE) as error:
        return Gateway(note.url, False, False, " ".join(str(error).split()) or type(error).__name__)
    return Gateway(note.url, True, health == 200, message, counts)


def counts_of(text: str) -> GatewayCounts:
    """Return the counts in a gateway's metrics, in the text format of Prometheus."""
    ended: list[tuple[int, int]] = []
    gauges: dict[str, int] = {}
    for name, labels, value in _samples(text):
        if name == "requests_total":
            if labels.get("endpoint", "").startswith(_API):
                ended.append((int(labels["status"]), int(value)))
        elif not labels:
            gauges[name] = int(value)
    return GatewayCounts(
        request_count=sum(count for _, count in ended),
        refused_count=sum(count for status, count in ended if 400 <= status < _LEFT),
        left_count=sum(count for status, count in ended if status == _LEFT),
        failed_count=sum(count for status, count in ended if status >= 500),
        open_count=gauges.get("open_requests", 0),
        stream_count=gauges.get("open_generations", 0),
        connection_count=gauges.get("connections", 0),
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if (found := _SAMPLE.fullmatch(line)) is not None:
            yield found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def _get(note: GatewayNote, path: str, token: str) -> tuple[int, bytes]:
    """Return status and body of a GET. Raises OSError, HTTPException."""
    connection = _connection(note)
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def _connection(note: GatewayNote) -> Any:
    import ssl
    from http.client import HTTPConnection, HTTPSConnection

    host, _, port = check_address(note.url.partition("://")[2]).rpartition(":")
    host = host.strip("[]")
    if not note.certificate:
        return HTTPConnection(host, int(port), timeout=_SECONDS)
    # That very certificate, whatever names are in it: this host's `up` wrote it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=note.certificate)
    return HTTPSConnection(host, int(port), timeout=_SECONDS, context=context)


def _message(status: int, body: bytes) -> str:
    """Return the message of an error in OpenAI's form, else its status."""
    try:
        told: Any = json.loads(body)
        return str(told["error"]["message"])
    except _UNREADABLE:
        return f"it answers {status}"


_STORE_SECONDS = 5.0
# A store of pages before the first engine.
NO_ARENA_YET = "NO_ARENA_YET"
_AWAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """One KV store's statistics; `message` says why there are none, `reason` in one word."""

    address: str
    stats: kvstore_pb2.GetStatsResponse | None
    message: str = ""
    reason: str = ""

    @property
    def is_serving(self) -> bool:
        """True if it answers; a store of pages has statistics once an engine has attached."""
        return self.stats is not None or self.reason == NO_ARENA_YET


@dataclass(frozen=True, slots=True)
class Status:
    """The status of scheduler, workers, stores and gateway."""

    address: str
    # Requests can succeed: at least one worker is ready.
    serving: bool
    models: tuple[Model, ...]
    workers: tuple[Worker, ...]
    queue: Queue
    stores: tuple[Store, ...]
    scheduler: SchedulerStatus
    # Workers that their `splitpoint up` has given up, by address; known on its host only.
    given_up: Mapping[str, GivenUpWorker] = field(default_factory=dict)
    # Of `splitpoint up --http`; known on its host only.
    gateways: tuple[Gateway, ...] = ()
    # Named schedulers that did not answer, with the message of why.
    # The one at `address` did.
    away: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if the scheduler serves with all the workers it knows, and the gateway serves."""
        has_workers = self.ready_count == len(self.workers) > 0
        return self.serving and has_workers and all(each.is_serving for each in self.gateways)

    @property
    def ready_count(self) -> int:
        """Workers that take requests."""
        return sum(worker.ready for worker in self.workers)


def read_status(client: Client) -> Status:
    """Ask scheduler, stores and gateway. Raises Unavailable without a scheduler."""
    workers = client.list_workers()
    addresses = sorted({worker.kvstore_address for worker in workers if worker.kvstore_address})
    serving = client.health()
    return Status(
        address=client.address,
        serving=serving,
        models=client.list_models() if serving else (),
        workers=workers,
        queue=client.get_queue(),
        stores=tuple(read_store(address, client.identity) for address in addresses),
        scheduler=client.scheduler_status(),
        given_up=read_given_up(worker.address for worker in workers if not worker.ready),
        gateways=tuple(
            read_gateway(note, client.identity)
            for note in read_gateways(worker.address for worker in workers)
        ),
        away=_still_away(client),
    )


def _still_away(client: Client) -> dict[str, str]:
    """Return the schedulers that did not answer a call of this client, and do not now.

    It asks the one that answered from then on, and does not see that another one is back.
    """
    found = {}
    for address in client.away:
        with Client(address, identity=client.identity, timeout=_AWAY_SECONDS) as other:
            try:
                other.get_queue()
            except SplitpointError as error:
                found[address] = error.message
    return found


def read_store(address: str, identity: Identity = PLAIN) -> Store:
    """Return GetStats of one store; a store that does not answer is no error here."""
    try:
        opened = channels.open_sync_channel(address, identity)
    except InvalidArgument as error:  # the token would travel in the clear
        return Store(address, None, error.message)
    with opened as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            return Store(
                address, stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=_STORE_SECONDS)
            )
        except grpc.RpcError as error:
            found = statuses.error_of(error, address)
            message = f"{code_name(found)}: {found.message}"
            return Store(address, None, message, found.reason)
