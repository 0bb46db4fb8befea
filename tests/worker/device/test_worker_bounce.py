"""Copies through pinned buffers: the bytes, and that no buffer is filled before it was read."""

from __future__ import annotations

import random

import pytest
import torch
from stream_double import StreamDouble

from worker_service.device.bounce import Bounce

CUDA = torch.device("cuda")


class LateBounce(Bounce):
    """Copies happen when the double's stream gets to them."""

    def __init__(self, cuda: StreamDouble) -> None:
        super().__init__(CUDA, cuda, buffer_bytes=96, pin_memory=False)
        self.double = cuda

    def _send(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        def happen() -> None:
            target.copy_(buffer)

        self.double.launch(happen, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_whatever_is_late(seed: int) -> None:
    cuda = StreamDouble(random.Random(seed))
    bounce = LateBounce(cuda)
    sources = [
        torch.randn(rows, 3, 5, generator=torch.Generator().manual_seed(rows)).to(dtype)
        for rows in (1, 2, 7, 40)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    targets = [torch.zeros_like(source) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        bounce.copy(target, source)
    assert not torch.equal(targets[-1], sources[-1]), "the host waited for the last copies"
    end = cuda.Event()
    end.record(cuda.default)
    end.synchronize()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pageable_memory_reaches_a_gpu_through_the_buffers() -> None:
    device = torch.device("cuda:0")
    bounce = Bounce(device, buffer_bytes=1 << 20)
    source = torch.randn(3, 1 << 20)
    target = torch.zeros(5, 1 << 20, device=device)
    bounce.copy(target[1:4], source)
    torch.cuda.synchronize(device)
    assert torch.equal(target[1:4].cpu(), source)
    assert not target[0].any()
    assert not target[4].any()
