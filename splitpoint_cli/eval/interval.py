"""How far a difference of perplexities may be chance: a bootstrap over blocks of tokens.

Losses of neighbouring tokens are correlated, so that whole blocks are drawn (Kunsch 1989).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64
_DRAWS = 2000
_BOUNDS = (0.025, 0.975)


def perplexity_interval(
    differences: Sequence[npt.NDArray[np.float64]], seed: int
) -> tuple[float, float]:
    """Return the 95 % interval of a perplexity over another, as a ratio minus 1.

    Args:
        differences: of each text, the losses of its tokens minus those of the other reading.
        seed: of the draws; equal texts then have equal intervals.
    """
    blocks = [
        part for text in differences for part in np.array_split(text, -(-len(text) // BLOCK_TOKENS))
    ]
    sums = np.array([part.sum() for part in blocks])
    counts = np.array([len(part) for part in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(_DRAWS, len(blocks)))
    means = sums[drawn].sum(-1) / counts[drawn].sum(-1)
    low, high = np.expm1(np.quantile(means, _BOUNDS))
    return float(low), float(high)
