"""Decoding with int4 codes beside bfloat16, one request, in turns: tokens per second and bytes.

Both models have random weights and the same dimensions. The codes are read from a GPTQ checkpoint
that is written to a temporary folder: groups of 128, and the head in bfloat16 as usual. The
bfloat16 model has the kernels that `--cpu-kernels auto` chooses on this host. `said`: bytes of the
weights by `size`; `held`: by the worker.

    python -m benchmarks.quantized [--shape NAME] [--layers N] [--rounds N] [--threads N]
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness import Timed, finish, is_quiet, parser_of, quieter_half, timed
from splitpoint.checkpoint.decoder import DecoderConfig, plain_config, read_decoder
from splitpoint.options.cpu_kernels import AUTO, with_panels
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.shapes import BUILT_IN_SHAPES, DataType
from splitpoint_cli.bench.decode_report import Run, Workload
from splitpoint_cli.bench.engine import use_worker_kernels
from splitpoint_cli.bench.our_worker import OurWorker
from worker_service.checkpoint.names import expected_tensors
from worker_service.checkpoint.tensors import RandomTensors
from worker_service.model.decoder import Decoder

CPU = torch.device("cpu")
GROUP = 128
PROMPT_TOKENS, NEW_TOKENS = 32, 32
QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}


def write_checkpoint(config: DecoderConfig, folder: Path) -> None:
    """Write a GPTQ checkpoint with random codes."""
    source = RandomTensors(config, 0, CPU, torch.bfloat16)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) < 2 or ".layers." not in name:
            tensors[name] = source.get(name)
            continue
        (out_features, in_features), module = shape, name.removesuffix(".weight")
        groups = in_features // GROUP
        words = torch.randint(-(2**31), 2**31, (in_features // 8, out_features))
        tensors[f"{module}.qweight"] = words.to(torch.int32)
        # Zeros of 8, stored less by 1.
        zeros = torch.full((groups, out_features // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{module}.qzeros"] = zeros
        scales = torch.full((groups, out_features), 0.02 / 4.6, dtype=torch.float16)
        tensors[f"{module}.scales"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = {**plain_config(config.shape), "dtype": "bfloat16"}
    written["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(written))


def decode_seconds(run: Run) -> float:
    """Return the mean seconds of a decode step."""
    return (run.seconds - run.first_token_seconds) / (NEW_TOKENS - run.tokens_before)


def measured(shape_name: str, layers: int, rounds: int, threads: int) -> dict[str, Any]:
    shape = replace(BUILT_IN_SHAPES[shape_name], layer_count=layers)
    config = DecoderConfig.of_shape(shape)
    torch.set_num_threads(threads)
    heads = [shape.head_dim]
    workload = Workload(
        shape=shape_name,
        dtype="bfloat16",
        batch=1,
        prompt=PROMPT_TOKENS,
        new=NEW_TOKENS,
        repeats=rounds,
        device="cpu",
        threads=threads,
        seed=0,
    )
    kernels = use_worker_kernels(CPU, DataType.BFLOAT16, heads)
    models = {"bfloat16": Decoder.random(config, 0, CPU, torch.bfloat16)}
    said = {"bfloat16": WeightSizes.of(shape).total}
    use_worker_kernels(CPU, DataType.BFLOAT16, heads, wish=with_panels(AUTO))
    with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as folder:
        write_checkpoint(config, Path(folder))
        models["int4"] = Decoder.load(Path(folder), CPU)
        said["int4"] = WeightSizes.of(read_decoder(Path(folder)).shape).total
    workers = {name: OurWorker(model, workload) for name, model in models.items()}
    rng = random.Random(0)
    prompts = (tuple(rng.randrange(3, shape.vocabulary_size) for _ in range(PROMPT_TOKENS)),)
    runs: dict[str, list[Timed[Run]]] = {name: [] for name in workers}
    for turn in range(rounds + 1):
        for name, worker in workers.items():
            found = timed(partial(worker.run, prompts, NEW_TOKENS))
            if turn:  # the first warms up
                runs[name].append(found)
    steps = {
        name: statistics.median(decode_seconds(each.result) for each in quieter_half(all_runs))
        for name, all_runs in runs.items()
    }
    return {
        "shape": f"{shape_name}, {layers} layers",
        "threads": threads,
        "kernels": kernels,
        "is_quiet": all(map(is_quiet, runs.values())),
        "step_seconds": steps,
        "said_bytes": said,
        "held_bytes": {name: model.weight_bytes for name, model in models.items()},
        "int4_over_bfloat16": steps["bfloat16"] / steps["int4"],
    }


def show(report: Mapping[str, Any]) -> None:
    print(f"{report['shape']}, {report['threads']} threads; bfloat16: {report['kernels']}")
    for name, seconds in report["step_seconds"].items():
        said, held = report["said_bytes"][name], report["held_bytes"][name]
        rate = held / seconds / 1e9
        print(f"{name:9} {1e3 * seconds:7.2f} ms a token, {held / 1e6:6.0f} MB held", end="")
        print(f" ({said / 1e6:.0f} said), {rate:.1f} GB/s")
    quiet = "" if report["is_quiet"] else " (other processes ran beside)"
    print(f"int4 decodes {report['int4_over_bfloat16']:.2f} times as fast{quiet}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-2-7b", choices=BUILT_IN_SHAPES)
    parser.add_argument("--layers", type=int, default=4, help="Layers of the model.")
    parser.add_argument("--rounds", type=int, default=7, help="Timed runs of each.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    with torch.inference_mode():
        found = measured(arguments.shape, arguments.layers, arguments.rounds, arguments.threads)
    finish(arguments, found, show)


if __name__ == "__main__":
    main()
