"""The equations of "KV cache offloading bottlenecks", and the rows of its tables. Pure.

    kappa_HW = BW / C (Table 2)     kappa_M = F_pf / B_kv, kappa_crit = kappa_M kappa_HW (Table 3)
    N_max = V / ((K + T) B_kv), T_sched = N_max T (Eq. 9 and 10; Table 4 is measured)

Misprints of the paper, which are not followed here: Eq. 2 prints a product where the sum of
the ranks gives its 70 KB; Table 3 has 1.42 for Llama-3.1-405B's kappa_M, 810e9 / 516.1e3 is 1.57;
Table 2 is of sparse FP8 peaks, and of 67.2 GB/s for PCIe 5 and half of that for PCIe 4; the
example with 60 GB floors 1.79 requests to 1.8, where at most 1 fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.first_token import kappa_crit_of

# Bytes per second of Table 2's links. A link of 16 lanes has at most 63.0e9 (costs/pcie.py).
PCIE_4, PCIE_5 = 33.6e9, 67.2e9
# What the paper measured on its PCIe 5 hosts.
MEASURED_LINK = 15e9
# Peaks of Table 2: FLOP/s of sparse FP8 (H100, B200), of sparse int8 (A100).
PEAKS = {"B200": 5e15, "H100": 1.979e15, "A100": 0.624e15}


@dataclass(frozen=True, slots=True)
class PaperModel:
    """One row of Table 3. `kv_bytes`: B_kv, bytes per token with 2 bytes per element."""

    name: str
    active_parameters: float
    kv_bytes: int

    @property
    def flops_per_token(self) -> float:
        """F_pf = 2 N_active."""
        return 2 * self.active_parameters

    def kappa_m(self) -> float:
        """Return F_pf / B_kv in GFLOP per KB, as Table 3 prints it, over 1000."""
        return self.flops_per_token / self.kv_bytes / 1e6

    def kappa_crit(self, link_bytes_per_second: float, flops_per_second: float) -> float:
        """Return Eq. 6."""
        return kappa_crit_of(
            self.flops_per_token,
            self.kv_bytes,
            link_bytes_per_second=link_bytes_per_second,
            flops_per_second=flops_per_second,
        )


def grouped_kv_bytes(layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Return Eq. 1."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def latent_kv_bytes(layers: int, rank: int, rotary: int, element_bytes: int = 2) -> int:
    """Return Eq. 2, with a sum for its misprinted product."""
    return layers * (rank + rotary) * element_bytes


MODELS = (
    PaperModel("Llama-3.1-70B", 70e9, grouped_kv_bytes(80, 8, 128)),
    PaperModel("Llama-3.1-405B", 405e9, grouped_kv_bytes(126, 8, 128)),
    PaperModel("Qwen3-30B-A3B", 3.3e9, grouped_kv_bytes(48, 4, 128)),
    PaperModel("Qwen3-235B-A22B", 22e9, grouped_kv_bytes(94, 4, 128)),
    PaperModel("DeepSeek-V3", 37e9, latent_kv_bytes(61, 512, 64)),
)


def kappa_hardware(link_bytes_per_second: float, flops_per_second: float) -> float:
    """Return Table 2's cell: bytes on the link per FLOP, in KB per GFLOP."""
    return link_bytes_per_second / flops_per_second * 1e6


def time_to_first_token(
    model: PaperModel,
    cached: float,
    new: float,
    *,
    link_bytes_per_second: float,
    flops_per_second: float,
    overlap: float = 0.0,
) -> float:
    """Return Eq. 4, which is Eq. 3 without overlap (`overlap` is its alpha, 0 to 1)."""
    link = cached * model.kv_bytes / link_bytes_per_second
    compute = new * model.flops_per_token / flops_per_second
    return link + compute - overlap * min(link, compute)


def requests_at_once(model: PaperModel, memory_bytes: float, cached: float, new: float) -> float:
    """Return Eq. 9: how many requests fit; the paper counts parts of one, too."""
    return memory_bytes / ((cached + new) * model.kv_bytes)
