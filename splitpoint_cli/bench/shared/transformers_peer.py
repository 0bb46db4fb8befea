"""transformers as the peer of benchmarks: a model of random weights, greedy to full length."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging as transformers_logging

from splitpoint.checkpoint.decoder import plain_config
from splitpoint.shapes import ModelShape
from worker_service.device.cache import TORCH_TYPES

ATTENTIONS = ("sdpa", "eager")


class TokenTimes(StoppingCriteria):
    """Note when all sequences had each token; never stop anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        # generate looks at a value on the device next, which waits all the same.
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def random_model(shape: ModelShape, seed: int, device: torch.device) -> Any:
    """Return transformers' model of this shape, with random weights on the device."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    fields = plain_config(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=TORCH_TYPES[shape.data_type]
        )
    return model.eval()


def generate_greedy(model: Any, ids: Any, new_tokens: int, watch: Any, **cache: str) -> Any:
    """Return int64 `[batch, prompt + new_tokens]` from ids of `[batch, prompt]` without padding.

    `watch`: a stopping criterion that stops nothing, called after each token. `cache`: options of
    `generate` for its cache.
    """
    return model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[watch],
        **cache,
    )
