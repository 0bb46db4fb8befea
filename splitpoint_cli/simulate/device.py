"""One simulated worker: its engine's steps, many equal ones at a time.

As the engine does (`worker_service/engine/queues.py`): every step decodes one token of each
sequence whose prefill is over, and computes prompt tokens up to the budget, of the earliest
arrivals first. Nothing changes in such a step but lengths, so steps are taken as one run until
a prefill or an answer ends, or until something new arrives.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitpoint_cli.simulate.costs import DeviceCosts, Run

if TYPE_CHECKING:
    from splitpoint_cli.simulate.workload import SimulatedRequest

# Steps of streamed sequences that are taken as one: their lengths change little meanwhile.
_STREAMED_STEPS = 16


@dataclass(slots=True)
class DeviceTotals:
    """What a device did. Seconds, tokens, counts.

    Attributes:
        link_seconds: of restores and streamed steps.
        page_seconds: integral of the pages that were charged.
    """

    step_count: int = 0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    restored_tokens: int = 0
    link_seconds: float = 0.0
    page_seconds: float = 0.0


class Device:
    """The engine of one worker. `run` is what it computes now; None: nothing."""

    __slots__ = (
        *("begun", "budget", "costs", "ends", "link_free", "run", "totals", "version"),
        *("_decoding", "_length", "_pieces", "_prefilling", "_steps"),
        *("_pulls", "_streamed", "_streamed_length"),
    )

    def __init__(self, costs: DeviceCosts, budget: int) -> None:
        self.costs = costs
        self.budget = budget
        self.totals = DeviceTotals()
        self.run: Run | None = None
        # When the run ends, and how often that changed.
        self.ends = 0.0
        self.version = 0
        # When the run began.
        self.begun = 0.0
        # When its link has done what it was given.
        self.link_free = 0.0
        self._steps = 0
        # (step at whose end it is over, number, request)
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []
        self._prefilling: list[tuple[int, SimulatedRequest]] = []
        # What each step of the run computes of prompts: one piece in each, or several in one.
        self._pieces: list[tuple[SimulatedRequest, int]] = []
        # Tokens of all decoding sequences together, and of the streamed ones among them.
        self._length = 0
        self._streamed = 0
        self._streamed_length = 0
        # True if the run reads cached tokens over the link.
        self._pulls = False

    def generated(self, request: SimulatedRequest) -> int:
        """Return the generated tokens of a request as of the beginning of the run."""
        if request.first_token < 0:
            return 0
        return request.output_tokens - (request.end_step - self._steps)

    def restore(self, tokens: int, now: float) -> float:
        """Put a restore on the link, after those before it. Return when it is over."""
        plan = self.costs.restore(tokens)
        seconds = plan.predicted_restore_seconds
        self.link_free = max(now, self.link_free) + seconds
        self.totals.link_seconds += seconds
        self.totals.restored_tokens += tokens
        return self.link_free

    def add(self, request: SimulatedRequest) -> None:
        """Take a request whose prefix is on the device; the next run computes it."""
        insort(self._prefilling, (request.arrival, request))

    def cut(self, now: float) -> bool:
        """End the run with the step under way. Return True if `ends` has changed."""
        assert self.run is not None
        steps = self.run.steps_until(now - self.begun)
        if steps == self.run.count:
            return False
        self.run = Run(steps, self.run.first, self.run.growth)
        self._set_end()
        return True

    def begin(self, now: float, most_prefill_steps: int | None = None) -> None:
        """Lay out the next run, if there is anything to compute.

        `most_prefill_steps`: bound of steps with prompts, for a caller that follows them.
        """
        self.begun = now
        self._pieces = []
        self._pulls = self._streamed > 0
        if self._prefilling:
            self.run = self._prefill_run(most_prefill_steps)
        elif self._decoding:
            self.run = self._decode_run(self._decoding[0][0] - self._steps)
        else:
            self.run = None
            return
        self._set_end()

    def finish(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest], int]:
        """End the run at `ends`.

        Return the requests that have their first token, those whose answer is whole, and the
        prompt tokens that were computed.
        """
        run, totals, now = self.run, self.totals, self.ends
        assert run is not None
        seconds, count = now - self.begun, len(self._decoding)
        self._steps += run.count
        self._length += count * run.count
        self._streamed_length += self._streamed * run.count
        totals.step_count += run.count
        totals.step_seconds += seconds
        totals.decoded_tokens += count * run.count
        if self._pulls:
            totals.link_seconds += seconds
        first: list[SimulatedRequest] = []
        prefilled = 0
        for request, tokens in self._pieces:
            computed = tokens * run.count
            request.left -= computed
            request.context += computed
            prefilled += computed
            if not request.left:
                first.append(request)
        if prefilled:
            totals.prefill_seconds += seconds
            totals.prefilled_tokens += prefilled
        ended = self._answers_ended()
        for request in first:
            self._decode(request, ended)
        return first, ended, prefilled

    # -- inside -------------------------------------------------------------------

    def _set_end(self) -> None:
        assert self.run is not None
        self.ends = self.begun + self.run.seconds
        self.version += 1

    def _decode_run(self, steps: int) -> Run:
        count = len(self._decoding)
        if self._streamed:
            return Run(min(steps, _STREAMED_STEPS), self._streamed_seconds())
        return self.costs.decodes(steps, count, self._length)

    def _streamed_seconds(self) -> float:
        resident = len(self._decoding) - self._streamed
        return self.costs.streamed_step(self._streamed, self._streamed_length, resident)

    def _prefill_run(self, most_steps: int | None) -> Run:
        count, budget = len(self._decoding), self.budget
        request = self._prefilling[0][1]
        is_alone = request.left > budget and not self._streamed and not request.is_streamed
        if is_alone and (request.has_begun or not self.costs.overheads.start):
            steps = (request.left - 1) // budget
            if most_steps is not None:
                steps = max(1, min(steps, most_steps))
            if self._decoding:
                steps = min(steps, self._decoding[0][0] - self._steps)
            self._pieces = [(request, budget)]
            return self.costs.prefills(steps, count, self._length, budget, request.context)
        return Run(1, self._mixed_step())

    def _mixed_step(self) -> float:
        """Lay out pieces of several prompts in one step; return its seconds."""
        costs, left = self.costs, self.budget
        flops = pulled = starts = 0.0
        for _, request in self._prefilling:
            tokens = min(request.left, left)
            left -= tokens
            self._pieces.append((request, tokens))
            ends = tokens == request.left
            starts += not request.has_begun
            flops += costs.prefill_flops(tokens, request.context, ends=ends)
            if request.is_streamed and request.context:
                pulled += costs.restore(request.context).predicted_restore_seconds
            if not left:
                break
        decoding = len(self._decoding)
        if self._streamed:
            pulled += self._streamed_seconds()
        self._pulls = pulled > 0
        seconds = costs.step(decoding, self._length, flops, 1)
        return max(seconds, pulled) + starts * costs.overheads.start

    def _answers_ended(self) -> list[SimulatedRequest]:
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            _, _, request = heapq.heappop(self._decoding)
            length = request.token_count
            self._length -= length
            if request.is_streamed:
                self._streamed -= 1
                self._streamed_length -= length
            ended.append(request)
        return ended

    def _decode(self, request: SimulatedRequest, ended: list[SimulatedRequest]) -> None:
        """Move a request whose prompt is computed to those that decode."""
        self._prefilling.remove((request.arrival, request))
        request.end_step = self._steps + request.output_tokens - 1
        if request.output_tokens == 1:
            ended.append(request)
            return
        # Its first token is the first that the next step attends to.
        self._length += request.input_tokens + 1
        if request.is_streamed:
            self._streamed += 1
            self._streamed_length += request.input_tokens + 1
        heapq.heappush(self._decoding, (request.end_step, request.arrival, request))
