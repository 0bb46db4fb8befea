"""What lanes brought and computed, summed by what it was for: bytes and seconds.

Lanes keep one of all that passed over them, so that no way to use them can forget to
count. Knows no requests; which work has which name is transfer.py's, prefetcher.py's and
meeting.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import REBUILDING, Span


@dataclass(slots=True)
class LaneTotals:
    """Copies to the device and products on it, since it was begun.

    Attributes:
        kv_bytes, activation_bytes, weight_bytes: over the link, towards the device.
        link_seconds: that these copies took, summed; two lanes copy side by side.
        compute_seconds: of all work of the compute lane.
        rebuild_seconds, prefill_seconds: of it, K and V from activations, from token ids.
    """

    kv_bytes: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    link_seconds: float = 0.0
    compute_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def add(self, spans: Iterable[Span]) -> None:
        """Other copies, such as those that measure the link, are nobody's traffic."""
        for span in spans:
            seconds = span.end - span.start
            if span.lane is Lane.COMPUTE:
                self.compute_seconds += seconds
                if span.name in REBUILDING:
                    self.rebuild_seconds += seconds
                elif span.name == "prefill":
                    self.prefill_seconds += seconds
            elif span.lane is Lane.WEIGHTS_IN:
                self.weight_bytes += int(span.amount)
                self.link_seconds += seconds
            elif span.name == "load K,V":
                self.kv_bytes += int(span.amount)
                self.link_seconds += seconds
            elif span.name == "send X":
                self.activation_bytes += int(span.amount)
                self.link_seconds += seconds
