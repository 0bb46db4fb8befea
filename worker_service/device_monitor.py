"""What a worker asks of whoever can look into its device: the seam to drivers and counters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from splitpoint.meters import Reading
from splitpoint.v1 import types_pb2


class DeviceMonitor(Protocol):
    """Answers at once, from the event loop, and never raises: what it cannot tell is absent."""

    def readings(self) -> Iterable[Reading]:
        """Power, memory, clocks, link: what there is now."""

    def fill(self, telemetry: types_pb2.Telemetry) -> None:
        """Set the fields that only a driver knows."""
