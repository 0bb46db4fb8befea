"""The counters as a message, which the scheduler gets about once a second.

It is made when it is sent, so it is current however slow its reader is.
"""

from __future__ import annotations

from splitpoint.v1 import types_pb2
from worker_service.counters import Way
from worker_service.startup.worker import LoadedWorker

# Seconds between two messages on a Run stream.
TELEMETRY_SECONDS = 1.0


class Telemeter:
    """Makes the telemetry of one Run stream, which tells only once what does not change."""

    def __init__(self, worker: LoadedWorker) -> None:
        self._worker = worker
        self._told_version: int | None = None

    def message(self) -> types_pb2.Telemetry:
        """Return the present telemetry; with the chunks on the device if they changed."""
        telemetry = telemetry_of(self._worker)
        shared = self._worker.engine.page_manager.shared
        if shared is not None and shared.prefixes.version != self._told_version:
            # The engine goes on meanwhile: a later change is told with the next message.
            self._told_version = shared.prefixes.version
            telemetry.device_chunk_marks = shared.prefixes.marks()
        return telemetry


def telemetry_of(worker: LoadedWorker) -> types_pb2.Telemetry:
    """Return the worker's present telemetry, without waking the engine."""
    counters, engine = worker.runtime.counters, worker.engine
    link = engine.lanes.link
    telemetry = types_pb2.Telemetry(
        uptime_seconds=counters.uptime_seconds,
        step_count=sum(counters.steps.values()),
        step_seconds=counters.step_seconds,
        prefilled_token_count=counters.prefilled_tokens,
        generated_token_count=counters.generated_tokens,
        scheduled_token_count=counters.prefilled_tokens + counters.decoded_tokens,
        link_in_bytes=sum(counters.link_in_bytes.values()),
        link_out_bytes=counters.written.bytes,
        link_in_busy_seconds=counters.link_in_seconds,
        link_out_busy_seconds=counters.written.seconds,
        compute_busy_seconds=counters.compute_until_now(engine.computing_seconds),
        loaded_token_count=counters.tokens_by(Way.LOADED),
        rebuilt_token_count=counters.tokens_by(Way.REBUILT),
        recomputed_token_count=counters.tokens_by(Way.RECOMPUTED),
        split_tokens=counters.split_tokens,
        predicted_seconds=sum(counters.predicted_seconds.values()),
        measured_seconds=sum(counters.measured_seconds.values()),
        cache_used_bytes=engine.cache.used_bytes,
        preemption_count=counters.preemptions,
        draft_count=sum(counters.drafts.values()),
        draft_token_count=sum(counters.drafted_tokens.values()),
        accepted_token_count=sum(counters.accepted_tokens.values()),
        selection_step_count=counters.selected.step_count,
        selection_visible_token_count=counters.selected.visible_token_count,
        selection_read_token_count=counters.selected.read_token_count,
        store_is_up=worker.store_is_up,
        redis_is_up=None if worker.redis_is_up is None else worker.redis_is_up(),
        link_ceiling_bytes_per_second=None if link is None else link.bytes_per_second,
        eager_message="" if engine.eager_reason is None else engine.eager_reason.text,
    )
    worker.monitor.fill(telemetry)
    return telemetry
