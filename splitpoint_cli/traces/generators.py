"""Made traces with the statistics of published ones, equal for equal seeds.

Mooncake's are "Mooncake: Trading more storage for less computation" (FAST 2025), Azure's those of
November 2023 (Splitwise). Lengths are drawn from quantile functions through the published
quantiles, one draw in each of `count` equal shares of probability, so that a trace of any size
has them; what is between the quantiles was chosen to give the published mean.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces.arrival import BLOCK_TOKENS, Arrival, Trace

# Anchors of a quantile function: (share of probability, tokens).
Quantiles = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Published:
    """Statistics of a published trace.

    Attributes:
        request_rate: requests per second.
        gap_cv: coefficient of variation of the gaps between arrivals.
        input, output: quantile functions of tokens.
        seen_share: part of the blocks that an earlier request had; None: it has no blocks.
    """

    count: int
    request_rate: float
    gap_cv: float
    input: Quantiles
    output: Quantiles
    seen_share: float | None = None


CONVERSATION, SYNTHETIC = "mooncake-conversation", "mooncake-synthetic"
PUBLISHED: dict[str, Published] = {
    CONVERSATION: Published(
        12_031,
        3.40,
        1.0,
        (
            *((0, 300), (0.2, 1_800), (0.5, 6_909), (0.75, 11_989)),
            *((0.9, 27_367), (0.99, 85_401), (1, 125_000)),
        ),
        ((0, 1), (0.2, 85), (0.5, 350), (0.9, 597), (1, 1_500)),
        seen_share=0.37,
    ),
    SYNTHETIC: Published(
        3_993,
        3.91,
        1.0,
        ((0, 500), (0.2, 3_500), (0.5, 11_587), (0.75, 19_344), (0.9, 38_615), (1, 64_000)),
        ((0, 5), (0.2, 30), (0.5, 69), (0.9, 355), (1, 1_000)),
        seen_share=0.64,
    ),
    "azure-code": Published(
        8_819,
        2.57,
        13.2,
        ((0, 100), (0.2, 229), (0.5, 1_469), (0.9, 5_194), (0.99, 7_436), (1, 7_500)),
        ((0, 1), (0.2, 7), (0.5, 13), (0.9, 55), (0.99, 176), (1, 600)),
    ),
    "azure-conversation": Published(
        19_366,
        5.53,
        1.09,
        ((0, 10), (0.2, 41), (0.5, 1_020), (0.9, 2_735), (0.99, 4_142), (1, 8_000)),
        ((0, 5), (0.2, 40), (0.5, 129), (0.75, 376), (0.9, 424), (1, 1_000)),
    ),
}

# Least part of a continued conversation's prompt that its turns before had.
_LEAST_SEEN = 0.67
# Tenants are named after their number.
TENANT = "tenant-{}"


def generate(name: str, *, seed: int = 0, count: int | None = None, tenants: int = 1) -> Trace:
    """Return a made trace.

    Args:
        name: a key of PUBLISHED.
        seed: another seed gives another trace with the same statistics.
        count: requests; None: as many as were published.
        tenants: the conversations are dealt to this many tenants; 1: the trace names none.

    Raises:
        InvalidArgument: an unknown name, or a number below 1.
    """
    published = PUBLISHED.get(name)
    if published is None:
        raise InvalidArgument(f"trace {name!r} is not one of {', '.join(PUBLISHED)}", field="trace")
    if tenants < 1 or (count is not None and count < 1):
        raise InvalidArgument("a trace has at least 1 request of 1 tenant", field="trace")
    random = Random(f"{name} {seed}")
    size = published.count if count is None else count
    times = _times(random, size, published)
    inputs = _drawn(random, size, published.input)
    outputs = _drawn(random, size, published.output)
    if published.seen_share is None:
        blocks: list[tuple[int, tuple[int, ...]]] = [(index, ()) for index in range(size)]
    else:
        blocks = _blocks(random, inputs, published.seen_share)
    arrivals = [
        Arrival(
            seconds,
            input_length,
            output_length,
            hash_ids,
            TENANT.format(conversation % tenants) if tenants > 1 else "",
        )
        for seconds, input_length, output_length, (conversation, hash_ids) in zip(
            times, inputs, outputs, blocks, strict=True
        )
    ]
    return Trace(name, tuple(arrivals))


def _shares(random: Random, size: int) -> list[float]:
    """Return one number of each of `size` equal parts of [0, 1), in random order."""
    shares = [(index + random.random()) / size for index in range(size)]
    random.shuffle(shares)
    return shares


def _drawn(random: Random, size: int, quantiles: Quantiles) -> list[int]:
    starts = [share for share, _ in quantiles]
    return [_value(share, starts, quantiles) for share in _shares(random, size)]


def _value(share: float, starts: Sequence[float], quantiles: Quantiles) -> int:
    """Return a quantile: its logarithm is linear between anchors."""
    place = min(bisect_right(starts, share), len(quantiles) - 1)
    (low, least), (high, most) = quantiles[place - 1], quantiles[place]
    growth: float = (most / least) ** ((share - low) / (high - low))
    return max(1, round(least * growth))


def _times(random: Random, size: int, published: Published) -> list[float]:
    """Return arrival times whose gaps have the published mean and variation.

    The gaps are exponential, of one mean for a coefficient of 1 (a Poisson process), else of
    two: bursts and pauses, each of which lasts half of the time.
    """
    excess = max(0.0, published.gap_cv**2 - 1)
    pause_share = (1 - math.sqrt(excess / (excess + 2))) / 2
    pauses = min(size, max(1, round(size * pause_share))) if excess else 0
    gaps = [_exponential(share) / (1 - pause_share) for share in _shares(random, size - pauses)]
    gaps += [_exponential(share) / pause_share for share in _shares(random, pauses)]
    random.shuffle(gaps)
    scale = size / sum(gaps) / published.request_rate
    times, now = [], 0.0
    for gap in gaps:
        times.append(now)
        now += gap * scale
    return times


def _exponential(share: float) -> float:
    return -math.log1p(-share)


def _blocks(
    random: Random, inputs: Sequence[int], seen_share: float
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (conversation, hash ids) of each request.

    A request continues a conversation, whose whole blocks it has again, while fewer blocks
    than wanted were seen before; else it starts one.
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    # Conversations by their whole blocks, the latest one last; the numbers of blocks in order.
    by_size: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    sizes: list[int] = []
    total = seen = fresh = conversations = 0
    for tokens in inputs:
        count, whole = -(-tokens // BLOCK_TOKENS), tokens // BLOCK_TOKENS
        conversation = -1
        shared: tuple[int, ...] = ()
        if whole and seen < seen_share * (total + count):
            # A turn adds up to a third of the conversation; if none is so long, more.
            place = bisect_right(sizes, random.uniform(_LEAST_SEEN, 1.0) * whole)
            if place:
                size = sizes[place - 1]
                conversation, shared = by_size[size].pop()
                if not by_size[size]:
                    del by_size[size], sizes[place - 1]
        if conversation < 0:
            conversation = conversations
            conversations += 1
        own = tuple(range(fresh, fresh + count - len(shared)))
        fresh += len(own)
        hash_ids = shared + own
        found.append((conversation, hash_ids))
        if whole:
            if whole not in by_size:
                by_size[whole] = []
                insort(sizes, whole)
            by_size[whole].append((conversation, hash_ids[:whole]))
        total += count
        seen += len(shared)
    return found
