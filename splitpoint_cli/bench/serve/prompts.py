"""Prompts of a load: token ids that depend on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
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
        lengths = [
            (self._length(self.input_length, rng), self._length(self.output_length, rng))
            for _ in range(count)
        ]
        check_lengths([(self.prefix_length + own, output) for own, output in lengths], model)
        ids = _plain_ids(model)
        prefix = rng.choices(ids, k=self.prefix_length)
        return [Sample([*prefix, *rng.choices(ids, k=own)], output) for own, output in lengths]

    def _length(self, length: int, rng: random.Random) -> int:
        spread = round(length * self.range_ratio)
        return max(1, length + rng.randint(-spread, spread))


def trace_samples(trace: Trace, model: ServedModel, seed: int) -> list[Sample]:
    """Return the requests of a trace; equal blocks are equal tokens.

    Raises InvalidArgument if one exceeds the model's context.
    """
    check_lengths([(each.input_length, each.output_length) for each in trace.arrivals], model)
    ids = _plain_ids(model)
    return [
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


def _plain_ids(model: ServedModel) -> range:
    """Return the token ids that prompts are made of."""
    return range(min(_FIRST_TOKEN, model.vocabulary_size - 1), model.vocabulary_size)


def check_lengths(lengths: Iterable[tuple[int, int]], model: ServedModel) -> None:
    """Raise InvalidArgument for (prompt, answer) tokens that the model's context cannot hold.

    Called before prompts are made: those that no model can hold may not fit in memory, either.
    """
    for number, (prompt, output) in enumerate(lengths, 1):
        if prompt + output > model.context_length:
            raise InvalidArgument(
                f"request {number} has {prompt:,} prompt tokens and asks for "
                f"{output:,} more: {model.name} has a context of "
                f"{model.context_length:,}",
                field="dataset",
            )
