"""Whether a draft model has the vocabulary of the served model."""

from __future__ import annotations

from pathlib import Path

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ModelShape


def check_vocabulary(
    folder: Path, shape: ModelShape, served_folder: Path, served: ModelShape
) -> None:
    """Raise InvalidArgument unless equal ids mean equal tokens in both models.

    `folder`, `shape`: the draft model's.
    """
    check_vocabulary_size(str(folder), shape, served)
    theirs = Tokenizer.load(served_folder)
    if theirs is None:
        return
    ours = Tokenizer.load(folder)
    if ours is None:
        raise _refused(str(folder), "it has no tokenizer to compare with the served model's")
    if (spelled := ours.spellings()) != (wanted := theirs.spellings()):
        differing = min(wanted.items() ^ spelled.items(), key=lambda item: item[0])
        index = differing[0]
        raise _refused(
            str(folder),
            f"its tokenizer is another one: token {index} is {spelled.get(index)!r}, that of the "
            f"served model {wanted.get(index)!r}",
        )


def check_vocabulary_size(draft: str, shape: ModelShape, served: ModelShape) -> None:
    """Raise InvalidArgument, which names the `draft` model, if the sizes differ."""
    if shape.vocabulary_size != served.vocabulary_size:
        raise _refused(
            draft,
            f"its vocabulary has {shape.vocabulary_size:,} tokens, that of the served model "
            f"{served.vocabulary_size:,}",
        )


def _refused(draft: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{draft} cannot draft: {reason}", field="draft_model")
