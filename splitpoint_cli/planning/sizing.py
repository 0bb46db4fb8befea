"""How much fits on one device and its host, and how fast it then is: pure arithmetic.

Everything is asked of the code that serves: the worker's division of its memory, the
arena's layout, the planner. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from splitpoint.config import counted
from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Plan, PlanInput
from splitpoint.planning.planner import plan_batch, plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import (
    StepRates,
    WeightObjective,
    WeightPlacement,
    WeightSizes,
)
from splitpoint.planning.weight_step import with_weights
from splitpoint.residency.batch_size import LEAST, BatchSize, choose_batch_size
from splitpoint.residency.full_batch import BatchRoom, MixedBatch, full_batch, residents_alone
from splitpoint.residency.seconds import DeviceRoom, PieceSeconds
from splitpoint.shapes import ArenaLayout, Encoding, ModelShape, WeightFormat, chunks_of
from splitpoint.speculation import STEP_DRAFT_TOKENS, DraftMethod
from splitpoint_cli.models import NamedModel
from worker_service.device.memory import (
    DividedDevice,
    MemoryPlan,
    divide_device,
    draft_memory,
    draft_window_pages,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What requests are like. Tokens of each: all it ever has, and of these the new ones.

    Attributes:
        token_count: prompt and generated tokens together; at least 2.
        new_tokens: of the prompt, what no store holds; the rest is a cached prefix.
        generated_tokens: of token_count.
    """

    token_count: int
    new_tokens: int
    generated_tokens: int

    def __post_init__(self) -> None:
        if self.generated_tokens < 1 or self.new_tokens < 1:
            raise InvalidArgument("at least 1 token is new and 1 generated", field="new")
        if self.cached_tokens < 0:
            raise InvalidArgument(
                f"{self.new_tokens:,} new and {counted(self.generated_tokens, 'generated token')} "
                f"are more than the {self.token_count:,} of a request",
                field="tokens",
            )

    @property
    def cached_tokens(self) -> int:
        return self.token_count - self.new_tokens - self.generated_tokens


