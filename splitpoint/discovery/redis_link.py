"""Operations on Redis with a time limit and a circuit breaker. Knows no key.

Every failure is `Unavailable` with the reason REDIS_AWAY, and the caller works without
Redis: everything in Redis is only a hint.

While the breaker is closed, every call may try. After some failures in a row it opens and no call
tries, so that none waits. After the open time, one call may probe (half open): its success closes
the breaker, its failure opens it again for twice as long. The breaker is pure: its caller gives the
time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.errors import Unavailable
from splitpoint.v1 import types_pb2


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Failures in a row that open the breaker; seconds that it stays open then."""

    failure_count: int = 3
    first_open_seconds: float = 1.0
    longest_open_seconds: float = 10.0


class Breaker:
    """The breaker of one peer.

    After each `True` from `may_try`, call `succeeded`, `failed` or `gave_up`.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.state = State.CLOSED
        self._limits = limits or BreakerLimits()
        self._failures = 0
        self._open_seconds = self._limits.first_open_seconds
        self._opens_until = 0.0

    def may_try(self, now: float, *, is_heartbeat: bool = False) -> bool:
        """Return True if the peer may be called now. `now` is monotonic seconds.

        A heartbeat always may: it runs in the background, once a second at most, and so
        serves as a probe.
        """
        if self.state is State.OPEN and (now >= self._opens_until or is_heartbeat):
            self.state = State.HALF_OPEN
            return True
        return self.state is State.CLOSED or is_heartbeat

    def succeeded(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._open_seconds = self._limits.first_open_seconds

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state is State.CLOSED and self._failures < self._limits.failure_count:
            return
        if self.state is State.HALF_OPEN:
            longest = self._limits.longest_open_seconds
            self._open_seconds = min(2 * self._open_seconds, longest)
        if self.state is not State.OPEN:  # late failures do not extend it
            self.state = State.OPEN
            self._opens_until = now + self._open_seconds

    def gave_up(self, now: float) -> None:
        """Record a call that ended before an answer: it tells nothing about the peer."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN
            self._opens_until = now


_log = logging.getLogger(__name__)

OPERATION_SECONDS = 0.25
# For heartbeats and a burst of requests; more wait within their time limit.
_MOST_CONNECTIONS = 16

T = TypeVar("T")


class RedisLink:
    """Connections to one Redis. Construct it inside the event loop, `close` it at the end."""

    def __init__(
        self,
        options: RedisOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        breaker: Breaker | None = None,
    ) -> None:
        self.name = options.name
        self.breaker = breaker or Breaker()
        self._clock = clock
        self._redis = _client(options)
        self._places = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._is_failing = False

    @property
    def is_away(self) -> bool:
        """True while only heartbeats may try."""
        return self.breaker.state is not State.CLOSED

    @property
    def status(self) -> types_pb2.RedisStatus:
        """Address and state, as the services report them."""
        return types_pb2.RedisStatus(address=self.name, is_up=not self.is_away)

    async def run(
        self, operation: Callable[[Redis], Awaitable[T]], *, is_heartbeat: bool = False
    ) -> T:
        """Return the operation's result. Raises Unavailable within OPERATION_SECONDS.

        Args:
            operation: one round trip: a command, or a pipeline's `execute`.
            is_heartbeat: a background task's operation, which passes an open breaker, too.
        """
        if not self.breaker.may_try(self._clock(), is_heartbeat=is_heartbeat):
            raise self._away("it failed lately")
        started = False
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(OPERATION_SECONDS), self._places:
                started = True
                result = await operation(self._redis)
        except TimeoutError:
            if not started:  # too many operations here, which says nothing about Redis
                self.breaker.gave_up(self._clock())
                raise self._away("too many operations at a time") from None
            raise self._failed(f"no answer within {OPERATION_SECONDS:g} s") from None
        except (RedisError, OSError) as error:
            raise self._failed(_words(error)) from error
        except BaseException:
            self.breaker.gave_up(self._clock())
            raise
        finally:
            # A cancellation can get lost in the client's own time limits. The canceller
            # would wait for ever.
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
        self.breaker.succeeded()
        if self._is_failing:
            self._is_failing = False
            _log.info("Redis at %s answers again", self.name)
        return result

    async def close(self) -> None:
        """Close every connection, without waiting for those that hang."""
        try:
            async with asyncio.timeout(OPERATION_SECONDS):
                await self._redis.aclose()
        except (TimeoutError, RedisError, OSError) as error:
            _log.info("closing the connections to Redis: %s", _words(error))

    def _failed(self, why: str) -> Unavailable:
        self.breaker.failed(self._clock())
        if not self._is_failing:  # once per outage
            self._is_failing = True
            _log.warning("Redis at %s is away, going on without it: %s", self.name, why)
        return self._away(why)

    def _away(self, why: str) -> Unavailable:
        return Unavailable(f"Redis at {self.name} is away: {why}", reason="REDIS_AWAY")


def _client(options: RedisOptions) -> Redis:
    return Redis(
        host=options.host,
        port=options.port,
        db=options.database,
        unix_socket_path=options.socket_path or None,
        username=options.user,
        password=options.password,
        # `run` limits the whole operation. Time limits of the client that end at the same
        # moment would leave a stray cancellation in the caller's task.
        socket_timeout=None,
        socket_connect_timeout=None,
        # One try: callers work without Redis, and the next heartbeat tries again.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        max_connections=2 * _MOST_CONNECTIONS,
        ssl=options.tls,
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        ssl_ca_certs=options.ca_file,
        ssl_min_version=ssl.TLSVersion.TLSv1_2,
    )


def _words(error: BaseException) -> str:
    """Return the kind of failure.

    A server's error text may quote what was sent, so only its first word (NOPERM,
    WRONGPASS, OOM) is used.
    """
    if isinstance(
        error.__cause__, RedisError
    ):  # the cause of a failed connection, such as the password
        error = error.__cause__
    if isinstance(error, RedisError):
        first = str(error).partition(" ")[0]
        return f"{type(error).__name__} {first}" if first.isupper() else type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return type(error).__name__
