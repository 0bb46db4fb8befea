"""What contenders are measured against: the memory's read bandwidth, and transformers' `generate`.

No decode step can be shorter than reading its bytes. transformers runs in this process, with a
model of random weights, greedily and to full length. It hands the same tensors to our decoder, so
that nothing is written to disk and both compute with the same numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from splitpoint.checkpoint.decoder import plain_config
from splitpoint.shapes import ModelShape
from splitpoint_cli.bench.offload_report import OffloadSample, Step
from splitpoint_cli.bench.peer_child import ATTENTIONS, TransformersModel, Work
from splitpoint_cli.bench.texts import Prompts
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.copies import large_zeros

# Far larger than any cache.
BUFFER_BYTES = 512 << 20


class MemoryReads:
    """A buffer on the device and the fastest of several reads of it, with torch's threads.

    Call `measure` several times during a run, so that the bandwidth is that of the same minutes
    as what is compared with it.

    Attributes:
        bytes_per_second: of the fastest read so far; 0 before the first.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        # Memory as weights and the cache have it.
        on_cpu = device.type == "cpu"
        empty = (
            large_zeros(buffer_bytes)
            if on_cpu
            else torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        )
        buffer = empty.view(torch.float32).fill_(1)
        self._device = device
        self._bytes = buffer.numel() * buffer.element_size()
        # Different processors read fastest in different reductions.
        self._reads: tuple[Callable[[], object], ...] = (
            lambda: torch.linalg.vector_norm(buffer),
            lambda: torch.dot(buffer, buffer),
            lambda: buffer.max(),
            lambda: buffer.sum(),
        )
        self.bytes_per_second = 0.0

    def measure(self, repeats: int = 3) -> float:
        """Read the buffer `repeats` times in each way; return `bytes_per_second`."""
        for read in self._reads:
            for _ in range(repeats):
                started = time.perf_counter()
                read()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                rate = self._bytes / (time.perf_counter() - started)
                self.bytes_per_second = max(self.bytes_per_second, rate)
        return self.bytes_per_second


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


class Peer:
    """`generate` with one kind of cache; a TensorSource of its own weights.

    Attributes:
        cache: which of transformers' caches.
        attention: the attention implementation that is used; `choose` tries both.
    """

    def __init__(
        self, shape: ModelShape, seed: int, device: torch.device, cache: str = "offloaded"
    ) -> None:
        model = random_model(shape, seed, device)
        self._peer = TransformersModel(model, transformers, torch)
        self._tensors = model.state_dict()
        self.cache = cache
        self.attention = ATTENTIONS[0]

    def get(self, name: str) -> torch.Tensor:
        """Return a weight by its checkpoint name: the very tensor that the peer computes with."""
        tensor: torch.Tensor = self._tensors[name]
        return tensor

    def read_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.get(name))

    def choose(self, prompts: Prompts, new_tokens: int) -> None:
        """Keep the faster attention implementation; this warms both up, too."""
        seconds = {}
        for attention in ATTENTIONS:
            self.attention = attention
            self.decode(prompts, 2)
            seconds[attention] = self.decode(prompts, new_tokens).seconds
        self.attention = min(seconds, key=seconds.__getitem__)

    def decode(self, prompts: Prompts, new_tokens: int) -> OffloadSample:
        """Prefill and decode; timing starts at the last sequence's first token."""
        work = Work(f"{self.cache} {self.attention}", [*map(list, prompts)], new_tokens)
        timing, times = self._peer.timed(work)
        return OffloadSample(
            steps=tuple(Step(later - earlier) for earlier, later in itertools.pairwise(times)),
            tokens=tuple(map(tuple, timing.tokens)),
        )
