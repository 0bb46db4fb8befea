"""Asks stores directly how much of a prefix they hold. Nothing is leased there.

A store that does not answer in time counts as empty. Until that answer came, or its call has ended,
nothing more is asked there, so that one lookup waits for a stopped store and not every one.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from scheduler_service.prefixes.lookup import PrefixQuery, StoreTokens
from splitpoint.observe import tracing
from splitpoint.tiers import Tier
from splitpoint.transport import channels, statuses
from splitpoint.transport.convert import tier_to_proto
from splitpoint.transport.store_session import CALL_SECONDS
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc

_log = logging.getLogger(__name__)

# Those behind an arena, by their numbers on the wire; a newer store may have others.
_TIERS = {int(tier_to_proto(tier)): tier for tier in Tier if tier is not Tier.ARENA}
# Further seconds for each token of a longer sequence: far less than computing it takes.
_SECONDS_PER_TOKEN = 2e-6
_PIECE_TOKENS = 32_768


class StoreCatalog:
    """The prefix catalog without Redis: one channel for each store that a worker named."""

    def __init__(self, timeout_seconds: float, identity: Identity = PLAIN) -> None:
        self._identity = identity
        self._timeout_seconds = timeout_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        # Stores whose silence was logged, until they answer again.
        self._silent: set[str] = set()
        # Calls that wait for an answer, and the late one of each store.
        self._calls: set[asyncio.Task[StoreTokens | None]] = set()
        self._late: dict[str, asyncio.Task[StoreTokens | None]] = {}

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, StoreTokens]:
        """Return what each named store and its tiers hold, by address.

        A partially matched last chunk of an arena counts, too.
        """
        addresses = sorted(address for address in query.stores if address)
        request = kvstore_pb2.MatchRequest(tenant_salt=query.tenant_salt, asks_tiers=True)
        for start in range(0, len(query.token_ids), _PIECE_TOKENS):
            if start:  # all at once they would hold the event loop
                await asyncio.sleep(0)
            request.token_ids.extend(query.token_ids[start : start + _PIECE_TOKENS])
        counts = await asyncio.gather(*(self._match(address, request) for address in addresses))
        found = zip(addresses, counts, strict=True)
        return {address: count for address, count in found if count is not None}

    async def stats(self, address: str) -> kvstore_pb2.GetStatsResponse | None:
        """Return None if the store does not answer."""
        request = kvstore_pb2.GetStatsRequest()
        try:
            stats: kvstore_pb2.GetStatsResponse = await self._stub(address).GetStats(
                request, timeout=self._timeout_seconds
            )
        except grpc.RpcError as error:
            self._log_silence(address, statuses.error_of(error).message)
            return None
        return stats

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _match(self, address: str, request: kvstore_pb2.MatchRequest) -> StoreTokens | None:
        """Ask one store. Return None at once while an earlier answer of it is late."""
        if address in self._late:
            return None
        call = asyncio.create_task(self._ask(address, request), name=f"match {address}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        seconds = self._timeout_seconds + len(request.token_ids) * _SECONDS_PER_TOKEN
        try:
            await asyncio.wait({call}, timeout=seconds)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.done():
            return call.result()
        if address in self._late:
            call.cancel()
        else:
            self._late[address] = call
            call.add_done_callback(lambda _: self._late.pop(address, None))
            self._log_silence(address, f"no answer within {seconds:.3g} s")
        return None

    async def _ask(self, address: str, request: kvstore_pb2.MatchRequest) -> StoreTokens | None:
        try:
            found = await self._stub(address).Match(
                request, timeout=CALL_SECONDS, metadata=tracing.metadata()
            )
        except grpc.RpcError as error:
            self._log_silence(address, statuses.error_of(error).message)
            return None
        if address in self._silent:
            self._silent.discard(address)
            _log.info("the store at %s answers again", address)
        return StoreTokens(
            found.cached_tokens,
            {_TIERS[each.tier]: each.cached_tokens for each in found.tiers if each.tier in _TIERS},
        )

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvStoreServiceStub:
        if address not in self._channels:
            self._channels[address] = channels.open_channel(address, self._identity)
        return kvstore_pb2_grpc.KvStoreServiceStub(self._channels[address])

    def _log_silence(self, address: str, reason: str) -> None:
        """Log the first failure only, not one for each request."""
        if address not in self._silent:
            self._silent.add(address)
            _log.warning("the store at %s did not answer: %s", address, reason)
