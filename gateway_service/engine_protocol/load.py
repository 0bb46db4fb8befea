"""The scheduler's load in the terms of vLLM's protocol. Knows no channel."""

from __future__ import annotations

from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2

from splitpoint.transport import convert
from splitpoint.v1 import scheduler_pb2


class LoadReport:
    """Reports of one engine; two readings give the rate of generated tokens."""

    def __init__(self) -> None:
        self._generated = 0
        self._uptime_seconds = 0.0
        self._tokens_per_second = 0.0

    def of(
        self,
        status: scheduler_pb2.GetSchedulerStatusResponse,
        workers: scheduler_pb2.ListWorkersResponse,
        model: scheduler_pb2.Model,
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the load of all workers together, as of one rank."""
        capacity = sum(worker.cache_capacity_bytes for worker in workers.workers if worker.ready)
        charged = sum(worker.cache_charged_bytes for worker in workers.workers if worker.ready)
        token_bytes = convert.shape_from_proto(model.shape).kv_bytes_per_token
        usage = min(1.0, charged / capacity) if capacity else 0.0
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=status.running_count,
            num_waiting_reqs=status.waiting_count,
            num_total_reqs=status.running_count + status.waiting_count,
            num_used_tokens=charged // token_bytes,
            max_total_num_tokens=capacity // token_bytes,
            token_usage=usage,
            gen_throughput=self._rate(status),
            cache_hit_rate=(
                status.cached_token_count / status.prompt_token_count
                if status.prompt_token_count
                else 0.0
            ),
            utilization=usage,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=1,
            loads=[load],
        )

    def _rate(self, status: scheduler_pb2.GetSchedulerStatusResponse) -> float:
        """Return tokens per second since the reading before; that one's if no time has passed."""
        seconds = status.uptime_seconds - self._uptime_seconds
        if seconds < 0:  # another scheduler, or the same one anew
            seconds, self._generated = status.uptime_seconds, 0
        if seconds > 0:
            made = max(0, status.generated_token_count - self._generated)
            self._tokens_per_second = made / seconds
            self._generated = status.generated_token_count
            self._uptime_seconds = status.uptime_seconds
        return self._tokens_per_second
