"""Known text read as decoding would read it: each token attends what a screen selects for it.

The prompt is computed exactly. All later tokens run in one pass, layer by layer: a layer's K and V
of these tokens come from hidden states under the selection, as in decoding step by step, so the
losses are those of a server that selects. Attention is by plain products, whatever the worker's
kernel is, and reading everything by any screen gives the bits of the exact pass.

Memory beside the model: of all layers X, q, k and v of the prompt and the hidden states of the
text; of one layer at a time q, k and v of all tokens; scores, weights and guesses of one block of
queries, fp32 `[BLOCK, n_q, S]` each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from splitpoint.selection import Selection
from worker_service.evaluation.counts import LayerCounts, SelectionCounts
from worker_service.model.attention import PartialAttention
from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.selection.guess import GuessFrom, GuessNorm, guess_of
from worker_service.selection.pool import PROMPT_QUERIES, TokenPool
from worker_service.selection.screen import (
    OBSERVED_QUERIES,
    AttentionShape,
    Guess,
    KeyScreen,
    LayerScreen,
    TokenRows,
    grouped_products,
    to_logits,
)
from worker_service.selection.screen_factory import Screens
from worker_service.selection.token_choice import choose, visible_tokens

# Queries whose scores are in memory at once.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model made of the tokens behind the prompt. N is their number.

    Attributes:
        losses: fp32 `[N - 1]`: negative log-probability of each token but the first of them.
        choices: int64 `[N - 1]`: the greedy choices in their place.
        counts: what was selected.
    """

    losses: torch.Tensor
    choices: torch.Tensor
    counts: SelectionCounts


@dataclass(frozen=True, slots=True)
class GuessRule:
    """What a layer's tokens are chosen by.

    Attributes:
        source: its own input, or the residual one layer before; norm: what the latter gets.
    """

    source: GuessFrom = GuessFrom.OWN
    norm: GuessNorm = GuessNorm.OWN


@dataclass(frozen=True, slots=True)
class _Rows:
    """One layer's rows of the prompt, and their V `[P, n_kv, d]`."""

    rows: TokenRows
    values: torch.Tensor


