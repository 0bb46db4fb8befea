"""Prompts of `bench decode`: random ones, or passages of a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument

Prompts = tuple[tuple[int, ...], ...]


def random_prompts(vocabulary_size: int, batch: int, length: int, seed: int) -> Prompts:
    """Return `batch` prompts of `length` token ids drawn from the seed."""
    draw = random.Random(seed)
    return tuple(tuple(draw.choices(range(vocabulary_size), k=length)) for _ in range(batch))


def text_prompts(text: Path, folder: Path, batch: int, length: int) -> Prompts:
    """Return `batch` passages of a text in a checkpoint's tokens, spread evenly over it.

    Each begins with what the tokenizer puts before a text. Raises InvalidArgument if the
    text cannot be read or is shorter than one passage.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise InvalidArgument(f"{folder} has no tokenizer", field="model")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{text} cannot be read as text: {error}", field="text") from error
    # What stands before any text, such as a token for its beginning.
    before = tokenizer.encode("")
    tokens = tokenizer.encode(content)[len(before) :]
    return passages(before, tokens, batch, length)


def passages(before: Sequence[int], tokens: Sequence[int], batch: int, length: int) -> Prompts:
    """Return passages of `length` tokens, `before` included. Raises InvalidArgument."""
    wanted = length - len(before)
    spare = len(tokens) - wanted
    if wanted < 1 or spare < 0:
        raise InvalidArgument(
            f"the text has {len(tokens)} tokens: --prompt {length} takes more", field="prompt"
        )
    starts = [spare * index // max(1, batch - 1) for index in range(batch)]
    return tuple((*before, *tokens[start : start + wanted]) for start in starts)
