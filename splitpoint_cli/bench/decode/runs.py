"""The contenders of `bench decode`: our engine, and transformers' generate.

All run the same weights, written once as a random checkpoint by transformers.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType
from splitpoint_cli.bench.decode.report import OURS, Run, Workload
from splitpoint_cli.bench.shared.engine_memory import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    exact_memory,
)
from splitpoint_cli.bench.shared.engine_runs import admission_of, outputs_until_idle
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.transformers_peer import (
    ATTENTIONS,
    TokenTimes,
    generate_greedy,
    random_model,
)
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.engine.engine import Engine
from worker_service.model.decoder import Decoder
from worker_service.startup import choose_device

CACHES = ("dynamic", "static")
WARM_UP_TOKENS = 8


class Contender(Protocol):
    """Answers prompts."""

    def run(self, prompts: torch.Tensor, new_tokens: int) -> Run: ...


class OurWorker:
    """The worker's engine with the settings it has by default, without gRPC or a store."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        dtype = TORCH_TYPES[DataType(workload.dtype)]
        device = choose_device(workload.device)
        model = Decoder.load(folder, device, dtype)
        layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK_TOKENS, has_activations=False)
        # A page more of each sequence than its tokens fill.
        memory = exact_memory(
            model.shape,
            layout,
            weight_bytes=model.weight_bytes,
            batch=workload.batch,
            tokens=workload.prompt + workload.new + CHUNK_TOKENS,
        )
        self._engine = Engine(
            model,
            DeviceCache(layout, memory, device),
            max_batch_size=workload.batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            # Each run computes its prompts.
            shares_prefixes=False,
        )

    def run(self, prompts: torch.Tensor, new_tokens: int) -> Run:
        engine = self._engine
        tokens: dict[str, list[int]] = {}
        first_seconds, before = 0.0, 0
        started = time.perf_counter()
        for index, prompt in enumerate(prompts.tolist()):
            engine.admit(admission_of(str(index), prompt, new_tokens))
        for output in outputs_until_idle(engine):
            for event in output.tokens:
                tokens.setdefault(event.key[0], []).append(event.choice.token_id)
            if not before and len(tokens) == len(prompts):
                first_seconds = time.perf_counter() - started
                before = sum(len(each) for each in tokens.values())
        seconds = time.perf_counter() - started
        ordered = tuple(tuple(tokens[str(index)]) for index in range(len(prompts)))
        return Run(seconds, first_seconds, before, ordered)


class Transformers:
    """`generate` with one of its caches and one of its attention implementations."""

    def __init__(self, model: Any, cache: str, attention: str) -> None:
        self._model = model
        self._attention = attention
        self._cache = {} if cache == "dynamic" else {"cache_implementation": cache}

    def run(self, prompts: torch.Tensor, new_tokens: int) -> Run:
        self._model.set_attn_implementation(self._attention)
        prompts = prompts.to(self._model.device)
        watch = TokenTimes()
        started = time.perf_counter()
        output = generate_greedy(self._model, prompts, new_tokens, watch, **self._cache)
        seconds = time.perf_counter() - started
        answers = output[:, prompts.shape[1] :].tolist()
        return Run(
            seconds=seconds,
            first_token_seconds=watch.times[0] - started,
            tokens_before=len(answers),
            tokens=tuple(tuple(answer) for answer in answers),
        )


def run_all(workload: Workload, progress: Progress) -> dict[str, list[Run]]:
    """Return all runs, by contender."""
    torch.set_num_threads(workload.threads)
    shape = replace(BUILT_IN_SHAPES[workload.shape], data_type=DataType(workload.dtype))
    generator = torch.Generator().manual_seed(workload.seed)
    prompts = torch.randint(
        shape.vocabulary_size, (workload.batch, workload.prompt), generator=generator
    )
    with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as folder:
        progress.say("writing a random checkpoint")
        # Drawn on the CPU: the same weights on each device.
        model = random_model(shape, workload.seed, torch.device("cpu"))
        model.save_pretrained(folder)
        model.to(choose_device(workload.device))
        ours = OurWorker(Path(folder), workload)
    contenders: dict[str, Contender] = {OURS: ours}
    for cache in CACHES:
        for attention in ATTENTIONS:
            contenders[f"transformers {cache} {attention}"] = Transformers(model, cache, attention)
    for contender in progress.track("warming up", [*contenders.values()]):
        contender.run(prompts, min(workload.new, WARM_UP_TOKENS))
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for name in progress.rounds("timed runs", contenders, workload.repeats):
        runs[name].append(contenders[name].run(prompts, workload.new))
    return runs
