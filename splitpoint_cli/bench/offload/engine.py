"""Our side of `bench offload`: one model, one cache on the host, engines that decode from it.

Prompts are prefilled and stored once; every run then leases them and decodes, so that
what is timed is decoding and nothing else. The contenders share weights, device pages
and the store, and differ in their lanes, their split and where the cache lies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.planning.plan import Residency
from splitpoint.planning.split_line import SplitLine
from splitpoint.shapes import ArenaLayout, DataType, ModelShape, chunks_of
from splitpoint_cli.bench.offload.costs import BatchCosts
from splitpoint_cli.bench.offload.report import DecodeRun, OffloadWorkload, Step
from splitpoint_cli.bench.offload.store import LocalStore
from splitpoint_cli.bench.shared.engine_memory import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    exact_memory,
)
from worker_service.checkpoint.config import DecoderConfig
from worker_service.checkpoint.tensors import TensorSource
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import STAGING_PAGES, MemoryPlan, staging_pages_on_gpu
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.lanes.lanes import EmulatedLink
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import StepTimes, Trace
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure
from worker_service.startup import choose_device, describe_device
from worker_service.store.write_back import BATCH_CHUNKS

# After each step: how many steps there were.
OnStep = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Order:
    """The request of each sequence in a run."""

    new_tokens: int
    residency: Residency
    split_tokens: int = 0
    split_line: SplitLine | None = None


class OffloadHost:
    """Weights, device pages, arena and engines of one benchmark. Close it.

    Attributes:
        prompts: token ids of each sequence; stored once `prefill` ran.
        link: the emulated link, whose rate may be changed; None: the device's own.
        memory: how device memory is divided.
        profile: measured over the lanes that are used.
        trace: spans of every run.
    """

    def __init__(
        self,
        shape: ModelShape,
        workload: OffloadWorkload,
        weights: TensorSource | None = None,
    ) -> None:
        check_workload(shape, workload)
        self.device = choose_device(workload.device)
        self.shape = replace(shape, data_type=DataType(workload.dtype))
        dtype = TORCH_TYPES[self.shape.data_type]
        config = DecoderConfig.of_shape(self.shape)
        if weights is None:
            model = Decoder.random(config, workload.seed, self.device, dtype)
        else:
            model = Decoder(config, weights, self.device, dtype)
        self.link = None if workload.link_rate is None else EmulatedLink(workload.link_rate)
        self.prompts = random_prompts(self.shape, workload)
        self.trace = Trace({"device": str(self.device), "model": shape.name})
        self._workload = workload
        layout = ArenaLayout.of(
            self.shape,
            chunk_tokens=CHUNK_TOKENS,
            # The store's own choice: what can never pay is not kept.
            has_activations=self.shape.activations_can_pay,
        )
        self.memory = self._divide(model, layout)
        check_device(self.memory, self.device)
        cache = DeviceCache(layout, self.memory, self.device)
        self._engines = {
            overlapped: Engine(
                model,
                cache,
                max_batch_size=workload.batch,
                max_batched_tokens=MAX_BATCHED_TOKENS,
                lanes=lanes_of(self.device, overlapped=overlapped, link=self.link),
            )
            for overlapped in (True, False)
        }
        self.profile: Profile = measure(
            model, self.device, describe_device(self.device), lanes=self._engines[True].lanes
        )
        for engine in self._engines.values():
            engine.watch_costs(self.profile)
            engine.trace = self.trace
        self.store = LocalStore(layout, self._slot_count(), cache, self.device)
        self._run_count = 0

    @property
    def has_activations(self) -> bool:
        """True if layer inputs are stored, so that a split above zero is possible."""
        return self.store.layout.has_activations

    @property
    def refitted_profile(self) -> Profile:
        """The profile as the overlapped runs until now have changed it."""
        return self._engines[True].profile or self.profile

    def close(self) -> None:
        for engine in self._engines.values():
            engine.lanes.close()
        self.store.close()

    def costs(self, cached: int, compute_seconds: float) -> BatchCosts:
        """Return the costs of a step with `cached` tokens in each sequence; see BatchCosts."""
        return BatchCosts(
            shape=self.shape,
            profile=self.profile,
            batch=len(self.prompts),
            cached=cached,
            has_activations=self.has_activations,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=self.memory.staging_pages * CHUNK_TOKENS,
            compute_seconds=compute_seconds,
        )

    def prefill(self) -> None:
        """Compute and store every prompt."""
        self._run(self._engines[True], _Order(1, Residency.RESIDENT))

    def decode(
        self,
        new_tokens: int,
        *,
        split_tokens: int = 0,
        split_line: SplitLine | None = None,
        overlapped: bool = True,
        residency: Residency = Residency.STREAMED,
        on_step: OnStep | None = None,
    ) -> DecodeRun:
        """Decode all sequences from their stored prompts, together.

        `split_line`: the engine follows it, and draws it anew when costs change; None:
        the split stays.
        """
        order = _Order(new_tokens, residency, split_tokens, split_line)
        return self._run(self._engines[overlapped], order, on_step)

    # -- below ---------------------------------------------------------------------------

    def _run(self, engine: Engine, order: _Order, on_step: OnStep | None = None) -> DecodeRun:
        self._run_count += 1
        names = [f"{self._run_count}.{index}" for index in range(len(self.prompts))]
        for name, prompt in zip(names, self.prompts, strict=True):
            admission = Admission(
                request_id=name,
                attempt=0,
                prompt=prompt,
                delivered=(),
                sampling=Sampling(max_tokens=order.new_tokens, ignore_eos=True),
                residency=order.residency,
                split_tokens=order.split_tokens,
                split_line=order.split_line,
                salt=b"",
            )
            engine.admit(admission, self.store.match(admission.key, prompt))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        steps: list[Step] = []
        times: list[StepTimes] = []
        begun: float | None = None
        while True:
            output = engine.step()
            now = time.perf_counter()
            _collect(output, tokens)
            if output.ran and engine.last_step is not None:
                times.append(engine.last_step)
            # Of a step in which some sequence had to wait for a page, the next is part.
            if min(len(each) for each in tokens.values()) > len(steps) + (begun is not None):
                if begun is not None:
                    steps.append(_step(now - begun, times))
                    if on_step is not None:
                        on_step(len(steps))
                begun, times = now, []
            self.store.handle(output)
            if engine.is_idle:
                break
            for answer in self.store.answers(wait=not output.ran):
                engine.post(answer)
        return DecodeRun(tuple(steps), tuple(tuple(tokens[name]) for name in names))

    def _divide(self, model: Decoder, layout: ArenaLayout) -> MemoryPlan:
        """Return a division with exactly the pages that the resident reference needs."""
        staging = STAGING_PAGES
        if self.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self.device)
            staging = staging_pages_on_gpu(self.shape, layout, total)
        return exact_memory(
            self.shape,
            layout,
            weight_bytes=model.weight_bytes,
            batch=self._workload.batch,
            tokens=self._workload.prompt + self._workload.new,
            staging_pages=staging,
        )

    def _slot_count(self) -> int:
        """Return room for the prompts and one run's chunks; those of earlier runs are evicted."""
        workload = self._workload
        prompt = chunks_of(workload.prompt, CHUNK_TOKENS)
        new = chunks_of(workload.new, CHUNK_TOKENS) + 1
        return workload.batch * (prompt + new) + BATCH_CHUNKS


