"""The workload of `bench serve`: what its options ask for, checked. Knows no server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from splitpoint.errors import InvalidArgument

# Metrics of a request, in milliseconds, under the names of vllm's options.
METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


class RampUp(StrEnum):
    """How the rate grows from its start to its end over the requests."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


# With more bursts than this, gamma-distributed gaps underflow to 0.
LEAST_BURSTINESS = 0.01


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    Attributes:
        rate: requests per second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less
            comes in bursts, more is more even.
        ramp_up: if set, the rate grows from `start_rate` to `end_rate`, and `rate` is not used.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    start_rate: float = 0.0
    end_rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidArgument("--request-rate must be above 0, or inf", field="request_rate")
        if not LEAST_BURSTINESS <= self.burstiness < math.inf:
            raise InvalidArgument(
                f"--burstiness must be at least {LEAST_BURSTINESS:g}", field="burstiness"
            )
        if self.burstiness != 1 and not self.is_open:
            raise InvalidArgument(
                "--burstiness needs --request-rate or a ramp: else all requests come at once, or "
                "as the trace says",
                field="burstiness",
            )
        if self.ramp_up is None:
            if self.start_rate or self.end_rate:
                raise InvalidArgument(
                    "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy",
                    field="ramp_up_strategy",
                )
            return
        if self.rate != math.inf:
            raise InvalidArgument(
                "a ramp has rates of its own: leave --request-rate out", field="request_rate"
            )
        if not (0 <= self.start_rate <= self.end_rate and self.end_rate > 0):
            raise InvalidArgument(
                "a ramp needs 0 <= --ramp-up-start-rps <= --ramp-up-end-rps, and an end above 0",
                field="ramp_up_strategy",
            )
        if self.ramp_up is RampUp.EXPONENTIAL and not self.start_rate:
            raise InvalidArgument("an exponential ramp starts above 0", field="ramp_up_start_rps")

    @property
    def is_open(self) -> bool:
        """True if requests are spread over time."""
        return self.ramp_up is not None or self.rate != math.inf


@dataclass(frozen=True, slots=True)
class Figures:
    """What of the results is wanted.

    Attributes:
        metrics: of METRICS, those whose distribution is reported.
        percentiles: in [0, 100].
        goals: most milliseconds by metric; a request that keeps all of them is good.
    """

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goals: dict[str, float] = field(default_factory=dict)


def read_metrics(text: str) -> tuple[str, ...]:
    """Return the metrics of a text such as "ttft,tpot". Raises InvalidArgument."""
    metrics = tuple(word.strip() for word in text.split(",") if word.strip())
    for metric in metrics:
        if metric not in METRICS:
            raise InvalidArgument(
                f"{metric!r} is no metric: there are {', '.join(METRICS)}",
                field="percentile_metrics",
            )
    return metrics


def read_percentiles(text: str) -> tuple[float, ...]:
    """Return the percentiles of a text such as "50,99". Raises InvalidArgument."""
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 100 for each in found):
        raise InvalidArgument(
            f"{text!r} are no percentiles: 50,99 are two of them", field="metric_percentiles"
        )
    return found


def read_goals(words: Iterable[str]) -> dict[str, float]:
    """Return the goals of words such as "ttft:500", in milliseconds. Raises InvalidArgument."""
    goals: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        metric, _, limit = word.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = -1.0
        if metric not in GOALS or not 0 <= milliseconds < math.inf:
            raise InvalidArgument(
                f"{word!r} is no goal: ttft:500 asks for a first token within 500 ms; there are "
                f"{', '.join(GOALS)}",
                field="goodput",
            )
        goals[metric] = milliseconds
    return goals
