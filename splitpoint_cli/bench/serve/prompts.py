"""Prompts of a load: token ids that depend on the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.serve.backends import Sample, ServedModel
from splitpoint_cli.traces.arrival import Trace
from splitpoint_cli.traces.prompts import prompt_of

# Low ids are often special: the end of a text, padding.
_FIRST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of random tokens: `prefix_length` that all share, then `input_length` of their own.

    `range_ratio`: lengths of input and output are drawn evenly from length * (1 - r) to
    length * (1 + r), and are at least 1.
    """

    input_length: int
    output_length: int
    prefix_length: int = 0
    range_ratio: float = 0.0

    def samples(self, count: int, model: ServedModel, rng: random.Random) -> list[Sample]:
        """Draw `count` samples. Raises InvalidArgument if one exceeds the model's context."""
        ids = _plain_ids(model)
        prefix = rng.choices(ids, k=self.prefix_length)
        found = []
        for _ in range(count):
            own = self._length(self.input_length, rng)
            output = self._length(self.output_length, rng)
            found.append(Sample([*prefix, *rng.choices(ids, k=own)], output))
        check_lengths(found, model)
        return found

    def _length(self, length: int, rng: random.Random) -> int:
        spread = round(length * self.range_ratio)
        return max(1, length + rng.randint(-spread, spread))


def trace_samples(trace: Trace, model: ServedModel, seed: int) -> list[Sample]:
    """Return the requests of a trace; equal blocks are equal tokens.

    Raises InvalidArgument if one exceeds the model's context.
    """
    ids = _plain_ids(model)
    found = [
        Sample(
            prompt_of(
                each,
                index,
                block_tokens=trace.block_tokens,
                least=ids[0],
                most=ids[-1],
                seed=seed,
            ),
            each.output_length,
            each.tenant,
            each.priority,
        )
        for index, each in enumerate(trace.arrivals)
    ]
    check_lengths(found, model)
    return found


def _plain_ids(model: ServedModel) -> range:
    """Return the token ids that prompts are made of."""
    return range(min(_FIRST_TOKEN, model.vocabulary_size - 1), model.vocabulary_size)


def check_lengths(samples: list[Sample], model: ServedModel) -> None:
    """Raise InvalidArgument for a sample that the model's context cannot hold."""
    for number, sample in enumerate(samples, 1):
        length = len(sample.prompt) + sample.output_length
        if length > model.context_length:
            raise InvalidArgument(
                f"request {number} has {len(sample.prompt):,} prompt tokens and asks for "
                f"{sample.output_length:,} more: {model.name} has a context of "
                f"{model.context_length:,}",
                field="dataset",
            )
