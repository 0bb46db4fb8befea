"""Chooses the next token from logits, reproducibly.

Randomness is a function of (seed, position) alone, so a token does not depend on which
requests share its step, on the worker, or on a restart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from splitpoint.transport.convert import from_message
from splitpoint.v1 import types_pb2
from worker_service.model.draws import MOST_ELEMENTS, NUCLEUS, Entry, PendingDraws, RowParameters
from worker_service.structured.masks import allowed_ids
from worker_service.structured.matcher import Mask

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """SamplingParams of types.proto with its defaults resolved; the bounds are checked there.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        logprobs: alternatives to report; None reports no log-probabilities.
        returns_hidden_state: report the hidden state from which the token is chosen.
        prompt_logprobs: alternatives to report at each position of the prompt; None: no position.
        allowed_token_ids: the only ids that may be chosen; empty: all.
        bad_words: ids that the answer does not have in a row, each at least one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    keeps_special_tokens: bool = False
    returns_hidden_state: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    @classmethod
    def from_proto(
        cls, message: types_pb2.SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> Sampling:
        """Return the message's values; absent fields keep the defaults of types.proto."""
        return from_message(
            cls,
            message,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=bad_words,
        )

    @property
    def uses_history(self) -> bool:
        """True if earlier tokens affect the choice."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the choice from one row of logits depends on.

    Attributes:
        tokens: the sequence so far, prompt first; read for penalties only.
        prompt_length: how many of `tokens` are the prompt.
        eos_token_ids: the model's end-of-sequence ids.
        drafts: guessed tokens after them that the row's logits depend on, too.
        mask: the ids that may be chosen, at least one; None: all but `forbidden`.
    """

    sampling: Sampling
    tokens: Sequence[int] = ()
    prompt_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    drafts: Sequence[int] = ()
    mask: Mask | None = None

    @property
    def position(self) -> int:
        """Index of the token to be chosen in the whole sequence."""
        return len(self.tokens) + len(self.drafts)

    @property
    def history(self) -> Sequence[int]:
        """All tokens before the one to be chosen."""
        return [*self.tokens, *self.drafts] if self.drafts else self.tokens

    @property
    def generated(self) -> list[int]:
        """The history without the prompt."""
        return [*self.tokens[self.prompt_length :], *self.drafts]

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids that may not be chosen yet: those that end the text before min_tokens.

        The mask of a grammar says that of its own.
        """
        sampling = self.sampling
        is_ruled = self.mask is not None and not sampling.allowed_token_ids
        if is_ruled or self.position - self.prompt_length >= sampling.min_tokens:
            return ()
        ends = () if sampling.ignore_eos else self.eos_token_ids
        return (*ends, *sampling.stop_token_ids)

    @property
    def unwanted(self) -> tuple[int, ...]:
        """Ids that would complete a bad word."""
        bad_words = self.sampling.bad_words
        if not bad_words:
            return ()
        newest = self.generated[-max(map(len, bad_words)) :]
        return tuple(
            word[-1]
            for word in bad_words
            if len(word) == 1 or tuple(newest[1 - len(word) :]) == word[:-1]
        )

    def excluded(self, vocabulary: int) -> list[int]:
        """Return the ids that may not be chosen: bad words, then all others, give way if nothing
        else is left.
        """
        unwanted, forbidden = self.unwanted, self.forbidden
        for ids in ({*forbidden, *unwanted}, {*forbidden}):
            if not ids:
                break
            left = vocabulary - len(ids)
            if self.mask is not None:
                left = len(set(allowed_ids(self.mask, vocabulary).tolist()) - ids)
            if left:
                return sorted(ids)
        return []

    @property
    def is_plain(self) -> bool:
        """True if the choice is the largest raw logit that may be chosen, and all that is asked."""
        sampling = self.sampling
        return (
            sampling.temperature == 0
            and sampling.logprobs is None
            and not sampling.uses_history
            and not sampling.logit_bias
            and not self.forbidden
            and not self.sampling.bad_words
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. Log-probabilities are natural logs of the softmax of the
    logits after masks, penalties and biases, before temperature and truncation.
    Of tokens that may not be chosen none is reported. `hidden_state`: fp32 `[h]` as bytes, if the
    request wants it; else empty."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    hidden_state: bytes = b""


@dataclass(frozen=True, slots=True)
class NonFiniteLogits:
    """The row held NaN or +infinity, or no finite value: no token can be chosen."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens that follow each other, by the logits as they are.

    Attributes:
        first_index: place of the first token in the prompt.
        logprobs, ranks: of each token; rank 1 is the likeliest.
        top_token_ids, top_logprobs: as many at each position, likeliest first.
    """

    first_index: int
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> None:
        """Add tokens, int64 `[M]`, by the fp32 logits `[M, vocabulary]` before each of them.

        `count`: alternatives at each position.
        """
        chosen = logits.gather(1, token_ids.unsqueeze(1))
        sums = logits.logsumexp(dim=1, keepdim=True)
        self.logprobs.extend((chosen - sums).squeeze(1).tolist())
        self.ranks.extend(((logits > chosen).sum(dim=1) + 1).tolist())
        top = logits.topk(min(count, logits.shape[1]), dim=1)
        self.top_token_ids.extend(top.indices.flatten().tolist())
        self.top_logprobs.extend((top.values - sums).flatten().tolist())

    def pieces(self, count: int) -> Iterator[PromptScores]:
        """Yield the same in parts of at most `count` tokens."""
        width = len(self.top_token_ids) // max(1, len(self.logprobs))
        for start in range(0, len(self.logprobs), count):
            part = slice(start, start + count)
            wide = slice(start * width, (start + count) * width)
            yield PromptScores(
                self.first_index + start,
                self.logprobs[part],
                self.ranks[part],
                self.top_token_ids[wide],
                self.top_logprobs[wide],
            )


class HostChoices:
    """Chooses from fp32 logits `[M, vocabulary]`, which are not changed, row by row.

    Plain greedy rows cost one argmax for all of them together.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        # NaN and +infinity are themselves the largest, so one pass finds both.
        largest, best = logits.max(dim=-1)
        self._largest: list[float] = largest.tolist()
        self._best: list[int] = best.tolist()

    def choice(self, index: int, row: SamplingRow) -> Choice | NonFiniteLogits:
        """Return the choice from the logits at `index`, which are those of `row`."""
        if not math.isfinite(self._largest[index]):
            return NonFiniteLogits()
        if row.is_plain and row.mask is None:
            return Choice(self._best[index])
        return _choose_one(self._logits[index].to("cpu"), row)


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Choice | NonFiniteLogits]:
    """Return one choice per row of fp32 logits `[M, vocabulary]`, which are not changed."""
    host = HostChoices(logits)
    return [host.choice(index, row) for index, row in enumerate(rows)]


