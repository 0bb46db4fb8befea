"""The worker's session of the KV store, with the arena mapped for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.mapping import Arena
from splitpoint.transport.convert import layout_from_proto
from splitpoint.transport.store_session import Connection as Session
from splitpoint.transport.store_session import process_start_ticks
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
        return pb.AttachRequest(
            client_name=client_name,
            process_id=os.getpid(),
            process_start_ticks=process_start_ticks(),
            layout_hash=layout_hash,
            previous_session_id=previous_session_id,
        )

    def connection(self, answer: pb.AttachResponse) -> Connection:
        return Connection(
            session_id=answer.session_id,
            epoch=answer.epoch,
            lease_seconds=answer.lease_duration.ToTimedelta().total_seconds(),
            tensors=self._tensors(answer),
            loads_from_stores=answer.loads_from_stores,
        )

    def _tensors(self, answer: pb.AttachResponse) -> ArenaTensors:
        arena = Arena.attach(
            Path(answer.arena_path),
            layout=layout_from_proto(answer.layout),
            slot_count=answer.slot_count,
            instance_id=answer.instance_id,
            epoch=answer.epoch,
            session_id=answer.session_id,
        )
        if self._pinning is not None:
            self._pinning.attach(arena)
        tensors = ArenaTensors(arena)
        if self._populator is not None:
            self._populator.watch(tensors.memory)
        return tensors
