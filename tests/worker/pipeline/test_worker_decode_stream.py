"""Decoding beside copies: no part is filled before it was decoded, and joining waits for all."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from stream_double import StreamDouble

from worker_service.pipeline.chunk_loader import DecodeStream

CUDA = torch.device("cuda")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_are_decoded_before_they_are_filled_again(parts: int, seed: int) -> None:
    cuda = StreamDouble(random.Random(seed))
    decoder = DecodeStream(CUDA, parts, cuda)
    buffer = [-1] * parts
    decoded: list[int] = []
    copies = cuda.Stream(CUDA)

    def fetch(part: int, number: int) -> None:
        cuda.launch(lambda: buffer.__setitem__(part, number), 1.0)

    def decode(part: int) -> None:
        cuda.launch(lambda: decoded.append(buffer[part]), 1.0)

    with cuda.stream(copies):
        decoder.join()  # nothing to wait for
        for number in range(11):
            part = number % parts
            decoder.run(part, partial(fetch, part, number), partial(decode, part))
        decoder.join()
    end = cuda.Event()
    end.record(copies)
    assert cuda.synchronized == 0, "the host waited"
    end.synchronize()
    assert decoded == list(range(11))
    # Eleven copies, one decoding at the end: the others run beside copies.
    assert copies.now == (22.0 if parts == 1 else 12.0)
