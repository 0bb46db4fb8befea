"""Draws the tokens of a step on its device, all rows at once.

The twin of `engine/sampling.py` for a GPU, in fp64 as well: a token is a function of the row, its
point and its parameters, and differs from the other twin's only where the point falls within
rounding of a border between two tokens. The step's flags, tokens and log-probabilities come back
in one copy. This module knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.upload import Upload

# Candidates for top_p at first; sorting a whole vocabulary takes milliseconds.
NUCLEUS = 1024
# Elements of the largest fp64 tensor; rows beyond are drawn in further rounds.
MOST_ELEMENTS = 1 << 20

# A score that changes: token id, and one or two values.
Entry = tuple[int, float, float]


@dataclass(frozen=True, slots=True)
class RowParameters:
    """How a row that is not plainly greedy is drawn.

    Attributes:
        point: in [0, 1), where the distribution function is inverted.
        reported: log-probabilities to report beside the token's own; None: not even that.
        repeated: tokens whose score is divided, or if negative multiplied, by the first value.
        counted: tokens from whose score both values are subtracted.
        biased: tokens to whose score the first value is added.
        forbidden: tokens whose score becomes the first value.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    point: float
    reported: int | None
    repeated: Sequence[Entry] = ()
    counted: Sequence[Entry] = ()
    biased: Sequence[Entry] = ()
    forbidden: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """What was drawn from one row of logits.

    Attributes:
        is_regular: False if the row held NaN or +infinity, or no finite value.
        is_short: the row is so flat that NUCLEUS tokens do not reach top_p; the token is void.
        logprob, top: as in `Choice`.
    """

    token_id: int
    is_regular: bool
    is_short: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PendingDraws:
    """Draws under way on the device. `read` waits for them."""

    def __init__(
        self,
        logits: torch.Tensor,
        finite: torch.Tensor,
        rows: Sequence[RowParameters | None],
        most_elements: int = MOST_ELEMENTS,
        masks: Sequence[tuple[int, npt.NDArray[np.int32]]] = (),
    ) -> None:
        """Issue all work for fp32 logits `[M, vocabulary]` and bool flags `[N]`; wait for nothing.

        A row without parameters takes its largest logit. `masks`: for some rows a bit of each id,
        least significant first. The logits of clear bits become -infinity.
        """
        self._rows = rows
        self._flag_count = len(finite)
        self._vocabulary = logits.shape[1]
        size = max(1, most_elements // self._vocabulary)
        # Also where a mask would hide a NaN.
        regular = logits.amax(dim=-1).isfinite() if masks else None
        for first in range(0, len(masks), size):
            _exclude(logits, masks[first : first + size])
        largest, best = logits.max(dim=-1)
        is_regular = largest.isfinite() if regular is None else largest.isfinite() & regular
        # In fp64, which holds each token id exactly.
        tokens = best.to(torch.float64)
        short = torch.zeros_like(tokens)
        special = [(index, row) for index, row in enumerate(rows) if row is not None]
        reported = []
        for first in range(0, len(special), size):
            each = _Round.of(special[first : first + size], logits)
            drawn = each.draw(logits)
            tokens.index_copy_(0, each.index, drawn.tokens)
            short.index_copy_(0, each.index, drawn.short)
            reported += drawn.reported
        parts = [finite, is_regular, short, tokens, *reported]
        packed = torch.cat([part.to(torch.float64).flatten() for part in parts])
        self._host = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=True)
        self._done = None
        if packed.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(packed.device))

    def read(self) -> tuple[list[bool], list[DrawnRow]]:
        """Wait for the device; return the flags, and what was drawn from each row."""
        if self._done is not None:
            self._done.synchronize()
        values = self._host.tolist()
        count, rows = self._flag_count, len(self._rows)
        regular, short, tokens = (
            values[count + part * rows : count + (part + 1) * rows] for part in range(3)
        )
        reported = iter(values[count + 3 * rows :])
        drawn = []
        for index, row in enumerate(self._rows):
            logprob: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if row is not None and row.reported is not None:
                logprob = next(reported)
                listed = min(row.reported, self._vocabulary)
                likeliest = [next(reported) for _ in range(listed)]
                top = tuple((int(next(reported)), value) for value in likeliest)
            drawn.append(
                DrawnRow(int(tokens[index]), regular[index] != 0, short[index] != 0, logprob, top)
            )
        return [flag != 0 for flag in values[:count]], drawn


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

    rows: list[RowParameters]
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
    def of(cls, numbered: Sequence[tuple[int, RowParameters]], logits: torch.Tensor) -> _Round:
        """Send the parameters of these rows of the logits in one copy."""
        upload = Upload(logits.device)
        vocabulary = logits.shape[1]
        some = [row for _, row in numbered]
        top_k = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in some]
        drawn = [place for place, row in enumerate(some) if row.temperature > 0]
        sorts = {p for p in drawn if top_k[p] < vocabulary or some[p].top_p < 1}

        def column(values: Iterable[float], dtype: npt.DTypeLike = np.float64) -> torch.Tensor:
            return upload.table(list(values), dtype).unsqueeze(1)

        made = cls(
            rows=some,
            index=upload.table([index for index, _ in numbered]),
            ordered=upload.table([place for place in drawn if place in sorts]),
            by_id=upload.table([place for place in drawn if place not in sorts]),
            temperature=column(row.temperature or 1.0 for row in some),
            top_p=column(row.top_p for row in some),
            min_p=column(row.min_p for row in some),
            point=column(row.point for row in some),
            top_k=column(top_k, np.int64),
            candidates=min(
                vocabulary,
                max([NUCLEUS, *(top_k[place] for place in sorts if top_k[place] < vocabulary)]),
            ),
            repeated=_pairs(upload, (row.repeated for row in some)),
            counted=_pairs(upload, (row.counted for row in some)),
            biased=_pairs(upload, (row.biased for row in some)),
            forbidden=_pairs(upload, (row.forbidden for row in some)),
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
        """Change the scores of the entries in place, in the order of `engine/sampling.py`."""
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
            count = row.reported
            if count is None:
                continue
            logprobs = torch.log_softmax(scores[place], dim=-1)
            reported.append(logprobs.gather(0, tokens[place : place + 1]))
            if count:
                listed = torch.topk(logprobs, min(count, len(logprobs)))
                reported += [listed.values, listed.indices]
        return reported


def _exclude(logits: torch.Tensor, masks: Sequence[tuple[int, npt.NDArray[np.int32]]]) -> None:
    """Set the logits of clear bits to -infinity, in place."""
    upload = Upload(logits.device)
    index = upload.table([row for row, _ in masks])
    words = upload.table(np.concatenate([mask for _, mask in masks]), np.int32)
    upload.send()
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words.view(len(masks), -1, 1) >> bits).bitwise_and_(1).flatten(1)
    excluded = allowed[:, : logits.shape[1]] == 0
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(excluded, -math.inf))


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


def _pairs(upload: Upload, entries: Iterable[Sequence[Entry]]) -> _Pairs | None:
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
