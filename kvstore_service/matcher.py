"""Answers Match: what the arena holds of a sequence, and what its tiers continue."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_service.calls import validation
from kvstore_service.calls.validation import handle_of
from kvstore_service.idempotency import Call, IdempotentCalls
from kvstore_service.maintenance import Maintenance
from kvstore_service.store import KvStore, Matched
from kvstore_service.tiers.manager import TierManager
from splitpoint.keys import chunk_keys
from splitpoint.transport.convert import tier_to_proto, to_message
from splitpoint.v1 import kvstore_pb2 as pb


class Matcher:
    """The look-ups of one store. A repeated one gets its first answer again."""

    def __init__(
        self, store: KvStore, maintenance: Maintenance, tiers: TierManager, calls: IdempotentCalls
    ) -> None:
        self._store = store
        self._maintenance = maintenance
        self._tiers = tiers
        self._calls = calls

    async def match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """Look a prefix up: under a lease for a session, else as a peek."""
        arena = self._store.arena
        tokens = validation.check_match(request, arena.slot_count * arena.layout.chunk_tokens)
        if not request.session_id:
            found = self._store.peek(request.tenant_salt, tokens)
            held = await self._held(request, found, tokens) if request.asks_tiers else ()
            return self._matched(found, held)
        validation.check_session(request.session_id, request.request_id)
        self._maintenance.called()
        answers = self._store.sessions.live(request.session_id).answers
        call = Call.of(request, answers, pb.MatchResponse)
        known = await self._calls.known(call)
        if known is not None:
            return known
        salt = request.tenant_salt
        if self._store.recovered.in_match(salt, tokens):
            work = self._verify_and_match(request, tokens)
            return await self._calls.run(call, work, keep_errors=False)
        found = self._leased_match(request, tokens)
        return self._calls.answered(call, self._matched(found))

    async def _verify_and_match(
        self, request: pb.MatchRequest, tokens: Sequence[int]
    ) -> pb.MatchResponse:
        salt = request.tenant_salt
        await self._maintenance.verify(lambda: self._store.recovered.in_match(salt, tokens))
        return self._matched(self._leased_match(request, tokens))

    def _leased_match(self, request: pb.MatchRequest, tokens: Sequence[int]) -> Matched:
        found = self._store.match(request.session_id, request.tenant_salt, tokens)
        self._tiers.used(found.entries)
        return found

    async def _held(
        self, request: pb.MatchRequest, found: Matched, tokens: Sequence[int]
    ) -> list[pb.TierPrefix]:
        """Return the tiers that continue the arena's full chunks of a sequence."""
        layout = self._store.arena.layout
        size = layout.chunk_tokens
        keys = list(chunk_keys(layout.layout_hash, request.tenant_salt, tokens, size))
        cached = sum(entry.key == key for entry, key in zip(found.entries, keys, strict=False))
        held = await self._tiers.held(keys[cached:])
        return [
            pb.TierPrefix(tier=tier_to_proto(tier), cached_tokens=(cached + count) * size)
            for tier, count in held.items()
            if count
        ]

    def _matched(self, found: Matched, tiers: Sequence[pb.TierPrefix] = ()) -> pb.MatchResponse:
        return to_message(
            pb.MatchResponse,
            found,
            chunks=map(handle_of, found.entries),
            chunk_keys=[entry.key for entry in found.entries],
            epoch=self._store.epoch,
            tiers=tiers,
        )
