"""The worker's session of the KV store, with the arena mapped for it."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.transport import local_session
from splitpoint.transport.store_session import Connection as Session
from splitpoint.transport.store_session import lease_seconds
from splitpoint.v1 import kvstore_pb2 as pb
from worker_service.device.pinning import Pinning
from worker_service.device.populating import Populator
from worker_service.store.arena_tensors import ArenaTensors


@dataclass(frozen=True, slots=True)
class Connection(Session):
    """One session and the arena mapped for it. Chunk handles are valid within it only.

    Attributes:
        loads_from_stores: the store itself can load chunks from other stores.
    """

    tensors: ArenaTensors
    loads_from_stores: bool = False


class MappedArena:
    """The store's arena on this host.

    `pinning` page-locks it, `populator` populates its mapping; each is None if that is not done.
    """

    def __init__(self, pinning: Pinning | None, populator: Populator | None = None) -> None:
        self._pinning = pinning
        self._populator = populator

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest:
        return local_session.attach_request(
            client_name, layout_hash=layout_hash, previous_session_id=previous_session_id
        )

    def connection(self, answer: pb.AttachResponse) -> Connection:
        return Connection(
            session_id=answer.session_id,
            epoch=answer.epoch,
            lease_seconds=lease_seconds(answer),
            tensors=self._tensors(answer),
            loads_from_stores=answer.loads_from_stores,
        )

    def _tensors(self, answer: pb.AttachResponse) -> ArenaTensors:
        arena = local_session.mapped_arena(answer)
        if self._pinning is not None:
            self._pinning.attach(arena)
        tensors = ArenaTensors(arena)
        if self._populator is not None:
            self._populator.watch(tensors.memory)
        return tensors
