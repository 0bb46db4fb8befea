"""Training of one layer's low-rank factors on the attention of the frozen model.

Epochs go over all passages in blocks of queries; the rate falls tenfold after each, as in MAPLE.
Training stops when the loss on passages that it does not see stops falling, and the best factors
are kept, those it started from included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker_service.selection.screen import AttentionShape, TokenRows
from worker_service.selection.token_choice import visible_tokens


@dataclass(frozen=True, slots=True)
class Training:
    """How factors are trained.

    Attributes:
        rate: the first step of Adam, relative to the factors' own size.
        block_queries: queries of one step.
        least_gain: training stops after an epoch that lowers the loss by less than this share.
    """

    epochs: int = 3
    rate: float = 0.02
    block_queries: int = 128
    least_gain: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """Factors and what became of the loss on unseen passages, one value per epoch from the start.

    `factors` are those of the smallest loss.
    """

    factors: tuple[torch.Tensor, torch.Tensor]
    losses: tuple[float, ...]


# Maps a passage's rows to guessed queries `[T, n_q, r]` and keys `[T, n_kv, r]`, by the factors.
LowRank = Callable[[TokenRows, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def train(
    start: tuple[torch.Tensor, torch.Tensor],
    low_rank: LowRank,
    shape: AttentionShape,
    passages: Sequence[TokenRows],
    unseen: Sequence[TokenRows],
    settings: Training,
    after_epoch: Callable[[int, float], None],
) -> Trained:
    """Return factors trained from `start`; `after_epoch` gets each epoch's number and loss."""
    factors = [each.clone().requires_grad_() for each in start]
    optimizer = torch.optim.Adam(
        [{"params": [each], "lr": settings.rate * size_of(each)} for each in factors]
    )
    random = torch.Generator().manual_seed(settings.seed)
    losses = [_mean_loss(start, low_rank, shape, unseen, settings)]
    best = start
    after_epoch(0, losses[0])
    for epoch in range(settings.epochs):
        for passage, first in _blocks(passages, settings.block_queries, random):
            optimizer.zero_grad()
            loss = _loss(factors, low_rank, shape, passages[passage], first, settings)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] /= 10
        reached = (factors[0].detach(), factors[1].detach())
        losses.append(_mean_loss(reached, low_rank, shape, unseen, settings))
        after_epoch(epoch + 1, losses[-1])
        if losses[-1] == min(losses):
            best = (reached[0].clone(), reached[1].clone())
        if losses[-1] > losses[-2] * (1 - settings.least_gain):
            break
    return Trained(best, tuple(losses))


def size_of(factor: torch.Tensor) -> float:
    return float(factor.detach().square().mean().sqrt())


def _blocks(
    passages: Sequence[TokenRows], rows: int, random: torch.Generator
) -> list[tuple[int, int]]:
    """Return the blocks of queries of all passages, as passage and first query, in random order."""
    blocks = [
        (number, first)
        for number, passage in enumerate(passages)
        for first in range(0, len(passage.keys), rows)
    ]
    return [blocks[index] for index in torch.randperm(len(blocks), generator=random).tolist()]


@torch.no_grad()
def _mean_loss(
    factors: tuple[torch.Tensor, torch.Tensor],
    low_rank: LowRank,
    shape: AttentionShape,
    passages: Sequence[TokenRows],
    settings: Training,
) -> float:
    """Return the loss on every other block of the passages."""
    losses = [
        float(_loss(factors, low_rank, shape, passage, first, settings))
        for passage in passages
        for first in range(0, len(passage.keys), 2 * settings.block_queries)
    ]
    return sum(losses) / len(losses)


def _loss(
    factors: Sequence[torch.Tensor],
    low_rank: LowRank,
    shape: AttentionShape,
    passage: TokenRows,
    first: int,
    settings: Training,
) -> torch.Tensor:
    """Return the mean loss of a row over a block of queries, from `first` on, and all heads."""
    last = min(first + settings.block_queries, len(passage.keys))
    block = TokenRows(
        passage.inputs[:last].float(), passage.queries[:last].float(), passage.keys[:last].float()
    )
    seen = visible_tokens(first, last - first, last, shape.window, block.keys.device).unsqueeze(1)
    with torch.no_grad():
        true = logits_of(block.queries[first:], block.keys, shape)
    queries, keys = low_rank(block, *factors)
    guessed = logits_of(queries[first:], keys, shape)
    return squared_error(guessed, true, seen)


def squared_error(guessed: torch.Tensor, true: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the mean of a row's mean squared error over the tokens that it sees (MAPLE, Eq. 2).

    A row's mean error is left out, unlike there: it decides no choice, and it may be far larger
    than the differences between tokens, which training then gives up for it.
    """
    count = seen.sum(-1, keepdim=True)
    errors = (guessed - true).masked_fill(~seen, 0)
    errors = (errors - errors.sum(-1, keepdim=True) / count).masked_fill(~seen, 0)
    return (errors.square().sum(-1) / count.squeeze(-1)).mean()


def logits_of(queries: torch.Tensor, keys: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Return scaled and capped products `[T, n_q, S]` in fp32, with gradients."""
    count, _, width = queries.shape
    grouped = queries.float().view(count, shape.kv_heads, -1, width)
    logits = torch.einsum("tkgr,skr->tkgs", grouped, keys.float()).flatten(1, 2) * shape.scale
    return logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)
