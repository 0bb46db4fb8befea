"""One request of a trace, and the trace: what load generators and the simulator replay."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Tokens of a block that `hash_ids` name.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        seconds: when it arrives, from the start of the trace.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens of the answer, at least 1.
        hash_ids: a number for each block of the prompt, the last one possibly partial. Requests
            with equal leading numbers have equal leading blocks. Empty: no block is shared.
        tenant: empty if the trace names none.
        priority: higher first within a tenant.
    """

    seconds: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; `block_tokens` are the tokens that one hash id stands for."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def seconds(self) -> float:
        """Time of the last arrival; 0 for an empty trace."""
        return self.arrivals[-1].seconds if self.arrivals else 0.0


def scaled(trace: Trace, *, rate: float = 1.0, length: float = 1.0, output: float = 1.0) -> Trace:
    """Return the trace with more requests a second, and other lengths.

    Args:
        rate: factor of the requests per second.
        length: factor of prompts. Blocks shrink or grow with them, to whole tokens, so that
            the same blocks are shared: the factor in effect is that of the blocks.
        output: factor of answers, of which at least 1 token remains.
    """
    block = max(1, round(trace.block_tokens * length))

    def change(each: Arrival) -> Arrival:
        return replace(
            each,
            seconds=each.seconds / rate,
            input_length=-(-each.input_length * block // trace.block_tokens),
            output_length=max(1, round(each.output_length * output)),
        )

    return replace(
        trace, arrivals=tuple(change(each) for each in trace.arrivals), block_tokens=block
    )


def limited(trace: Trace, *, count: int | None = None, seconds: float | None = None) -> Trace:
    """Return the first requests of a trace: this many at most, and none that arrive later."""
    found = trace.arrivals[:count]
    if seconds is not None:
        found = tuple(each for each in found if each.seconds <= seconds)
    return replace(trace, arrivals=found)