@dataclass(frozen=True, slots=True)
class Node:
    """One device, what it costs to reach it, and how its worker is started."""

    profile: Profile
    device_memory_bytes: int
    # Most requests of a step; None: chosen as by a worker.
    max_batch: int | None = None
    max_batched_tokens: int = 512
    chunk_tokens: int = 64
    encoding: Encoding = Encoding.NATIVE
    weights: WeightFormat = WeightFormat.NATIVE
    weight_objective: WeightObjective = WeightObjective.BALANCED
    # Seconds of a decode step beside its cache traffic; None: the profile's.
    step_compute_seconds: float | None = None
    # The own method of workers with --speculative-config, OFF included; None: without it.
    drafts: DraftMethod | None = None
    # Checkpoint folder of the served model; None: its shape alone is known.
    folder: Path | None = None
    # The draft model; None: there is none.
    draft: NamedModel | None = None

    @property
    def draft_tokens(self) -> int:
        """Drafted tokens that one step verifies at most."""
        return 0 if self.drafts is None else STEP_DRAFT_TOKENS

    @property
    def drafts_itself(self) -> bool:
        """Streamed requests keep a window on the device for self drafts."""
        return self.drafts in (DraftMethod.AUTO, DraftMethod.SELF)

    @property
    def least_batch(self) -> int:
        """The batch for which weights are placed and drafts get memory, before it is chosen."""
        return LEAST if self.max_batch is None else self.max_batch

    def batch(
        self,
        shape: ModelShape,
        profile: Profile,
        pages: Callable[[int], int],
        *,
        prefill_tokens: int,
    ) -> BatchSize:
        """Return the batch of its worker; `pages` returns those of its cache beside a batch."""
        return choose_batch_size(
            shape,
            profile,
            pages,
            chunk_tokens=self.chunk_tokens,
            prefill_tokens=prefill_tokens,
            given=self.max_batch,
            has_draft_model=self.draft is not None,
            step_compute_seconds=self.step_compute_seconds,
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answers. Bytes and seconds; `*_count` are requests at once.

    Attributes:
        memory: the served model's part; `draft`: the draft model's, None if there is none.
        cached_tokens_in_memory: tokens of cache that all of the device's cache holds.
        resident_count: with the whole cache on the device.
        streamed_count: with the cache on the host, as far as the device's pages and the
            batch go; each of them holds `host_request_bytes` of the arena.
        prefix_bytes: of the arena, one cached prefix.
        restore: bringing such a prefix back.
        step_seconds: one decode step of `streamed_count` requests, all at their last token.
        lone_step_seconds: of one such request by itself.
        residents, full_batch: batches that decode together: as many residents as fit, or with
            streamed ones (`--objective throughput`).
        batch_streams: `--objective throughput` streams: weights cross the link, and `full_batch`
            has so many more tokens per second.
        batch: most requests of a step.
    """

    memory: MemoryPlan
    placement: WeightPlacement
    has_activations: bool
    cached_tokens_in_memory: int
    resident_request_bytes: int
    resident_count: int
    streamed_request_bytes: int
    streamed_count: int
    host_token_bytes: int
    host_request_bytes: int
    prefix_bytes: int
    restore: Plan
    step_seconds: float
    lone_step_seconds: float
    residents: MixedBatch
    full_batch: MixedBatch
    batch_streams: bool
    batch: BatchSize
    draft: MemoryPlan | None = None


def size_up(shape: ModelShape, node: Node, load: Load) -> Sizing:
    """Raises InvalidArgument for requests beyond the context, ResourceExhausted for a
    device that is too small for anything."""
    if load.token_count > shape.context_length:
        raise InvalidArgument(
            f"{counted(load.token_count, 'token is', 'tokens are')} over {shape.name}'s context of "
            f"{shape.context_length:,}",
            field="tokens",
        )
    has_activations = shape.activations_can_pay
    worker = divided(shape, node, has_activations=has_activations)
    memory, layout = worker.device.memory, worker.layout
    pages = chunks_of(load.token_count, node.chunk_tokens)
    resident_bytes = pages * memory.page_bytes
    streamed_bytes = min(pages, memory.streamed_page_count) * memory.page_bytes
    places = worker.batch.size
    streamed_count = min(places, memory.cache_capacity_bytes // streamed_bytes)
    ask = _Ask(shape, worker, node)
    room = BatchRoom(memory.page_count, places, pages, streamed_bytes // memory.page_bytes)
    together = PieceSeconds(shape, worker.profile, ask.room)
    residents = residents_alone(together, room, load.token_count)
    full = full_batch(together, room, load.token_count)
    # From an encoded store no request is streamed unless asked.
    may_stream = worker.device.placement.streamed_bytes > 0 and not node.encoding.is_lossy
    return Sizing(
        memory=memory,
        placement=worker.device.placement,
        has_activations=has_activations,
        cached_tokens_in_memory=memory.page_count * node.chunk_tokens,
        resident_request_bytes=resident_bytes,
        resident_count=min(places, memory.cache_capacity_bytes // resident_bytes),
        streamed_request_bytes=streamed_bytes,
        streamed_count=streamed_count,
        host_token_bytes=-(-layout.chunk_bytes // node.chunk_tokens),
        host_request_bytes=pages * layout.chunk_bytes,
        prefix_bytes=chunks_of(load.cached_tokens, node.chunk_tokens) * layout.chunk_bytes,
        restore=ask.restore(load, resident_bytes),
        step_seconds=ask.step(streamed_count, load.token_count),
        lone_step_seconds=ask.step(1, load.token_count),
        residents=residents,
        full_batch=full,
        batch_streams=may_stream and full.is_worth_streaming(residents),
        batch=worker.batch,
        draft=worker.draft,
    )


@dataclass(frozen=True, slots=True)
class Divided:
    """A worker's memory, and its profile with the weights that it keeps on the host.

    Attributes:
        sizes, device: of the served model.
        draft: the draft model's memory; None if there is none.
    """

    layout: ArenaLayout
    sizes: WeightSizes
    device: DividedDevice
    profile: Profile
    batch: BatchSize
    draft: MemoryPlan | None = None

    @property
    def staging_tokens(self) -> int:
        """Tokens of X that fit the staging memory."""
        return self.device.memory.staging_pages * self.layout.chunk_tokens


def divided(shape: ModelShape, node: Node, *, has_activations: bool) -> Divided:
    """Divide device memory as a worker does at its start. Raises ResourceExhausted."""
    layout = ArenaLayout.of(
        shape,
        chunk_tokens=node.chunk_tokens,
        has_activations=has_activations,
        encoding=node.encoding,
    )
    is_gpu = node.profile.is_of_gpu
    sizes = NamedModel(shape, node.folder).weight_sizes(node.weights, is_gpu=is_gpu)
    draft = _draft_memory(shape, node)
    device = divide_device(
        shape,
        layout,
        sizes,
        budget_bytes=node.device_memory_bytes - (0 if draft is None else draft.budget_bytes),
        max_batch_size=node.least_batch,
        max_batched_tokens=node.max_batched_tokens,
        is_gpu=is_gpu,
        rates=lambda: StepRates.of(shape, node.profile),
        objective=node.weight_objective,
        draft_tokens=node.draft_tokens,
        window_pages=draft_window_pages(shape, node.chunk_tokens) if node.drafts_itself else 0,
    )
    profile = with_weights(node.profile, sizes, device.placement)
    batch = node.batch(
        shape,
        profile,
        lambda size: device.with_batch(size).page_count,
        prefill_tokens=device.max_batched_tokens,
    )
    device = replace(device, memory=device.with_batch(batch.size))
    return Divided(layout, sizes, device, profile, batch, draft)


def _draft_memory(served: ModelShape, node: Node) -> MemoryPlan | None:
    """Return what the draft model takes of the device; None if there is none."""
    if node.draft is None:
        return None
    return draft_memory(
        node.draft.shape,
        served,
        weight_bytes=node.draft.weight_sizes(is_gpu=node.profile.is_of_gpu).total,
        chunk_tokens=node.chunk_tokens,
        budget_bytes=node.device_memory_bytes,
        max_batch_size=node.least_batch,
        max_batched_tokens=node.max_batched_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Ask:
    """Questions to the planner about one worker."""

    shape: ModelShape
    worker: Divided
    node: Node

    @property
    def room(self) -> DeviceRoom:
        return DeviceRoom(
            has_activations=self.worker.layout.has_activations,
            chunk_tokens=self.node.chunk_tokens,
            staging_tokens=self.worker.staging_tokens,
            prefill_tokens=self.worker.device.max_batched_tokens,
            encoding=self.node.encoding,
            step_compute_seconds=self.node.step_compute_seconds,
        )

    def restore(self, load: Load, footprint_bytes: int) -> Plan:
        return plan_request(
            self.shape,
            self.worker.profile,
            PlanInput(
                cached_tokens=load.cached_tokens,
                new_tokens=load.new_tokens,
                has_activations=self.worker.layout.has_activations,
                schedule=Schedule.PIPELINED,
                encoding=self.node.encoding,
                chunk_tokens=self.node.chunk_tokens,
                staging_tokens=self.worker.staging_tokens,
                prefill_tokens=self.worker.device.max_batched_tokens,
                footprint_bytes=footprint_bytes,
            ),
        )

    def step(self, count: int, token_count: int) -> float:
        """Seconds of a decode step of this many streamed requests."""
        return plan_batch(
            self.shape,
            self.worker.profile,
            [token_count] * count,
            has_activations=self.worker.layout.has_activations,
            schedule=Schedule.PIPELINED,
            chunk_tokens=self.node.chunk_tokens,
            staging_tokens=self.worker.staging_tokens,
            encoding=self.node.encoding,
            step_compute_seconds=self.node.step_compute_seconds,
        ).step_seconds


# Writers hold slots before they seal them, and an arena that is full to the last slot
# evicts with each request.
HEADROOM = 0.1


def host_memory_of(sizing: Sizing, *, streamed_count: int, prefix_count: int) -> int:
    """Bytes of arena for this many streamed requests and cached prefixes, with headroom."""
    needed = streamed_count * sizing.host_request_bytes + prefix_count * sizing.prefix_bytes
    return int(needed * (1 + HEADROOM))
