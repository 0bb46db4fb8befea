"""Decoding while a prefix is restored: tokens per second beside a restore, against without.

One engine in this process, over an emulated link whose rate makes loading the prefix take two
seconds. Four requests decode. In each round their rate is measured alone, and while a fifth
request restores its prefix; the restore is also timed alone. The serial twin, which does a
whole restore within one step as the engine once did, is measured beside.

    python -m benchmarks.restore_beside_decoding [--rounds N] [--json] [--output FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import finish, parser_of, random_ids
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.errors import Internal
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout, chunks_of
from splitpoint_cli.bench.engine import admission_of, exact_memory, outputs_until_idle
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS, Progress
from splitpoint_cli.bench.local_store import LocalStore
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Cancel, RestoreEvent, StepOutput
from worker_service.engine.sequence import Admission
from worker_service.lanes.lanes import EmulatedLink
from worker_service.lanes.select import lanes_of
from worker_service.model.decoder import Decoder

SHAPE = "opt-125m"
CPU = torch.device("cpu")
PREFIX_TOKENS = 1536
RESTORE_SECONDS = 2.0
REQUESTS = 4
PROMPT_TOKENS = 64
ANSWER_TOKENS = 400
ALONE_SECONDS = 2.0


@dataclass
class Bench:
    """An engine, its store, and the requests that decode."""

    engine: Engine
    store: LocalStore
    prefix: list[int]
    rng: random.Random
    number: int = 0

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind} {self.number}"

    def step(self) -> StepOutput:
        output = self.engine.step()
        for event in output.finishes:
            if event.error is not None:
                raise event.error
        self.store.handle(output, self.engine.cache)
        for answer in self.store.answers(wait=False):
            self.engine.post(answer)
        if not self.engine.can_go_on(output):
            self.engine.wait(1e-3)
        return output

    def admit(self, admission: Admission, prompt: list[int]) -> None:
        self.engine.admit(admission, self.store.match(admission.key, prompt))

    def begin_restore(self, split: int) -> str:
        name = self.name("restore")
        admission = admission_of(name, self.prompt, 1, split_tokens=split)
        self.admit(replace(admission, restores_all=True), self.prompt)
        return name

    @property
    def prompt(self) -> list[int]:
        return [*self.prefix, 7]

    def end(self) -> None:
        for _ in outputs_until_idle(self.engine, self.store):
            continue

    def restore_alone(self, split: int) -> float:
        """Return the seconds of a restore beside nothing."""
        name = self.begin_restore(split)
        seconds = 0.0
        for output in outputs_until_idle(self.engine, self.store):
            seconds += sum(each.restore_seconds for each in output.restores)
        if not seconds:
            raise Internal(f"{name} restored nothing")
        return seconds

    def beside(self, split: int) -> dict[str, float]:
        """Return tokens per second without and beside a restore, and the restore's seconds."""
        keys = []
        for _ in range(REQUESTS):
            prompt = random_ids(self.rng, PROMPT_TOKENS)
            admission = admission_of(self.name("decode"), prompt, ANSWER_TOKENS)
            keys.append(admission.key)
            self.admit(admission, prompt)
        while True:  # until all decode
            output = self.step()
            if output.step is not None and output.step.decoded_tokens == REQUESTS:
                break
        alone = self._rate(ALONE_SECONDS)
        began = time.perf_counter()
        self.begin_restore(split)
        counts, gaps, last = 0, [0.0], began
        restored: RestoreEvent | None = None
        while restored is None:
            output = self.step()
            now = time.perf_counter()
            for event in output.restores:
                restored = event
            if output.tokens:
                counts += sum(event.key in keys for event in output.tokens)
                gaps.append(now - last)
                last = now
        seconds = time.perf_counter() - began
        for key in keys:
            self.engine.post(Cancel(key))
        self.end()
        return {
            "alone_tokens_per_second": alone,
            "beside_tokens_per_second": counts / seconds,
            "ratio": counts / seconds / alone,
            "longest_gap_seconds": max(gaps),
            "restore_seconds": restored.restore_seconds,
        }

    def _rate(self, seconds: float) -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            count += len(self.step().tokens)
        return count / (time.perf_counter() - began)


def make(model: Decoder, rng: random.Random, link: EmulatedLink, *, overlapped: bool) -> Bench:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK_TOKENS, has_activations=True)
    tokens = PREFIX_TOKENS + CHUNK_TOKENS
    memory = exact_memory(
        model.shape, layout, weight_bytes=model.weight_bytes, batch=REQUESTS + 1, tokens=tokens
    )
    cache = DeviceCache(layout, memory, CPU)
    lanes = lanes_of(CPU, overlapped=overlapped, link=link)
    engine = Engine(
        model,
        cache,
        max_batch_size=REQUESTS + 1,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        lanes=lanes,
    )
    slots = (2 * REQUESTS + 4) * chunks_of(tokens, CHUNK_TOKENS)
    bench = Bench(engine, LocalStore(layout, slots, CPU), random_ids(rng, PREFIX_TOKENS), rng)
    bench.admit(admission_of(bench.name("store"), bench.prefix, 1), bench.prefix)
    bench.end()
    return bench


def measure(rounds: int, threads: int, progress: Progress) -> dict[str, object]:
    torch.set_num_threads(threads)
    rng = random.Random(0)
    shape = BUILT_IN_SHAPES[SHAPE]
    progress.say(f"{shape.name}: random weights")
    model = Decoder.random(DecoderConfig.of_shape(shape), 0, CPU, TORCH_TYPES[shape.data_type])
    link = EmulatedLink(1e12)
    found: dict[str, dict[str, object]] = {}
    for name, split, overlapped in (
        ("load", 0, True),
        ("rebuild half", PREFIX_TOKENS // 2, True),
        ("load, serial twin", 0, False),
    ):
        link.bytes_per_second = 1e12
        bench = make(model, rng, link, overlapped=overlapped)
        try:
            link.bytes_per_second = PREFIX_TOKENS * shape.kv_bytes_per_token / RESTORE_SECONDS
            runs = []
            for number in range(rounds):
                alone = bench.restore_alone(split)
                runs.append({**bench.beside(split), "restore_alone_seconds": alone})
                progress.say(f"{name}, round {number + 1}: {runs[-1]['ratio']:.3f}")
        finally:
            bench.engine.lanes.close()
            bench.store.close()
        found[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        found[name]["ratios"] = [run["ratio"] for run in runs]
    return {
        "benchmark": "restore_beside_decoding",
        "model": shape.name,
        "dtype": shape.data_type.value,
        "prefix_tokens": PREFIX_TOKENS,
        "requests": REQUESTS,
        "threads": threads,
        "rounds": rounds,
        "seed": 0,
        **found,
    }


def show(result: Mapping[str, Any]) -> None:
    for name, found in result.items():
        if isinstance(found, dict):
            rate = found["alone_tokens_per_second"]
            print(
                f"{name:<20} {found['ratio']:.3f} of {rate:.1f} tokens/s"
                f" (longest gap {found['longest_gap_seconds']:.3f} s); restore "
                f"{found['restore_seconds']:.2f} s, alone {found['restore_alone_seconds']:.2f} s"
            )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.threads, Progress())
    finish(arguments, result, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
