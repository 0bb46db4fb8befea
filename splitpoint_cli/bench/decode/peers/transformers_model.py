"""transformers as a peer: `generate` with each of its caches and attention implementations.

Imported in the peer's own interpreter; `module` is the package `transformers`. It generates as
`generate_greedy` of bench/shared/transformers_peer.py does, which this interpreter may not have.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Work

CACHES = ("dynamic", "static")
ATTENTIONS = ("sdpa", "eager")


class TransformersModel:
    """A causal language model and its `generate`."""

    def __init__(self, module: Any, load: Load) -> None:
        torch = self._torch = importlib.import_module("torch")
        torch.set_num_threads(load.threads)
        module.utils.logging.disable_progress_bar()
        model = module.AutoModelForCausalLM.from_pretrained(
            Path(load.checkpoint), dtype=getattr(torch, load.data_type)
        )
        self._model = model.to(load.device).eval()
        self._times = _times_of(module, torch)
        self.variants = tuple(f"{cache} {how}" for cache in CACHES for how in ATTENTIONS)
        self.version = f"transformers {module.__version__}, torch {torch.__version__}"

    def run(self, work: Work) -> Timing:
        cache, attention = work.variant.split()
        self._model.set_attn_implementation(attention)
        ids = self._torch.tensor(work.prompts, device=self._model.device)
        watch = self._times()
        started = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=work.new_tokens,
            min_new_tokens=work.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[watch],
            **({} if cache == "dynamic" else {"cache_implementation": cache}),
        )
        answers = output[:, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - started
        # All sequences have their first token at once.
        return Timing(seconds, watch.times[0] - started, len(answers), answers)


def _times_of(module: Any, torch: Any) -> Any:
    """Return the class of a stopping criterion that stops nothing and notes when it was called."""

    class Times(module.StoppingCriteria):  # type: ignore[misc]
        """Times at which all sequences had another token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return Times
