"""Log records on stderr, one a line, as text or JSON, with the id of their request if any.

    2026-01-31T12:00:00.123Z INFO scheduler [chat-7]: request ended outcome=stop ...
    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "service": "scheduler", ...}

Code that works for a request runs in `for_request(id)`; every record made there, also by
libraries, carries the id. Clients cannot forge records: the text format escapes characters
that do not print, and JSON escapes by itself. Prompts, token ids, salts, tokens and tenants
are never logged.

A record may have two extras: `incident`, the id in the client's message about a bug, and
`facts`, counts and names for programs (`LogFacts`).
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

# The last lines of a traceback matter most. `splitpoint up` reads whole lines.
_MOST_TRACEBACK_LINES = 100
_LONGEST_TEXT = 8_000

_request: ContextVar[str] = ContextVar("request_id", default="")


class LogFormat(StrEnum):
    """The format of a record."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The lowest level that is logged: a level of the logging package in lower case."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the command line."""

    format: LogFormat = LogFormat.TEXT
    level: LogLevel = LogLevel.INFO


def log_options(arguments: argparse.Namespace) -> LogOptions:
    return LogOptions(LogFormat(arguments.log_format), LogLevel(arguments.log_level))


@contextmanager
def for_request(request_id: str) -> Iterator[None]:
    """Give the request's id to records made in this block and in tasks started in it."""
    token = _request.set(request_id)
    try:
        yield
    finally:
        _request.reset(token)


def set_request(request_id: str) -> None:
    """Give the request's id to the current task's records from now on.

    For handlers: the guard logs their failure after they have ended.
    """
    _request.set(request_id)


def setup_logging(service: str, options: LogOptions | None = None) -> None:
    """Log to stderr, instead of any earlier handlers."""
    options = options or LogOptions()
    handler = logging.StreamHandler(sys.stderr)
    is_json = options.format is LogFormat.JSON
    handler.setFormatter(_JsonFormatter(service) if is_json else _LineFormatter(service))
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the failure of a background task; a done-callback."""
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
    """Return a JSON record without line break. `created`: seconds since 1970; None: now."""
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
    """Return the level of a service's line in either format; None if it is not a record."""
    if line.startswith("{"):
        try:
            level = json.loads(line).get("level")
        except ValueError:
            return None
        return level if isinstance(level, str) else None
    words = line.split(" ", 2)
    is_record = len(words) == 3 and words[0].endswith("Z") and words[1] in _LEVELS
    return words[1] if is_record else None


def message_of(line: str) -> str:
    """Return the message of a service's line in either format; the line if it is not a record."""
    if level_of(line) is None:
        return line
    if line.startswith("{"):
        return str(json.loads(line).get("message", line))
    return line.partition(": ")[2] or line


_LEVELS = frozenset(logging.getLevelNamesMapping())


class _LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z LEVEL service [request]: text`, also for traceback lines."""

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
    """One JSON object a record, on one line; empty values are left out."""

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
    """Escape every character that ends a line or controls a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _stamp(created: float) -> str:
    """Return the time in UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"