def check_workload(shape: ModelShape, workload: OffloadWorkload) -> None:
    """Raise InvalidArgument if the sequences are longer than the context."""
    if workload.prompt + workload.new > shape.context_length:
        raise InvalidArgument(
            f"{workload.prompt} prompt and {workload.new} new tokens are more than the context "
            f"of {shape.name}, {shape.context_length}",
            field="prompt",
        )


def check_device(plan: MemoryPlan, device: torch.device) -> None:
    """Raise ResourceExhausted if the reference's cache does not fit beside the loaded weights."""
    if device.type != "cuda":
        return
    needed = plan.budget_bytes - plan.weight_bytes
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ResourceExhausted(
            f"the resident reference needs {format_size(needed)} of device memory, "
            f"{format_size(free)} are free: take a smaller batch or prompt",
            reason="DEVICE_MEMORY",
        )


def random_prompts(shape: ModelShape, workload: OffloadWorkload) -> tuple[tuple[int, ...], ...]:
    """Return prompts of equal length, drawn from the seed."""
    generator = torch.Generator().manual_seed(workload.seed)
    size = (workload.batch, workload.prompt)
    drawn = torch.randint(shape.vocabulary_size, size, generator=generator)
    return tuple(tuple(row) for row in drawn.tolist())


def _collect(output: StepOutput, tokens: dict[str, list[int]]) -> None:
    for finish in output.finishes:
        if finish.error is not None:
            raise finish.error
    for event in output.tokens:
        tokens[event.key[0]].append(event.choice.token_id)


def _step(seconds: float, times: Sequence[StepTimes]) -> Step:
    """Return a step of the batch: one of the engine, or more if a sequence waited."""
    predicted = [each.predicted_seconds for each in times]
    known = [each for each in predicted if each is not None]
    return Step(
        seconds=seconds,
        predicted_seconds=sum(known) if known and len(known) == len(predicted) else None,
        link_bytes=sum(each.link_bytes for each in times),
        link_seconds=sum(each.link_busy for each in times),
    )
