"""The cost of structured output: of a token, of a mask, and of compiling a schema.

One engine with the bundled model decodes a batch again and again, in turns: free, and with a JSON
schema whose answers do not end. The masks are also computed alone, for the bundled vocabulary and
for one of 128,000 tokens that is made of it, along random answers.

    python -m benchmarks.structured [--rounds N] [--batches 1,8] [--tokens N] [--dtype TYPE]
        [--threads N] [--json] [--output FILE]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.shapes import ArenaLayout, DataType
from splitpoint.structured.grammar import GrammarKind, GrammarText, parser_limits
from splitpoint_cli.bench.shared.engine_runs import admission_of
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import commit, hardware
from splitpoint_cli.traces.statistics import quantile
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import divide
from worker_service.engine.engine import Engine
from worker_service.model.decoder import Decoder
from worker_service.structured.compiler import GrammarCompiler
from worker_service.structured.masks import MaskFiller, allowed_ids
from worker_service.structured.matcher import GrammarMatcher
from worker_service.structured.vocabulary import Vocabulary

CPU = torch.device("cpu")
PROMPT_TOKENS = 64
CHUNK_TOKENS = 64
WIDE = 128_000
# Masks of one timing, and rows of those that are computed together.
MASKS = 2000
ROWS = 64
SCHEMA = {
    "type": "array",
    # It does not end within a run.
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "size": {"type": "integer", "minimum": 0, "maximum": 99999},
            "share": {"type": "number"},
            "kind": {"enum": ["module", "class", "function"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "code", "size", "share", "kind", "tags"],
        "additionalProperties": False,
    },
}
GRAMMAR = GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Mean seconds of a run's decode steps, and of the masks of one of its tokens."""

    step_seconds: float
    mask_seconds: float