def accepted(
    choices: Iterable[Choice | NonFiniteLogits], drafts: Sequence[int]
) -> list[Choice] | NonFiniteLogits:
    """Return the choices that hold: up to the first one that differs from its draft.

    Choice i supposes that the first i drafts are right, so it is what plain decoding chooses
    if they are. No further choice is asked for. A row without finite logits ends them; plain
    decoding meets it in a later step, unless it is the first one.
    """
    held: list[Choice] = []
    for index, choice in enumerate(choices):
        if isinstance(choice, NonFiniteLogits):
            return held or choice
        held.append(choice)
        if index == len(drafts) or choice.token_id != drafts[index]:
            break
    return held


class PendingChoices:
    """The choices of a step under way on a GPU: the twin of `HostChoices`. `read` waits."""

    def __init__(
        self,
        logits: torch.Tensor,
        finite: torch.Tensor,
        rows: Sequence[SamplingRow],
        most_elements: int = MOST_ELEMENTS,
    ) -> None:
        """Issue all work for fp32 logits `[M, vocabulary]`, and for bool flags `[N]` to return.

        What a mask excludes becomes -infinity in the logits.
        """
        self._logits = logits
        self._rows = rows
        parameters = [_parameters(row, logits.shape[1]) for row in rows]
        masks = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
        self._draws = PendingDraws(logits, finite, parameters, most_elements, masks)

    def read(self) -> tuple[list[bool], list[Choice | NonFiniteLogits]]:
        """Wait for the device; return the flags, and one choice per row of logits."""
        flags, drawn = self._draws.read()
        choices: list[Choice | NonFiniteLogits] = []
        for index, (row, each) in enumerate(zip(self._rows, drawn, strict=True)):
            if not each.is_regular:
                choices.append(NonFiniteLogits())
            elif each.is_short:
                # Rare: the whole vocabulary is sorted for this row alone.
                choices.append(_choose_one(self._logits[index].to("cpu"), row))
            else:
                top = tuple(pair for pair in each.top if pair[1] > -math.inf)
                choices.append(Choice(each.token_id, each.logprob, top))
        return flags, choices


def choose_with_flags(
    logits: torch.Tensor, flags: torch.Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[bool], list[Choice | NonFiniteLogits]]:
    """Choose where the logits are; return the bool flags `[N]`, too, read in the same wait."""
    if logits.is_cuda:
        return PendingChoices(logits, flags, rows).read()
    return flags.tolist(), choose(logits, rows)


def _parameters(row: SamplingRow, vocabulary: int) -> RowParameters | None:
    """Return what the draw of a row depends on; None if it is plain."""
    if row.is_plain:
        return None
    sampling = row.sampling
    penalty = sampling.repetition_penalty
    repeated = sorted(set(row.history)) if penalty != 1 else []
    return RowParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        point=uniform(sampling.seed, row.position),
        reported=sampling.logprobs,
        repeated=[(token, penalty, 0.0) for token in repeated],
        counted=_counted(row),
        biased=[(token, bias, 0.0) for token, bias in sampling.logit_bias.items()],
        forbidden=[(token, -math.inf, 0.0) for token in row.excluded(vocabulary)],
    )


