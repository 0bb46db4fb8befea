"""Restarts dead services by the restart policy, and decides when the stack cannot go on.

A stack goes on without a worker, or a scheduler, while another one is left. It needs its store. The
policy is pure: its times are the caller's, in seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from splitpoint_cli.output import duration_text
from splitpoint_cli.stack.child import (
    Service,
    ServiceCommand,
    ServiceExited,
    ServiceNotReady,
    ServiceNotStarted,
)
from splitpoint_cli.stack.notes import GivenUpWorker
from splitpoint_cli.stack.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Limits of the policy.

    Attributes:
        first_delay_seconds, longest_delay_seconds: the pause doubles from one to the other.
        good_seconds: a service that served this long starts over with the first delay.
        most_deaths, within_seconds: number of deaths within this time at which it is given up.
        first_retry_seconds, longest_retry_seconds: the pause before a given-up service is
            tried again doubles from one to the other.
    """

    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 30.0
    good_seconds: float = 60.0
    most_deaths: int = 5
    within_seconds: float = 120.0
    first_retry_seconds: float = 300.0
    longest_retry_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Decision to start the service again after a pause; `recent_deaths` includes this one."""

    seconds: float
    recent_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to go on without the service.

    Attributes:
        reason: completes "X ended by SIGKILL, ..."; may be empty.
        retry_seconds: pause before the next attempt, if the stack can serve without it.
    """

    reason: str
    retry_seconds: float = 0.0


class RestartPolicy:
    """The recent deaths of one service, and the decision after the next one.

    With `limits` None no service is started again.
    """

    def __init__(self, limits: RestartLimits | None) -> None:
        self._limits = limits
        self._deaths: deque[float] = deque()
        self._last_delay = 0.0
        # The last pause of a given-up service; 0 if it is not given up.
        self._last_retry = 0.0

    def died(self, at: float, *, served_seconds: float) -> RestartAfter | GiveUp:
        """Decide after a death at `at`, after `served_seconds` of service (0: never ready)."""
        limits = self._limits
        if limits is None:
            return GiveUp("")
        if served_seconds >= limits.good_seconds and self._last_retry:
            self._last_retry = 0.0
            self._deaths.clear()
        self._deaths.append(at)
        while self._deaths[0] <= at - limits.within_seconds:
            self._deaths.popleft()
        if self._last_retry:
            self._last_retry = min(2 * self._last_retry, limits.longest_retry_seconds)
            return GiveUp("given up again", self._last_retry)
        if len(self._deaths) >= limits.most_deaths:
            self._last_retry = limits.first_retry_seconds
            return GiveUp(
                f"given up after {len(self._deaths)} deaths within {limits.within_seconds:g} s",
                self._last_retry,
            )
        if not self._last_delay or served_seconds >= limits.good_seconds:
            self._last_delay = limits.first_delay_seconds
        else:
            self._last_delay = min(2 * self._last_delay, limits.longest_delay_seconds)
        return RestartAfter(self._last_delay, len(self._deaths))


