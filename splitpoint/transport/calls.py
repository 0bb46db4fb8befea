"""Count a server's calls by method and status, from `create_server`'s `on_answer`."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health
from prometheus_client import Counter

from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import RPC_CALLS
from splitpoint.transport.guard import OnCallEnded

# The label of any other method: callers must not be able to add series.
UNKNOWN_METHOD = "unknown"


def count_calls(meters: Meters, service_names: Sequence[str]) -> OnCallEnded:
    """Return the `on_answer` of a server of these services (full names) and health.

    Every method starts with 0 calls that succeeded. Call once per process.
    """
    calls = meters.counter(RPC_CALLS)
    methods = _methods_of([*service_names, health.SERVICE_NAME])
    counted: dict[tuple[str, grpc.StatusCode], Counter] = {
        (method, grpc.StatusCode.OK): calls.labels(method, grpc.StatusCode.OK.name)
        for method in methods.values()
    }

    def count(path: str, code: grpc.StatusCode) -> None:
        method = methods.get(path, UNKNOWN_METHOD)
        counter = counted.get((method, code))
        if counter is None:
            counter = counted[method, code] = calls.labels(method, code.name)
        counter.inc()

    return count


def _methods_of(service_names: Sequence[str]) -> dict[str, str]:
    """Map the path of each method, "/package.Service/Method", to "Service/Method"."""
    pool = descriptor_pool.Default()
    return {
        f"/{service.full_name}/{method.name}": f"{service.name}/{method.name}"
        for service in map(pool.FindServiceByName, service_names)
        for method in service.methods
    }