def engine_of(model: Decoder, batch: int, tokens: int) -> Engine:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK_TOKENS, has_activations=False)
    pages = batch * (-(-(PROMPT_TOKENS + tokens) // CHUNK_TOKENS) + 1)
    limits: Any = {"max_batch_size": batch, "max_batched_tokens": 512}
    roomy = divide(
        model.shape, layout, budget_bytes=1 << 50, weight_bytes=model.weight_bytes, **limits
    )
    plan = replace(roomy, page_count=max(pages, roomy.streamed_page_count))
    return Engine(model, DeviceCache(layout, plan, CPU), shares_prefixes=False, **limits)


def decode(
    engine: Engine, compiler: GrammarCompiler | None, batch: int, tokens: int, temperature: float
) -> Decoded:
    """Decode the batch once; steps that prefill are left out."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.model.shape.vocabulary_size
    for index in range(batch):
        prompt = torch.randint(3, vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
        asked = admission_of(str(index), prompt, tokens)
        sampling = replace(asked.sampling, temperature=temperature, seed=index)
        matcher = None if compiler is None else compiler.matcher(GRAMMAR, salt=b"")
        engine.admit(replace(asked, sampling=sampling), matcher=matcher)
    before, seconds, steps, chosen = replace(engine.mask_totals), 0.0, 0, 0
    while not engine.is_idle or not chosen:
        began = time.perf_counter()
        output = engine.step()
        if output.step is not None and not output.prefills and len(output.tokens) == batch:
            seconds += time.perf_counter() - began
            steps += 1
        chosen += len(output.tokens)
    after = engine.mask_totals
    masks = after.count - before.count
    return Decoded(seconds / steps, (after.seconds - before.seconds) / masks if masks else 0.0)


def compare(
    model: Decoder, compiler: GrammarCompiler, batch: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Free and constrained in turns, sampled at temperature 1 so that both choose alike."""
    engine = engine_of(model, batch, tokens)
    runs: dict[bool, list[Decoded]] = {False: [], True: []}
    for number in range(rounds + 1):
        for is_ruled in (False, True) if number % 2 else (True, False):
            found = decode(engine, compiler if is_ruled else None, batch, tokens, 1.0)
            if number:  # the first round warms up
                runs[is_ruled].append(found)
    free, ruled = (statistics.median(r.step_seconds for r in runs[each]) for each in (False, True))
    return {
        "batch": batch,
        "free_step_ms": 1e3 * free,
        "structured_step_ms": 1e3 * ruled,
        "overhead_us_per_token": 1e6 * (ruled - free) / batch,
        "mask_us_per_token": 1e6 * statistics.median(run.mask_seconds for run in runs[True]),
        "step_overhead": ruled / free - 1,
    }


class WideVocabulary(Vocabulary):
    """The bundled one and pairs of its tokens, up to WIDE."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, tokenizer.vocabulary_size)
        source, seen = random.Random(0), set(self._bytes)
        texts = [text for text in self._bytes if len(text) > 1]
        while len(self._bytes) < WIDE:
            pair = source.choice(texts) + source.choice(texts)
            if pair not in seen:
                seen.add(pair)
                self._bytes.append(pair)
        self.size = self.end_id = WIDE


def masks_alone(vocabulary: Vocabulary, progress: Progress) -> dict[str, Any]:
    """Time masks along random answers: one at a time, and of many answers at once."""
    from llguidance import LLMatcher

    guide, source = vocabulary.guide(), random.Random(1)
    began = time.perf_counter()
    inner = LLMatcher(guide, GRAMMAR.source(), log_level=0, limits=parser_limits())
    compile_seconds = time.perf_counter() - began
    times: dict[int, list[float]] = {1: [], ROWS: []}
    for rows, kept in times.items():
        filler = MaskFiller(vocabulary.size)
        matchers = [GrammarMatcher(inner.deep_copy(), ends=frozenset()) for _ in range(rows)]
        for _ in progress.track(f"masks of {rows}", range(MASKS // rows + 50)):
            began = time.perf_counter()
            masks = filler.fill([(each, ()) for each in matchers])
            kept.append((time.perf_counter() - began) / rows)
            for matcher, [mask] in zip(matchers, masks, strict=True):
                matcher.accept(int(source.choice(allowed_ids(mask, vocabulary.size))))
    return {
        "vocabulary": vocabulary.size,
        "compile_ms": 1e3 * compile_seconds,
        "mask_us": 1e6 * statistics.mean(times[1][10:]),
        "mask_p99_us": 1e6 * quantile(sorted(times[1][10:]), 0.99),
        f"mask_us_of_{ROWS}": 1e6 * statistics.mean(times[ROWS][10:]),
    }


def show(result: Mapping[str, Any]) -> None:
    print(f"{'batch':>5} {'free step':>11} {'structured':>11} {'a token more':>13} {'its mask':>9}")
    for case in result["decoding"]:
        print(
            f"{case['batch']:>5} {case['free_step_ms']:>8.2f} ms {case['structured_step_ms']:>8.2f}"
            f" ms {case['overhead_us_per_token']:>10.0f} us {case['mask_us_per_token']:>6.0f} us"
        )
    print(f"{'vocabulary':>10} {'compile':>9} {'mask':>8} {'p99':>8} {f'of {ROWS} at once':>15}")
    for case in result["masks"]:
        print(
            f"{case['vocabulary']:>10,} {case['compile_ms']:>6.1f} ms {case['mask_us']:>5.0f} us "
            f"{case['mask_p99_us']:>5.0f} us {case[f'mask_us_of_{ROWS}']:>12.0f} us"
        )


def measured(
    folder: Path, data_type: DataType, batches: Sequence[int], tokens: int, rounds: int
) -> dict[str, Any]:
    progress = Progress()
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise RuntimeError("the bundled model has a tokenizer")
    model = Decoder.load(folder, CPU, TORCH_TYPES[data_type])
    with closing(GrammarCompiler(tokenizer, model.shape.vocabulary_size)) as compiler:
        decoding = [
            compare(model, compiler, batch, tokens, rounds)
            for batch in progress.track("batches", batches)
        ]
    narrow = Vocabulary(tokenizer, model.shape.vocabulary_size)
    masks = [masks_alone(each, progress) for each in (narrow, WideVocabulary(tokenizer))]
    return {"decoding": decoding, "masks": masks}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    batches = [int(each) for each in arguments.batches.split(",")]
    data_type = DataType(arguments.dtype)
    found = measured(resolve_model(None), data_type, batches, arguments.tokens, arguments.rounds)
    finish(
        arguments,
        {
            "benchmark": "structured",
            "commit": commit(),
            "hardware": hardware(),
            "threads": torch.get_num_threads(),
            "dtype": data_type.value,
            "tokens": arguments.tokens,
            "rounds": arguments.rounds,
            "schema": SCHEMA,
            **found,
        },
        show,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
