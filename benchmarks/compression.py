"""Accuracy and link bytes of a compressed store: native, int8, int4.

The bundled model reads Python files it was never trained on, with teacher
forcing. What it has read goes through write-back into an arena and comes back by
a restore, exactly as a worker does it; what follows is predicted from that:

    restored   1,024 tokens, the first 512 restored: loaded
    split      the same, K and V of the first 256 rebuilt from stored X
    streamed   every chunk of 64 comes from the arena once it is complete, so that
               all but the newest tokens were encoded

Bytes on the link are counted where they move: of a restore what its link lane
carried, of write-back every copy that it makes into the arena's mapping.

    python -m benchmarks.compression [--windows N] [--dtype TYPE] [--json] [--output FILE]
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import ArenaLayout, DataType, Encoding
from splitpoint_cli.bench.shared.passages import UNSEEN_SEED, read_unseen
from splitpoint_cli.bench.shared.progress import Progress
from worker_service.device import copies
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import divide
from worker_service.lanes.select import lanes_of
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.decoder import Decoder
from worker_service.pipeline.restore import Prefix, restore
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.mirror_cache import MirrorCache, name_of
from worker_service.store.write_back import WriteJob, copy_chunks

CHUNK = 64
WINDOW = 1024
PREFIX = 512
SPLIT = 256
CPU = torch.device("cpu")


class LinkCounter:
    """Counts the bytes that write-back copies into one mapped arena."""

    def __init__(self, mirror: MirrorCache) -> None:
        payload = mirror.arena.payload
        self._first = payload.ctypes.data
        self._last = self._first + payload.nbytes
        self.written_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every `copies.copy` in this context: all copies of write-back are made by it."""
        copy = copies.copy

        def counted(target: torch.Tensor, source: torch.Tensor) -> None:
            if self._first <= target.data_ptr() < self._last:
                self.written_bytes += target.nbytes
            copy(target, source)

        with patch.object(copies, "copy", counted):
            yield


