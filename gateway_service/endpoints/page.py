"""The page at / and its files, and GET /splitpoint/status: what its live view shows."""

from __future__ import annotations

import asyncio

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openai.errors import HttpError
from gateway_service.page.files import INDEX, PageFile, read_files
from gateway_service.page.readings import status_reading
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.tries import ADMIN
from splitpoint.v1 import scheduler_pb2 as pb


class Page:
    """Answers with the file that the path names; / is the page itself. Asks for no key."""

    def __init__(self) -> None:
        self._files = read_files()

    async def __call__(self, gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
        file = self._files.get(exchange.scope["path_params"].get("name", INDEX))
        if file is None:
            raise HttpError(404, "the page has no such file", reason="UNKNOWN_URL")
        status, headers = 200, dict(file.headers)
        kind = headers.pop("content-type").encode()
        if any(file.is_known(tags) for tags in exchange.headers(b"if-none-match")):
            status, body = 304, b""
        else:
            body = _encoded(file, exchange, headers)
        await exchange.respond_bytes(body, kind, status=status, headers=headers)


def _encoded(file: PageFile, exchange: Exchange, headers: dict[str, str]) -> bytes:
    """Return the body in a form that the client takes, and name it in the headers."""
    takes = ",".join(exchange.headers(b"accept-encoding"))
    if not any(each.partition(";")[0].strip() == "gzip" for each in takes.split(",")):
        return file.content
    headers["content-encoding"] = "gzip"
    return file.compressed


async def status(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer with the scheduler's counters, its queue and its workers.

    Raises PermissionDenied for a client whose key does not have the role for them.
    """
    call = gateway.upstream.call
    scheduler, queue, workers = await asyncio.gather(
        call(ADMIN, "GetSchedulerStatus", pb.GetSchedulerStatusRequest(), metadata),
        call(ADMIN, "GetQueue", pb.GetQueueRequest(), metadata),
        call(ADMIN, "ListWorkers", pb.ListWorkersRequest(), metadata),
    )
    await exchange.respond(
        status_reading(scheduler, queue, workers), headers={"cache-control": "no-store"}
    )
