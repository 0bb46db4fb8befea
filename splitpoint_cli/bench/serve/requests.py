"""The requests of a load, and the times at which they are due.

Both are drawn before the load begins, so that nothing delays them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from splitpoint_cli.bench.serve.backends import Sample, ServedModel
from splitpoint_cli.bench.serve.prompts import RandomPrompts, trace_samples
from splitpoint_cli.bench.serve.workload import Arrivals, RampUp
from splitpoint_cli.traces.arrival import Trace


@dataclass(frozen=True, slots=True)
class Requests:
    """What is sent when: random prompts, or a trace.

    Attributes:
        arrivals: None if a trace says when.
    """

    source: RandomPrompts | Trace
    arrivals: Arrivals | None
    count: int
    warmup_count: int
    seed: int

    def samples(self, model: ServedModel) -> list[Sample]:
        """Draw the samples. Raises InvalidArgument if the model cannot hold one."""
        if isinstance(self.source, Trace):
            return trace_samples(self.source, model, self.seed)
        return self.source.samples(self.count, model, random.Random(self.seed))

    def warmups(self, model: ServedModel) -> list[Sample]:
        """Draw samples of the same lengths whose prompts are cached for none of the others."""
        return [
            Sample([*reversed(each.prompt)], each.output_length, each.tenant)
            for each in self.samples(model)[: self.warmup_count]
        ]

    def due(self) -> list[float]:
        """Return when each sample is due, in seconds from the start."""
        if self.arrivals is not None:
            return due_seconds(self.arrivals, self.count, random.Random(f"gaps {self.seed}"))
        if not isinstance(self.source, Trace):
            raise TypeError("random prompts have no times of their own")
        return [each.seconds for each in self.source.arrivals]


def due_seconds(arrivals: Arrivals, count: int, rng: random.Random) -> list[float]:
    """Return when each of `count` requests is due, in seconds from the start, ascending.

    At a constant rate the last one is due after count / rate seconds exactly: the gaps are
    scaled to their expected sum, as `vllm bench serve` does, so that runs are comparable.
    """
    if not arrivals.is_open:
        return [0.0] * count
    shape, now, due = arrivals.burstiness, 0.0, []
    for index in range(count):
        # In the middle of its step: a ramp may begin at a rate of 0.
        rate = _rate(arrivals, (index + 0.5) / count)
        now += rng.gammavariate(shape, 1 / (rate * shape))
        due.append(now)
    if arrivals.ramp_up is None and due:
        scale = count / arrivals.rate / due[-1]
        due = [seconds * scale for seconds in due]
    return due


def _rate(arrivals: Arrivals, progress: float) -> float:
    """Return the requests per second after this share of all requests."""
    first, last = arrivals.start_rate, arrivals.end_rate
    match arrivals.ramp_up:
        case RampUp.LINEAR:
            return first + (last - first) * progress
        case RampUp.EXPONENTIAL:
            return first * float((last / first) ** progress)
        case None:
            return arrivals.rate
