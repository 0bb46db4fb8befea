"""Brings dead services back, as the restart policy says, until one is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from splitpoint_cli.child import (
    Service,
    ServiceCommand,
    ServiceExited,
    ServiceNotReady,
    ServiceNotStarted,
)
from splitpoint_cli.restart_policy import GiveUp, RestartLimits, RestartPolicy
from splitpoint_cli.supervisor import Supervisor


class Keeper:
    """Watches a supervisor's services once all of them have started.

    A successor gets the arguments of the one that died, and the very address it
    served at. Cancelling `run` ends pauses and starts under way.

    Args:
        limits: of each service's restarts; None: the first death is the end.
        say: called with a service's name and what happens to it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        limits: RestartLimits | None,
        say: Callable[[str, str], None],
    ) -> None:
        self._supervisor = supervisor
        self._limits = limits
        self._say = say
        self._policies: dict[str, RestartPolicy] = {}
        self._starts: set[asyncio.Task[None]] = set()

    async def run(self) -> ServiceExited:
        """Until a service is given up; returns its last death."""
        exit_ = asyncio.create_task(self._supervisor.next_exit())
        try:
            while True:
                done, _ = await asyncio.wait(
                    (exit_, *self._starts), return_when=asyncio.FIRST_COMPLETED
                )
                for start in self._starts & done:
                    self._starts.discard(start)
                    try:
                        start.result()  # raises what nobody foresaw
                    except ServiceExited as death:
                        return death
                if exit_ in done:
                    given_up = self._decide(exit_.result())
                    if given_up is not None:
                        return given_up
                    exit_ = asyncio.create_task(self._supervisor.next_exit())
        finally:
            tasks = (exit_, *self._starts)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _decide(self, service: Service) -> ServiceExited | None:
        policy = self._policies.setdefault(service.name, RestartPolicy(self._limits))
        now = asyncio.get_running_loop().time()
        decision = policy.died(now, served_seconds=service.served_seconds)
        if isinstance(decision, GiveUp):
            return service.death(and_then=decision.reason)
        count = "" if decision.recent_deaths == 1 else f" (death {decision.recent_deaths})"
        self._say(
            service.name,
            f"{service.death().message}{count}; starts again in {decision.seconds:g} s",
        )
        command = service.command
        if service.address:  # port 0 must not become another port
            command = command.listening_on(service.address)
        self._starts.add(asyncio.create_task(self._bring_back(command, decision.seconds)))
        return None

    async def _start(self, command: ServiceCommand) -> Service:
        """A process for the command; while the system has none to give, that is a death, too."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._supervisor.start(command)
            except ServiceNotStarted as error:
                decision = self._policies[command.name].died(loop.time(), served_seconds=0.0)
                if isinstance(decision, GiveUp):
                    raise ServiceExited(
                        command.name, 1, (), and_then=f"cannot be started: {error.why}"
                    ) from error
                self._say(
                    command.name,
                    f"cannot be started ({error.why}); again in {decision.seconds:g} s",
                )
                await asyncio.sleep(decision.seconds)

    async def _bring_back(self, command: ServiceCommand, pause: float) -> None:
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        began = loop.time()
        service = await self._start(command)
        try:
            await service.ready()
        except ServiceExited:
            return  # its end is told by the supervisor, and decided about like any other
        except ServiceNotReady as error:
            self._say(service.name, f"{error.message}: killed")
            service.kill()
        else:
            self._say(service.name, f"ready again after {loop.time() - began:.1f} s")
