"""What services write to stderr: one record a line, as text or as JSON, for one request or none.

    2026-01-31T12:00:00.123Z INFO scheduler [chat-7]: request ended outcome=stop ...
    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "service": "scheduler", ...}

Whoever works for a request does so `for_request(id)`; every record made meanwhile, by
whichever library, carries the id. Nothing that a client sends can forge a record: in text
whatever does not print is escaped, JSON escapes by itself. Prompts, token ids, salts,
tokens and tenants are never logged, in either format.

A record may have two extras: `incident`, the id that the client was told of a bug, and
`facts`, counts and names that programs read too (`LogFacts`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LogFacts = Mapping[str, str | int | float | None]

# A traceback's last lines say what went wrong; a line is read whole by `splitpoint up`.
_MOST_TRACEBACK_LINES = 100
_LONGEST_TEXT = 8_000

_request: ContextVar[str] = ContextVar("request_id", default="")


class LogFormat(StrEnum):
    """How a record becomes a line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least that is logged; a level of the logging package in small letters."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What the command line says of logs."""

    format: LogFormat = LogFormat.TEXT
    level: LogLevel = LogLevel.INFO


def log_options(arguments: argparse.Namespace) -> LogOptions:
    return LogOptions(LogFormat(arguments.log_format), LogLevel(arguments.log_level))


@contextmanager
def for_request(request_id: str) -> Iterator[None]:
    """Every record made in this block, and in tasks that begin in it, is about this request."""
    token = _request.set(request_id)
    try:
        yield
    finally:
        _request.reset(token)


def set_request(request_id: str) -> None:
    """Every record of the present task is about this request from now on: for a handler,
    whose failure is told after it has ended."""
    _request.set(request_id)


def setup_logging(service: str, options: LogOptions | None = None) -> None:
    """Log to stderr from now on. Replaces earlier handlers."""
    options = options or LogOptions()
    handler = logging.StreamHandler(sys.stderr)
    is_json = options.format is LogFormat.JSON
    handler.setFormatter(_JsonFormatter(service) if is_json else _LineFormatter(service))
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Done-callback of a background task that the service can do without: a bug in it
    is logged, not swallowed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("background").error("%s ended", task.get_name(), exc_info=error)


def json_line(
    service: str,
    level: str,
    message: str,
    *,
    created: float | None = None,
    logger: str,
    **more: object,
) -> str:
    """One JSON record without its line break. `created`: seconds since 1970; None: now."""
    record: dict[str, object] = {
        "time": _stamp(time.time() if created is None else created),
        "level": level,
        "service": service,
        "logger": logger,
        "message": message[:_LONGEST_TEXT],
    }
    record |= {name: value for name, value in more.items() if value}
    return json.dumps(record, default=str)


def level_of(line: str) -> str | None:
    """The level of a line that a service wrote, in either format; None: it is no record."""
    if line.startswith("{"):
        try:
            level = json.loads(line).get("level")
        except ValueError:
            return None
        return level if isinstance(level, str) else None
    words = line.split(" ", 2)
    is_record = len(words) == 3 and words[0].endswith("Z") and words[1] in _LEVELS
    return words[1] if is_record else None


_LEVELS = frozenset(logging.getLevelNamesMapping())


class _LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z LEVEL service [request]: text`, on every line of a record.

    A traceback gets the header on each of its lines.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request.get()
        about = f" [{printable(request_id)}]" if request_id else ""
        head = f"{_stamp(record.created)} {record.levelname} {self._service}{about}:"
        facts = getattr(record, "facts", None) or {}
        parts = [record.getMessage()]
        parts += [f"{name}={_short(value)}" for name, value in facts.items() if value is not None]
        lines = [f"{head} {printable(' '.join(parts))}"]
        lines += [f"{head}   {printable(line)}" for line in _traceback_of(self, record)]
        return "\n".join(lines)


class _JsonFormatter(logging.Formatter):
    """One object a record, everything in it on one line; what is empty is left out."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None) or {}
        return json_line(
            self._service,
            record.levelname,
            record.getMessage(),
            created=record.created,
            logger=record.name,
            request_id=_request.get(),
            incident=getattr(record, "incident", ""),
            facts={name: value for name, value in facts.items() if value is not None},
            exception=_traceback_of(self, record),
        )


def _traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    if not record.exc_info:
        return []
    lines = formatter.formatException(record.exc_info).splitlines()
    return [line[:_LONGEST_TEXT] for line in lines[-_MOST_TRACEBACK_LINES:]]


def printable(text: str) -> str:
    """The text with every character escaped that ends a line or steers a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _stamp(created: float) -> str:
    """UTC to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"
