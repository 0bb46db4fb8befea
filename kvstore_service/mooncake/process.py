"""The store's end of a Mooncake process: starts it, asks it, and replaces it when it ends.

All methods run on the event loop. What a call was told to do is over when it returns, also if it
is cancelled: a process that does not say so in time is ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

from kvstore_service.mooncake import messages
from kvstore_service.mooncake.messages import Message
from kvstore_service.mooncake.settings import MooncakeSettings
from kvstore_service.tiers.tier import TransferEndpoint, TransferStats
from splitpoint.arena.mapping import Arena
from splitpoint.errors import FailedPrecondition, Unavailable

# A slower link is not worth using.
_SLOWEST_BYTES_PER_SECOND = 10e6
_ROUND_TRIP_SECONDS = 5.0
_POOL_SECONDS = 15.0
# Mooncake itself gives up after 60 s, but may then still write into slots.
_LONGEST_SECONDS = 30.0
# A call of the pool takes some seconds to fail while its master or a host of it is away.
POOL_CANCEL_SECONDS = 30.0
QUESTION_SECONDS = 5.0


def pool_seconds_for(size_bytes: int) -> float:
    """Return the time limit of a call of the pool that moves this many bytes."""
    return min(_LONGEST_SECONDS, _POOL_SECONDS + size_bytes / _SLOWEST_BYTES_PER_SECOND)


def seconds_for(size_bytes: int) -> float:
    """Return the time limit of a call that moves this many bytes."""
    return min(_LONGEST_SECONDS, _ROUND_TRIP_SECONDS + size_bytes / _SLOWEST_BYTES_PER_SECOND)


log = logging.getLogger(__name__)

# Seconds for the first start: imports, and the engine's sockets.
START_SECONDS = 20.0
# Pauses before the next start. A process that ran for the last of them begins anew.
RESTART_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0, 15.0)
# Seconds in which the process leaves the pool and ends, once its socket is closed. Leaving takes
# 2 s if it gave memory.
GOODBYE_SECONDS = 3.0
# Seconds for a cancelled call to finish what is under way.
CANCEL_SECONDS = 10.0
# Lines of the process's errors that are kept to explain its end.
_LAST_LINES = 5
# Lines that the engine writes at each start.
_ROUTINE = ("InitGoogleLogging", "Local segment descriptor not found")


class Duty(StrEnum):
    """What a process is for.

    They are two, since a read from a host that is frozen can be ended only with its process: that
    must not cost what other hosts read here.
    """

    SERVE = "serve"  # lets other stores read the arena, and is in the pool
    READ = "read"  # reads from other stores


class MooncakeProcess:
    """One Mooncake process of a store. Begin with `start`, end with `close`.

    Attributes:
        stats: of its transfer engine.
        endpoint: where other stores read this arena. None until it is registered.
        pool_is_up, pool_message: of the pool's master.
        on_pool: is called when they change.
    """

    def __init__(self, arena: Arena, settings: MooncakeSettings, duty: Duty = Duty.SERVE) -> None:
        self._arena = arena
        self._settings = settings
        self._duty = duty
        self._pool = settings.pool if duty is Duty.SERVE else None
        self.stats = TransferStats(settings.interface, message="it starts")
        self.endpoint: TransferEndpoint | None = None
        self.pool_is_up = False
        self.pool_message = "not connected yet"
        self.on_pool: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._errors: deque[str] = deque(maxlen=_LAST_LINES)
        self._failure = ""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, and wait until its engine listens. Repeating this has no effect.

        Raises FailedPrecondition if it does not.
        """
        if self._keeper is not None:
            return
        started = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(started), name="mooncake")
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait(
            {waiting, self._keeper}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if not self.stats.is_up:
            message = self.stats.message
            await self.close()
            raise FailedPrecondition(f"Mooncake does not start: {message}", reason="MOONCAKE")

    async def close(self) -> None:
        """End the process."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    # -- calls ---------------------------------------------------------------------------

    async def ask(self, op: str, seconds: float, **fields: Any) -> Any:
        """Return the process's answer to a question that touches no slot.

        Raises Unavailable: it has none, says that it failed, or is late. Nothing is ended then.
        """
        number, answer, _, _ = self._sent(op, fields)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Unavailable("Mooncake did not answer in time", reason="MOONCAKE") from None
        finally:
            self._calls.pop(number, None)

    async def call(
        self, op: str, seconds: float, *, cancel_seconds: float = CANCEL_SECONDS, **fields: Any
    ) -> Any:
        """Return the process's answer. Raises Unavailable: it has none, or says that it failed.

        The process is ended if `seconds` have passed, or `cancel_seconds` since a cancellation:
        it may still write to slots.
        """
        number, answer, process, writer = self._sent(op, fields)
        try:
            done, _ = await asyncio.wait({answer}, timeout=seconds)
            if not done:
                log.warning("Mooncake did not answer within %.1f s: it is ended", seconds)
                await self._end(process)
                raise Unavailable("Mooncake did not answer in time", reason="MOONCAKE")
            return answer.result()
        except asyncio.CancelledError:
            await self._finish(process, writer, number, answer, cancel_seconds)
            raise
        finally:
            self._calls.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # was seen

    def _sent(
        self, op: str, fields: Message
    ) -> tuple[int, asyncio.Future[Any], asyncio.subprocess.Process, asyncio.StreamWriter]:
        """Send a message. Return its number and its answer. Raises Unavailable."""
        process, writer = self._process, self._writer
        if process is None or writer is None or not self.stats.is_up:
            raise Unavailable(f"Mooncake is away: {self.stats.message}", reason="MOONCAKE")
        number = next(self._numbers)
        writer.write(messages.encode({"id": number, "op": op, **fields}))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        return number, answer, process, writer

    async def _finish(
        self,
        process: asyncio.subprocess.Process,
        writer: asyncio.StreamWriter,
        number: int,
        answer: asyncio.Future[Any],
        seconds: float,
    ) -> None:
        """Return when a cancelled call is over. Further cancellations wait for that, too."""

        async def finish() -> None:
            writer.write(messages.encode({"op": "cancel", "of": number}))
            done, _ = await asyncio.wait({answer}, timeout=seconds)
            if not done:
                log.warning("a cancelled call of Mooncake does not end: its process is ended")
                await self._end(process)

        task = asyncio.ensure_future(finish())
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(task)
        task.result()

    async def _end(self, process: asyncio.subprocess.Process, seconds: float = 0.0) -> None:
        """End the process, which may end by itself within some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    # -- the process ---------------------------------------------------------------------

    async def _keep(self, started: asyncio.Event) -> None:
        """Run the process again and again; only once if its first start fails."""
        pauses = iter(RESTART_SECONDS)
        while True:
            began = time.monotonic()
            try:
                await self._run(started)
            except OSError as error:
                self._failure = str(error)
            self.stats.message = self._failure
            if not started.is_set():
                return
            if self._pool is not None:
                start = f"start {self.stats.restart_count + 2} follows"
                self._set_pool(False, f"Mooncake's process ended ({self._failure}); {start}")
            log.error("Mooncake's process ended: %s", self._failure)
            if time.monotonic() - began > RESTART_SECONDS[-1]:
                pauses = iter(RESTART_SECONDS)
            await asyncio.sleep(next(pauses, RESTART_SECONDS[-1]))
            self.stats.restart_count += 1

    async def _run(self, started: asyncio.Event) -> None:
        """Run the process until it ends."""
        self._failure = ""
        self._errors.clear()
        link, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvstore_service.mooncake", self._duty.value),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                cwd="/",
            )
        errors = asyncio.create_task(self._keep_errors(process))
        reader, writer = await asyncio.open_connection(sock=link, limit=messages.LINE_BYTES)
        self._process, self._writer = process, writer
        try:
            writer.write(messages.encode(self._first_message()))
            async for line in reader:
                self._received(messages.decode(line), started)
        except (ConnectionError, ValueError, messages.BadMessage) as error:
            self._failure = f"its messages: {error}"
        finally:
            self._forget()
            writer.close()
            await self._end(process, GOODBYE_SECONDS)
            await asyncio.gather(errors, return_exceptions=True)
            if not self._failure:
                last_words = "".join(f"; {line}" for line in self._errors)
                self._failure = f"exit code {process.returncode}{last_words}"
            self._fail_calls()

    def _first_message(self) -> Message:
        settings, pool = self._settings, self._pool
        return {
            "arena": str(self._arena.path),
            "instance": self._arena.superblock.instance_id.hex(),
            "interface": settings.interface,
            "is_shared": settings.has_transfer and self._duty is Duty.SERVE,
            "master": pool.master if pool else "",
            "memory_bytes": pool.memory_bytes if pool else 0,
            "replicas": pool.replicas if pool else 0,
        }

    def _received(self, message: Message, started: asyncio.Event) -> None:
        match message.get("event"):
            case None:
                answer = self._calls.get(message["id"])
                if answer is None or answer.done():
                    return
                if "error" in message:
                    answer.set_exception(Unavailable(message["error"], reason="MOONCAKE"))
                else:
                    answer.set_result(message["value"])
            case "started":
                self.stats.is_up, self.stats.message = True, ""
                self.stats.segment = message["segment"]
                started.set()
            case "registered":
                self.stats.registered_bytes = message["bytes"]
            case "ready":
                self.endpoint = TransferEndpoint(self.stats.segment, message["address"])
                log.info("other stores can read the arena at %s", self.stats.segment)
            case "pool":
                self._set_pool(message["is_up"], message["message"])
            case "failed":
                self._failure = message["message"]

    def _set_pool(self, is_up: bool, message: str) -> None:
        if is_up != self.pool_is_up and self._keeper is not None:  # else it is being closed
            level = logging.INFO if is_up else logging.WARNING
            log.log(level, "Mooncake's pool is %s", "up" if is_up else f"away: {message}")
        self.pool_is_up, self.pool_message = is_up, message
        self.on_pool()

    def _forget(self) -> None:
        """The process ends: nothing can be asked any more."""
        self._writer = None
        self.endpoint = None
        self.stats.is_up, self.stats.segment, self.stats.registered_bytes = False, "", 0
        if self._pool is not None:
            self._set_pool(False, "Mooncake's process ended")

    def _fail_calls(self) -> None:
        """Fail the calls under way, now that the process cannot touch the arena any more."""
        self._process = None
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(Unavailable("Mooncake's process ended", reason="MOONCAKE"))

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line longer than the limit; its rest follows
                continue
            if not line:
                return
            text = line.decode(errors="replace").strip()
            log.debug("mooncake: %s", text)
            if not any(each in text for each in _ROUTINE):
                self._errors.append(text)


def _environment() -> dict[str, str]:
    """Return what Python and Mooncake need; a service's environment may hold tokens."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH") or name.startswith("MC_")
    }
    found = [path for path in sys.path if path]
    return {**kept, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"}
