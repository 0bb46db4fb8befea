"""The ratio of cached to new tokens at which the link becomes the limit.

kappa_ratio = K / T of a request. At kappa_crit = (F_pf / B_kv) * (BW / C), loading K cached
tokens takes as long as prefilling T new ones ("KV cache offloading bottlenecks", Eq. 6). A
request above it waits for the link, one below it for the device. Overheads, and the attention
of new tokens to cached ones, are left out.
"""

from __future__ import annotations

from splitpoint.costs.profile import Profile
from splitpoint.shapes import Encoding, ModelShape


def kappa_crit(shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE) -> float:
    """Return the ratio for a model on a worker, whose store keeps the cache so encoded."""
    return kappa_crit_of(
        shape.prefill_flops_per_token,
        shape.stored_kv_bytes_per_token(encoding),
        link_bytes_per_second=profile.link_bytes_per_second,
        flops_per_second=profile.prefill_flops_per_second,
    )


def kappa_crit_of(
    prefill_flops_per_token: float,
    kv_bytes_per_token: float,
    *,
    link_bytes_per_second: float,
    flops_per_second: float,
) -> float:
    """Return the same from numbers, for models that no ModelShape describes."""
    model = prefill_flops_per_token / kv_bytes_per_token  # FLOP per cached byte
    hardware = link_bytes_per_second / flops_per_second  # bytes per FLOP
    return model * hardware
