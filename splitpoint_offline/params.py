"""Sampling parameters of offline requests: the clients' own options, and `n`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import InvalidArgument

# Most answers to one prompt.
MOST_ANSWERS = 128


class SamplingParams:
    """How the answers to a prompt are made.

        SamplingParams(n=2, temperature=0.8, max_tokens=64, stop=["\\n\\n"])

    The keyword arguments are those of `Client.generate` (splitpoint.client.GenerateOptions), with
    its defaults: greedy, 128 tokens. `request_id` is not among them: one of several prompts.

    Attributes:
        n: answers to each prompt, 1 to 128. With a seed, answer k has the seed + k.
        options: what was given.
    """

    __slots__ = ("n", "options")

    def __init__(self, *, n: int = 1, **options: Unpack[GenerateOptions]) -> None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be an int, not {type(n).__name__}")
        if not 1 <= n <= MOST_ANSWERS:
            raise InvalidArgument(f"n must be from 1 to {MOST_ANSWERS}, not {n}", field="n")
        unknown = sorted(options.keys() - _KNOWN)
        if unknown:
            raise TypeError(
                f"SamplingParams() got unexpected keyword arguments: {', '.join(unknown)}"
            )
        self.n = n
        self.options = options

    @classmethod
    def of(cls, value: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Return parameters from themselves, from a mapping of the arguments, or from nothing."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(
                f"sampling_params must be SamplingParams or a mapping, not {type(value).__name__}"
            )
        return cls(**value)

    def of_answer(self, index: int) -> GenerateOptions:
        """Return the options of the answer with this index, counted from 0."""
        seed = self.options.get("seed")
        if seed is None or not index:
            return self.options
        return {**self.options, "seed": seed + index}

    def __repr__(self) -> str:
        given = {"n": self.n, **self.options} if self.n != 1 else self.options
        return f"SamplingParams({', '.join(f'{key}={value!r}' for key, value in given.items())})"


_KNOWN = GenerateOptions.__optional_keys__ - {"request_id", "worker", "token"}
