"""Guesses of a layer's queries from a residual of an earlier layer (InfiniGen, section 4.3).

The residual changes little from one layer to the next, so a layer's tokens can be chosen, and
fetched, while the layer before it computes.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from worker_service.model.layer import DecoderLayer
from worker_service.model.rope import Rotary
from worker_service.selection.screen import Guess


class GuessFrom(StrEnum):
    """What a layer's queries are guessed from."""

    # Its own input: no guess, but nothing can be fetched ahead.
    OWN = "own"
    # The residual that enters the layer before it.
    PREVIOUS = "previous"


class GuessNorm(StrEnum):
    """Which layer's norm is applied to an earlier residual."""

    # That of the layer whose queries are guessed.
    OWN = "own"
    # That of the layer before it, as in InfiniGen's paper: its X is there already.
    PREVIOUS = "previous"


def guess_of(
    hidden: torch.Tensor,
    layer: DecoderLayer,
    norm_of: DecoderLayer,
    rotary: Rotary | None,
    first_position: int,
) -> Guess:
    """Return what `layer` asks of its cache for consecutive tokens, guessed from `hidden`.

    Args:
        hidden: the residual `[T, h]` that enters this layer or the one before it.
        norm_of: the layer whose norm is applied: `layer`, or the one before it.
        rotary: angles of the tokens' positions.
    """
    inputs = norm_of.attention_input(hidden)
    return Guess(inputs, layer.project_queries(inputs, rotary), first_position)
