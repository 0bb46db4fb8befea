"""Workers as `splitpoint status` and `top` are told of them."""

from __future__ import annotations

import dataclasses

from splitpoint.client.answers import Telemetry, Worker
from splitpoint.costs.profile import BUILT_IN_PROFILES

STORE = "unix:/run/store"


def telemetry(uptime: float, scale: float = 1.0, **changes: object) -> Telemetry:
    """A worker that has done `scale` times the same work."""
    told = Telemetry(
        uptime_seconds=uptime,
        step_count=int(10 * scale),
        step_seconds=scale,
        prefilled_token_count=int(1000 * scale),
        generated_token_count=int(40 * scale),
        link_in_bytes=int(200e6 * scale),
        link_out_bytes=int(20e6 * scale),
        link_in_busy_seconds=1.5 * scale,
        link_out_busy_seconds=0.1 * scale,
        compute_busy_seconds=0.5 * scale,
        loaded_token_count=int(600 * scale),
        rebuilt_token_count=int(300 * scale),
        recomputed_token_count=int(100 * scale),
        predicted_seconds=2.0 * scale,
        measured_seconds=2.2 * scale,
        cache_used_bytes=1 << 20,
        draft_count=int(10 * scale),
        draft_token_count=int(40 * scale),
        accepted_token_count=int(30 * scale),
        selection_step_count=int(2 * scale),
        selection_visible_token_count=int(2000 * scale),
        selection_read_token_count=int(250 * scale),
        scheduled_token_count=int(1030 * scale),
    )
    return dataclasses.replace(told, **changes)  # type: ignore[arg-type]


def worker(name: str = "0", told: Telemetry | None = None, **changes: object) -> Worker:
    return Worker(
        id=name,
        address="unix:/run/worker",
        ready=True,
        draining=False,
        device="cpu (1 thread)",
        cache_capacity_bytes=4 << 20,
        cache_charged_bytes=0,
        running_count=1,
        profile=BUILT_IN_PROFILES["a100-80"],
        kvstore_address=STORE,
        message="",
        telemetry=told,
        **changes,  # type: ignore[arg-type]
    )
