"""The cost of the compared worker's kernels: a batch decoded with them and with the fast ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, Numerics
from splitpoint_cli.bench.decode_report import Run
from splitpoint_cli.bench.decode_report import Workload as DecodeWorkload
from splitpoint_cli.bench.numerics.report import Cost, NumericsWorkload
from splitpoint_cli.bench.our_worker import OurWorker
from splitpoint_cli.bench.shared.kernels import use_worker_kernels
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.texts import Prompts, random_prompts
from worker_service.device.cache import TORCH_TYPES
from worker_service.kernels.choice import Choice, in_use, use
from worker_service.kernels.gpu_order import adds_in_one_order, use_one_order
from worker_service.model.decoder import Decoder

BATCHES = (1, 8)
PROMPT, NEW = 512, 32


@dataclass(frozen=True, slots=True)
class _Contender:
    """A model and the kernels that it was loaded for: see `use_worker_kernels`."""

    model: Decoder
    choice: Choice | None
    in_one_order: bool
    name: str

    def worker(self, decode: DecodeWorkload) -> OurWorker:
        return OurWorker(self.model, decode)

    def run(self, worker: OurWorker, prompts: Prompts, new: int) -> Run:
        """Weights keep their layout; attention takes the kernels that are in use."""
        use(self.choice)
        use_one_order(self.in_one_order)
        return worker.run(prompts, new)


def measure_costs(
    workload: NumericsWorkload, device: torch.device, progress: Progress
) -> tuple[str, list[Cost]]:
    """Return the fast kernels, and the runs of each batch.

    "" and none if no cost is wanted; no runs if the compared worker has the fast kernels.
    """
    if not workload.cost_shape:
        return "", []
    before, was_in_one_order = in_use(), adds_in_one_order()
    contenders = [
        _contender(workload, wish, device, progress, numerics=numerics)
        for wish, numerics in (
            (workload.kernels, Numerics.INVARIANT),
            (workload.fast_kernels, Numerics.FAST),
        )
    ]
    costs: list[Cost] = []
    if contenders[0].name != contenders[1].name:
        costs = [_cost(workload, contenders, batch, progress) for batch in BATCHES]
    use(before)
    use_one_order(was_in_one_order)
    return contenders[1].name, costs


def _contender(
    workload: NumericsWorkload,
    wish: str,
    device: torch.device,
    progress: Progress,
    *,
    numerics: Numerics,
) -> _Contender:
    data_type = DataType(workload.dtype)
    shape = replace(BUILT_IN_SHAPES[workload.cost_shape], data_type=data_type)
    name = use_worker_kernels(device, data_type, [shape.head_dim], wish=wish, numerics=numerics)
    progress.say(f"{shape.name}: random weights, {name or 'the usual kernels of a GPU'}")
    config = DecoderConfig.of_shape(shape)
    model = Decoder.random(config, workload.seed, device, TORCH_TYPES[data_type])
    return _Contender(model, in_use(), adds_in_one_order(), name)


def _cost(
    workload: NumericsWorkload, contenders: list[_Contender], batch: int, progress: Progress
) -> Cost:
    """Time both in turns. Each runs once before, to warm up."""
    decode = DecodeWorkload(
        shape=workload.cost_shape,
        dtype=workload.dtype,
        batch=batch,
        prompt=PROMPT,
        new=NEW,
        repeats=workload.repeats,
        device=workload.device,
        threads=workload.threads,
        seed=workload.seed,
    )
    vocabulary = contenders[0].model.shape.vocabulary_size
    prompts = random_prompts(vocabulary, batch, PROMPT, workload.seed)
    workers = [each.worker(decode) for each in contenders]
    for contender, worker in zip(contenders, workers, strict=True):
        contender.run(worker, prompts, 2)
    runs: tuple[list[Run], list[Run]] = ([], [])
    for number in progress.rounds(f"cost of batch {batch}", (0, 1), workload.repeats):
        runs[number].append(contenders[number].run(workers[number], prompts, NEW))
    return Cost(batch, PROMPT, NEW, *runs)
