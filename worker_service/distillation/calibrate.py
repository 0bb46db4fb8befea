"""Makes the artefacts of one screen: samples, factors layer by layer, and how well they rank.

Samples are what each layer makes of passages of text, on the frozen model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.errors import InvalidArgument
from splitpoint.selection import SelectionMethod
from worker_service.distillation.factors import (
    Sums,
    closed_form,
    projected_form,
    rotated_form,
    skew,
)
from worker_service.distillation.fine_tuning import FineTuning, fine_tune
from worker_service.distillation.measures import found_by
from worker_service.distillation.training import Training, train
from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.model import Layer
from worker_service.model.rope import inverse_frequencies
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.columns import ColumnScreen, LowRankScreen
from worker_service.selection.kept_rows import to_int8
from worker_service.selection.maple import (
    MapleScreen,
    MapleWeights,
    maple_weights,
    project,
    sparse_signs,
)
from worker_service.selection.screen import AttentionShape, LayerScreen, TokenRows


@torch.no_grad()
def sampled(model: Decoder, passage: Sequence[int]) -> list[TokenRows]:
    """Return X, q and k of every layer for one passage, which is attended by itself."""
    recorder = _Recorder()
    ids = torch.tensor(passage, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    model.run(ids, positions, recorder)
    return recorder.rows


class _Recorder:
    """Attends a whole passage, and keeps what its layers made of it, in order."""

    def __init__(self) -> None:
        self.rows: list[TokenRows] = []

    def __call__(
        self,
        _index: int,
        layer: Layer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        # Copies: keys are a view of keys and values.
        self.rows.append(TokenRows(inputs, queries, keys.clone()))
        return prefill_alone(
            queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
        )


Item = TypeVar("Item")

# One passage in this many is not seen by training.
_UNSEEN = 8
LEAST_PASSAGES = 2


@dataclass(frozen=True, slots=True)
class LayerResult:
    """How one layer's factors came out, on passages that they were not made from.

    Attributes:
        losses: at the start and after each epoch; empty if nothing is trained.
        closed_recall: of the true top tenth of the tokens, by the closed form of the same rank.
        recall: the same by these factors, in the form in which a screen keeps rows by default.
        closed_weight, weight: the share of attention that goes to the guessed top tenth.
    """

    layer: int
    losses: tuple[float, ...]
    closed_recall: float
    recall: float
    closed_weight: float
    weight: float


class Track(Protocol):
    """Yields items, and shows how many of them are done."""

    def __call__(self, what: str, items: Sequence[Item], /) -> Iterator[Item]: ...


def calibrate(
    model: Decoder,
    method: SelectionMethod,
    passages: Sequence[Sequence[int]],
    *,
    rank: int,
    projection: int = 0,
    training: Training,
    tuning: FineTuning | None = None,
    track: Track,
    say: Callable[[str], None],
) -> tuple[Artifacts, list[LayerResult]]:
    """Return a method's artefacts and how each layer came out.

    Args:
        passages: token ids; the last eighth of them measures, the others are learned from.
        rank: columns of each head's low-rank factors; even for MAPLE.
        projection: columns of MAPLE's P; 0: X is not projected.
        tuning: MAPLE's second stage; None: there is none. It takes a model that `plain_weights`
            loaded.
        track: shows progress over passages and layers; say: takes a line for each epoch.

    Raises InvalidArgument if there are too few passages.
    """
    if len(passages) < LEAST_PASSAGES:
        raise InvalidArgument(
            f"calibration takes at least {LEAST_PASSAGES} passages, not {len(passages)}",
            field="tokens",
        )
    layer_count = model.shape.layer_count
    by_layer: list[list[TokenRows]] = [[] for _ in range(layer_count)]
    for passage in track("passages", passages):
        for layer, of_layer in zip(by_layer, sampled(model, passage), strict=True):
            layer.append(of_layer)
    unseen = max(1, len(passages) // _UNSEEN)
    facts: dict[str, object] = {"tokens": sum(map(len, passages)), "rank": rank}
    if method is SelectionMethod.MAPLE:
        facts |= {"training": asdict(training), "projection": projection}
    works, fits = [], []
    made: list[tuple[dict[str, torch.Tensor], LayerResult]] = []
    for index in track("layers", range(layer_count)):
        # What is learned from is released as soon as the layer is done.
        samples, by_layer[index] = by_layer[index], []
        work = _Layer(
            index,
            AttentionShape.of(model.config, index),
            _frequencies(model.config, index),
            samples[:-unseen],
            samples[-unseen:],
            rank=rank,
            projection=projection,
            training=training,
            say=say,
        )
        if method is SelectionMethod.MAPLE:
            fits.append(work.fit_maple())
            works.append(replace(work, seen=[]))
        else:
            made.append(work.make(method))
    if method is SelectionMethod.MAPLE:
        weights = [fit.trained for fit in fits]
        if tuning is not None:
            seen = passages[:-unseen]
            weights, facts["fine_tuning"] = fine_tune(
                model, weights, track("passages again", seen), passages[-unseen:], tuning
            )
        made = [
            work.finish_maple(fit, each)
            for work, fit, each in zip(works, fits, weights, strict=True)
        ]
    tensors = {
        f"layers.{index}.{name}": tensor
        for index, (named, _) in enumerate(made)
        for name, tensor in named.items()
    }
    return Artifacts(method, tensors, facts), [result for _, result in made]


@dataclass(frozen=True, slots=True)
class _MapleFit:
    """Factors in closed form, those trained from them, and the losses of `Trained`."""

    start: MapleWeights
    trained: MapleWeights
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's samples, and what is made of them."""

    index: int
    shape: AttentionShape
    rope: torch.Tensor
    seen: list[TokenRows]
    unseen: list[TokenRows]
    rank: int
    projection: int
    training: Training
    say: Callable[[str], None]

    def make(self, method: SelectionMethod) -> tuple[dict[str, torch.Tensor], LayerResult]:
        """Return the layer's tensors by name, and the result; not for MAPLE."""
        sums = Sums.empty(self.shape.kv_heads, self.shape.head_dim, self.seen[0].keys.device)
        for rows in self.seen:
            sums.add(rows)
        closed = closed_form(sums.queries, sums.keys)
        of_closed = partial(LowRankScreen, self.shape, *(each[..., : self.rank] for each in closed))
        if method is SelectionMethod.INFINIGEN:
            factor = skew(sums)
            screen = partial(ColumnScreen, self.shape, self.rank, skew=factor)
            return {"skew": factor}, self._result(method, screen, of_closed)
        result = self._result(method, of_closed, of_closed)
        return {"query_map": closed[0], "key_map": closed[1]}, result

    def fit_maple(self) -> _MapleFit:
        """Train W_Q and W_K: MAPLE's first stage."""
        # One more stream for each layer.
        random = torch.Generator().manual_seed(self.training.seed * 65_536 + self.index)
        device = self.seen[0].inputs.device
        width = self.seen[0].inputs.shape[1]
        projection = sparse_signs(width, self.projection, random).to(device)
        inputs = [project(rows.inputs, projection) for rows in self.seen]
        frequencies = torch.empty((self.shape.kv_heads, 0), device=device)
        if len(self.rope):
            rope = self.rope.to(device)
            query, key, frequencies = rotated_form(inputs, self.seen, self.rank, rope)
        else:
            query, key = projected_form(inputs, self.seen, self.rank)
        start = query, key

        def weights(query: torch.Tensor, key: torch.Tensor) -> MapleWeights:
            return MapleWeights(projection, query, key, frequencies)

        def projected(
            rows: TokenRows, query: torch.Tensor, key: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            made = weights(query, key)
            return made.queries(rows.inputs, 0), made.keys(rows.inputs, 0)

        def after_epoch(epoch: int, loss: float) -> None:
            self.say(f"layer {self.index}, epoch {epoch}: loss {loss:.4g}")

        trained = train(
            start, projected, self.shape, self.seen, self.unseen, self.training, after_epoch
        )
        return _MapleFit(weights(*start), weights(*trained.factors), trained.losses)

    def finish_maple(
        self, fit: _MapleFit, weights: MapleWeights
    ) -> tuple[dict[str, torch.Tensor], LayerResult]:
        """Quantise factors, and return them by name, and the result."""
        tensors = {"projection": weights.projection, "frequencies": weights.frequencies}
        for name, factor in (("query", weights.query), ("key", weights.key)):
            rows, scales = to_int8(factor.transpose(0, -1))
            tensors[name] = rows.transpose(0, -1).contiguous()
            tensors[f"{name}_scale"] = scales.float().transpose(0, -1).contiguous()
        closed, screen = (
            partial(MapleScreen, self.shape, made)
            for made in (fit.start, maple_weights(tensors.__getitem__))
        )
        return tensors, self._result(SelectionMethod.MAPLE, screen, closed, fit.losses)

    def _result(
        self,
        method: SelectionMethod,
        screen: _MakeScreen,
        closed: _MakeScreen,
        losses: tuple[float, ...] = (),
    ) -> LayerResult:
        """Measure the screen beside that of the closed form."""
        start, made = partial(closed, int8=False), partial(screen, int8=method.is_int8)
        closed_recall, closed_weight = found_by(start, self.shape, self.unseen)
        recall, weight = found_by(made, self.shape, self.unseen)
        return LayerResult(self.index, losses, closed_recall, recall, closed_weight, weight)


# Makes an empty screen of the layer; takes `int8`.
_MakeScreen = Callable[..., LayerScreen]


def _frequencies(config: DecoderConfig, layer: int) -> torch.Tensor:
    """Return the radians a token of each pair of RoPE in a layer, `[d / 2]`; empty without RoPE."""
    has_own = config.local_rope is not None and config.windows[layer] is not None
    rope = config.local_rope if has_own else config.rope
    return torch.empty(0) if rope is None else inverse_frequencies(rope, config.shape.head_dim)
