"""The connector that vLLM loads: vLLM's offloading connector over the pages of a KV store.

It adds what that connector lacks: one look-up for each request, the plan, failed loads that end in
recomputation, and the reason in the answer. It reads private state of vLLM's scheduler, so each
version of vLLM must be tried.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from splitpoint.errors import SplitpointError
from splitpoint_vllm.manager import SplitpointManager
from splitpoint_vllm.namespace import namespace_of
from splitpoint_vllm.pages import WorkerReport
from splitpoint_vllm.plan import Reason
from splitpoint_vllm.spec import SplitpointSpec, block_bytes, check_version, engine_facts
from splitpoint_vllm.store import PageFinder

log = logging.getLogger("vllm.splitpoint.connector")

# How long an engine's start waits for the store.
START_SECONDS = 2.0
# A request that arrives during a step is looked up right before the next one, which it would miss
# if its answer were not waited for: by this share of a step's time in all, and at most so long.
PATIENCE_SHARE = 0.03
PATIENCE_SECONDS = 0.01


class ConnectorWorker(OffloadingConnectorWorker):
    """A rank's side: tells failed loads by request."""

    def __init__(
        self, spec: SplitpointSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._splitpoint = spec
        self._report = WorkerReport()

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what ended since the last call; failed loads also as received."""
        requests = dict(self._load_jobs)
        sent, received = self.get_finished(finished_req_ids)
        failed = set()
        assert self._splitpoint.worker is not None
        for job in self._splitpoint.worker.ended:
            self._report.unstored.update(job.unstored)
            if job.is_load:
                self._report.loads[job.job_id] = job.byte_count, job.seconds
                if job.problem:
                    self._report.problems[job.job_id] = job.problem
                    failed.add(requests[job.job_id])
        return KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        found = super().build_connector_worker_meta()
        if found is None:
            return None
        report, self._report = self._report, WorkerReport()
        report.completed_jobs, report.transfer_stats = found.completed_jobs, found.transfer_stats
        return report


class SplitpointConnector(OffloadingConnector):
    """`"kv_connector": "SplitpointConnector"`, of the module `splitpoint_vllm.connector`."""

    connector_worker: OffloadingConnectorWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raise ValueError for a configuration that would lose requests or share wrong pages."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'splitpoint: set "kv_load_failure_policy": "recompute": with vLLM\'s default a '
                "request ends when a load fails"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        _use_handlers_of_vllm()
        # Steps under way: when each began, and the tokens that it computes.
        self._steps: deque[tuple[float, int]] = deque()
        self._step_ended = 0.0
        self._patience = PATIENCE_SECONDS  # left for the step that is scheduled now
        self._step_seconds = PATIENCE_SECONDS / PATIENCE_SHARE
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            assert isinstance(spec, SplitpointSpec)
            self.connector_worker = ConnectorWorker(spec, vllm_config, kv_cache_config)
        else:
            manager = self.scheduler.manager
            assert isinstance(manager, SplitpointManager)
            self._manager = manager
            self._start(vllm_config, kv_cache_config)

    def _start(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        """Connect to the store. Without one, or with pages that cannot be told, serve without."""
        # vLLM's connector does not keep the spec on the scheduler's side.
        assert config.kv_transfer_config is not None
        spec = _spec_of(config, cache)
        groups = self.scheduler.config.kv_group_configs
        specs = [cache.kv_cache_groups[group.group_idx] for group in groups]
        self._block_bytes = [block_bytes(group) for group in specs]
        try:
            check_version()
            facts = engine_facts(config, cache)
            namespace = namespace_of(facts)
            finder = PageFinder(spec.store_settings("scheduler", max(self._block_bytes)))
        except SplitpointError as error:
            log.error("Splitpoint: serving without the KV store: %s", error.message)
            return
        except Exception:  # of vLLM's configuration, or of a model's: no reason to end an engine
            log.exception("Splitpoint: serving without the KV store")
            return
        # Without the hashes' seed, which may be a secret.
        log.info(
            "Splitpoint: namespace %s: %s on %s, weights %s, %s",
            *(namespace.hex()[:16], facts.engine, facts.device),
            *(" and ".join(each[:16] for each in facts.weights), facts.groups),
        )
        self._manager.start(finder, namespace, config.parallel_config.world_size)
        if not finder.wait_connected(START_SECONDS) and finder.refusal is Reason.AWAY:
            log.warning("Splitpoint: the KV store is not there yet; it is used when it is")

    # -- the scheduler's side ---------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        # The content of an adapter is not in vLLM's keys, only its name and path.
        if request.lora_request is None and not request.skip_reading_prefix_cache:
            self._manager.look_up(request.request_id, self._block_keys(request))

    def _block_keys(self, request: Request) -> list[OffloadKey]:
        """Return the keys of all blocks that may be asked for, in the order of the sequence."""
        config = self.scheduler.config
        keys = []
        for number, block_hash in enumerate(request.block_hashes, start=1):
            for group in config.kv_group_configs:
                if config.supports_partial_tail or number % group.hashes_per_chunk == 0:
                    keys.append(make_offload_key(block_hash, group.group_idx))
        return keys

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._manager.look_up_again(request.request_id, lambda: self._block_keys(request))
        if self._is_waiting(request.request_id):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _is_waiting(self, request_id: str) -> bool:
        """Return True if a request has no answer yet, although it was waited for a little."""
        if self._manager.is_waiting(request_id) and self._patience > 0:
            started = time.monotonic()
            self._manager.wait_for_answer(request_id, self._patience)
            self._patience -= time.monotonic() - started
        return self._manager.is_waiting(request_id)

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the most tokens to load, by the plan. None: no limit."""
        self._manager.cached(request.request_id, num_computed_tokens)
        limit = super()._max_loadable_tokens(request, num_computed_tokens)
        status = self.scheduler._req_status[request.request_id]
        if status.transfer_jobs or request.skip_reading_prefix_cache:
            return limit
        status.update_offload_keys()
        status.num_locally_computed_tokens = num_computed_tokens
        found = self.scheduler._lookup(status, limit)
        if not found:
            return limit
        groups = self.scheduler.config.kv_group_configs
        # A part of what was found may end where windows and linear attention have no state.
        least = math.lcm(*(group.tokens_per_chunk for group in groups))
        plan = self._manager.plan(
            request.request_id,
            found,
            found if self.scheduler._sliding_window_groups else least,
            self._load_bytes(num_computed_tokens, found),
        )
        return limit if plan.tokens >= found else plan.tokens

    def _load_bytes(self, computed_tokens: int, found_tokens: int) -> int:
        """Return the bytes per rank of the pages that are loaded for the found tokens."""
        end, total = computed_tokens + found_tokens, 0
        groups = self.scheduler.config.kv_group_configs
        for group, size in zip(groups, self._block_bytes, strict=True):
            count = math.ceil(found_tokens / group.tokens_per_chunk)
            window = group.load_window_size_in_chunks(end)
            total += size * (count if window is None else min(count, window))
        return total

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._manager.allocated(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        tokens = scheduler_output.total_num_scheduled_tokens
        self._patience = min(PATIENCE_SECONDS, PATIENCE_SHARE * self._step_seconds)
        if tokens:
            # A step without prompts says little about computing them.
            is_prefill = tokens > len(scheduler_output.num_scheduled_tokens)
            self._steps.append((time.monotonic(), tokens if is_prefill else 0))
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._note_step()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._manager.unstored(report.unstored)
            for job_id, (byte_count, seconds) in report.loads.items():
                job = self.scheduler._jobs.get(job_id)
                if job is not None:
                    self._manager.load_ended(
                        job.req_id, byte_count, seconds, report.problems.get(job_id, "")
                    )
        super().update_connector_output(connector_output)
        for request_id in connector_output.failed_recving or ():
            status = self.scheduler._req_status.get(request_id)
            if status is not None:
                # Or what is computed instead would never be stored.
                for group in status.group_states:
                    group.next_stored_chunk_idx = 0

    def _note_step(self) -> None:
        """Measure the step that ended."""
        now = time.monotonic()
        if self._steps:
            begun, tokens = self._steps.popleft()
            # With asynchronous scheduling a step begins before the one before it has ended.
            self._step_seconds = now - max(begun, self._step_ended)
            self._manager.planner.measured_step(tokens, self._step_seconds)
        self._step_ended = now

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delays, parameters = super().request_finished_all_groups(request, block_ids)
        outcome = self._manager.outcome(request.request_id)
        return delays, {**(parameters or {}), "splitpoint": outcome}

    # -- a worker's side --------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert isinstance(self.connector_worker, ConnectorWorker)
        return self.connector_worker.transfer_results(finished_req_ids)


def _spec_of(config: VllmConfig, cache: KVCacheConfig) -> SplitpointSpec:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )

    return SplitpointSpec(build_offloading_config(config, cache))


def _use_handlers_of_vllm() -> None:
    """Let the modules shared with the other services log as vLLM does."""
    ours, theirs = logging.getLogger("splitpoint"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(logging.WARNING)  # each attempt to attach is INFO