class Keeper:
    """Keeps a supervisor's services alive, once all of them have started.

    A successor gets the arguments and the address of the service that died. Cancelling `run`
    also ends pauses and starts under way.

    Args:
        limits: of each service's restarts; None: the first death ends the stack.
        say: called with a service's name and a message about it.
        workers: names and addresses of the workers, of which one is enough.
        schedulers: names of the schedulers, of which one is enough.
        show_tail: called with the death of a worker that is given up.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        limits: RestartLimits | None,
        say: Callable[[str, str], None],
        *,
        workers: Mapping[str, str],
        schedulers: Collection[str] = (),
        show_tail: Callable[[ServiceExited], None],
    ) -> None:
        self._supervisor = supervisor
        self._limits = limits
        self._say = say
        self._workers = workers
        self._schedulers = schedulers
        self._show_tail = show_tail
        self._policies: dict[str, RestartPolicy] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        # Given-up workers and schedulers: the last death's message, and when the next start is.
        self._given_up: dict[str, tuple[str, float]] = {}
        # Called when the result of `given_up` changes.
        self.on_given_up: Callable[[], None] = lambda: None

    async def run(self) -> ServiceExited:
        """Run until a needed service is down for good, and return its exit."""
        exit_ = asyncio.create_task(self._supervisor.next_exit())
        failure = asyncio.create_task(self._failures.get())
        try:
            while True:
                await asyncio.wait((exit_, failure), return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    if isinstance(error := failure.result(), ServiceExited):
                        return error
                    raise error  # a bug
                end = self._decide(exit_.result())
                if end is not None:
                    return end
                exit_ = asyncio.create_task(self._supervisor.next_exit())
        finally:
            tasks = (exit_, failure, *self._starts)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def given_up(self) -> list[GivenUpWorker]:
        """Return the workers that the stack does without at this moment."""
        now = asyncio.get_running_loop().time()
        return [
            GivenUpWorker(self._workers[name], why, max(0.0, at - now))
            for name, (why, at) in self._given_up.items()
            if name in self._workers
        ]

    def _decide(self, service: Service) -> ServiceExited | None:
        """Restart the service or give it up; return its death if the stack cannot go on."""
        policy = self._policies.setdefault(service.name, RestartPolicy(self._limits))
        now = asyncio.get_running_loop().time()
        decision = policy.died(now, served_seconds=service.served_seconds)
        if isinstance(decision, GiveUp):
            death = service.death(and_then=decision.reason)
            if not self._try_give_up(service.name, death, decision):
                return death
            seconds = decision.retry_seconds
        else:
            seconds = decision.seconds
            count = "" if decision.recent_deaths == 1 else f" (death {decision.recent_deaths})"
            self._say(
                service.name, f"{service.death().message}{count}; starts again in {seconds:g} s"
            )
        self._bring_back_later(_same_again(service), seconds)
        return None

    def _try_give_up(self, name: str, death: ServiceExited, decision: GiveUp) -> bool:
        """Return True if others of its kind are left; then note and report it as given up."""
        kind = next((each for each in (self._workers, self._schedulers) if name in each), ())
        others = set(kind) - self._given_up.keys() - {name}
        if not others or not decision.retry_seconds:
            return False
        at = asyncio.get_running_loop().time() + decision.retry_seconds
        self._given_up[name] = (death.message, at)
        self._show_tail(death)
        pause = duration_text(decision.retry_seconds)
        self._say(name, f"{death.message}; the stack serves without it, tries it again in {pause}")
        self.on_given_up()
        return True

    async def _start(self, command: ServiceCommand) -> Service | None:
        """Start a process; a failure to do so counts as a death.

        Return None if the service was given up for now.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._supervisor.start(command)
            except ServiceNotStarted as error:
                policy = self._policies.setdefault(command.name, RestartPolicy(self._limits))
                decision = policy.died(loop.time(), served_seconds=0.0)
                if isinstance(decision, GiveUp):
                    why = f"cannot be started: {error.why}"
                    death = ServiceExited(command.name, 1, (), and_then=why)
                    if not self._try_give_up(command.name, death, decision):
                        raise death from error
                    self._bring_back_later(command, decision.retry_seconds)
                    return None
                self._say(
                    command.name,
                    f"cannot be started ({error.why}); again in {decision.seconds:g} s",
                )
                await asyncio.sleep(decision.seconds)

    def _bring_back_later(self, command: ServiceCommand, seconds: float) -> None:
        start = asyncio.create_task(self._bring_back(command, seconds))
        self._starts.add(start)
        start.add_done_callback(self._start_ended)

    def _start_ended(self, start: asyncio.Task[None]) -> None:
        self._starts.discard(start)
        if not start.cancelled() and (error := start.exception()) is not None:
            self._failures.put_nowait(error)

    async def _bring_back(self, command: ServiceCommand, pause: float) -> None:
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        began = loop.time()
        service = await self._start(command)
        if service is None:
            return
        try:
            await service.ready()
        except ServiceExited:
            return  # `run` gets its end from the supervisor, like any other
        except ServiceNotReady as error:
            self._say(service.name, f"{error.message}: killed")
            service.kill()
        else:
            self._say(service.name, f"ready again after {loop.time() - began:.1f} s")
            if self._given_up.pop(service.name, None) is not None:
                self.on_given_up()


def _same_again(service: Service) -> ServiceCommand:
    """Return the command of its successor, which listens at the same address."""
    return service.command.listening_on(service.address) if service.address else service.command
