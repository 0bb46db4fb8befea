"""Totals of the work that passed over lanes, by its purpose: bytes and seconds.

Lanes keep the totals, so that each way to use them counts. The names of work come from
pipeline/transfer.py and pipeline/both_ends.py; this module knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import REBUILDING, Span


@dataclass(slots=True)
class LaneTotals:
    """Copies to the device and products on it, since the totals were begun.

    Attributes:
        kv_bytes, activation_bytes, weight_bytes: over the link, to the device.
        link_seconds: sum over these copies; two lanes copy side by side.
        compute_seconds: all work of the compute lane.
        rebuild_seconds: the part of it that computes K and V from activations.
        prefill_seconds: the part of it that computes K and V from token ids.
    """

    kv_bytes: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    link_seconds: float = 0.0
    compute_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans; other copies, such as those that measure the link, do not count."""
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
