"""Asks the stores how much of a prefix they hold, without holding anything there.

A hint only: a store that does not answer in time counts as empty.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc

from scheduler_service.prefixes.catalog import PrefixQuery
from splitpoint.observe import tracing
from splitpoint.transport import channels, statuses
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a store says of itself: its arena's slots, and the name of that arena."""

    slot_count: int
    instance_id: bytes


class StoreCatalog:
    """The catalog without Redis: one channel for each store that a worker named.

    Close it at the end.
    """

    def __init__(self, timeout_seconds: float, identity: Identity = PLAIN) -> None:
        self._identity = identity
        self._timeout_seconds = timeout_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._silent: set[str] = set()  # complained about

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, int]:
        """Tokens of the longest cached prefix in each store that is named, by address.

        A partially matched last chunk counts too.
        """
        distinct = sorted(address for address in query.stores if address)
        request = kvstore_pb2.MatchRequest(tenant_salt=query.tenant_salt, token_ids=query.token_ids)
        counts = await asyncio.gather(*(self._match(address, request) for address in distinct))
        return {
            address: count
            for address, count in zip(distinct, counts, strict=True)
            if count is not None
        }

    async def facts(self, address: str) -> StoreFacts | None:
        """None when the store cannot be asked."""
        try:
            stats = await self._stub(address).GetStats(
                kvstore_pb2.GetStatsRequest(), timeout=self._timeout_seconds
            )
        except grpc.RpcError as error:
            self._complain(address, error)
            return None
        return StoreFacts(int(stats.slot_count), bytes(stats.instance_id))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _match(self, address: str, request: kvstore_pb2.MatchRequest) -> int | None:
        try:
            found = await self._stub(address).Match(
                request, timeout=self._timeout_seconds, metadata=tracing.metadata()
            )
        except grpc.RpcError as error:
            self._complain(address, error)
            return None
        if address in self._silent:
            self._silent.discard(address)
            _log.info("the store at %s answers again", address)
        return int(found.cached_tokens)

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvStoreServiceStub:
        if address not in self._channels:
            self._channels[address] = channels.open_channel(address, self._identity)
        return kvstore_pb2_grpc.KvStoreServiceStub(self._channels[address])

    def _complain(self, address: str, error: grpc.RpcError) -> None:
        """Once until it answers again, not for every request."""
        if address not in self._silent:
            self._silent.add(address)
            _log.warning(
                "the store at %s did not answer: %s", address, statuses.error_of(error).message
            )
