"""The child's transfer engine: one listening segment, and reads out of other segments.

The only modules that import Mooncake are this one and `pool_client`.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mooncake.engine import TransferEngine

from kvstore_service.mooncake.pieces import Piece, registered_ranges
from kvstore_service.mooncake.settings import address_of, confine, end_connections
from splitpoint.arena.mapping import Arena
from splitpoint.errors import FailedPrecondition, Unavailable

# Pieces of one read under way at a time. More are no faster, and if the source is gone the engine
# gives up a few of them a second.
_PIECES_UNDER_WAY = 16
# Bytes of these pieces: a cancelled read waits for them.
_BYTES_UNDER_WAY = 16 << 20
# Pause between two looks at them. The engine has no call that waits without using a processor.
_POLL_SECONDS = 0.0005
_REGISTERED_AT_ONCE = 16 << 30
# Time limit for the first connection to a segment. The engine's own attempt may take a minute.
_CONNECT_SECONDS = 2.0
# Time for connections that came in before the sockets were confined to be accepted.
_SETTLE_SECONDS = 0.05


class Engine:
    """Mooncake's Transfer Engine, confined to one network interface.

    Attributes:
        address: of the interface.
        segment: name under which other engines reach this one.
        inner: what the pool's client shares.
    """

    def __init__(self, interface: str) -> None:
        """Start listening. Raises FailedPrecondition."""
        self.address = address_of(interface)
        self._engine: Any = TransferEngine()
        if self._engine.initialize(self.address, "P2PHANDSHAKE", "tcp", "") != 0:
            raise FailedPrecondition("Mooncake's transfer engine does not start")
        try:
            count = confine(interface)
        except OSError as error:
            raise FailedPrecondition(
                f"Mooncake's sockets cannot be bound to {interface}: {error.strerror}"
            ) from error
        if not count:
            raise FailedPrecondition("Mooncake listens on no socket of its own")
        time.sleep(_SETTLE_SECONDS)
        end_connections()
        self.segment = f"{self.address}:{self._engine.get_rpc_port()}"
        self.inner = self._engine.get_engine()
        self._reached: set[str] = set()

    def register(self, arena: Arena, registered: Callable[[int], None]) -> int:
        """Let other engines read the payload of an arena that is mapped read-only.

        Return the address of the file's first byte. `registered` is told the bytes so far.
        The mapping must be read-only: the engine would let other hosts write what they can read.
        """
        address = arena.payload.ctypes.data - arena.geometry.payload_offset
        done = 0
        for offset, size in registered_ranges(arena.geometry, _REGISTERED_AT_ONCE):
            if self._engine.register_memory(address + offset, size) != 0:
                raise FailedPrecondition("Mooncake cannot register the arena")
            done += size
            registered(done)
        return address

    def read(
        self,
        segment: str,
        address: int,
        own_address: int,
        pieces: Iterable[Piece],
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Read pieces of the arena at `address` of a segment into the own arena.

        Returns only when no byte is under way any more. Raises Unavailable if a piece was not
        read. Each piece is a batch of its own: the engine reports a failed batch while other
        pieces of it are still being written.
        """
        self._reach(segment)
        waiting = deque(pieces)
        under_way: dict[int, int] = {}  # sizes by batches
        has_failed = False
        while waiting or under_way:
            while waiting and _is_room(under_way.values()):
                piece = waiting.popleft()
                batch = self._engine.batch_transfer_async_read(
                    segment, [own_address + piece.target], [address + piece.source], [piece.size]
                )
                if batch:
                    under_way[batch] = piece.size
                else:
                    has_failed = True
                if has_failed or is_cancelled():
                    has_failed = True
                    waiting.clear()
            for batch in list(under_way):
                status = self._engine.transfer_check_status(batch)
                if status != 0:
                    del under_way[batch]
                    has_failed = has_failed or status < 0
            if has_failed:
                waiting.clear()
            if under_way:
                time.sleep(_POLL_SECONDS)
        if has_failed:
            self._reached.discard(segment)
            raise Unavailable(f"not everything was read from {segment}")

    def _reach(self, segment: str) -> None:
        """Raise Unavailable if a segment that was not read before accepts no connections."""
        if segment in self._reached:
            return
        host, _, port = segment.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise Unavailable(f"{segment} cannot be reached: {error}") from error
        self._reached.add(segment)


def _is_room(sizes: Collection[int]) -> bool:
    return len(sizes) < _PIECES_UNDER_WAY and sum(sizes) < _BYTES_UNDER_WAY
