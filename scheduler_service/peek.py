"""Asks the stores how much of a prefix they hold, without holding anything there.

A hint only: a store that does not answer in time counts as empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import grpc

from splitpoint import rpc
from splitpoint.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc

_log = logging.getLogger(__name__)


class StorePeeker:
    """One channel for each store that a worker named. Close it at the end."""

    def __init__(self, timeout_seconds: float, identity: Identity = PLAIN) -> None:
        self._identity = identity
        self._timeout_seconds = timeout_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def cached_tokens(
        self, addresses: Iterable[str], tenant_salt: bytes, token_ids: Sequence[int]
    ) -> dict[str, int]:
        """Tokens of the longest cached prefix in each store, by address."""
        distinct = sorted({address for address in addresses if address})
        request = kvstore_pb2.MatchRequest(tenant_salt=tenant_salt, token_ids=token_ids)
        counts = await asyncio.gather(*(self._match(address, request) for address in distinct))
        return dict(zip(distinct, counts, strict=True))

    async def slot_count(self, address: str) -> int | None:
        """Slots of the store's arena; None when it cannot be asked."""
        try:
            stats = await self._stub(address).GetStats(
                kvstore_pb2.GetStatsRequest(), timeout=self._timeout_seconds
            )
        except grpc.RpcError as error:
            self._complain(address, error)
            return None
        return int(stats.slot_count)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _match(self, address: str, request: kvstore_pb2.MatchRequest) -> int:
        try:
            found = await self._stub(address).Match(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            self._complain(address, error)
            return 0
        return int(found.cached_tokens)

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvStoreServiceStub:
        if address not in self._channels:
            self._channels[address] = rpc.open_channel(address, self._identity)
        return kvstore_pb2_grpc.KvStoreServiceStub(self._channels[address])

    def _complain(self, address: str, error: grpc.RpcError) -> None:
        _log.warning("the store at %s did not answer: %s", address, rpc.error_of(error).message)
