"""`splitpoint status`: is everything ready, and what is it doing?"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer
from rich.markup import escape
from rich.table import Table

from splitpoint import convert, rpc
from splitpoint.answers import Model, Queue, Worker
from splitpoint.client import Client
from splitpoint.config import DEFAULT_ADDRESS, format_rate, format_size
from splitpoint.errors import DeadlineExceeded, InvalidArgument, Unavailable
from splitpoint.tls import PLAIN, Identity, client_identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from splitpoint_cli.generate import Address
from splitpoint_cli.identity import CaFile, TokenFile
from splitpoint_cli.output import code_name, out, print_json

_STORE_SECONDS = 5.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Store:
    """One KV store's own account; `message` says why there is none."""

    address: str
    stats: kvstore_pb2.GetStatsResponse | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything the scheduler knows, and what the stores say."""

    address: str
    serving: bool
    models: tuple[Model, ...]
    workers: tuple[Worker, ...]
    queue: Queue
    stores: tuple[Store, ...]

    @property
    def ready(self) -> bool:
        """The scheduler serves, and there are workers, all of them ready."""
        return self.serving and bool(self.workers) and all(w.ready for w in self.workers)


def read_status(client: Client) -> Status:
    """Ask scheduler and stores. Raises Unavailable when there is no scheduler."""
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
    )


def read_store(address: str, identity: Identity = PLAIN) -> Store:
    """GetStats of one store; a store that cannot be asked is no error here."""
    try:
        opened = rpc.open_sync_channel(address, identity)
    except InvalidArgument as error:  # the token would travel in the clear
        return Store(address, None, error.message)
    with opened as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            return Store(
                address, stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=_STORE_SECONDS)
            )
        except grpc.RpcError as error:
            reason = rpc.error_of(error)
            return Store(address, None, f"{code_name(reason)}: {reason.message}")


def status(
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[
        float, typer.Option(help="Wait until all is ready, this long at most.", metavar="SECONDS")
    ] = 0.0,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show workers, store and queue; exit 0 only when scheduler and all workers are ready.

    Exit codes: 0 ready; 1 something is not ready; 3 no scheduler answers.
    """
    with Client(address, identity=client_identity(ca=ca, token_file=token_file)) as client:
        found = _wait_ready(client, wait)
    if as_json:
        print_json(status_json(found))
    else:
        _print_tables(found)
    if not found.ready:
        raise typer.Exit(1)


def _wait_ready(client: Client, seconds: float) -> Status:
    """The first ready status, or the last one before the time was over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = read_status(client)
        except (Unavailable, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
        else:
            if found.ready or time.monotonic() >= deadline:
                return found
        time.sleep(_POLL_SECONDS)


def status_json(found: Status) -> dict[str, object]:
    """The object that `--json` prints; each worker's `profile` fits `plan --profile`."""
    return {
        "ready": found.ready,
        "address": found.address,
        "models": [
            {
                "name": model.name,
                "context_length": model.context_length,
                "ready_worker_count": model.ready_worker_count,
                "has_tokenizer": model.has_tokenizer,
                "has_activations": model.has_activations,
                "kv_encoding": model.kv_encoding.value,
                "chunk_tokens": model.chunk_tokens,
            }
            for model in found.models
        ],
        "workers": [
            {**dataclasses.asdict(worker), "schedule": worker.schedule.value}
            for worker in found.workers
        ],
        "queue": dataclasses.asdict(found.queue),
        "stores": [_store_json(store) for store in found.stores],
    }


_STORE_FIELDS = (
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
    "checksum_failure_count",
    "arena_path",
    "arena_size_bytes",
)


def _store_json(store: Store) -> dict[str, object]:
    if store.stats is None:
        return {"address": store.address, "message": store.message}
    return {
        "address": store.address,
        "data_type": convert.data_type_from_proto(store.stats.layout.data_type).value,
        "chunk_tokens": store.stats.layout.chunk_tokens,
        "has_activations": store.stats.layout.has_activations,
        "kv_encoding": convert.encoding_from_proto(store.stats.layout.encoding).value,
        **{name: getattr(store.stats, name) for name in _STORE_FIELDS},
        "evicted_by_use_count": list(store.stats.evicted_by_use_count),
    }


def _print_tables(found: Status) -> None:
    state = "ready" if found.ready else "not ready"
    names = ", ".join(model.name for model in found.models) or "no model yet"
    out.print(f"scheduler {found.address}: {state}, serves {names}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "state", "device", "schedule", "cache", "running", "note"):
        table.add_column(column)
    for worker in found.workers:
        table.add_row(
            worker.id,
            "draining" if worker.draining else "ready" if worker.ready else "not ready",
            worker.device,
            worker.schedule.value if worker.device else "",
            f"{format_size(worker.cache_charged_bytes)} of "
            f"{format_size(worker.cache_capacity_bytes)}",
            str(worker.running_count),
            worker.message,
        )
    out.print(table)
    for worker in found.workers:
        if worker.weights:
            out.print(f"worker {escape(worker.id)}: {escape(worker.weights)}")
        if worker.emulated_link_bytes_per_second is not None:
            rate = format_rate(worker.emulated_link_bytes_per_second)
            out.print(
                f"[bold red]worker {escape(worker.id)} EMULATES a link of {rate}: it is slower "
                "than it could be (--link-rate)[/bold red]"
            )
    for store in found.stores:
        out.print(_store_line(store))
        if store.stats is not None:
            out.print(_memory_line(store.stats))
    waiting = len(found.queue.requests)
    out.print(f"queue: {waiting} waiting, room for {found.queue.capacity}")
    for request in found.queue.requests:
        out.print(
            f"  {request.position} {request.request_id} for {request.waited_seconds:.1f} s, "
            f"{format_size(request.footprint_bytes)}: {request.reason}"
        )


def _store_line(store: Store) -> str:
    stats = store.stats
    if stats is None:
        return f"store {store.address}: {store.message}"
    hits = f"{stats.hit_token_count:,} of {stats.query_token_count:,} tokens found"
    return (
        f"store {store.address}: {stats.sealed_slot_count:,} of {stats.slot_count:,} slots sealed, "
        f"{stats.leased_slot_count:,} leased, {hits}, arena {format_size(stats.arena_size_bytes)}"
        f"{_lossy_note(stats)}"
    )


def _lossy_note(stats: kvstore_pb2.GetStatsResponse) -> str:
    """What reuse costs in exactness; nothing for a store that keeps what was computed."""
    encoding = convert.encoding_from_proto(stats.layout.encoding)
    return f" in {encoding.value}: what is reused is approximate" if encoding.is_lossy else ""


def _memory_line(stats: kvstore_pb2.GetStatsResponse) -> str:
    """How the store uses its room: what went, after how much use, and what was kept out."""
    parts = [f"  eviction {stats.eviction_policy or 'unknown'}"]
    if stats.evicted_chunk_count:
        unused = stats.evicted_by_use_count[0] if stats.evicted_by_use_count else 0
        age = stats.evicted_age_seconds_sum / stats.evicted_chunk_count
        parts.append(
            f"{stats.evicted_chunk_count:,} chunks evicted, {unused:,} of them never used again, "
            f"after {age:,.0f} s on average"
        )
    if stats.unadmitted_chunk_count:
        parts.append(f"{stats.unadmitted_chunk_count:,} kept out")
    if stats.memory_description:
        parts.append(stats.memory_description)
    return ", ".join(parts)
