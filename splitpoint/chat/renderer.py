"""Renders chats in processes of their own, so that a template can do no harm.

A template is a program, and it comes with the model. In a service's own process an endless loop
could not be stopped, one multiplication of a text could fill the memory, and the interpreter's
lock would be held meanwhile. So a process with limits renders, the kernel ends it after 2 seconds
of processor time, and the next chat gets a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from splitpoint.chat.messages import Chat
from splitpoint.chat.source import ChatTemplates, special_tokens_json
from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint.limited.child import MOST_SECONDS
from splitpoint.limited.pool import TOO_SLOW, LimitedPool, LimitedProcess, ProcessEnded

_MODULE = "splitpoint.chat.process"


class ChatRenderer:
    """Processes for the templates of one model. Threads may share it.

    Args:
        most: processes at a time. The first starts at once, others when chats come together.
        most_seconds: seconds of the processor that one chat, or compiling the templates, may take.

    Raises InvalidArgument if the templates cannot be compiled, Unavailable if no process starts.
    """

    def __init__(
        self, templates: ChatTemplates, *, most: int = 2, most_seconds: float = MOST_SECONDS
    ) -> None:
        self._told = special_tokens_json(templates)
        self._most_seconds = most_seconds
        self._pool = LimitedPool(self._start, most=most)
        with self._errors("compile", field="model"):
            self._pool.start_one()

    def render(self, chat: Chat) -> str:
        """Return the prompt of a chat.

        Raises InvalidArgument (the template refuses it, fails, or takes too long),
        ResourceExhausted (no process was free in time), Unavailable (processes end at once).
        """
        with self._errors("render", field="chat.messages"):
            answer = self._pool.ask(*chat.parts)
        if len(answer) == 1:
            return answer[0]
        _, field, message = answer
        raise InvalidArgument(message, field=f"chat.{field}", reason="CHAT_REFUSED")

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def _start(self) -> LimitedProcess:
        """Return a process that has compiled the templates."""
        process = LimitedProcess(_MODULE, self._most_seconds)
        [error] = process.ask(self._told)
        if error:
            process.end()
            raise InvalidArgument(f"the chat template cannot be used: {error}", field="model")
        return process

    @contextmanager
    def _errors(self, what: str, *, field: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ResourceExhausted(
                "other chats are being rendered", reason="TOKENIZER_BUSY", retry_after_seconds=1.0
            ) from None
        except ProcessEnded as error:
            if error.exit_code == TOO_SLOW:
                raise InvalidArgument(
                    f"the chat template takes more than {self._most_seconds:g} s to {what}",
                    field=field,
                    reason="CHAT_TOO_SLOW",
                ) from None
            raise Unavailable(
                f"the process that renders chats ended: {error}", reason="CHAT_PROCESS_LOST"
            ) from None
