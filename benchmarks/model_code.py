"""Time decoding by transformers' code in our engine, beside our own decoder and `generate`.

Each model is a random checkpoint of about 150 million parameters that a step reads: a Llama and a
Qwen3, and a Phi-3 and a Qwen3 with experts, which our own decoder does not have. `generate` runs
in a process of its own, with each of its caches, attentions and implementations of experts; the
two settings that are fastest in a trial run in all rounds, and the faster one counts. Contenders
alternate. All of it takes about 6 minutes on 2 cores.

    python -m benchmarks.model_code [--models NAME,...] [--dtypes TYPE,...] [--batches N,...]
        [--rounds N] [--threads N] [--json] [--output FILE]

The last line of the table of each model says what a step reads, and how fast the memory is.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.host.processor import SPIN_COUNT
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import DataType, WeightFormat
from splitpoint_cli.bench.decode_report import Run, Workload
from splitpoint_cli.bench.decode_runs import ask_peer
from splitpoint_cli.bench.engine import use_worker_kernels
from splitpoint_cli.bench.harness import Progress, thread_count
from splitpoint_cli.bench.limits import MemoryReads
from splitpoint_cli.bench.our_worker import OurWorker
from splitpoint_cli.bench.peer_child import Load
from splitpoint_cli.bench.peers import TRANSFORMERS, PeerProcess, interpreters_of, start_peer
from splitpoint_cli.bench.texts import random_prompts
from worker_service.device.cache import TORCH_TYPES
from worker_service.startup.model_source import source_of

OWN, OURS, GENERATE = "own decoder", "transformers' code", "generate"
PROMPT_TOKENS, NEW_TOKENS = 32, 24
# Of a trial; some settings take a minute for a long prompt.
TRIAL_PROMPT, TRIAL_TOKENS = 4, 6
# Settings of `generate` that run in all rounds.
KEPT_SETTINGS = 2
_COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 352}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": _EXPERTS,
}
_OWN_FAMILIES = ("llama", "qwen3")

Answer = Callable[..., Run]


def config_of(family: str) -> PreTrainedConfig:
    """Return the configuration of one of MODELS."""
    kind: Any = CONFIG_MAPPING[family]
    made: PreTrainedConfig = kind(**_COMMON, **MODELS[family])
    return made


def step_weight_bytes(config: Any, batch: int, element_bytes: int) -> int:
    """Return the bytes of matrices that a step reads, with experts that are chosen at random."""
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM
        tensors = dict(make.from_config(config).named_parameters())
    size: int = sum(each.numel() for each in tensors.values())
    experts = sum(each.numel() for name, each in tensors.items() if ".experts." in name)
    if experts:
        unread = (1 - config.num_experts_per_tok / config.num_experts) ** batch
        size -= int(unread * experts)
    return size * element_bytes


def measured(
    family: str, dtype: str, batch: int, rounds: int, threads: int, progress: Progress
) -> dict[str, Any]:
    """Return seconds of a step by contender, and what is compared with what."""
    config, data_type = config_of(family), DataType(dtype)
    workload = Workload(
        *(family, dtype, batch, PROMPT_TOKENS, NEW_TOKENS, rounds, "cpu"), threads=threads, seed=0
    )
    prompts = random_prompts(config.vocab_size, batch, PROMPT_TOKENS, 0)
    device, reads = torch.device("cpu"), MemoryReads(torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as name:
        folder = Path(name)
        torch.manual_seed(0)
        make: Any = AutoModelForCausalLM
        make.from_config(config, dtype=TORCH_TYPES[data_type]).save_pretrained(folder)
        kernels = use_worker_kernels(device, data_type, [config.head_dim])
        answers: dict[str, Answer] = {}
        for title, backend in ((OWN, ModelBackend.OWN), (OURS, ModelBackend.TRANSFORMERS)):
            if backend is ModelBackend.OWN and family not in _OWN_FAMILIES:
                continue
            source = source_of(folder, data_type, backend)
            model = source.load(device, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
            answers[title] = OurWorker(model, workload).run
        load = Load(TRANSFORMERS, name, dtype, threads, batch, PROMPT_TOKENS + NEW_TOKENS)
        process = start_peer(load, interpreters_of([]))
    try:
        for answer in answers.values():
            answer(prompts, TRIAL_TOKENS)
        answers |= _fastest(process, prompts)
        runs: dict[str, list[Run]] = {title: [] for title in answers}
        for title in progress.rounds(f"{family} {dtype} x {batch}", [*answers, ""], rounds):
            if title:
                runs[title].append(answers[title](prompts, NEW_TOKENS))
            else:
                reads.measure()
    finally:
        process.close()
    steps = {
        title: sorted(batch / run.decode_tokens_per_second for run in each)
        for title, each in runs.items()
    }
    medians = {title: statistics.median(each) for title, each in steps.items()}
    peers = [title for title in medians if title.startswith(GENERATE)]
    peer = min(peers, key=medians.__getitem__)
    step_bytes = step_weight_bytes(config, batch, data_type.size)
    return {
        "model": family,
        "dtype": dtype,
        "batch": batch,
        "kernels": kernels,
        "version": process.version,
        "step_seconds": {
            title: {"median": medians[title], "range": [each[0], each[-1]]}
            for title, each in steps.items()
        },
        "ratio_to_own": medians[OWN] / medians[OURS] if OWN in medians else None,
        "ratio_to_generate": medians[peer] / medians[OURS],
        "tokens_agree": runs[OURS][0].tokens == runs[peer][0].tokens,
        "peers_agree": len({each[0].tokens for title, each in runs.items() if title in peers}) == 1,
        "step_weight_bytes": step_bytes,
        "read_bytes_per_second": reads.bytes_per_second,
        "limit_seconds": step_bytes / reads.bytes_per_second,
    }


def _fastest(process: PeerProcess, prompts: Any) -> dict[str, Answer]:
    """Return the settings of `generate` that decode fastest in a trial, by name."""
    seconds: dict[str, float] = {}
    short = tuple(prompt[:TRIAL_PROMPT] for prompt in prompts)
    for variant in process.variants:
        ask_peer(process, variant, short, 2)
        run = ask_peer(process, variant, short, TRIAL_TOKENS)
        seconds[variant] = 1 / run.decode_tokens_per_second
    kept = sorted(seconds, key=seconds.__getitem__)[:KEPT_SETTINGS]
    return {f"{GENERATE} {variant}": partial(ask_peer, process, variant) for variant in kept}


def show(report: Mapping[str, Any]) -> None:
    """Print a paragraph for each model, type and batch."""
    print(f"{report['hardware']}, {report['threads']} threads, commit {report['commit']}")
    for case in report["cases"]:
        print(f"\n{case['model']} {case['dtype']}, {case['batch']} sequences ({case['kernels']})")
        for title, step in case["step_seconds"].items():
            low, high = step["range"]
            print(
                f"  {title:<36} {1e3 * step['median']:7.2f} ms a step "
                f"({1e3 * low:.2f} to {1e3 * high:.2f})"
            )
        print("  " + "; ".join(_comparisons(case)))


def _comparisons(case: Mapping[str, Any]) -> Iterator[str]:
    if case["ratio_to_own"] is not None:
        yield f"{case['ratio_to_own']:.2f} x {OWN}"
    yield f"{case['ratio_to_generate']:.2f} x {GENERATE} at its best"
    near_tie = "" if case["peers_agree"] else f" (as between the settings of {GENERATE})"
    yield "equal tokens" if case["tokens_agree"] else f"OTHER TOKENS{near_tie}"
    yield (
        f"a step reads {case['step_weight_bytes'] / 1e6:.0f} MB of weights: "
        f"{1e3 * case['limit_seconds']:.1f} ms at {case['read_bytes_per_second'] / 1e9:.1f} GB/s"
    )


def main() -> None:
    parser = parser_of(__doc__)

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", type=names, default=[*MODELS])
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=names, default=["1", "8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    arguments = parser.parse_args()
    quiet: Any = logging
    quiet.disable_progress_bar()
    threads = thread_count(arguments.threads)
    torch.set_num_threads(threads)
    cases = [
        measured(family, dtype, int(batch), arguments.rounds, threads, Progress())
        for family in arguments.models
        for dtype in arguments.dtypes
        for batch in arguments.batches
    ]
    facts = {"threads": threads, "spin_count": os.environ.get(SPIN_COUNT, ""), "cases": cases}
    finish(arguments, facts, show)


if __name__ == "__main__":
    main()
