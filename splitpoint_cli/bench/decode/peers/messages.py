"""What a benchmark and a peer's child process say to each other, one JSON object a line.

Imported in the peer's own interpreter: nothing but the standard library.

The benchmark sends `Load` once, then any number of `Work`; the child answers the first with
`{"variants": [NAME, ...], "version": TEXT}` and the others with a `Timing`. In the place of either
it may send `{"error": TEXT, "is_missing": BOOL}`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: what is computed with, and how large it gets.

    Attributes:
        module: the module that has the peer.
        checkpoint: a folder in Hugging Face form, in the element type that is computed with.
        scratch: an empty folder for the converted model.
        data_type: "float32" or "bfloat16".
        batch: sequences at once.
        tokens: tokens of a sequence at its end.
        device: as torch names it; peers but transformers have the CPU only.
    """

    peer: str
    module: str
    checkpoint: str
    scratch: str
    data_type: str
    threads: int
    batch: int
    tokens: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Work:
    """One run: each prompt is answered greedily with `new_tokens` tokens, ends not heeded."""

    variant: str
    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in seconds from the start of a run, and the tokens of each sequence.

    `first_token_seconds`: when the last sequence had its first token; `tokens_before` counts all
    tokens there were by then.
    """

    seconds: float
    first_token_seconds: float
    tokens_before: int
    tokens: list[list[int]]


class PeerModel(Protocol):
    """A model in a peer's engine.

    Attributes:
        version: of the package, for people.
        variants: settings that `run` has; empty strings stand for the only one.
    """

    version: str
    variants: tuple[str, ...]

    def run(self, work: Work) -> Timing: ...


class Unsupported(Exception):
    """The peer cannot do what is asked; the message says what."""


def line_of(message: Load | Work | Timing | dict[str, Any]) -> str:
    """Return the line of a message, its end included."""
    return json.dumps(message if isinstance(message, dict) else asdict(message)) + "\n"
