"""Renders chats in processes of their own, so that a template can do no harm.

A template is a program, and it comes with the model. In a service's own process an endless loop
could not be stopped, one multiplication of a text could fill the memory, and the interpreter's
lock would be held meanwhile. So a process with limits renders, the kernel ends it after 2 seconds
of processor time, and the next chat gets a new one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Protocol

from splitpoint.chat import frames
from splitpoint.chat.messages import Chat
from splitpoint.chat.source import ChatTemplates, special_tokens_json
from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable

# A process that says nothing for this long is stopped or starved, not slow.
_PATIENCE_SECONDS = 20.0
_MODULE = "splitpoint.chat.process"


class Renderer(Protocol):
    """Turns chats into prompts. Any thread may call it; it blocks."""

    def render(self, chat: Chat) -> str: ...


class ChatRenderer:
    """Processes for the templates of one model. Threads may share it.

    Args:
        most: processes at a time. The first starts at once, others when chats come together.

    Raises InvalidArgument if the templates cannot be compiled, Unavailable if no process starts.
    """

    def __init__(self, templates: ChatTemplates, *, most: int = 2) -> None:
        self._templates = templates
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._idle = [_Process(templates)]
        except _Ended as error:
            raise _lost(error) from None

    def render(self, chat: Chat) -> str:
        """Return the prompt of a chat.

        Raises InvalidArgument (the template refuses it, fails, or takes too long),
        ResourceExhausted (no process was free in time), Unavailable (processes end at once).
        """
        if not self._places.acquire(timeout=_PATIENCE_SECONDS):
            raise _busy()
        try:
            try:
                return self._rendered(chat)
            except _Ended:  # between two chats, or by a signal from outside: try a new one
                return self._rendered(chat)
        except _Ended as error:
            raise _lost(error) from None
        finally:
            self._places.release()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _rendered(self, chat: Chat) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process(self._templates)
        is_whole = False
        try:
            answer = process.ask(frames.chat_parts(chat))
            is_whole = True
        finally:
            if not is_whole or not self._keep(process):
                process.end()
        if len(answer) == 1:
            return answer[0]
        _, field, message = answer
        raise InvalidArgument(message, field=f"chat.{field}", reason="CHAT_REFUSED")

    def _keep(self, process: _Process) -> bool:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
            return not self._is_closed


class _Ended(Exception):
    """The process ended without an answer, and not by its own limits."""


class _Process:
    """One rendering process. Raises InvalidArgument if the templates cannot be compiled."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Nothing of the service's: its environment may hold tokens.
                env=_environment(),
                cwd="/",
            )
        try:
            [_, error] = self.ask((special_tokens_json(templates),), what="compile")
        except BaseException:
            self.end()
            raise
        if error:
            self.end()
            raise InvalidArgument(f"the chat template cannot be used: {error}", field="model")

    def ask(self, parts: tuple[str, ...], *, what: str = "render") -> list[str]:
        """Return the answer. Raises InvalidArgument, ResourceExhausted, _Ended."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        self._link.settimeout(_PATIENCE_SECONDS)
        try:
            frames.send(self._link, *parts)
            answer = frames.receive(self._link, deadline)
        except TimeoutError:
            raise _busy() from None
        except (OSError, EOFError):
            self.end()
            raise self._why(what) from None
        except frames.BadFrame as error:
            raise _Ended(f"its answer is malformed: {error}") from None
        return answer

    def end(self) -> None:
        """End it, and wait for that. Repeating this has no effect."""
        self._link.close()
        if self._process.poll() is None:
            # A process that ends by itself keeps its own code for a moment.
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _why(self, what: str) -> Exception:
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return InvalidArgument(
                f"the chat template takes more than 2 s to {what}",
                field="chat.messages" if what == "render" else "model",
                reason="CHAT_TOO_SLOW",
            )
        return _Ended(f"exit code {code}")


def _lost(error: _Ended) -> Unavailable:
    return Unavailable(f"the process that renders chats ended: {error}", reason="CHAT_PROCESS_LOST")


def _busy() -> ResourceExhausted:
    return ResourceExhausted(
        "other chats are being rendered", reason="TOKENIZER_BUSY", retry_after_seconds=1.0
    )


def _environment() -> dict[str, str]:
    """Return what Python needs to find this package, and the time zone that templates print."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ}
    found = [path for path in sys.path if path]
    return {**kept, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"}