class TeacherForced:
    """One text, whose prompt is computed once for all selections.

    All weights may stream from the host; the layers are visited in order.
    """

    def __init__(self, model: Decoder, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """At least one prompt token, and two behind it."""
        if not 0 < prompt_tokens <= len(token_ids) - 2:
            raise ValueError(f"a prompt of {prompt_tokens} of {len(token_ids)} tokens")
        self._model = model
        self._ids = torch.tensor(token_ids, device=model.device)
        self._first = prompt_tokens
        self._shapes = [
            AttentionShape.of(model.config, index) for index in range(len(model.layers))
        ]
        self._prompt = list(self._compute_prompt())

    @property
    def targets(self) -> torch.Tensor:
        """The tokens whose losses a Reading has, int64 `[N - 1]`."""
        return self._ids[self._first + 1 :]

    def _compute_prompt(self) -> Iterator[_Rows]:
        """Yield the layers' rows of the prompt, computed exactly."""
        model = self._model
        positions = torch.arange(self._first, device=model.device)
        hidden = model.embed(self._ids[: self._first], positions)
        rotary = model.rotary(positions)
        for index, layer in enumerate(model.visit()):
            inputs = layer.attention_input(hidden)
            queries, keys, values = layer.project(inputs, rotary)
            yield _Rows(TokenRows(inputs, queries, keys), values)
            attention = _LayerAttention(self._shapes[index], queries, keys, values, first=0)
            hidden = layer.finish(hidden, attention.of_all(None))

    def read(self, screens: Screens, rule: GuessRule = GuessRule()) -> Reading:
        """Return what the model makes of the later tokens under these screens."""
        model = self._model
        positions = torch.arange(self._first, len(self._ids), device=model.device)
        hidden = model.embed(self._ids[self._first :], positions)
        rotary = model.rotary(positions)
        counts = SelectionCounts()
        before: tuple[torch.Tensor, DecoderLayer] | None = None
        for index, layer in enumerate(model.visit()):
            inputs = layer.attention_input(hidden)
            queries, keys, values = layer.project(inputs, rotary)
            prompt = self._prompt[index]
            attention = _LayerAttention(
                self._shapes[index],
                queries,
                torch.cat((prompt.rows.keys, keys)),
                torch.cat((prompt.values, values)),
                first=self._first,
            )
            choosing = self._choosing(index, screens, rule)
            if choosing is None:
                attended = attention.of_all(LayerCounts(counts))
            else:
                guess = Guess(inputs, queries, self._first)
                if before is not None and rule.source is GuessFrom.PREVIOUS:
                    residual, previous = before
                    norm_of = layer if rule.norm is GuessNorm.OWN else previous
                    guess = guess_of(residual, layer, norm_of, rotary, self._first)
                attended = attention.of_chosen(choosing, guess, inputs, LayerCounts(counts))
            before = hidden, layer
            hidden = layer.finish(hidden, attended)
        return self._reading(hidden, counts)

    def _choosing(self, index: int, screens: Screens, rule: GuessRule) -> _Choosing | None:
        """Return how a layer chooses, its screen with the prompt; None if it reads everything."""
        screen = screens.layer(index)
        if screen is None:
            return None
        prompt = self._prompt[index]
        learnt = prompt.rows
        if rule.source is GuessFrom.PREVIOUS and isinstance(screen, KeyScreen):
            # As in serving, which decides what columns a screen keeps.
            learnt = replace(learnt, queries=learnt.queries[-OBSERVED_QUERIES:])
        screen.extend(learnt)
        shape = self._shapes[index]
        pool = None
        if screens.selection.pool is not None:
            pool = TokenPool(screens.selection, shape.kv_heads, shape.window)
        choosing = _Choosing(shape, screen, pool, screens.selection)
        choosing.start_pool(prompt.rows)
        return choosing

    def kept_bytes(self, screens: Screens, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes that the screens keep of the prompt, and those of its K and V.

        Only screened layers count, with the model's rows in this type.
        """
        kept = whole = 0
        for index, prompt in enumerate(self._prompt):
            screen = screens.layer(index)
            if screen is None:
                continue
            rows = prompt.rows
            screen.extend(
                TokenRows(rows.inputs.to(dtype), rows.queries.to(dtype), rows.keys.to(dtype))
            )
            kept += screen.device_bytes
            whole += (rows.keys.numel() + prompt.values.numel()) * dtype.itemsize
        return kept, whole

    def _reading(self, hidden: torch.Tensor, counts: SelectionCounts) -> Reading:
        targets = self.targets
        losses, choices = [], []
        for first, last in _blocks(0, len(targets)):
            logits = self._model.logits(hidden[first:last])
            losses.append(functional.cross_entropy(logits, targets[first:last], reduction="none"))
            choices.append(logits.argmax(-1))
        return Reading(torch.cat(losses), torch.cat(choices), counts)


@dataclass(frozen=True, slots=True)
class _Choosing:
    """How one layer's tokens are chosen.

    Attributes:
        screen: has the prompt's rows.
        pool: what is left to choose from; None: everything.
    """

    shape: AttentionShape
    screen: LayerScreen
    pool: TokenPool | None
    selection: Selection

    def start_pool(self, prompt: TokenRows) -> None:
        """Admit the prompt, and evict by what its newest queries choose."""
        if self.pool is None:
            return
        first = max(0, len(prompt.keys) - PROMPT_QUERIES)
        guess = Guess(prompt.inputs[first:], prompt.queries[first:], first)
        self.pool.admit(len(prompt.keys))
        self.pool.read(self._chosen(self.screen.scores(guess), guess), first)
        self.pool.evict()

    def choose(self, rows: TokenRows, guess: Guess) -> torch.Tensor:
        """Take the next tokens; return what each of them reads, bool `[T, n_kv, S]`.

        Behind them, they join the pool, as a chunk does that is stored.
        """
        # `choose` drops the scores of later tokens.
        self.screen.extend(rows)
        scores = self.screen.scores(guess)
        if self.pool is None:
            return self._chosen(scores, guess)
        tokens = guess.first_position + len(rows.keys)
        chosen = self._chosen(self.pool.masked(scores), guess) & self.pool.left(tokens)
        self.pool.read(chosen, guess.first_position)
        self.pool.admit(len(rows.keys))
        self.pool.evict()
        return chosen

    def _chosen(self, scores: torch.Tensor, guess: Guess) -> torch.Tensor:
        return choose(
            scores,
            self.selection,
            first_position=guess.first_position,
            tokens=guess.first_position + len(guess.queries),
            kv_heads=self.shape.kv_heads,
            window=self.shape.window,
        )


@dataclass(frozen=True, slots=True)
class _LayerAttention:
    """Attention of consecutive queries `[T, n_q, d]`, the first at `first`, in one layer.

    Attributes:
        keys, values: of all tokens up to the last query's own, `[S, n_kv, d]`.
    """

    shape: AttentionShape
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    first: int

    def of_all(self, counts: LayerCounts | None) -> torch.Tensor:
        """Return attention over everything, `[T, n_q * d]`."""
        parts = []
        for first, last in self._blocks():
            visible = self._visible(first, last)
            if counts is not None:
                read = visible.expand(-1, self.shape.kv_heads, -1)
                counts.add(read, visible, is_screened=False)
            part = self._part(self._scores(first, last), visible, last)
            parts.append(part.attended(self.queries.dtype))
        return torch.cat(parts)

    def of_chosen(
        self, choosing: _Choosing, guess: Guess, inputs: torch.Tensor, counts: LayerCounts
    ) -> torch.Tensor:
        """Return attention over what is chosen, `[T, n_q * d]`.

        `guess` is what the queries' tokens ask; `inputs` are their true X.
        """
        shape = self.shape
        parts = []
        for first, last in self._blocks():
            block = slice(first - self.first, last - self.first)
            rows = TokenRows(inputs[block], self.queries[block], self.keys[first:last], first)
            chosen = choosing.choose(rows, Guess(guess.inputs[block], guess.queries[block], first))
            visible, scores = self._visible(first, last), self._scores(first, last)
            counts.add(chosen, visible, is_screened=True)
            counts.add_weights(chosen, visible, scores)
            group = shape.query_heads // shape.kv_heads
            part = self._part(scores, chosen.repeat_interleave(group, 1), last)
            parts.append(part.attended(self.queries.dtype))
        counts.add_pool(0 if choosing.pool is None else choosing.pool.evicted, self.keys)
        return torch.cat(parts)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first position, and the last + 1, of each block of queries."""
        yield from _blocks(self.first, len(self.keys))

    def _visible(self, first: int, last: int) -> torch.Tensor:
        """Return bool `[T, 1, S]`."""
        window = self.shape.window
        return visible_tokens(first, last - first, last, window, self.keys.device).unsqueeze(1)

    def _scores(self, first: int, last: int) -> torch.Tensor:
        """Return the true scores, fp32 `[T, n_q, S]`."""
        queries = self.queries[first - self.first : last - self.first]
        return to_logits(grouped_products(queries, self.keys[:last]), self.shape)

    def _part(self, scores: torch.Tensor, read: torch.Tensor, last: int) -> PartialAttention:
        """Return attention over the tokens that are read, bool `[T, 1 or n_q, S]`."""
        weights = scores.masked_fill(~read, -torch.inf)
        peak = weights.amax(-1)
        weights.sub_(peak.unsqueeze(-1)).exp_()
        count, heads, tokens = weights.shape
        kv_heads = self.shape.kv_heads
        group = heads // kv_heads
        folded = weights.view(count, kv_heads, group, tokens).permute(1, 2, 0, 3)
        folded = folded.reshape(kv_heads, group * count, tokens)
        values = self.values[:last].permute(1, 0, 2).to(torch.float32)
        weighted = torch.bmm(folded, values).view(kv_heads, group, count, -1)
        weighted = weighted.permute(2, 0, 1, 3).reshape(count, heads, -1)
        return PartialAttention(weighted, peak, weights.sum(-1))


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, BLOCK):
        yield start, min(start + BLOCK, last)