class Reader:
    """The model, its cache, and an arena of one encoding."""

    def __init__(self, model: Decoder, encoding: Encoding) -> None:
        layout = ArenaLayout.of(
            model.shape, chunk_tokens=CHUNK, has_activations=True, encoding=encoding
        )
        self.model = model
        self.encoding = encoding
        plan = divide(
            model.shape,
            layout,
            budget_bytes=1 << 30,
            weight_bytes=model.weight_bytes,
            max_batch_size=1,
            max_batched_tokens=WINDOW,
        )
        self.cache = DeviceCache(layout, plan, CPU)
        self.mirror = MirrorCache(layout, 64 << 20)
        self.transfer = CacheTransfer(
            model, self.mirror.tensors, Staging(layout, plan.staging_pages, CPU)
        )
        self.lanes = lanes_of(CPU)
        self.link = LinkCounter(self.mirror)
        self._windows = {layer.window for layer in model.layers}

    def compute(self, token_ids: Sequence[int], start: int, count: int) -> torch.Tensor:
        """Logits `[count, vocabulary]` of tokens [start, start + count); page i holds chunk i."""
        positions = torch.arange(start, start + count)
        pages, rows = positions // CHUNK, positions % CHUNK
        read = range(-(-(start + count) // CHUNK))
        plan = PrefillPlan.of_prefix(
            read, start, count, chunk_tokens=CHUNK, windows=self._windows, device=CPU
        )
        model, cache = self.model, self.cache
        hidden = model.embed(torch.tensor(token_ids[start : start + count]), positions)
        rotary = model.rotary(positions)
        for index, layer in enumerate(model.layers):
            inputs = layer.attention_input(hidden)
            queries, keys, values = layer.project(inputs, rotary)
            cache.write(index, pages, rows, keys, values)
            cache.write_inputs(index, pages, rows, inputs)
            attended = prefill(
                queries,
                keys,
                values,
                cache.keys[index],
                cache.values[index],
                plan,
                window=layer.window,
                scale=layer.scale,
                cap=layer.cap,
            )
            hidden = layer.finish(hidden, attended)
        return model.logits(hidden)

    def store(self, token_ids: Sequence[int], first: int, last: int) -> list[StoredChunk]:
        """Chunks [first, last) from their pages into the arena, by write-back's own copy."""
        jobs = [
            WriteJob(index, index, index, tuple(token_ids[index * CHUNK : (index + 1) * CHUNK]))
            for index in range(first, last)
        ]
        places = self.mirror.grant(len(jobs))
        with self.link.counting():
            checksums = copy_chunks(
                self.cache, self.mirror.tensors, jobs, [slot for slot, _ in places]
            )
        chunks = []
        for job, place, checksum in zip(jobs, places, checksums, strict=True):
            # Any distinct key will do: no look-up uses it.
            key = hashlib.sha256(repr((job.chunk_index, place, checksum)).encode()).digest()
            chunks.append(self.mirror.publish(place, name_of(key, checksum), key, CHUNK))
        return chunks

    def forget(self) -> None:
        """Clear the pages, so that a row which a restore misses is found."""
        for plane in (*self.cache.keys, *self.cache.values, *self.cache.inputs):
            plane.zero_()

    def restore(
        self, token_ids: Sequence[int], chunks: Sequence[StoredChunk], first: int, split: int
    ) -> float:
        """Chunks from `first` on into their pages, rows below `split` rebuilt from X.

        Returns the bytes that came over the link.
        """
        pages = [None if index < first else index for index in range(len(chunks))]
        spans = restore(
            self.transfer,
            self.lanes,
            Prefix(chunks, first, pages, token_ids, len(chunks) * CHUNK, split),
            self.cache.keys,
            self.cache.values,
            tile_tokens=PREFIX // 4,
        )
        return sum(span.amount for span in spans if span.lane is Lane.LINK_IN)

    # -- what is measured: negative log-likelihoods of the tokens that were predicted ----

    def restored(self, token_ids: Sequence[int], split: int) -> torch.Tensor:
        """Return the losses of the tokens after the prefix."""
        self.compute(token_ids, 0, PREFIX)
        chunks = self.store(token_ids, 0, PREFIX // CHUNK)
        self.forget()
        self.restore(token_ids, chunks, 0, split)
        return losses(self.compute(token_ids, PREFIX, WINDOW - PREFIX), token_ids, PREFIX)

    def streamed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the losses after the first chunk; each chunk is encoded once it is complete."""
        found = []
        chunks: list[StoredChunk] = []
        for start in range(0, WINDOW, CHUNK):
            found.append(losses(self.compute(token_ids, start, CHUNK), token_ids, start))
            index = start // CHUNK
            chunks += self.store(token_ids, index, index + 1)
            self.restore(token_ids, chunks, index, 0)
        return torch.cat(found[1:])


def losses(logits: torch.Tensor, token_ids: Sequence[int], start: int) -> torch.Tensor:
    """Return the losses of predicting token i + 1 at each position i from `start` on."""
    targets = torch.tensor(token_ids[start + 1 : start + 1 + len(logits)])
    return functional.cross_entropy(logits[: len(targets)], targets, reduction="none")


@dataclass(frozen=True, slots=True)
class Result:
    """One encoding: perplexities, and bytes a token on the link."""

    encoding: str
    perplexity: dict[str, float]
    written_bytes: float
    loaded_bytes: float
    sent_bytes: float


@torch.inference_mode()
def measure(model: Decoder, encoding: Encoding, windows: Sequence[Sequence[int]]) -> Result:
    reader = Reader(model, encoding)
    found: dict[str, list[torch.Tensor]] = {"restored": [], "split": [], "streamed": []}
    try:
        for window in windows:
            found["restored"].append(reader.restored(window, 0))
            found["split"].append(reader.restored(window, SPLIT))
            found["streamed"].append(reader.streamed(window))
        moved = link_bytes(reader, windows[0])
    finally:
        reader.lanes.close()
    perplexity = {name: math.exp(torch.cat(each).mean().item()) for name, each in found.items()}
    return Result(encoding.value, perplexity, *moved)


def link_bytes(reader: Reader, window: Sequence[int]) -> tuple[float, float, float]:
    """Bytes a token: K, V and X written; K and V loaded; X sent to rebuild all of them
    (of all layers but the first, whose X comes from the token ids)."""
    link = reader.link
    reader.compute(window, 0, PREFIX)
    before = link.written_bytes
    chunks = reader.store(window, 0, PREFIX // CHUNK)
    written = link.written_bytes - before
    loaded, sent = (reader.restore(window, chunks, 0, split) for split in (0, PREFIX))
    return written / PREFIX, loaded / PREFIX, sent / PREFIX


def run(window_count: int, dtype: str, progress: Progress) -> dict[str, object]:
    folder = resolve_model(None)
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None:
        raise SystemExit(f"{folder} has no tokenizer")
    data_type = DataType(dtype)
    model = Decoder.load(folder, CPU, TORCH_TYPES[data_type])
    samples = list(read_unseen(tokenizer, window_count, WINDOW))
    windows = [window for sample in samples for window in sample.windows]
    began = time.monotonic()
    encodings = progress.track("encodings", [*Encoding])
    results = [measure(model, encoding, windows) for encoding in encodings]
    native = results[0]
    return {
        "benchmark": "compression",
        "model": folder.name,
        "dtype": data_type.value,
        "window_tokens": WINDOW,
        "prefix_tokens": PREFIX,
        "split_tokens": SPLIT,
        "chunk_tokens": CHUNK,
        "windows": len(windows),
        "encodings": [
            {
                "encoding": result.encoding,
                "perplexity": result.perplexity,
                "perplexity_over_native": {
                    name: value / native.perplexity[name] - 1
                    for name, value in result.perplexity.items()
                },
                "written_bytes_per_token": result.written_bytes,
                "loaded_bytes_per_token": result.loaded_bytes,
                "sent_bytes_per_token": result.sent_bytes,
                "written_over_16_bit": result.written_bytes / native.written_bytes,
                "loaded_over_16_bit": result.loaded_bytes / native.loaded_bytes,
                "sent_over_16_bit": result.sent_bytes / native.sent_bytes,
            }
            for result in results
        ],
        "seed": UNSEEN_SEED,
        "files": {sample.package: sample.files for sample in samples},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": time.monotonic() - began,
    }


def report(result: Mapping[str, Any]) -> None:
    print(
        f"{'':<8} {'bytes loaded':>13} {'of 16 bit':>10} {'restored':>18} {'split':>18} "
        f"{'streamed':>18}"
    )
    for entry in result["encodings"]:
        cells = [
            f"{entry['perplexity'][name]:.4f} {entry['perplexity_over_native'][name]:+9.3%}"
            for name in ("restored", "split", "streamed")
        ]
        print(
            f"{entry['encoding']:<8} {entry['loaded_bytes_per_token']:>13,.0f} "
            f"{entry['loaded_over_16_bit']:>10.3f} " + " ".join(f"{cell:>18}" for cell in cells)
        )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--windows", type=int, default=4, help="of each package, a file each")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    arguments = parser.parse_args()
    result = run(arguments.windows, arguments.dtype, Progress())
    finish(arguments, result, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
