"""What a load needs of a server: the interface that each backend implements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the load.

    Attributes:
        prompt: token ids.
        output_length: tokens to generate at most.
        tenant: in whose name it is sent; empty: the caller's.
        priority: within the tenant; higher goes first.
    """

    prompt: list[int]
    output_length: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How all requests of a load sample; None: the server's default."""

    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What a server said about an answer. None: it does not say.

    Attributes:
        prompt_tokens, output_tokens: by the server's count.
        cached_tokens: prompt tokens that were not computed.
        plan: what was planned, in two words such as "resident load".
        queue_seconds: until a worker was told to run it.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    plan: str | None = None
    queue_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model under load. Token ids of prompts are below `vocabulary_size`."""

    name: str
    vocabulary_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Requests of one kind that began to run, and the sum of the seconds they waited before."""

    count: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Waits) -> Waits:
        return Waits(self.count - other.count, self.seconds - other.seconds)


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of a server, to be subtracted.

    Attributes:
        steps, scheduled_tokens: engine steps, and the tokens that they computed.
        failovers: requests that went on elsewhere because their worker was lost.
        link_bound, device_bound: requests by what limits them on their worker.
        decisions: requests that began to run, by the policy's reason.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    failovers: int = 0
    link_bound: Waits = Waits()
    device_bound: Waits = Waits()
    decisions: Mapping[str, int] = field(default_factory=dict)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.steps - other.steps,
            self.scheduled_tokens - other.scheduled_tokens,
            self.failovers - other.failovers,
            self.link_bound - other.link_bound,
            self.device_bound - other.device_bound,
            dict(Counter(self.decisions) - Counter(other.decisions)),
        )


class Backend(Protocol):
    """A server under load."""

    name: str

    async def served(self) -> ServedModel:
        """Return its model. Raises SplitpointError if it cannot be reached."""
        ...

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> AnswerFacts:
        """Generate one answer; call `on_tokens` with the number of tokens of each message.

        Raises SplitpointError if the answer does not become whole.
        """
        ...

    async def counters(self) -> Counters | None:
        """Return its totals by now; None if it has none."""
        ...
