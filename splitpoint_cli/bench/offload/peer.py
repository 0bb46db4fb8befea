"""The peer of `bench offload` on a GPU: transformers' generate with its offloaded cache.

It is built with random weights on the device, and hands the same tensors to our decoder,
so that nothing is written to disk and both compute with the same numbers.
"""

from __future__ import annotations

import itertools

import torch

from splitpoint.shapes import ModelShape
from splitpoint_cli.bench.limits import (
    ATTENTIONS,
    TokenTimes,
    generate_greedy,
    random_model,
)
from splitpoint_cli.bench.offload.report import DecodeRun, Step


class Peer:
    """`generate` with one kind of cache; a TensorSource of its own weights.

    Attributes:
        cache: which of transformers' caches.
        attention: the attention implementation that is used; `choose` tries both.
    """

    def __init__(
        self, shape: ModelShape, seed: int, device: torch.device, cache: str = "offloaded"
    ) -> None:
        self._model = random_model(shape, seed, device)
        self._tensors = self._model.state_dict()
        self.cache = cache
        self.attention = ATTENTIONS[0]

    def get(self, name: str) -> torch.Tensor:
        """Return a weight by its checkpoint name: the very tensor that the peer computes with."""
        tensor: torch.Tensor = self._tensors[name]
        return tensor

    def read_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.get(name))

    def choose(self, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> None:
        """Keep the faster attention implementation; this warms both up, too."""
        seconds = {}
        for attention in ATTENTIONS:
            self.attention = attention
            self.decode(prompts, 2)
            run = self.decode(prompts, new_tokens)
            seconds[attention] = sum(step.seconds for step in run.steps)
        self.attention = min(seconds, key=seconds.__getitem__)

    def decode(self, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> DecodeRun:
        """Prefill and decode; timing starts at the last sequence's first token."""
        self._model.set_attn_implementation(self.attention)
        ids = torch.tensor(prompts, device=self._model.device)
        watch = TokenTimes()
        output = generate_greedy(
            self._model, ids, new_tokens, watch, cache_implementation=self.cache
        )
        times = watch.times
        return DecodeRun(
            steps=tuple(Step(later - earlier) for earlier, later in itertools.pairwise(times)),
            tokens=tuple(tuple(row) for row in output[:, ids.shape[1] :].tolist()),
        )
