"""/v1/files and /v1/batches."""

from __future__ import annotations

from gateway_service.batch.batches import Batches
from gateway_service.batch.folder import BATCH, FILE, Record, disk_error, pieces_of
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.http.multipart import read_form
from gateway_service.openai.batches import BATCH_FIELDS, DeletedFile, listed, read_upload
from gateway_service.openai.errors import HttpError
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.scheduler_attempts import INFERENCE
from splitpoint.errors import PermissionDenied
from splitpoint.transport.access import METADATA_KEY
from splitpoint.v1 import scheduler_pb2 as pb


def _batches(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> Batches:
    """Return the batches, which now know the client's key. Raises HttpError (404)."""
    if gateway.batches is None:
        raise HttpError(
            404, "this gateway keeps no files: it has no --batch-folder", reason="BATCHES_OFF"
        )
    gateway.batches.seen(exchange.owner, _key(metadata))
    return gateway.batches


def _key(metadata: Metadata) -> Metadata:
    return tuple((name, value) for name, value in metadata if name == METADATA_KEY)


async def _check_key(gateway: Gateway, metadata: Metadata) -> None:
    """Let the scheduler check a key that this gateway cannot, before anything is kept for it."""
    if gateway.access is None:
        await gateway.upstream.call(INFERENCE, "ListModels", pb.ListModelsRequest(), metadata)


# -- files ---------------------------------------------------------------------------------


async def create_file(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Keep an upload. Its key and size are checked before its body is read."""
    batches = _batches(gateway, exchange, metadata)
    _check_origin(exchange)
    await _check_key(gateway, metadata)
    folder, owner = batches.folder, exchange.owner
    folder.check_count(owner)
    lengths = exchange.headers(b"content-length")
    folder.check_room(int(lengths[0]) if lengths and lengths[0].isdigit() else 0)
    kind = ", ".join(exchange.headers(b"content-type"))
    async with folder.upload() as (name, write):
        filename, seconds = read_upload(await read_form(kind, exchange.chunks(), write))
        await write(b"")
        more = {} if seconds is None else {"seconds": seconds}
        record = await batches.add_file(owner, name, filename, **more)
    await exchange.respond(record.value)


def _check_origin(exchange: Exchange) -> None:
    """Refuse forms of other sites' pages, which browsers send without asking this server."""
    hosts = exchange.headers(b"host")
    for origin in exchange.headers(b"origin"):
        if origin.partition("://")[2] not in hosts:
            raise PermissionDenied(
                "files are not taken from pages of another site", reason="ORIGIN_NOT_ALLOWED"
            )


async def list_files(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    files = [record.value for record in batches.folder.all(FILE, exchange.owner)]
    await exchange.respond(listed(exchange.scope["query_string"], files, 10_000, 10_000))


def _file(batches: Batches, exchange: Exchange) -> Record:
    name = exchange.scope["path_params"]["file_id"]
    return batches.folder.get(FILE, exchange.owner, name)


async def get_file(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    await exchange.respond(_file(batches, exchange).value)


async def delete_file(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    record = _file(batches, exchange)
    await batches.remove_file(record)
    await exchange.respond(DeletedFile(id=record.id, object="file", deleted=True))


async def get_content(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    record = _file(batches, exchange)
    try:
        file = batches.folder.content(record.id).open("rb")
    except OSError as error:
        raise disk_error(error) from error
    with file:
        async with exchange.while_connected():
            await exchange.respond_pieces(pieces_of(file), record.value["bytes"])


# -- batches -------------------------------------------------------------------------------


async def create_batch(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    fields = BATCH_FIELDS.read(await exchange.json())
    await _check_key(gateway, metadata)
    record = await batches.create(exchange.owner, _key(metadata), fields)
    await exchange.respond(batches.shown(record))


async def list_batches(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    found = [batches.shown(record) for record in batches.folder.all(BATCH, exchange.owner)]
    await exchange.respond(listed(exchange.scope["query_string"], found, 100, 20))


def _batch(batches: Batches, exchange: Exchange) -> Record:
    name = exchange.scope["path_params"]["batch_id"]
    return batches.folder.get(BATCH, exchange.owner, name)


async def get_batch(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    await exchange.respond(batches.shown(_batch(batches, exchange)))


async def cancel_batch(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    batches = _batches(gateway, exchange, metadata)
    record = _batch(batches, exchange)
    await batches.cancel(record)
    await exchange.respond(batches.shown(record))
