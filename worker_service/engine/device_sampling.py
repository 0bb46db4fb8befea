"""Chooses the tokens of a step on its device: the twin of `sampling.choose` for a GPU.

All rows are drawn at once, and the step's flags, tokens and log-probabilities come back in one
copy. The definition is that of `sampling`, in fp64: a token is a function of the row, its seed
and its position, and differs from the other twin's only where a draw falls within rounding of
a border between two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.upload import Upload
from worker_service.engine.sampling import (
    NUCLEUS,
    Choice,
    NonFiniteLogits,
    SamplingRow,
    choose_one,
    uniform,
)

# Elements of the largest fp64 tensor; rows beyond are drawn in further rounds.
MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class StepChoices:
    """What a step leaves on the host.

    Attributes:
        finite: for each token of the step, whether its hidden state is finite.
        choices: for each row of logits.
    """

    finite: list[bool]
    choices: list[Choice | NonFiniteLogits]


class PendingChoices:
    """Choices under way on the device. `read` waits for them."""

    def __init__(
        self,
        logits: torch.Tensor,
        finite: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        most_elements: int = MOST_ELEMENTS,
    ) -> None:
        """Issue all work for fp32 logits `[M, vocabulary]` and bool `[N]`; waits for nothing."""
        self._logits = logits
        self._rows = rows
        self._token_count = len(finite)
        largest, best = logits.max(dim=-1)
        # In fp64, which holds each token id exactly.
        parts = [finite, largest.isfinite()]
        tokens = best.to(torch.float64)
        special = [index for index, row in enumerate(rows) if not row.is_plain]
        size = max(1, most_elements // logits.shape[1])
        rounds = [
            _Round.of(special[first : first + size], rows, logits)
            for first in range(0, len(special), size)
        ]
        short = torch.zeros_like(tokens)
        reported = []
        for each in rounds:
            drawn = each.draw(logits)
            tokens.index_copy_(0, each.index, drawn.tokens)
            short.index_copy_(0, each.index, drawn.short)
            reported += drawn.reported
        parts += [short, tokens, *reported]
        packed = torch.cat([part.to(torch.float64).flatten() for part in parts])
        self._host = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=True)
        self._done = None
        if packed.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(packed.device))

    def read(self) -> StepChoices:
        """Wait for the device, and return the step's flags and choices."""
        if self._done is not None:
            self._done.synchronize()
        values = self._host.tolist()
        count, rows = self._token_count, len(self._rows)
        finite = [flag != 0 for flag in values[:count]]
        regular, short, tokens = (
            values[count + part * rows : count + (part + 1) * rows] for part in range(3)
        )
        reported = iter(values[count + 3 * rows :])
        choices: list[Choice | NonFiniteLogits] = []
        for index, row in enumerate(self._rows):
            choice = _choice(int(tokens[index]), row, reported, self._logits.shape[1])
            if not regular[index]:
                choices.append(NonFiniteLogits())
            elif short[index]:
                # So flat that the likeliest NUCLEUS tokens do not reach top_p: sort them all.
                choices.append(choose_one(self._logits[index].to("cpu"), row))
            else:
                choices.append(choice)
        return StepChoices(finite, choices)


