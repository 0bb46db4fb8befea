"""llama.cpp as a peer: one batch of sequences through its C interface.

Imported in the peer's own interpreter; `module` is the package `llama_cpp`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy

from splitpoint_cli.bench.decode.peers.checkpoint import Array, Checkpoint
from splitpoint_cli.bench.decode.peers.gguf import write_llama
from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Unsupported, Work

_TYPE_FLOAT32, _TYPE_FLOAT16 = 0, 1
_PREFILL_TOKENS = 512
# A cache has whole blocks of tokens.
_CACHE_TOKENS = 256
PLAIN, FLASH = "", "flash attention"


class LlamaCppModel:
    """A model and a context for each kind of attention that it has for these types.

    K and V are float32, or float16 beside bfloat16 weights: its fastest type of that size.
    """

    def __init__(self, module: Any, load: Load) -> None:
        self._api = module
        self._load = load
        self.version = f"llama-cpp-python {module.__version__}"
        checkpoint = Checkpoint(Path(load.checkpoint))
        self._vocabulary_size = int(checkpoint.config["vocab_size"])
        path = Path(load.scratch, "model.gguf")
        write_llama(checkpoint, path)
        self._api.llama_backend_init()
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        # Read into memory of its own: it may lay matrices out anew.
        settings.use_mmap = False
        self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise Unsupported("it does not load the converted model")
        made = {variant: self._context(variant) for variant in (PLAIN, FLASH)}
        self._contexts = {variant: context for variant, context in made.items() if context}
        if not self._contexts:
            raise Unsupported("it makes no context of this size")
        self.variants = tuple(self._contexts)
        most = load.batch * load.tokens
        self._batch = self._api.llama_batch_init(most, 0, 1)

    def _context(self, variant: str) -> Any:
        """Return a context with this attention; None if it refuses."""
        load = self._load
        settings = self._api.llama_context_default_params()
        rows = -(-load.tokens // _CACHE_TOKENS) * _CACHE_TOKENS
        settings.n_ctx = load.batch * rows
        settings.n_batch = load.batch * load.tokens
        settings.n_ubatch = _PREFILL_TOKENS
        settings.n_seq_max = load.batch
        settings.n_threads = settings.n_threads_batch = load.threads
        kind = _TYPE_FLOAT32 if load.data_type == "float32" else _TYPE_FLOAT16
        settings.type_k = settings.type_v = kind
        # Sequences attend to their own rows only.
        settings.kv_unified = False
        settings.flash_attn_type = int(variant == FLASH)
        return self._api.llama_init_from_model(self._model, settings)

    def run(self, work: Work) -> Timing:
        context = self._contexts[work.variant]
        self._forget(context)
        started = time.perf_counter()
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(work.prompts)
            for position, token in enumerate(prompt)
        ]
        chosen = self._decode(context, rows)
        first = time.perf_counter() - started
        answers = [[token] for token in chosen]
        for step in range(work.new_tokens - 1):
            chosen = self._decode(
                context,
                [
                    (token, len(work.prompts[number]) + step, number, True)
                    for number, token in enumerate(chosen)
                ],
            )
            for answer, token in zip(answers, chosen, strict=True):
                answer.append(token)
        seconds = time.perf_counter() - started
        return Timing(seconds, first, len(answers), answers)

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, is wanted); return the wanted rows' choices."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, number, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = number
            batch.logits[index] = wanted
        status = self._api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [
            int(self._logits(context, index).argmax())
            for index, (_, _, _, wanted) in enumerate(rows)
            if wanted
        ]

    def _logits(self, context: Any, index: int) -> Array:
        pointer = self._api.llama_get_logits_ith(context, index)
        found: Array = numpy.ctypeslib.as_array(pointer, (self._vocabulary_size,))
        return found

    def _forget(self, context: Any) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
