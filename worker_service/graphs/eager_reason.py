"""Why decoding steps are computed eagerly: a name for metrics, and a text for people."""

from __future__ import annotations

from enum import StrEnum


class EagerReason(StrEnum):
    """One reason; its value is a label. The text of an exception is in the log alone."""

    NOT_ASKED = "not_asked"
    NO_GPU = "no_gpu"
    WEIGHTS_ON_HOST = "weights_on_host"
    ATTENTION_GATHERS = "attention_gathers"
    ATTENTION_PLANS = "attention_plans"
    NO_MEMORY = "no_memory"
    RECORDING_FAILED = "recording_failed"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    EagerReason.NOT_ASKED: "graphs were not asked for (--enforce-eager)",
    EagerReason.NO_GPU: "the device is no GPU",
    EagerReason.WEIGHTS_ON_HOST: "weights come from the host in each step",
    EagerReason.ATTENTION_GATHERS: "decode attention gathers pages",
    EagerReason.ATTENTION_PLANS: "FlashInfer plans each step on the host",
    EagerReason.NO_MEMORY: "the device memory has no room for graphs",
    EagerReason.RECORDING_FAILED: "a recording failed (see the log)",
}
