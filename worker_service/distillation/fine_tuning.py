"""MAPLE's second stage: one epoch in which the factors of all layers learn from the model's loss.

`Loss = L_model + alpha L_MSE` (Eq. 3) with a frozen model. Layers attend as they do when they
select, exactly to the tokens that their factors choose within a budget. That choice has no
gradient: the factors get that of attention whose weights are the guessed ones, over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from splitpoint.selection import Selection
from worker_service.distillation.training import logits_of, size_of, squared_error
from worker_service.model.decoder import Decoder
from worker_service.selection.maple import MapleWeights
from worker_service.selection.screen import AttentionShape
from worker_service.selection.token_choice import choose, visible_tokens

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How the second stage trains.

    Attributes:
        selection: what layers read; its `full_layers` keep the factors of the first stage.
        alpha: weight of the squared error of scores beside the model's loss.
        rate: steps of Adam, relative to the factors' own size.
        block_queries: queries whose scores are in memory at once.
    """

    selection: Selection
    alpha: float = 1.0
    rate: float = 0.003
    block_queries: int = 128


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean losses of a passage.

    Attributes:
        model: negative log-probability of its tokens under the selection (L_model).
        scores: squared error of scores, the mean of the layers that select (L_MSE).
    """

    model: torch.Tensor
    scores: torch.Tensor

    def total(self, alpha: float) -> torch.Tensor:
        """Return Eq. 3."""
        return self.model + alpha * self.scores


def fine_tune(
    model: Decoder,
    weights: Sequence[MapleWeights],
    passages: Iterable[Sequence[int]],
    unseen: Sequence[Sequence[int]],
    settings: FineTuning,
) -> tuple[list[MapleWeights], dict[str, object]]:
    """Return each layer's factors, and losses on the unseen passages before and after.

    The factors are those given if training does not lower the loss. In memory are what a pass of a
    passage leaves for its gradients, without scores.

    Args:
        weights: fp32 factors of all layers.

    Raises ValueError for a model whose weights are not plain: its products have no gradients.
    """
    if not all(layer.query.has_gradients for layer in model.layers):
        raise ValueError("fine-tuning takes a model that `plain_weights` loaded")
    first = settings.selection.exact_layers
    tuned = [
        replace(each, query=each.query.clone(), key=each.key.clone()) for each in weights[first:]
    ]
    factors = [factor.requires_grad_() for each in tuned for factor in (each.query, each.key)]
    optimizer = torch.optim.Adam(
        [{"params": [each], "lr": settings.rate * size_of(each)} for each in factors]
    )
    used = [*weights[:first], *tuned]
    before = _mean_losses(model, used, unseen, settings)
    for passage in passages:
        optimizer.zero_grad()
        loss = _losses(model, used, passage, settings).total(settings.alpha)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = _mean_losses(model, used, unseen, settings)
    is_better = bool(after.total(settings.alpha) < before.total(settings.alpha))
    kept = [replace(each, query=each.query.detach(), key=each.key.detach()) for each in used]
    return kept if is_better else list(weights), {
        "selection": str(settings.selection),
        "alpha": settings.alpha,
        "model_losses": [float(each.model) for each in (before, after)],
        "score_losses": [float(each.scores) for each in (before, after)],
        "is_kept": is_better,
    }


@torch.no_grad()
def _mean_losses(
    model: Decoder,
    weights: Sequence[MapleWeights],
    passages: Sequence[Sequence[int]],
    settings: FineTuning,
) -> Losses:
    found = [_losses(model, weights, passage, settings) for passage in passages]
    return Losses(
        torch.stack([each.model for each in found]).mean(),
        torch.stack([each.scores for each in found]).mean(),
    )


def _losses(
    model: Decoder,
    weights: Sequence[MapleWeights],
    passage: Sequence[int],
    settings: FineTuning,
) -> Losses:
    """Read a passage with the selection of these factors."""
    ids = torch.tensor(passage, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    hidden, rotary = model.embed(ids, positions), model.rotary(positions)
    errors = []
    for index, layer in enumerate(model.layers):
        inputs = layer.attention_input(hidden)
        made = layer.project(inputs, rotary)
        guessed = None
        if index >= settings.selection.exact_layers:
            # The model is frozen: what its layers make teaches no earlier factors by this way.
            known, factors = inputs.detach(), weights[index]
            guessed = factors.queries(known, 0), factors.keys(known, 0)
        attention = _Attention(AttentionShape.of(model.config, index), settings)
        attended, error = attention.of(*made, guessed)
        errors += error
        hidden = layer.finish(hidden, attended)

    def log_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.logits(hidden), targets, reduction="sum")

    size = settings.block_queries
    blocks = zip(torch.split(hidden[:-1], size), torch.split(ids[1:], size), strict=True)
    sums = torch.stack([_checkpointed(log_loss, *block) for block in blocks])
    return Losses(sums.sum() / (len(ids) - 1), torch.stack(errors).mean())


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention of a whole passage in one layer."""

    shape: AttentionShape
    settings: FineTuning

    def of(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        guessed: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return `[T, n_q * d]`, and the squared errors of blocks of guessed scores.

        `guessed`: low-rank queries and keys; None: the layer reads everything.
        """
        parts, errors = [], []
        for first in range(0, len(queries), self.settings.block_queries):
            last = min(first + self.settings.block_queries, len(queries))
            block = queries[first:last], keys[:last], values[:last]
            if guessed is None:
                parts.append(_checkpointed(self._exact, *block))
            else:
                low_rank = guessed[0][first:last], guessed[1][:last]
                part, error = _checkpointed(self._selected, *block, *low_rank)
                parts.append(part)
                errors.append(error)
        return torch.cat(parts), errors

    def _exact(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        true = logits_of(queries, keys, self.shape)
        return self._attended(true, self._seen(true), values)

    def _selected(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        asked: torch.Tensor,
        kept: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        true, guess = logits_of(queries, keys, self.shape), logits_of(asked, kept, self.shape)
        seen = self._seen(true)
        chosen = choose(
            guess.detach(),
            self.settings.selection,
            first_position=len(keys) - len(queries),
            tokens=len(keys),
            kv_heads=self.shape.kv_heads,
            window=self.shape.window,
        ).repeat_interleave(self.shape.query_heads // self.shape.kv_heads, 1)
        attended = self._attended(true, chosen, values)
        passed = self._attended(guess, seen, values.detach())
        return attended + passed - passed.detach(), squared_error(guess, true.detach(), seen)

    def _seen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what the last tokens see, bool `[T, 1, S]`, given logits `[T, n_q, S]`."""
        count, _, tokens = logits.shape
        seen = visible_tokens(tokens - count, count, tokens, self.shape.window, logits.device)
        return seen.unsqueeze(1)

    def _attended(
        self, logits: torch.Tensor, read: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend to the tokens that are read, bool `[T, 1 or n_q, S]`: `[T, n_q * d]`."""
        weights = logits.masked_fill(~read, -torch.inf).softmax(-1)
        grouped = weights.unflatten(1, (self.shape.kv_heads, -1))  # type: ignore[no-untyped-call]
        attended = torch.einsum("tkgs,skd->tkgd", grouped, values.float())
        return attended.flatten(1).to(values.dtype)


def _checkpointed(call: Callable[..., Result], *tensors: torch.Tensor) -> Result:
    """Call; gradients compute it again instead of keeping what is inside."""
    result: Result = checkpoint(call, *tensors, use_reentrant=False)
    return result
