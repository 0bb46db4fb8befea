"""The contenders of `bench decode`: our engine, and peers in children.

All run the same weights: random ones, or a checkpoint's, written once by transformers.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from splitpoint.host.processor import SPIN_COUNT
from splitpoint.shapes import DataType, ModelShape, WeightFormat
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.decode_report import (
    LIMIT,
    OURS,
    OURS_INT8,
    Measured,
    Run,
    Workload,
    too_slow,
)
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.limits import MemoryReads, random_model
from splitpoint_cli.bench.our_worker import OurWorker, load_decoder
from splitpoint_cli.bench.peer_child import Load, Work
from splitpoint_cli.bench.peers import PeerProcess, interpreters_of, start_peer
from splitpoint_cli.bench.texts import Prompts, random_prompts, text_prompts
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.choice import choose_device
from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.model import Layer

# A short run meets all code; a long prompt's own first costs are lost in a median.
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 4


# Answers prompts with this number of new tokens each.
Answer = Callable[[Prompts, int], Run]


def ask_peer(process: PeerProcess, variant: str, prompts: Prompts, new_tokens: int) -> Run:
    """Let a peer answer with one of its settings."""
    timing = process.run(Work(variant, [list(prompt) for prompt in prompts], new_tokens))
    return Run(
        seconds=timing.seconds,
        first_token_seconds=timing.first_token_seconds,
        tokens_before=timing.tokens_before,
        tokens=tuple(tuple(answer) for answer in timing.tokens),
    )


@dataclass(frozen=True, slots=True)
class Contenders:
    """All contenders over the same weights.

    Attributes:
        by_name: ours first, then ours with drafts.
        peer_of: the peer of each contender but these.
        versions: of the peers in children.
        models: ours, by the names of their plain contenders.
        workers: what runs them, by the same names.
    """

    by_name: dict[str, Answer] = field(default_factory=dict)
    peer_of: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    models: dict[str, Decoder] = field(default_factory=dict)
    workers: dict[str, OurWorker] = field(default_factory=dict)

    def add_ours(self, checkpoint: Path, workload: Workload) -> None:
        """Add plain decoding, and each draft method with the same weights."""
        model = load_decoder(checkpoint, workload)
        self.models[OURS] = model
        if workload.weights == WeightFormat.INT8.value:
            self.models[OURS_INT8] = load_decoder(checkpoint, workload, WeightFormat.INT8)
        for name, each in self.models.items():
            self.workers[name] = OurWorker(each, workload)
            self.by_name[name] = self.workers[name].run
        for method in workload.speculate:
            worker = OurWorker(model, workload, DraftMethod(method), checkpoint)
            self.by_name[f"{OURS} {method}"] = worker.run

    def add_peer(self, peer: str, process: PeerProcess) -> None:
        self.versions[peer] = process.version
        for variant in process.variants:
            name = f"{peer} {variant}".strip()
            self.by_name[name] = partial(ask_peer, process, variant)
            self.peer_of[name] = peer


@contextmanager
def started(
    workload: Workload, shape: ModelShape, peer_pythons: Sequence[Path], progress: Progress
) -> Iterator[Contenders]:
    """Load our models and start the peers' children; end these afterwards."""
    contenders = Contenders()
    with ExitStack() as children:
        with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as folder:
            progress.say("writing a checkpoint for all contenders")
            _write_model(workload, shape, Path(folder))
            contenders.add_ours(Path(folder), workload)
            for peer in workload.peers:
                progress.say(f"starting {peer}")
                load = Load(
                    peer=peer,
                    checkpoint=folder,
                    data_type=workload.dtype,
                    threads=workload.threads,
                    batch=workload.batch,
                    tokens=workload.prompt + workload.new,
                    device=str(choose_device(workload.device)),
                )
                process = start_peer(load, interpreters_of(peer_pythons))
                children.callback(process.close)
                contenders.add_peer(peer, process)
        yield contenders


