"""Decoding steps as CUDA graphs beside eager ones: the same tokens, and the time of a step.

    python -m benchmarks.gpu_graphs [--device cuda] [--tiny] [--json] [--output FILE]

A random model decodes resident requests of 512 tokens, at each batch size with graphs, eagerly,
and eagerly with the padding rows of graphs, whose tokens must be equal. A further case verifies
drafts: several rows of each sequence in a step, from a drafter that knows the text and errs in
every third guess. A CPU has no graphs: it proves the script.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, DataType
from splitpoint.speculation import DraftMethod, Speculation
from splitpoint_cli.bench.engine import admission_of
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import divide
from worker_service.drafts.drafter import TargetKey
from worker_service.engine import sequence as engine_sequence
from worker_service.engine.engine import Engine
from worker_service.graphs.support import graph_obstacle, graphs_of
from worker_service.model.decoder import Decoder

CHUNK = 64
PROMPT = 512
DRAFTS = 4
# The first steps that decode the whole batch: kernels are built, a graph recorded.
WARM_UP_STEPS = 6
GRAPH_BYTES = 1 << 30


class Way(StrEnum):
    """How decoding steps are computed."""

    EAGER = "eager"
    # Eager, with the rows of a graph: its tokens are those of graphs to the bit.
    PADDED = "padded"
    GRAPHS = "graphs"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(BUILT_IN_SHAPES))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to prove the script")
    given = parser.parse_args()
    device = torch.device(given.device)
    shape = BUILT_IN_SHAPES["opt-125m" if given.tiny else given.shape]
    dtype = torch.float32 if given.tiny else torch.bfloat16
    data_type = DataType.FLOAT32 if given.tiny else DataType.BFLOAT16
    shape = replace(shape, data_type=data_type, layer_count=2 if given.tiny else shape.layer_count)
    with torch.inference_mode():
        model = Decoder.random(DecoderConfig.of_shape(shape), 0, device, dtype)
        obstacle = graph_obstacle(device, dtype, shape.head_dim)
        cases = ((1, 0), (2, DRAFTS)) if given.tiny else ((1, 0), (8, 0), (32, 0), (8, DRAFTS))
        result = {
            "benchmark": "gpu graphs",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "shape": shape.name,
            "obstacle": obstacle,
            "cases": [
                case(model, batch, drafts, 8 if given.tiny else 60, has_graphs=obstacle is None)
                for batch, drafts in cases
            ],
        }
    finish(given, result, report)


def report(result: Mapping[str, Any]) -> None:
    """Print a line for each case."""
    for each in result["cases"]:
        rows = f"batch {each['batch']:>2}, {each['drafts']} drafts"
        for way, found in each["ways"].items():
            print(
                f"{rows} {way:<7} {found['step_milliseconds']:9.3f} ms a step, "
                f"{found['tokens_per_step']:5.2f} tokens"
            )
        if "graphs" not in each["ways"]:
            print(f"{rows} has no graphs: {result['obstacle']}")
        else:
            equal = "equal" if each["equal"] else "DIFFERENT"
            print(f"{rows} tokens are {equal}, {each['texts_as_eager']} texts those of eager steps")


def case(
    model: Decoder, batch: int, drafts: int, steps: int, *, has_graphs: bool
) -> dict[str, Any]:
    """Return step times and tokens of each way for one batch; `steps`: the fewest."""
    new_tokens = steps * (1 + drafts)
    rng = random.Random(batch)
    vocabulary = model.shape.vocabulary_size
    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(batch)]
    answers: list[list[int]] = []
    if drafts:
        answers = run(model, prompts, new_tokens, [], 0, Way.EAGER)["tokens"]
    wanted = list(Way) if has_graphs else [Way.EAGER]
    ways = {way.value: run(model, prompts, new_tokens, answers, drafts, way) for way in wanted}
    texts = {name: found.pop("tokens") for name, found in ways.items()}
    graphs, eager = texts.get(Way.GRAPHS.value, []), texts[Way.EAGER.value]
    return {
        "batch": batch,
        "drafts": drafts,
        "equal": graphs == texts.get(Way.PADDED.value, []),
        # Products of other sizes round otherwise, and random logits are often nearly equal.
        "texts_as_eager": sum(ours == theirs for ours, theirs in zip(graphs, eager, strict=False)),
        "ways": ways,
    }


def run(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    answers: list[list[int]],
    drafts: int,
    way: Way,
) -> dict[str, Any]:
    """Return the tokens, and the median time of the steps that decode the whole batch."""
    engine = engine_of(model, len(prompts), new_tokens, answers, drafts, way)
    for index, prompt in enumerate(prompts):
        request = admission_of(str(index), prompt, new_tokens)
        if drafts:
            speculation = Speculation(DraftMethod.SUFFIX, num_speculative_tokens=drafts)
            request = replace(request, speculation=speculation)
        engine.admit(request)
    tokens: dict[str, list[int]] = {}
    times: list[float] = []
    counts: list[int] = []
    while True:
        started = time.perf_counter()
        output = engine.step()
        seconds = time.perf_counter() - started
        for finished in output.finishes:
            if finished.error is not None:
                raise finished.error
        for event in output.tokens:
            tokens.setdefault(event.key[0], []).append(event.choice.token_id)
        is_whole = len({event.key for event in output.tokens}) == len(prompts)
        if is_whole and output.step is not None and not output.step.prefilled_tokens:
            times.append(seconds)
            counts.append(len(output.tokens))
        if engine.is_idle:
            break
    graphs = engine.graphs
    if graphs is not None and graphs.obstacle is not None:
        raise RuntimeError(graphs.obstacle)
    return {
        "tokens": [tokens[str(index)] for index in range(len(prompts))],
        "step_milliseconds": round(1e3 * statistics.median(times[WARM_UP_STEPS:]), 4),
        "tokens_per_step": round(statistics.mean(counts[WARM_UP_STEPS:]), 3),
        "graphs": 0 if graphs is None else graphs.graph_count,
        "graph_bytes": 0 if graphs is None else graphs.size_bytes,
        "replayed_steps": 0 if graphs is None else graphs.counts.replayed,
    }


def engine_of(
    model: Decoder,
    batch: int,
    new_tokens: int,
    answers: list[list[int]],
    drafts: int,
    way: Way,
) -> Engine:
    """Return a worker's engine with a cache for the batch, without a store."""
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=False)
    limits: dict[str, Any] = {
        "weight_bytes": model.weight_bytes,
        "max_batch_size": batch,
        "max_batched_tokens": PROMPT,
        "has_store": False,
        "draft_tokens": batch * drafts,
        "graph_bytes": 0 if way is Way.EAGER else GRAPH_BYTES,
    }
    # Any large budget tells what is fixed.
    roomy = divide(model.shape, layout, budget_bytes=1 << 50, **limits)
    pages = max(2 * PROMPT // CHUNK + 4, batch * (-(-(PROMPT + new_tokens) // CHUNK) + 1))
    budget = roomy.weight_bytes + roomy.workspace_bytes + pages * roomy.page_bytes
    plan = divide(model.shape, layout, budget_bytes=budget, **limits)
    cache = DeviceCache(layout, plan, model.device)
    graphs = graphs_of(cache, [layer.window for layer in model.layers], max_batch_size=batch)
    if graphs is not None:
        graphs.is_full = way is Way.PADDED
    return Engine(
        model,
        cache,
        max_batch_size=batch,
        max_batched_tokens=PROMPT,
        drafters={DraftMethod.SUFFIX: Prompter(answers)} if drafts else {},
        graphs=graphs,
    )


class Prompter:
    """Drafts a known text, every third token of it wrong. Request i is answered by `answers[i]`."""

    method = DraftMethod.SUFFIX

    def __init__(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def propose(self, wanted: Sequence[tuple[engine_sequence.Sequence, int]]) -> list[list[int]]:
        """Return the next tokens of each target."""
        return [self._next(target, count) for target, count in wanted]

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        """Keep nothing of a sequence."""

    def _next(self, target: engine_sequence.Sequence, count: int) -> list[int]:
        done = len(target.tokens) - target.prompt_length
        guesses = self._answers[int(target.key[0])][done : done + count]
        return [guess if (done + i) % 3 else guess ^ 1 for i, guess in enumerate(guesses)]


if __name__ == "__main__":
    main()
