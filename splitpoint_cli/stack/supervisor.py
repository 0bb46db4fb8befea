"""A set of child processes: started, watched, stopped in order, and never left behind.

It does not know what the services do. Three measures ensure that no process
survives:

* every child inherits the read end of one pipe and stops when the kernel
  closes the other end, so even `kill -9` of this process ends them;
* every child leads its own process group: a Ctrl-C in the terminal reaches
  only this process, which then stops the children in the right order, and
  SIGKILL takes a child's own children with it;
* every wait has a bound, after which SIGKILL follows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Self

from splitpoint_cli.stack.child import LogLine, Service, ServiceCommand


class Supervisor:
    """A set of services; leaving the `async with` block stops them all.

    Args:
        interpreter: path of the Python that runs the services.
        show: called with every line a child writes.
        inherited: open files that every child gets in addition to the pipe.
    """

    def __init__(
        self, interpreter: str, show: Callable[[LogLine], None], inherited: Sequence[int] = ()
    ) -> None:
        self._interpreter = interpreter
        self._show = show
        self._inherited = inherited
        # By name, in the order of their first start: a successor replaces the one that died.
        self._services: dict[str, Service] = {}
        self._exits: asyncio.Queue[Service] = asyncio.Queue()
        self._stopping = False
        self._hurry = asyncio.Event()
        # Held open until this process ends, in whatever way.
        self._alive_read, self._alive_write = os.pipe()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            os.close(self._alive_write)
            os.close(self._alive_read)

    # -- starting -----------------------------------------------------------------

    async def start(self, command: ServiceCommand) -> Service:
        """Start a service without waiting for it; its predecessor of the same name must be gone.

        Raises ServiceNotStarted.
        """
        predecessor = self._services.get(command.name)
        if predecessor is not None:
            if not predecessor.gone.is_set():
                raise RuntimeError(f"{command.name} is running already")
            await predecessor.close()
            if command.socket is not None and command.socket.is_socket():
                command.socket.unlink()
        service = await Service.start(
            self._interpreter,
            command,
            self._alive_read,
            self._show,
            self._ended,
            inherited=self._inherited,
        )
        self._services[command.name] = service
        return service

    # -- running ------------------------------------------------------------------

    def _ended(self, service: Service) -> None:
        if not self._stopping:
            self._exits.put_nowait(service)

    async def next_exit(self) -> Service:
        """Wait for a service that ends without being stopped; return each such service once."""
        return await self._exits.get()

    # -- stopping -----------------------------------------------------------------

    @property
    def is_hurried(self) -> bool:
        """True once `hurry` was called."""
        return self._hurry.is_set()

    def hurry(self) -> None:
        """Stop waiting: every process that still runs gets SIGKILL."""
        self._hurry.set()

    async def stop(self) -> None:
        """Stop all services, last started group first; returns when all are gone.

        Services of one kind ("worker 0", "worker 1") stop together, and those that name
        another kind in `stops_with` stop with that one.
        """
        self._stopping = True
        groups: dict[str, list[Service]] = {}
        for service in self._services.values():
            kind = service.command.stops_with or service.name.split()[0]
            groups.setdefault(kind, []).append(service)
        for services in reversed(list(groups.values())):
            await asyncio.gather(*(self.stop_one(service) for service in services))
        for service in self._services.values():
            await service.close()
        self._services.clear()

    async def stop_one(self, service: Service) -> None:
        """Stop one service, by SIGKILL when it takes too long; returns when it is gone."""
        seconds = service.command.stop_seconds
        if not service.gone.is_set() and not self._hurry.is_set():
            service.terminate()
            await self._gone_within(service, seconds)
        if not service.gone.is_set():
            why = "stopped at once" if self._hurry.is_set() else f"still ran after {seconds:g} s"
            self._show(LogLine(service.name, f"{why}: killed", True))
            service.kill()
        await service.gone.wait()

    async def _gone_within(self, service: Service, seconds: float) -> None:
        waits = [
            asyncio.create_task(service.gone.wait()),
            asyncio.create_task(self._hurry.wait()),
        ]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
