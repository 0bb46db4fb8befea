"""The check at a worker's start: do equal rows give equal bits, whatever is beside them?"""

from __future__ import annotations

import itertools
import logging
import time

import torch

from worker_service.model.decoder import Decoder
from worker_service.numerics.attention_operators import attention_operators
from worker_service.numerics.model_operators import model_operators
from worker_service.numerics.operators import first_difference
from worker_service.numerics.sampling_operator import sampling_operator

log = logging.getLogger(__name__)


@torch.inference_mode()
def dependence(model: Decoder, chunk_tokens: int) -> str | None:
    """Return the first operator whose results depend on other rows, in words; None if none does.

    Takes about as long as a prefill of 2,000 tokens through one layer.
    """
    began = time.perf_counter()
    operators = itertools.chain(
        model_operators(model),
        attention_operators(model, chunk_tokens),
        [sampling_operator(model.shape.vocabulary_size, model.device)],
    )
    found = first_difference(operators)
    log.info("numerics checked in %.2g s: %s", time.perf_counter() - began, found or "invariant")
    return found
