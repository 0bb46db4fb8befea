"""`python -m splitpoint.chat.process`: renders chats for a service, within limits.

Its first request has the templates and is answered with why they cannot be used, if so; each other
one has a chat and is answered with its prompt, or with nothing, the field and the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from splitpoint.chat.messages import Chat, ChatError
from splitpoint.chat.template import ModelTemplates
from splitpoint.limited.child import serve


class _Templates:
    """Answers requests."""

    def __init__(self) -> None:
        self._templates: ModelTemplates | None = None

    def answer(self, parts: Sequence[str]) -> tuple[str, ...]:
        try:
            if self._templates is None:
                [told] = parts
                self._templates = _compiled(told)
                return ("",)
            return (self._templates.render(Chat.of_parts(parts)),)
        except ChatError as error:
            return (str(error),) if self._templates is None else ("", error.field, str(error))
        except MemoryError:
            if self._templates is None:
                raise
            return ("", "messages", "the chat needs too much memory")


def _compiled(told: str) -> ModelTemplates:
    found = json.loads(told)
    return ModelTemplates(found["default"], found["tool_use"], found["special_tokens"])


def main() -> int:
    serve(_Templates().answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
