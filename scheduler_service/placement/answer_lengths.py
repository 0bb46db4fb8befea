"""Predicts how long an answer will be, from the answers that ended lately. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

# Fewer answers than this say nothing: the longest possible answer is expected then.
LEAST_SAMPLES = 8
# Answers that are remembered: of all requests, of each tenant, and the number of tenants.
_WINDOW = 256
_TENANT_WINDOW = 64
_MOST_TENANTS = 256
# Part of the recent answers that are at most as long as expected. Longer ones grow beyond
# their charge, shorter ones leave memory unused.
_QUANTILE = 0.75


class AnswerLengths:
    """Lengths of recent answers in tokens: of each tenant, and of all together."""

    def __init__(self) -> None:
        self._all = _Window(_WINDOW)
        # The tenant that was heard of last is the last one.
        self._tenants: OrderedDict[str, _Window] = OrderedDict()

    def note(self, tenant: str, token_count: int) -> None:
        """Remember the length of an answer that has ended."""
        self._all.add(token_count)
        window = self._tenants.setdefault(tenant, _Window(_TENANT_WINDOW))
        self._tenants.move_to_end(tenant)
        window.add(token_count)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)

    def expected(self, tenant: str, most: int) -> int:
        """Return the expected length of an answer of at most `most` tokens, from 1 on.

        The tenant's own answers count if there are enough of them, else those of all.
        """
        for window in (self._tenants.get(tenant), self._all):
            if window is not None and window.quantile is not None:
                return max(1, min(most, window.quantile))
        return most


class _Window:
    """The newest samples, and their quantile; None while there are too few."""

    def __init__(self, size: int) -> None:
        self.quantile: int | None = None
        self._samples: deque[int] = deque(maxlen=size)

    def add(self, sample: int) -> None:
        self._samples.append(sample)
        if len(self._samples) >= LEAST_SAMPLES:
            self.quantile = quantile_of(self._samples, _QUANTILE)


def quantile_of(samples: Sequence[int], share: float) -> int:
    """Return the smallest sample that is at least as large as this share of all samples."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
