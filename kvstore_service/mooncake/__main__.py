"""`python -m kvstore_service.mooncake`: a process of a store that runs Mooncake.

Only the store starts it. Standard input is the store's socket; the first line says what to do. The
argument is for readers of `ps`. A crash or a hang of Mooncake costs this process, not the store; it
ends with the store.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore_service.mooncake import messages
from kvstore_service.mooncake.messages import Message
from kvstore_service.mooncake.pieces import pieces_of
from kvstore_service.mooncake.settings import how_to_install
from splitpoint.arena.format import Geometry
from splitpoint.arena.mapping import Arena, open_arena, read_superblock
from splitpoint.errors import FailedPrecondition, SplitpointError, Unavailable

if TYPE_CHECKING:
    from kvstore_service.mooncake.pool_client import PoolClient

# Reads from other stores, and calls of the pool, that run at a time. They have threads of their
# own: calls of a pool whose master is away hang for seconds.
_READ_THREADS = 4
_POOL_THREADS = 8
# Seconds between two looks at the pool's master.
_LOOK_SECONDS = 1.0
# How long it may take to answer. Mooncake itself waits for many seconds.
_PROBE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


class Child:
    """Serves one store's requests, each in a thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lines = link.makefile("rb")
        self._sending = threading.Lock()
        self._reads = ThreadPoolExecutor(_READ_THREADS)
        self._pool_calls = ThreadPoolExecutor(_POOL_THREADS)
        self._running: set[int] = set()
        self._cancelled: set[int] = set()
        self._pool: PoolClient | None = None

    def serve(self) -> None:
        """Run until the store is gone."""
        settings = messages.decode(self._lines.readline(messages.LINE_BYTES))
        try:
            self._start(settings)
        except ImportError as error:
            self._send({"event": "failed", "message": how_to_install() or str(error)})
            return
        except (SplitpointError, OSError) as error:
            self._send({"event": "failed", "message": str(error)})
            return
        for line in self._lines:
            message = messages.decode(line)
            if message["op"] == "cancel":
                self._cancelled |= self._running & {message["of"]}
            else:
                self._running.add(message["id"])
                threads = self._reads if message["op"] == "read" else self._pool_calls
                threads.submit(self._answer, message)

    def leave(self) -> None:
        """Leave the pool, so that its master knows at once that this memory is gone."""
        if self._pool is not None:
            self._pool.close()

    def _start(self, settings: Message) -> None:
        # Here, so that a missing library is told to the store.
        from kvstore_service.mooncake.engine import Engine

        path = Path(settings["arena"])
        fd = open_arena(path)
        superblock = read_superblock(fd)
        if superblock.instance_id.hex() != settings["instance"]:
            raise FailedPrecondition(f"{path} is another arena than the store's")
        self._arena = Arena(path, fd, superblock)
        self._address = self._arena.payload.ctypes.data - self._arena.geometry.payload_offset
        self._engine = Engine(settings["interface"])
        self._send({"event": "started", "segment": self._engine.segment})
        if settings["is_shared"]:
            threading.Thread(target=self._register, args=(path,), daemon=True).start()
        if settings["master"]:
            pool = (settings["master"], settings["memory_bytes"], settings["replicas"])
            threading.Thread(target=self._keep_pool, args=pool, daemon=True).start()

    def _register(self, path: Path) -> None:
        # Another mapping, which cannot be written.
        shared = Arena.attach_read_only(path)
        try:
            address = self._engine.register(
                shared, lambda done: self._send({"event": "registered", "bytes": done})
            )
        except FailedPrecondition as error:
            self._send({"event": "failed", "message": error.message})
            return
        self._shared = shared  # stays mapped
        self._send({"event": "ready", "address": address})

    def _keep_pool(self, master: str, memory_bytes: int, replicas: int) -> None:
        """Connect to the master, and tell the store whenever it goes and comes back."""
        from kvstore_service.mooncake.pool_client import PoolClient

        last: tuple[bool, str] | None = None
        probes = ThreadPoolExecutor(1)
        probe: Future[bool] | None = None
        while True:
            message = ""
            try:
                if self._pool is None:
                    self._pool = PoolClient(
                        self._engine, master, memory_bytes, replicas, self._arena
                    )
                probe = probe or probes.submit(self._pool.is_up)
                is_up = probe.result(_PROBE_SECONDS)
                probe = None
                if not is_up:
                    message = f"the Mooncake master at {master} does not answer"
            except TimeoutError:  # the same question is asked again
                message = f"the Mooncake master at {master} does not answer in time"
            except SplitpointError as error:
                message = error.message
            now = (not message, message)
            if now != last:
                self._send({"event": "pool", "is_up": now[0], "message": message})
                last = now
            time.sleep(_LOOK_SECONDS)

    def _answer(self, message: Message) -> None:
        answer: Message = {"id": message["id"]}
        try:
            answer["value"] = self._operations[message["op"]](self, message)
        except SplitpointError as error:
            answer["error"] = error.message
        except Exception as error:  # the store goes on without this call
            answer["error"] = f"{type(error).__name__}: {error}"
        self._running.discard(message["id"])
        self._cancelled.discard(message["id"])
        self._send(answer)

    def _send(self, message: Message) -> None:
        with self._sending:
            self._link.sendall(messages.encode(message))

    # -- operations ----------------------------------------------------------------------

    def _read(self, message: Message) -> None:
        own = self._arena.geometry
        source = Geometry(own.layout, message["slot_count"])
        pieces = pieces_of(source, message["sources"], own, message["targets"])
        self._engine.read(
            message["segment"],
            message["address"],
            self._address,
            pieces,
            lambda: message["id"] in self._cancelled,
        )

    def _pool_has(self, message: Message) -> list[bool]:
        return self._connected().has(messages.keys_of(message["keys"]))

    def _pool_read(self, message: Message) -> list[int | None]:
        return self._connected().read(messages.keys_of(message["keys"]), message["slots"])

    def _pool_write(self, message: Message) -> list[bool]:
        return self._connected().write(
            messages.keys_of(message["keys"]), message["slots"], message["checksums"]
        )

    def _pool_drop(self, message: Message) -> None:
        self._connected().drop(messages.keys_of(message["keys"]))

    def _connected(self) -> PoolClient:
        if self._pool is None:
            raise Unavailable("the pool is not connected yet")
        return self._pool

    _operations: ClassVar[dict[str, Callable[[Child, Message], Any]]] = {
        "read": _read,
        "pool_has": _pool_has,
        "pool_read": _pool_read,
        "pool_write": _pool_write,
        "pool_drop": _pool_drop,
    }


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the store ended in between
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # of a terminal; the store decides
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    link = socket.socket(fileno=sys.stdin.fileno())
    child = Child(link)
    try:
        child.serve()
        child.leave()
    except (OSError, messages.BadMessage) as error:
        print(f"the store's socket: {error}", file=sys.stderr, flush=True)
    finally:
        # Threads may be inside Mooncake; nothing of theirs is worth waiting for.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