def _choice(token: int, row: SamplingRow, reported: Iterable[float], vocabulary: int) -> Choice:
    """Take what was reported of a row, in order."""
    if row.sampling.logprobs is None:
        return Choice(token)
    values = iter(reported)
    count = min(row.sampling.logprobs, vocabulary)
    logprob = next(values)
    top = [next(values) for _ in range(count)]
    ids = [int(next(values)) for _ in range(count)]
    return Choice(token, logprob, tuple(zip(ids, top, strict=True)))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """fp64 `[R]` tokens, 1.0 in `short` where the candidates were too few, and reports."""

    tokens: torch.Tensor
    short: torch.Tensor
    reported: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Entries (row, id) of the scores, each at most once, with a value or two."""

    rows: torch.Tensor
    ids: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """Rows that are drawn together, with their parameters on the device.

    Attributes:
        index: int64 `[R]`, rows of the logits.
        ordered, by_id: int64, places of the rows that draw in order of likelihood, or by id;
            the others are greedy.
        temperature, top_p, min_p, point: fp64 `[R, 1]`.
        top_k: int64 `[R, 1]`; the vocabulary keeps all.
        candidates: tokens that the rows in order of likelihood look at.
    """

    rows: list[SamplingRow]
    index: torch.Tensor
    ordered: torch.Tensor
    by_id: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    point: torch.Tensor
    top_k: torch.Tensor
    candidates: int
    repeated: _Pairs | None
    counted: _Pairs | None
    biased: _Pairs | None
    forbidden: _Pairs | None

    @classmethod
    def of(cls, index: list[int], rows: Sequence[SamplingRow], logits: torch.Tensor) -> _Round:
        """Send the parameters of these rows in one copy."""
        upload = Upload(logits.device)
        vocabulary = logits.shape[1]
        some = [rows[each] for each in index]
        samplings = [row.sampling for row in some]
        top_k = [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in samplings]
        places = range(len(some))
        drawn = [place for place in places if samplings[place].temperature > 0]
        sorts = {p for p in drawn if top_k[p] < vocabulary or samplings[p].top_p < 1}

        def column(values: Iterable[float], dtype: npt.DTypeLike = np.float64) -> torch.Tensor:
            return upload.table(list(values), dtype).unsqueeze(1)

        made = cls(
            rows=some,
            index=upload.table(index),
            ordered=upload.table([place for place in drawn if place in sorts]),
            by_id=upload.table([place for place in drawn if place not in sorts]),
            temperature=column(each.temperature or 1.0 for each in samplings),
            top_p=column(each.top_p for each in samplings),
            min_p=column(each.min_p for each in samplings),
            point=column(uniform(row.sampling.seed, row.position) for row in some),
            top_k=column(top_k, np.int64),
            candidates=min(
                vocabulary,
                max([NUCLEUS, *(top_k[place] for place in sorts if top_k[place] < vocabulary)]),
            ),
            repeated=_pairs(upload, (_repeated(row) for row in some)),
            counted=_pairs(upload, (_counted(row) for row in some)),
            biased=_pairs(upload, (_biased(row) for row in some)),
            forbidden=_pairs(upload, (_forbidden(row, vocabulary) for row in some)),
        )
        upload.send()
        return made

    def draw(self, logits: torch.Tensor) -> _Drawn:
        scores = self._adjusted(logits.index_select(0, self.index).to(torch.float64))
        tokens = scores.argmax(dim=-1)
        short = torch.zeros_like(self.point).squeeze(1)
        if len(self.by_id):
            probabilities = torch.softmax(self._scaled(scores, self.by_id), dim=-1)
            tokens.index_copy_(0, self.by_id, self._pick(probabilities, self.by_id))
        if len(self.ordered):
            scaled, top_k = self._scaled(scores, self.ordered), self.top_k[self.ordered]
            values, ids = most_likely(scaled, self.candidates)
            places = torch.arange(values.shape[1], device=values.device)
            cut = torch.softmax(values.masked_fill(places >= top_k, -math.inf), dim=-1)
            whole = torch.softmax(scaled, dim=-1).gather(1, ids)
            is_cut = top_k < logits.shape[1]
            probabilities = torch.where(is_cut, cut, whole)
            top_p = self.top_p[self.ordered]
            if self.candidates < logits.shape[1]:
                reached = probabilities.sum(dim=-1, keepdim=True) >= top_p
                missed = (~(reached | is_cut)).squeeze(1).to(torch.float64)
                short.index_copy_(0, self.ordered, missed)
            # The token that reaches top_p is still kept.
            before = torch.cumsum(probabilities, dim=-1) - probabilities
            probabilities = torch.where((before < top_p) | (top_p >= 1), probabilities, 0.0)
            picked = self._pick(probabilities, self.ordered)
            tokens.index_copy_(0, self.ordered, ids.gather(1, picked.unsqueeze(1)).squeeze(1))
        return _Drawn(tokens.to(torch.float64), short, self._reported(scores, tokens))

    def _adjusted(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply penalties, biases and forbidden tokens in place, as `sampling` does."""
        if (pairs := self.repeated) is not None:
            values = scores[pairs.rows, pairs.ids]
            changed = torch.where(values > 0, values / pairs.first, values * pairs.first)
            scores[pairs.rows, pairs.ids] = changed
        if (pairs := self.counted) is not None:
            values = scores[pairs.rows, pairs.ids]
            scores[pairs.rows, pairs.ids] = values - pairs.first - pairs.second
        if (pairs := self.biased) is not None:
            scores[pairs.rows, pairs.ids] += pairs.first
        if (pairs := self.forbidden) is not None:
            scores[pairs.rows, pairs.ids] = pairs.first
        return scores

    def _scaled(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the scores of some rows, the largest 0, over the temperature."""
        some = scores.index_select(0, places)
        return (some - some.amax(dim=-1, keepdim=True)) / self.temperature[places]

    def _pick(self, probabilities: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return for each row the place where the distribution function reaches its point."""
        least = self.min_p[places] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
        cumulative = torch.cumsum(probabilities, dim=-1)
        point = self.point[places] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, point, right=True)
        # Rounding must not lead past the end, nor to a token of probability zero.
        every = torch.arange(probabilities.shape[1], device=probabilities.device)
        possible = (probabilities > 0) & (every <= found)
        return torch.where(possible, every, -1).amax(dim=-1).clamp_(min=0)

    def _reported(self, scores: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return for each row that asks: its log-probability, the largest ones, their ids."""
        reported = []
        for place, row in enumerate(self.rows):
            count = row.sampling.logprobs
            if count is None:
                continue
            logprobs = torch.log_softmax(scores[place], dim=-1)
            reported.append(logprobs.gather(0, tokens[place : place + 1]))
            if count:
                listed = torch.topk(logprobs, min(count, len(logprobs)))
                reported += [listed.values, listed.indices]
        return reported


def most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row `[R, V]` and their ids, largest first.

    Lower ids come first among equals, and are the ones that are kept.
    """
    least = torch.topk(scores, count).values[:, -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    ids = torch.topk(torch.where(kept, scores, -math.inf), count).indices.sort(dim=-1).values
    values, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


# -- entries of the scores that change, as (id, value, value) ---------------------------------

_Entry = tuple[int, float, float]


def _repeated(row: SamplingRow) -> list[_Entry]:
    penalty = row.sampling.repetition_penalty
    return [] if penalty == 1 else [(token, penalty, 0.0) for token in sorted(set(row.tokens))]


def _counted(row: SamplingRow) -> list[_Entry]:
    sampling, generated = row.sampling, row.tokens[row.prompt_length :]
    if not generated or not (sampling.presence_penalty or sampling.frequency_penalty):
        return []
    ids, counts = np.unique(np.asarray(generated), return_counts=True)
    # `sampling` multiplies counts, which torch does in fp32.
    often = np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    present = float(np.float32(sampling.presence_penalty))
    return [
        (token, less, present) for token, less in zip(ids.tolist(), often.tolist(), strict=True)
    ]


def _biased(row: SamplingRow) -> list[_Entry]:
    return [(token, bias, 0.0) for token, bias in row.sampling.logit_bias.items()]


def _forbidden(row: SamplingRow, vocabulary: int) -> list[_Entry]:
    ids = set(row.forbidden)
    return [(token, -math.inf, 0.0) for token in sorted(ids)] if len(ids) < vocabulary else []


def _pairs(upload: Upload, entries: Iterable[list[_Entry]]) -> _Pairs | None:
    listed = [(place, *entry) for place, some in enumerate(entries) for entry in some]
    if not listed:
        return None
    rows, ids, first, second = zip(*listed, strict=True)
    return _Pairs(
        upload.table(rows),
        upload.table(ids),
        upload.table(first, np.float64),
        upload.table(second, np.float64),
    )
