"""The requests of one cell, made from a trace's arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.placement.demand import Demand
from splitpoint_cli.traces.arrival import Arrival

if TYPE_CHECKING:
    from splitpoint_cli.simulate.device import Device


@dataclass(slots=True, eq=False)
class SimulatedRequest(Demand):
    """One request. Times in seconds of the simulation; negative: not yet.

    Attributes:
        marks: names of the leading chunks of its prompt that other requests of the cell have, too.
        device: where it runs or ran; None: it has not started.
        context: tokens that are on the device.
        left: tokens of the prompt that are not computed yet.
        end_step: the device's step at whose end the answer is whole.
        pages: what its worker's account counts for it, shared pages included.
        restored_tokens: tokens of its prompt that were not computed again.
    """

    arrived: float
    input_tokens: int
    output_tokens: int
    marks: tuple[bytes, ...]
    started: float = -1.0
    first_token: float = -1.0
    ended: float = -1.0
    device: Device | None = None
    is_streamed: bool = False
    context: int = 0
    left: int = 0
    end_step: int = 0
    pages: int = 0
    restored_tokens: int = 0

    @property
    def has_begun(self) -> bool:
        """True if a step has computed a part of its prompt."""
        return self.left < self.input_tokens - self.restored_tokens

    @property
    def prompt_count(self) -> int:
        return self.input_tokens

    @property
    def generated_count(self) -> int:
        return 0 if self.device is None else self.device.generated(self)

    @property
    def most_generated(self) -> int:
        return self.output_tokens

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.ended - self.first_token) / max(1, self.output_tokens - 1)


def requests_of(
    arrivals: Sequence[Arrival],
    *,
    block_tokens: int,
    chunk_tokens: int,
    context_length: int,
    weights: Mapping[str, float],
) -> list[SimulatedRequest]:
    """Return the requests; `weights` are those of tenants that have not weight 1.

    `context_length`: the cell refuses longer requests, so that their chunks need no names.
    """
    chains = _chains(arrivals)
    uses = Counter(block for chain in chains for block in chain)
    marks: dict[tuple[int, int], bytes] = {}
    found = []
    for number, (arrival, chain) in enumerate(zip(arrivals, chains, strict=True)):
        shared, fits = 0, arrival.input_length + arrival.output_length <= context_length
        while fits and shared < len(chain) and uses[chain[shared]] > 1:
            shared += 1
        # The last token of a prompt is always computed.
        tokens = min(shared * block_tokens, arrival.input_length - 1)
        names = []
        for chunk in range(tokens // chunk_tokens):
            block = chain[((chunk + 1) * chunk_tokens - 1) // block_tokens]
            key = (block, chunk)
            mark = marks.get(key)
            if mark is None:
                mark = marks[key] = len(marks).to_bytes(4, "big")
            names.append(mark)
        found.append(
            SimulatedRequest(
                arrival.seconds,
                arrival.input_length,
                arrival.output_length,
                tuple(names),
                arrival=number,
                tenant=arrival.tenant,
                weight=weights.get(arrival.tenant, 1.0),
                priority=arrival.priority,
            )
        )
    return found


def _chains(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Return a number for each block with all blocks before it: equal only for equal prefixes.

    Tenants share nothing: each has its own keys.
    """
    numbers: dict[tuple[int, int], int] = {}
    roots: dict[str, int] = {}
    chains = []
    for arrival in arrivals:
        chain, parent = [], roots.setdefault(arrival.tenant, -1 - len(roots))
        for block in arrival.hash_ids:
            parent = numbers.setdefault((parent, block), len(numbers))
            chain.append(parent)
        chains.append(chain)
    return chains
