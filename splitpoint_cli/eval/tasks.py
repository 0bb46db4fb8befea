"""Tasks that ask for something far back: a hidden assignment, and the fields of a long table.

They are read with teacher forcing, as text is: the question and the right answer follow the
prompt, and the greedy choices in place of the answer count. Parts of a text are tokenised by
themselves, so that a name has the same tokens where it is defined and where it is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument

_WORDS = (
    *("alpha", "branch", "cache", "delta", "event", "frame", "group", "header", "index", "joint"),
    *("kernel", "label", "matrix", "number", "object", "packet", "query", "record", "signal"),
    *("token", "update", "vector", "window", "zone"),
)
# Share of a table's tokens in its records; the questions have the rest.
_TABLE_SHARE = 0.6
_VALUES = range(100_000, 1_000_000)


class TaskKind(StrEnum):
    """What is asked for."""

    # A unique assignment, hidden in code and asked for at its end.
    NEEDLE = "needle"
    # The values of a long table's keys, in another order.
    EXTRACTION = "extraction"


@dataclass(frozen=True, slots=True)
class Task:
    """A text of which some tokens must follow from others far before them.

    Attributes:
        prompt_tokens: tokens before the first question.
        answers: positions of the tokens that are asked for, each behind a question.
    """

    kind: TaskKind
    token_ids: tuple[int, ...]
    prompt_tokens: int
    answers: tuple[range, ...]


class _Text:
    """Token ids that grow part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What stands before any text, such as a token for its beginning.
        self._before = tokenizer.encode("")
        self.ids = list(self._before)

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)[len(self._before) :]

    def add(self, text: str) -> range:
        """Append a part; return its positions."""
        first = len(self.ids)
        self.ids += self.tokens(text)
        return range(first, len(self.ids))


def needle(
    tokenizer: Tokenizer, filler: Sequence[int], tokens: int, depth: float, seed: int
) -> Task:
    """Return code of about `tokens` tokens with an assignment at a depth in [0, 1].

    `filler`: token ids of the code around it. Raises InvalidArgument if they are too few.
    """
    rng = random.Random(seed)
    name = "_".join(rng.sample(_WORDS, 2)).upper()
    question, answer = f"\n{name} = ", str(rng.choice(_VALUES))
    text = _Text(tokenizer)
    room = tokens - len(text.ids) - 2 * len(text.tokens(question) + text.tokens(answer)) - 1
    if not 0 < room <= len(filler):
        raise InvalidArgument(
            f"a needle in {counted(tokens, 'token')} needs {room} of other text, "
            f"and there are {len(filler)}",
            field="tokens",
        )
    cut = round(depth * room)
    text.ids += filler[:cut]
    text.add(question)
    text.add(answer)
    text.add("\n")
    text.ids += filler[cut:room]
    asked = text.add(question)
    answers = (text.add(answer),)
    return Task(TaskKind.NEEDLE, tuple(text.ids), asked.start, answers)


def extraction(tokenizer: Tokenizer, tokens: int, seed: int) -> Task:
    """Return a table of about `tokens` tokens: its records, then its keys in another order.

    Raises InvalidArgument if there is no room for two records.
    """
    rng = random.Random(seed)
    names = [f"{one}_{other}" for one in _WORDS for other in _WORDS if one != other]
    rng.shuffle(names)
    text = _Text(tokenizer)
    text.add("TABLE = {")
    records: list[tuple[str, str]] = []
    for name in names:
        if len(text.ids) >= _TABLE_SHARE * tokens:
            break
        records.append((f"\n    '{name}': ", str(rng.choice(_VALUES))))
        for part in (*records[-1], ","):
            text.add(part)
    text.add("\n}\n\nCOPY = {")
    rng.shuffle(records)
    prompt = len(text.ids)
    answers = []
    for question, answer in records:
        if len(text.ids) + len(text.tokens(question) + text.tokens(answer)) >= tokens:
            break
        text.add(question)
        answers.append(text.add(answer))
        text.add(",")
    if len(answers) < 2:
        held = counted(tokens, "token holds", "tokens hold")
        raise InvalidArgument(f"{held} no table and questions", field="tokens")
    return Task(TaskKind.EXTRACTION, tuple(text.ids), prompt, tuple(answers))
