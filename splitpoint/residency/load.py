"""What residency is decided for: one request, and the device that would decode it."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """One request, in tokens.

    Attributes:
        prompt_tokens: all of the prompt; at least 1 of it is not cached.
        cached_tokens: the leading ones whose K and V the store holds.
        answer_tokens: generated tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("prompt_tokens", self.prompt_tokens, 1, None),
            ("answer_tokens", self.answer_tokens, 1, None),
            ("cached_tokens", self.cached_tokens, 0, self.prompt_tokens - 1),
        ):
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
                raise InvalidArgument(f"{name} must be {allowed}, not {value}", field=name)

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that are prefilled."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def mean_length(self) -> int:
        """Length of the sequence half way through its answer."""
        return self.prompt_tokens + self.answer_tokens // 2

    @property
    def step_count(self) -> int:
        """Decode steps: the prefill chooses the first token."""
        return self.answer_tokens - 1


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """How one worker brings caches onto its device, and computes.

    Attributes:
        has_activations: the store keeps X.
        staging_tokens: tokens of X that fit the staging memory; 0: no bound.
        prefill_tokens: most tokens of a prefill in one piece; 0: no bound.
        step_compute_seconds: of a decode step of one sequence without its cache traffic.
            None: the profile's, or that of reading all weights from device memory.
    """

    has_activations: bool
    chunk_tokens: int = 64
    staging_tokens: int = 0
    prefill_tokens: int = 0
    schedule: Schedule = Schedule.PIPELINED
    encoding: Encoding = Encoding.NATIVE
    objective: Objective = Objective.LATENCY
    step_compute_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise InvalidArgument("chunk_tokens must be at least 1", field="chunk_tokens")