def run_all(
    workload: Workload,
    shape: ModelShape,
    text: Path | None,
    peer_pythons: Sequence[Path],
    progress: Progress,
) -> Measured:
    """Return what all runs gave. The memory is read in every round, beside the contenders."""
    torch.set_num_threads(workload.threads)
    prompts = _prompts(workload, shape, text)
    with started(workload, shape, peer_pythons, progress) as contenders:
        runs, reads = _timed_runs(contenders, workload, prompts, progress)
        progress.say("timing the parts of a step")
        parts = contenders.workers[OURS].parts(prompts, workload.new)
        perplexities: dict[str, float] = {}
        if text is not None and len(contenders.models) > 1:
            for name in progress.track("perplexity", [*contenders.models]):
                perplexities[name] = perplexity(contenders.models[name], prompts)
    # K and V grow by a token in each step.
    mean_tokens = workload.prompt + workload.new / 2
    return Measured(
        runs=runs,
        peer_of=contenders.peer_of,
        read_bytes_per_second=reads.bytes_per_second,
        step_bytes=shape.decode_step_bytes(workload.batch, mean_tokens),
        versions=contenders.versions,
        spin_count=os.environ.get(SPIN_COUNT, ""),
        perplexities=perplexities,
        cache_bytes=int(workload.batch * mean_tokens * shape.kv_bytes_per_token),
        parts=parts,
    )


def _timed_runs(
    contenders: Contenders, workload: Workload, prompts: Prompts, progress: Progress
) -> tuple[dict[str, list[Run]], MemoryReads]:
    """Warm up, then run in turns. Raises the errors of a contender.

    A peer's settings that are clearly slower than its fastest run in the first round only.
    """
    reads = MemoryReads(choose_device(workload.device))
    by_name = contenders.by_name
    short = tuple(prompt[:WARM_UP_PROMPT] for prompt in prompts)
    for answer in progress.track("warming up", [*by_name.values()]):
        answer(short, min(workload.new, WARM_UP_TOKENS))
    runs: dict[str, list[Run]] = {name: [] for name in by_name}
    slow: set[str] = set()
    for name in progress.rounds("timed runs", [*by_name, LIMIT], workload.repeats):
        if name == LIMIT:
            reads.measure()
        elif name not in slow:
            runs[name].append(by_name[name](prompts, workload.new))
            if all(len(each) == 1 for each in runs.values()):
                slow = too_slow(runs, contenders.peer_of)
    return runs, reads


def _prompts(workload: Workload, shape: ModelShape, text: Path | None) -> Prompts:
    if text is not None:
        return text_prompts(text, Path(workload.model), workload.batch, workload.prompt)
    return random_prompts(shape.vocabulary_size, workload.batch, workload.prompt, workload.seed)


def _write_model(workload: Workload, shape: ModelShape, folder: Path) -> None:
    """Save transformers' model as one file in the type that is computed with."""
    if workload.model:
        dtype = TORCH_TYPES[DataType(workload.dtype)]
        model: Any = AutoModelForCausalLM.from_pretrained(workload.model, dtype=dtype)
        model.eval()
    else:
        # Drawn on the CPU: the same weights on each device.
        model = random_model(shape, workload.seed, torch.device("cpu"))
    model.save_pretrained(folder, max_shard_size="1TB")


@torch.inference_mode()
def perplexity(model: Decoder, passages: Prompts) -> float:
    """Return e to the mean negative log-probability of all tokens but each passage's first.

    Each passage is read by itself, teacher-forced; all weights are on the device. Attention is by
    torch's products, whatever the worker's kernel is: models that are compared differ in their
    weights only.
    """
    total, count = 0.0, 0
    for passage in passages:
        logits = _logits(model, passage)[:-1].double()
        targets = torch.tensor(passage[1:], device=logits.device)
        chosen = logits.log_softmax(-1).gather(1, targets[:, None])
        total -= float(chosen.sum())
        count += len(targets)
    return math.exp(total / count)


def _logits(model: Decoder, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the logits after each token, fp32 `[T, vocabulary]`."""

    def attend(
        _index: int,
        layer: Layer,
        _inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        return prefill_alone(
            queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
        )

    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    return model.logits(model.run(ids, positions, attend))
