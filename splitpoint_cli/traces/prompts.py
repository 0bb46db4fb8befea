"""Prompts with the lengths and the shared blocks of a trace, as token ids."""

from __future__ import annotations

from random import Random

from splitpoint_cli.traces.arrival import Arrival


def prompt_of(
    arrival: Arrival, index: int, *, block_tokens: int, least: int, most: int, seed: int = 0
) -> list[int]:
    """Return a prompt of `arrival.input_length` token ids, each in [least, most].

    Equal hash ids give equal blocks. What no hash id names is the request's own: it depends on
    `index`, its place in the trace.
    """
    tokens: list[int] = []
    for block in arrival.hash_ids:
        tokens += _tokens(f"{seed} block {block}", block_tokens, least, most)
    if len(tokens) < arrival.input_length:
        missing = arrival.input_length - len(tokens)
        tokens += _tokens(f"{seed} request {index}", missing, least, most)
    return tokens[: arrival.input_length]


def _tokens(seed: str, count: int, least: int, most: int) -> list[int]:
    random = Random(seed)
    return [random.randint(least, most) for _ in range(count)]
