"""What `bench numerics` runs: every prompt by the reference and by all variants, and the cost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import Internal
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.planning.plan import RestoreMethod
from splitpoint.shapes import DataType, Encoding, Numerics
from splitpoint_cli.bench.numerics.costs import measure_costs
from splitpoint_cli.bench.numerics.host import NumericsHost
from splitpoint_cli.bench.numerics.report import (
    Answer,
    Cost,
    NumericsResults,
    NumericsWorkload,
    VariantResult,
)
from splitpoint_cli.bench.numerics.variants import BATCH, REFERENCE, Cached, Split, variants
from splitpoint_cli.bench.shared.kernels import use_worker_kernels
from splitpoint_cli.bench.shared.passages import beginnings, held_back_files
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.texts import Prompts, random_prompts
from splitpoint_cli.output import duration_text
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.choice import choose_device
from worker_service.kernels.choice import in_use
from worker_service.model.decoder import Decoder
from worker_service.model.span_attention import kernels_of
from worker_service.numerics.self_check import dependence
from worker_service.numerics.verdict import WorkerNumerics, decide, obstacle

LEAST_PROMPT = 8


def run_all(workload: NumericsWorkload, progress: Progress) -> NumericsResults:
    """Compare all variants with the reference, then measure the cost.

    What ended the comparison early, if anything, is part of the results.
    """
    device, folder = choose_device(workload.device), Path(workload.model)
    if device.type == "cpu":
        torch.set_num_threads(workload.threads)
    data_type = DataType(workload.dtype)
    config = read_decoder(folder, data_type)
    kernels = use_worker_kernels(
        device,
        data_type,
        [config.shape.head_dim],
        wish=workload.kernels,
        numerics=Numerics.INVARIANT,
    )
    progress.say(f"{config.shape.name} in {workload.dtype}: loading weights, cutting prompts")
    prompts = draw_prompts(workload, folder, config.shape.vocabulary_size)
    model = Decoder.load(folder, device, TORCH_TYPES[data_type])
    numerics = _numerics(model, workload.page_tokens)
    error, fast_kernels = "", ""
    costs: list[Cost] = []
    with closing(NumericsHost(model, workload)) as host:
        try:
            results = compare_all(host, prompts, workload.prompts, progress)
        except Unfinished as unfinished:
            results, error = unfinished.results, unfinished.message
    if not error:
        fast_kernels, costs = measure_costs(workload, device, progress)
    return NumericsResults(
        config.shape.name,
        kernels,
        numerics.numerics.value,
        numerics.reason,
        results,
        fast_kernels,
        costs,
        error,
    )


def _numerics(model: Decoder, page_tokens: int) -> WorkerNumerics:
    """Return what a worker of this model says of its numerics at its start."""
    against = obstacle(
        Numerics.INVARIANT,
        is_gpu=model.device.type == "cuda",
        encoding=Encoding.NATIVE,
        kernels=in_use(),
        has_triton=kernels_of(model.device) is not None,
    )
    return decide(AUTO, obstacle=against, check=partial(dependence, model, page_tokens))


def draw_prompts(workload: NumericsWorkload, folder: Path, vocabulary_size: int) -> Prompts:
    """Return prompts of LEAST_PROMPT to `workload.prompt` tokens: at least BATCH, so that each one
    has 15 others. Passages of a text, or random tokens for a checkpoint without a tokenizer."""
    count = max(workload.prompts, BATCH)
    if Tokenizer.load(folder) is None:
        whole = random_prompts(vocabulary_size, count, workload.prompt, workload.seed)
    else:
        whole = beginnings(held_back_files(), folder, count, workload.prompt)
    draw = random.Random(workload.seed)
    lengths = (draw.randint(LEAST_PROMPT, workload.prompt) for _ in whole)
    return tuple(each[:length] for each, length in zip(whole, lengths, strict=True))


class Unfinished(Internal):
    """A variant failed, or did not take its way; `results` are those that were compared before."""

    def __init__(self, why: str, results: list[VariantResult]) -> None:
        super().__init__(why)
        self.results = [each for each in results if each.answers]


def compare_all(
    host: NumericsHost, prompts: Prompts, count: int, progress: Progress
) -> list[VariantResult]:
    """Return the results of all variants for the first `count` prompts.

    The prompts go in groups through all variants, so that the store needs room for one group.
    Raises Unfinished.
    """
    results = [VariantResult(each) for each in variants(has_activations=host.has_activations)]
    reference = VariantResult(REFERENCE)
    groups = [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
    work = [(group, each) for group in groups for each in (reference, *results)]
    try:
        _compare(host, prompts, work, reference, progress)
        for result in results:
            check_work(result)
    except Internal as error:
        raise Unfinished(error.message, results) from error
    return results


def _compare(
    host: NumericsHost,
    prompts: Prompts,
    work: Sequence[tuple[range, VariantResult]],
    reference: VariantResult,
    progress: Progress,
) -> None:
    """Compute groups of prompts by variants, and compare them with those by the reference."""
    wanted: dict[int, Answer] = {}
    began = time.monotonic()
    for number, (group, result) in enumerate(progress.track("groups by variants", work)):
        # A smaller group is filled up with other prompts; their answers are not compared.
        filled = [index % len(prompts) for index in range(group.start, group.start + BATCH)]
        is_filled = result is reference or not result.variant.is_alone
        indices = filled if is_filled else group
        found = host.run(result.variant, prompts, indices, wanted, result.work)
        if result is reference:
            wanted = found
        for index in group:
            result.compare(index, len(prompts[index]), found[index], wanted[index])
        if not number:
            seconds = time.monotonic() - began
            progress.say(
                f"the first of {len(work)} took {duration_text(seconds)}: all take about "
                f"{duration_text(seconds * len(work))} at most; fewer --prompts take less"
            )


def check_work(result: VariantResult) -> None:
    """Raise Internal if a variant's way was not taken."""
    variant, work = result.variant, result.work
    needed = {
        "recomputed": variant.method is RestoreMethod.TOKENS,
        "loaded": variant.is_warm and not variant.is_streamed and variant.split is not Split.ALL,
        "rebuilt": variant.split is not Split.NONE and not variant.is_streamed,
        "streamed_loaded": variant.is_streamed and variant.split is not Split.ALL,
        "streamed_rebuilt": variant.is_streamed and variant.split is not Split.NONE,
        "on_device": variant.cached is Cached.ON_DEVICE,
        "drafted": bool(variant.draft_tokens),
    }
    missing = [name for name, is_needed in needed.items() if is_needed and not getattr(work, name)]
    if missing:
        raise Internal(f"{variant.name}: nothing was {', '.join(missing)}")
