"""Read the status of a running stack: its scheduler, its stores and its gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from splitpoint.client import Client
from splitpoint.client.answers import Model, Queue, SchedulerStatus, Worker
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.transport import channels, statuses
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from splitpoint_cli.output import code_name
from splitpoint_cli.request.gateways import Gateway, read_gateway
from splitpoint_cli.stack.notes import GivenUpWorker, read_gateways, read_given_up

_STORE_SECONDS = 5.0
_AWAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """One KV store's statistics; `message` says why there are none."""

    address: str
    stats: kvstore_pb2.GetStatsResponse | None
    message: str = ""


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
    # Of several schedulers that were named, those that did not answer, with the message of why.
    # The one at `address` did.
    away: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if the scheduler serves with all the workers it knows."""
        return self.serving and self.ready_count == len(self.workers) > 0

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
            reason = statuses.error_of(error, address)
            return Store(address, None, f"{code_name(reason)}: {reason.message}")
