"""When the link is the limit of a prefill after a cached prefix, in equations. Pure.

"Understanding Bottlenecks for Efficiently Serving LLM Inference with KV Offloading" (Meng, Lee,
Wang), with K cached and T new tokens, B_kv bytes of K and V per token, F_pf FLOP per new token, BW
bytes of the link and C FLOP of the device per second:

    TTFT = t_link + t_prefill - alpha * min(t_link, t_prefill)                  Eq. 3, 4
    kappa_crit = F_pf / B_kv * BW / C = kappa_M * kappa_HW                      Eq. 5, 6
    U = t_prefill / (t_link + t_prefill), P_OH = t_link / t_prefill             Eq. 7, 8
    N_max = V / ((K + T) * B_kv), T_sched = floor(N_max) * T                    Eq. 9, 10

At kappa_ratio = K / T = kappa_crit loading takes as long as computing. A request above it waits for
the link, one below it for the device. Overheads, and the attention of new tokens to cached ones,
are left out. B_kv (Eq. 1, 2) and F_pf are a ModelShape's.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.shapes import Encoding, ModelShape


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A model on a machine.

    Attributes:
        flops_per_token: F_pf.
        kv_bytes_per_token: B_kv.
        link_bytes_per_second: BW.
        flops_per_second: C.
    """

    flops_per_token: float
    kv_bytes_per_token: float
    link_bytes_per_second: float
    flops_per_second: float

    @classmethod
    def of(
        cls, shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE
    ) -> Bottleneck:
        """Return a model on a worker, whose store keeps the cache so encoded."""
        return cls(
            shape.prefill_flops_per_token,
            shape.stored_kv_bytes_per_token(encoding),
            profile.link_bytes_per_second,
            profile.prefill_flops_per_second,
        )

    @property
    def kappa_model(self) -> float:
        """kappa_M, in FLOP per byte."""
        return self.flops_per_token / self.kv_bytes_per_token

    @property
    def kappa_hardware(self) -> float:
        """kappa_HW, in bytes per FLOP."""
        return self.link_bytes_per_second / self.flops_per_second

    @property
    def kappa_crit(self) -> float:
        """Cached tokens per new one from which the link is the limit."""
        return self.kappa_model * self.kappa_hardware

    def link_seconds(self, cached: float) -> float:
        return cached * self.kv_bytes_per_token / self.link_bytes_per_second

    def compute_seconds(self, new: float) -> float:
        return new * self.flops_per_token / self.flops_per_second

    def ttft(self, cached: float, new: float, overlap: float = 0.0) -> float:
        """Return the seconds to the first token; `overlap` is alpha, 0 to 1."""
        link, compute = self.link_seconds(cached), self.compute_seconds(new)
        return link + compute - overlap * min(link, compute)

    def utilisation(self, cached: float, new: float) -> float:
        """Return U: the part of the time without overlap in which the device computes."""
        return self.compute_seconds(new) / self.ttft(cached, new)

    def link_overhead(self, cached: float, new: float) -> float:
        """Return P_OH: seconds of the link for each second of the device."""
        return self.link_seconds(cached) / self.compute_seconds(new)

    def requests_at_once(self, memory_bytes: float, cached: float, new: float) -> float:
        """Return N_max before it is rounded down. `memory_bytes`: V, of the device for K and V."""
        return memory_bytes / ((cached + new) * self.kv_bytes_per_token)

    def scheduled_tokens(self, memory_bytes: float, cached: float, new: float) -> float:
        """Return T_sched: new tokens of the requests that fit together, in one step."""
        return int(self.requests_at_once(memory_bytes, cached, new)) * new

    def attainable_flops(self, kappa: float) -> float:
        """Return the roofline: FLOP per second at a ratio, if link and device never wait."""
        return self.flops_per_second * min(1.0, self.kappa_crit / kappa)


def kappa_crit(shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE) -> float:
    """Return the ratio for a model on a worker, whose store keeps the cache so encoded."""
    return Bottleneck.of(shape, profile, encoding).kappa_crit