def _counted(row: SamplingRow) -> list[Entry]:
    """Return the generated tokens with what penalties subtract from their scores."""
    sampling = row.sampling
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return []
    generated = row.generated
    if not generated:
        return []
    ids, counts = np.unique(np.asarray(generated), return_counts=True)
    # `_adjusted` multiplies counts, which torch does in fp32.
    often = np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    present = float(np.float32(sampling.presence_penalty))
    return [
        (token, less, present) for token, less in zip(ids.tolist(), often.tolist(), strict=True)
    ]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is a function of (seed, position) only."""
    message = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"splitpoint draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _choose_one(logits: torch.Tensor, row: SamplingRow) -> Choice | NonFiniteLogits:
    """Choose from one row `[vocabulary]`, on the CPU, in fp64."""
    sampling, ids = row.sampling, None
    if row.mask is not None:
        ids = torch.from_numpy(allowed_ids(row.mask, len(logits)))
    if row.is_plain:
        # The first of the largest, as without a mask.
        some = logits if ids is None else logits[ids]
        place = int(some.argmax())
        if not math.isfinite(float(some[place])):
            return NonFiniteLogits()
        return Choice(_id(ids, place))
    scores = _adjusted(logits.to(torch.float64), row)
    if ids is not None:
        scores = scores[ids]
    if not math.isfinite(float(scores.max())):
        return NonFiniteLogits()
    place = (
        int(scores.argmax())
        if sampling.temperature == 0
        else _draw(scores, sampling, uniform(sampling.seed, row.position))
    )
    if sampling.logprobs is None:
        return Choice(_id(ids, place))
    logprobs = torch.log_softmax(scores, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.logprobs:
        listed = torch.topk(logprobs, min(sampling.logprobs, len(logprobs)))
        pairs = zip(listed.indices.tolist(), listed.values.tolist(), strict=True)
        top = tuple((_id(ids, each), value) for each, value in pairs if value > -math.inf)
    return Choice(_id(ids, place), float(logprobs[place]), top)


def _id(ids: torch.Tensor | None, place: int) -> int:
    """Return the id at a place of the scores."""
    return place if ids is None else int(ids[place])


def _adjusted(scores: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Apply penalties, biases and forbidden tokens; may change `scores` in place."""
    sampling = row.sampling
    vocabulary = len(scores)
    if sampling.repetition_penalty != 1 and (history := row.history):
        seen = torch.tensor(sorted(set(history)))
        values = scores[seen]
        scores[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and (generated := row.generated):
        counts = torch.bincount(torch.tensor(generated), minlength=vocabulary)
        scores -= sampling.frequency_penalty * counts
        scores -= sampling.presence_penalty * (counts > 0)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        scores[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=scores.dtype)
    if excluded := row.excluded(vocabulary):
        scores[torch.tensor(excluded)] = -math.inf
    return scores


def _draw(scores: torch.Tensor, sampling: Sampling, point: float) -> int:
    """Return the inverse of the distribution function at `point`.

    Truncates in the order top_k, top_p, min_p, each on what the one before left; ties are
    broken by the lower id. Tokens are in the order of likelihood if top_k or top_p needs it,
    else by id, which needs no sort.
    """
    # The largest score becomes 0 first: a tiny temperature must not overflow.
    scaled = (scores - scores.max()) / sampling.temperature
    vocabulary = len(scaled)
    ids = None
    if 0 < sampling.top_k < vocabulary:
        kept, ids = _most_likely(scaled, sampling.top_k)
        probabilities = torch.softmax(kept, dim=-1)
    else:
        probabilities = torch.softmax(scaled, dim=-1)
        if sampling.top_p < 1:
            probabilities, ids = _nucleus_candidates(probabilities, sampling.top_p)
    if sampling.top_p < 1:
        # The token that reaches top_p is still kept.
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.max()
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    cumulative = torch.cumsum(probabilities, dim=-1)
    place = int(torch.searchsorted(cumulative, point * float(cumulative[-1]), right=True))
    # Rounding must not lead past the end, nor to a token of probability zero.
    place = min(place, len(probabilities) - 1)
    while probabilities[place] == 0:
        place -= 1
    return place if ids is None else int(ids[place])


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest and their ids, largest first, lower ids first among equals."""
    least = torch.topk(scores, count).values[-1]
    ids = (scores >= least).nonzero().squeeze(1)
    ordered, order = torch.sort(scores[ids], descending=True, stable=True)
    return ordered[:count], ids[order[:count]]


def _nucleus_candidates(
    probabilities: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return enough tokens, most likely first, to reach `top_p`: rarely the whole vocabulary."""
    vocabulary = len(probabilities)
    if vocabulary > NUCLEUS:
        ordered, ids = _most_likely(probabilities, NUCLEUS)
        if float(ordered.sum()) >= top_p:
            return ordered, ids
    return _most_likely(probabilities, vocabulary)
