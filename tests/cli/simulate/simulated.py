"""Small fleets and requests for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_service.policy.settings import PolicySettings
from splitpoint.costs.profile import Machine, Profile
from splitpoint.options.scheduler import Policy
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.planning.sizing import Node
from splitpoint_cli.simulate.costs import NO_OVERHEADS, Overheads
from splitpoint_cli.simulate.device_types import Worker, worker_on
from splitpoint_cli.simulate.simulator import Cell
from splitpoint_cli.simulate.workload import SimulatedRequest, requests_of
from splitpoint_cli.traces.arrival import Arrival

SHAPE = BUILT_IN_SHAPES["llama-168m"]
CHUNK = 64
# A link of 1 GB/s, 1 TFLOP/s, and a step of 10 ms for the weights.
PROFILE = Profile(1e9, 1e-5, 1e12, 1e-5, 1e12, step_compute_seconds=0.01)


def worker(
    *, pages: int = 200, batch: int = 8, budget: int = 256, overheads: Overheads = NO_OVERHEADS
) -> Worker:
    """Return a worker with this number of pages of cache."""
    kind = Machine("small", PROFILE, 0, 50, 400, cache_bytes=pages * SHAPE.page_bytes(CHUNK))
    node = Node(PROFILE, 0, max_batch=batch, max_batched_tokens=budget, chunk_tokens=CHUNK)
    return worker_on(kind, SHAPE, node, overheads)


def cell(
    workers: Sequence[Worker],
    policy: Policy = Policy.FIFO,
    *,
    store_chunks: int = 1_000,
    streams: bool = True,
) -> Cell:
    return Cell(
        workers,
        PolicySettings(policy),
        store_bytes=store_chunks * workers[0].facts.slot_bytes,
        streams=streams,
    )


def requests(arrivals: Iterable[Arrival], **weights: float) -> list[SimulatedRequest]:
    """Return requests whose blocks are chunks."""
    return requests_of(
        list(arrivals),
        block_tokens=CHUNK,
        chunk_tokens=CHUNK,
        context_length=SHAPE.context_length,
        weights=weights,
    )
