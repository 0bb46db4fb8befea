"""Redis: whether it answers, how fast, and whether this user may write to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from dataclasses import dataclass

from splitpoint.discovery.redis_options import RedisOptions, read_redis_options
from splitpoint.errors import PermissionDenied, SplitpointError, Unavailable
from splitpoint_cli.checks.finding import Finding, Verdict, one_line
from splitpoint_cli.output import seconds_text

_NAME = "Redis"
_PINGS = 5
# Services give up an operation after a quarter of a second.
_SLOW_SECONDS = 0.05
# Older versions lack options of the commands in use.
_LEAST_VERSION = (6, 2)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a server; `version` is empty if unknown."""

    version: str
    ping_seconds: float


def check_redis(url: str, password_file: str | None, ca: str | None) -> Finding:
    """Check Redis by its options, without showing URL or password."""
    try:
        options = read_redis_options(url, password_file=password_file, ca_file=ca)
    except PermissionDenied as error:
        return Finding(
            _NAME, Verdict.PROBLEM, error.message, f"Close it to others: chmod 600 {password_file}"
        )
    except SplitpointError as error:
        return Finding(_NAME, Verdict.PROBLEM, error.message, "See docs/tiers.md")
    assert options is not None
    if ca is not None and not os.access(ca, os.R_OK):
        return Finding(
            _NAME, Verdict.PROBLEM, f"--redis-ca {ca} cannot be read", "Name a file (PEM) that can"
        )
    try:
        answers = asyncio.run(_ask(options))
    except Unavailable as error:
        return _refusal(options, one_line(error.message))
    return judge(options.name, answers)


def judge(where: str, answers: Answers) -> Finding:
    """Return the finding about a server that answered."""
    took = seconds_text(answers.ping_seconds)
    found = f"{where} answers in {took}, may be written to"
    if answers.version:
        found += f", version {answers.version}"
        if tuple(map(int, answers.version.split(".")[:2])) < _LEAST_VERSION:
            least = ".".join(map(str, _LEAST_VERSION))
            return Finding(_NAME, Verdict.WARNING, found, f"Use {least} or newer")
    if answers.ping_seconds > _SLOW_SECONDS:
        return Finding(
            _NAME,
            Verdict.WARNING,
            found,
            "Services wait for 250 ms at most and then go on without: use one that is nearer",
        )
    return Finding(_NAME, Verdict.OK, found)


async def _ask(options: RedisOptions) -> Answers:
    """Ask the server. Raises Unavailable, with the kind of failure."""
    from splitpoint.discovery.redis_link import RedisLink  # slow to load, and few have a Redis

    link = RedisLink(options)
    try:
        await link.run(lambda redis: redis.ping())
        pings = []
        for _ in range(_PINGS):
            started = time.perf_counter()
            await link.run(lambda redis: redis.ping())
            pings.append(time.perf_counter() - started)
        # As a service writes: below its prefix, with an end.
        key = f"sp:doctor:{secrets.token_hex(8)}"
        await link.run(lambda redis: redis.set(key, b"", px=1000))
        await link.run(lambda redis: redis.delete(key))
        # Open to every user, which INFO is not.
        hello = await link.run(
            lambda redis: redis.execute_command("HELLO")  # type: ignore[no-untyped-call]
        )
        return Answers(_version(hello), statistics.median(pings))
    finally:
        await link.close()


def _version(hello: object) -> str:
    """Return the version in the answer to HELLO, a list of names and values."""
    if isinstance(hello, list):
        pairs = dict(zip(hello[::2], hello[1::2], strict=False))
        version = pairs.get(b"version", b"")
        if isinstance(version, bytes):
            return version.decode("ascii", "replace")
    return ""


def _refusal(options: RedisOptions, why: str) -> Finding:
    """Return the finding for a kind of failure that `RedisLink` names."""
    if any(word in why for word in ("Authentication", "NOAUTH", "WRONGPASS")):
        advice = (
            "Name the user in the URL (redis://USER@HOST) and give its password by "
            "--redis-password-file"
            if options.password is None
            else "User or password is wrong: compare them with the server's (ACL LIST)"
        )
    elif "NOPERM" in why or "NoPermission" in why:
        advice = 'The user may not write sp:*: give it the rights of docs/tiers.md, "Rights"'
    elif "READONLY" in why or "ReadOnly" in why:
        advice = "This is a replica: name the primary"
    elif "no answer within" in why:
        advice = "It is too far away, hangs, or speaks TLS (rediss://) where this does not"
    elif options.tls:
        advice = "Does it serve TLS there, with a certificate of --redis-ca for that host name?"
    else:
        advice = (
            f"Start it there, or correct --redis; a look: redis-cli -u {options.name} ping"
            if not options.socket_path
            else f"Start it there, or correct --redis; a look: redis-cli -s {options.socket_path}"
            " ping"
        )
    # The client library's name for a refused, reset or unresolved connection alike.
    return Finding(_NAME, Verdict.PROBLEM, why.replace("ConnectionError", "no connection"), advice)
