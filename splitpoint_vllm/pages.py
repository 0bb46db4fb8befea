"""What vLLM carries from its scheduler to its workers about pages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey

from splitpoint_vllm.store import ArenaName, Page


@dataclass
class LoadedPages(LoadStoreSpec):
    """The pages of blocks to load: for each block those of all ranks.

    `arena_name`: whose slots they are in. None: of none, so that the load fails.
    """

    pages: Sequence[tuple[Page, ...]]
    arena_name: ArenaName | None


@dataclass
class StoredPages(LoadStoreSpec):
    """Blocks to store under these keys in this namespace."""

    namespace: bytes
    block_keys: Sequence[OffloadKey]


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """What a step's workers tell, beside the jobs that ended.

    Attributes:
        loads: bytes and seconds of loads by job. Of several ranks, the largest.
        problems: of loads that failed, by job.
        unstored: blocks that a worker could not store.
    """

    loads: dict[int, tuple[int, float]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    unstored: set[OffloadKey] = field(default_factory=set)

    def aggregate(self, other: OffloadingWorkerMetadata) -> WorkerReport:
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        result = WorkerReport(merged.completed_jobs, merged.transfer_stats)
        for each in (self, other):
            if isinstance(each, WorkerReport):
                for job, found in each.loads.items():
                    result.loads[job] = max(found, result.loads.get(job, found))
                result.problems.update(each.problems)
                result.unstored |= each.unstored
        return result
