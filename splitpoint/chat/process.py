"""`python -m splitpoint.chat.process`: renders chats for a service, within limits.

The service's end of a socket is this process's standard input. It ends with the service, and the
kernel ends it when one rendering takes too long. It cannot write files, and has little memory.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from contextlib import suppress

from splitpoint.chat import frames
from splitpoint.chat.messages import ChatError
from splitpoint.chat.template import ModelTemplates

# Seconds of the processor that compiling templates, or rendering one chat, may take.
MOST_SECONDS = 2.0
_MEMORY_BYTES = 1 << 30


def main() -> int:
    _limit()
    with socket.socket(fileno=sys.stdin.fileno()) as link, suppress(ConnectionError, EOFError):
        _serve(link)
    return 0


def _serve(link: socket.socket) -> None:
    """Answer until the service is gone: first whether the templates compile, then each chat."""
    [told] = frames.receive(link)
    _start_clock()
    try:
        found = json.loads(told)
        templates = ModelTemplates(found["default"], found["tool_use"], found["special_tokens"])
    except ChatError as error:
        _stop_clock()
        frames.send(link, "", str(error))
        return
    _stop_clock()
    frames.send(link, "", "")
    while True:
        parts = frames.receive(link)
        _start_clock()
        try:
            answer: tuple[str, ...] = (templates.render(frames.chat_of(parts)),)
        except ChatError as error:
            answer = ("", error.field, str(error))
        except MemoryError:
            answer = ("", "messages", "the chat needs too much memory")
        _stop_clock()
        frames.send(link, *answer)


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the service decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _start_clock() -> None:
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)


def _stop_clock() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    sys.exit(main())
