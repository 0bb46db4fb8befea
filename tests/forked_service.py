"""A service process for an asyncio test, forked in place of `python -m MODULE` (fork_server.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fork_server import SECONDS, Child, Parent, parent_of

from splitpoint.service import READY_PREFIX


class ForkedService:
    """What tests use of `asyncio.subprocess.Process`."""

    def __init__(self, parent: Parent, child: Child) -> None:
        self._parent = parent
        self._child = child
        self._code: int | None = None
        self.pid = child.process_id

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the service runs."""
        if self._code is None and not self._child.is_running:
            self._code = self._parent.code_of(self.pid)
            self._child.log.unlink()
            self._child.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal; no effect if the process has ended."""
        if self.returncode is None:
            self._child.signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit code once the service has ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(0.01)
        return code

    async def first_line(self) -> str:
        """Return the first line that the service prints; empty if it ends without one."""
        async with asyncio.timeout(SECONDS):
            while (line := self._child.line_printed()) is None:
                await asyncio.sleep(0.01)
        return line


async def start_forked(
    module: str,
    *arguments: str,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ForkedService, str]:
    """Start a service; return it with the address that it says it is ready at.

    `errors`: file for its stderr, which else is that of the tests. `environment`: variables in
    addition to those of this process.
    """
    descriptor, log = tempfile.mkstemp(prefix="service-")
    os.close(descriptor)
    parent = parent_of(module)  # in this thread; it may take seconds to answer
    child = await asyncio.to_thread(
        parent.fork,
        *(module, arguments, Path(log)),
        errors=errors,
        environment=environment,
    )
    service = ForkedService(parent, child)
    line = await service.first_line()
    if not line.startswith(READY_PREFIX):
        service.kill()
        await service.wait()
        told = "" if errors is None else errors.read_text()
        raise AssertionError(f"{module} is not ready: {line!r} {told}")
    return service, line.removeprefix(READY_PREFIX)
