"""Where the link becomes the limit: the ratio of cached to new tokens.

kappa_ratio = K / T of a request; kappa_crit = (F_pf / B_kv) * (BW / C), where loading K
cached tokens takes as long as prefilling T new ones ("KV cache offloading bottlenecks",
Eq. 6). A request above it waits for the link, one below it for the device. Overheads are
left out, and the attention of new tokens to cached ones: at length both only shift it.
"""

from __future__ import annotations

from splitpoint.costs.profile import Profile
from splitpoint.shapes import Encoding, ModelShape


def kappa_crit(shape: ModelShape, profile: Profile, encoding: Encoding = Encoding.NATIVE) -> float:
    """Of a model on a worker with this profile and a store that keeps the cache so encoded."""
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
    """The same from bare numbers, for models that no ModelShape describes."""
    model = prefill_flops_per_token / kv_bytes_per_token  # FLOP per cached byte
    hardware = link_bytes_per_second / flops_per_second  # bytes per FLOP
    return model * hardware
