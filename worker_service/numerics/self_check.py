"""The check at a worker's start: do equal rows give equal bits, whatever is beside them?

An operator under test computes its rows with different rows beside them: the products of the
loaded model, by its own code, from token ids to logits (of equal matrices, by shape and purpose,
one is taken); attention, by the plans and kernels that serve requests; choices and
log-probabilities. A row of attention is a query with its position, and the keys and values are
random: alone, with any others of its sequence, as a decoded token, as one of several guesses, and
as a part of a prompt's piece it should have the same bits.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from worker_service.engine.sampling import Choice, Sampling, SamplingRow, choose_with_flags
from worker_service.model.attention import decode, prefill
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.model.model import Layer, Model

# Rows of one call. Kernels change at powers of two and at the sizes of their blocks.
COUNTS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 512)
# Rows that are compared: one more, so that a call with 512 of them is another call.
MOST_ROWS = COUNTS[-1] + 1
# Rows that are also computed in the opposite order.
_REVERSED = 17
# Where the rows of a call begin: spread over all rows.
_STRIDE = 38
# Rows of the calls of one count in all, unless one call has more.
_FEW_ROWS = 16

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A function of rows, each result of which should depend on its own row alone.

    Attributes:
        name: for people, such as "linear gate [2816, 1024]".
        inputs: tensors with equally many rows, dimension 0; at most MOST_ROWS.
        call: takes equally many rows of each, and returns as many in each of its results.
        is_ordered: it takes neighbours in their order only.
        most_calls: with the same few rows; fewer where a call is expensive.
    """

    name: str
    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., Result]
    is_ordered: bool = False
    most_calls: int = 8

    @property
    def row_count(self) -> int:
        return len(self.inputs[0])


def first_difference(operators: Iterable[Operator]) -> str | None:
    """Return the first operator that is not invariant, and how that shows; None if all are."""
    for operator in operators:
        found = difference(operator)
        if found is not None:
            return f"{operator.name} {found}"
    return None


def difference(operator: Operator) -> str | None:
    """Return how results of the operator depend on other rows; None if no bit of them does."""
    count = operator.row_count
    whole = _called(operator, operator.inputs)
    for rows in _parts(count, operator.most_calls):
        part = _called(operator, tuple(each[rows] for each in operator.inputs))
        place = _first_unequal(part, tuple(each[rows] for each in whole))
        if place is not None:
            size = rows.stop - rows.start
            return f"computes row {rows.start + place} of {count} otherwise in a call of {size}"
    if operator.is_ordered:
        return None
    rows = slice(0, min(count, _REVERSED))
    part = _called(operator, tuple(each[rows].flip(0) for each in operator.inputs))
    place = _first_unequal(part, tuple(each[rows].flip(0) for each in whole))
    if place is not None:
        return f"computes row {rows.stop - 1 - place} otherwise if the rows are reversed"
    return None


def _parts(count: int, most_calls: int) -> Iterator[slice]:
    """Yield the rows of each call: of every count below the whole, at changing places.

    Few rows are computed in several calls: rounding to a half-precision type hides most
    differences.
    """
    for index, size in enumerate(COUNTS):
        calls = max(1, min(most_calls, _FEW_ROWS // size)) if size < count else 0
        for call in range(calls):
            first = (1 + index * _STRIDE + call * size) % (count - size + 1)
            yield slice(first, first + size)


def _called(operator: Operator, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    result = operator.call(*inputs)
    # Some operators return views of memory that the next call overwrites.
    return tuple(
        each.clone() for each in ((result,) if isinstance(result, torch.Tensor) else result)
    )


def _first_unequal(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> int | None:
    """Return the first row in which any bit differs; None if all are equal."""
    for mine, theirs in zip(found, expected, strict=True):
        unequal = (_bits(mine) != _bits(theirs)).flatten(1).any(dim=1)
        if bool(unequal.any()):
            return int(unequal.to(torch.uint8).argmax())
    return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element: NaN equals itself, and 0 differs from -0."""
    return values.contiguous().unsqueeze(-1).view(torch.uint8)


_ATTENTION_SEED = 16
# Calls of this many queries decode, as guesses do; those of more prefill.
_MOST_GUESSES = 8


def attention_operators(model: Model, chunk_tokens: int) -> Iterator[Operator]:
    """Yield the operators of each kind of layer."""
    seen: set[tuple[object, ...]] = set()
    for index, layer in enumerate(model.layers):
        kind = (layer.window, layer.scale, layer.cap, layer.sinks is None)
        if kind not in seen:
            seen.add(kind)
            sequence = _Sequence.random(model, layer, chunk_tokens)
            inputs = (sequence.queries, sequence.positions)
            name = f"layer {index}: attention, decoding"
            yield Operator(name, inputs, sequence.decoded)
            name = f"layer {index}: attention, in pieces of a prompt and one by one,"
            yield Operator(name, inputs, sequence.by_count, is_ordered=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Cached tokens of one sequence, and as many queries.

    Attributes:
        keys, values: the pool, `[pages, n_kv, C, d]`.
        pages: the page of each chunk, in no order.
    """

    layer: Layer
    queries: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: Sequence[int]

    @classmethod
    def random(cls, model: Model, layer: Layer, chunk_tokens: int) -> _Sequence:
        generator = torch.Generator().manual_seed(_ATTENTION_SEED)
        shape, count = model.shape, -(-MOST_ROWS // chunk_tokens)

        def values(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(model.device, model.dtype)

        pool = (count + 1, shape.kv_head_count, chunk_tokens, shape.head_dim)
        return cls(
            layer,
            values(MOST_ROWS, shape.query_head_count, shape.head_dim),
            torch.arange(MOST_ROWS),
            values(*pool),
            values(*pool),
            (1 + torch.randperm(count, generator=generator)).tolist(),
        )

    @property
    def _chunk(self) -> int:
        return self.keys.shape[2]

    def decoded(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with each query as one that decodes, all in one step."""
        plan = DecodePlan.of_sequences(
            [self.pages] * len(queries),
            (positions + 1).tolist(),
            chunk_tokens=self._chunk,
            windows=[self.layer.window],
            device=queries.device,
        )
        return decode(queries, self.keys, self.values, plan, self.layer)

    def by_count(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with consecutive queries as a step does: few of them decode, many prefill."""
        if len(queries) <= _MOST_GUESSES:
            return self.decoded(queries, positions)
        first, end = int(positions[0]), int(positions[-1]) + 1
        plan = PrefillPlan.of_prefix(
            self.pages,
            first,
            end - first,
            chunk_tokens=self._chunk,
            windows=[self.layer.window],
            device=queries.device,
        )
        new = slice(first, end)
        return prefill(
            queries,
            self._rows(self.keys)[new],
            self._rows(self.values)[new],
            self.keys,
            self.values,
            plan,
            window=self.layer.window,
            scale=self.layer.scale,
            cap=self.layer.cap,
            sinks=self.layer.sinks,
        )

    def _rows(self, plane: torch.Tensor) -> torch.Tensor:
        """Return the sequence's rows of a plane, `[N, n_kv, d]`."""
        return plane[list(self.pages)].transpose(1, 2).flatten(0, 1)


# Rows of the output head, which computes few in a step, and is the largest matrix by far.
_HEAD_ROWS = 65
_MODEL_SEED = 14

Apply = Callable[..., Result]


def model_operators(model: Model) -> Iterator[Operator]:
    """Yield the operators in the order of a step; on a CPU all layers have the same threads."""
    rows = _Rows(model)
    positions = torch.randint(model.shape.context_length, (MOST_ROWS,), generator=rows.generator)
    positions = positions.to(model.device)
    ids = torch.randint(model.shape.vocabulary_size, (MOST_ROWS,), generator=rows.generator)
    places = (ids.to(model.device), positions)
    if isinstance(model, Decoder):
        yield Operator("the embedding", places, model.embed)
        if model.rotary(positions[:1]) is not None:
            yield Operator("the rotary angles", (positions,), _angles(model))
    else:
        yield Operator("the first inputs", places, model.first_inputs)
    seen: set[tuple[object, ...]] = set()
    for index, layer in enumerate(model.visit()):
        kind = _kind_of(layer)
        if kind not in seen:
            seen.add(kind)
            if isinstance(layer, DecoderLayer):
                yield from _own_operators(model, rows, index, layer, positions)
            else:
                yield from _layer_operators(model, rows, index, layer, positions)
    hidden = rows.of(model.shape.hidden_size, _HEAD_ROWS)
    yield Operator("the output head", (hidden,), model.logits, most_calls=1)


class _Rows:
    """Random rows of the model's type, the same at every start."""

    def __init__(self, model: Model) -> None:
        self.generator = torch.Generator().manual_seed(_MODEL_SEED)
        self._device, self._dtype = model.device, model.dtype

    def of(self, width: int, count: int = MOST_ROWS) -> torch.Tensor:
        """Return `[count, width]`, normally distributed."""
        values = torch.randn(count, width, generator=self.generator)
        return values.to(self._device, self._dtype)


def _kind_of(layer: Layer) -> tuple[object, ...]:
    """Return what distinguishes layers whose operators may differ: not the weights' values."""
    return (layer.window, layer.scale, layer.head_dim, layer.structure)


def _layer_operators(
    model: Model, rows: _Rows, index: int, layer: Layer, positions: torch.Tensor
) -> Iterator[Operator]:
    """Yield what can be asked of any layer."""
    hidden, inputs = rows.of(model.shape.hidden_size), rows.of(model.shape.hidden_size)

    def of_positions(call: Callable[[torch.Tensor, object], Result]) -> Apply:
        return lambda rows, positions: call(rows, model.rotary(positions))

    yield Operator(f"layer {index}: queries", (hidden, positions), of_positions(layer.ask))
    whole = of_positions(layer.work)
    yield Operator(f"layer {index}: all but attention", (hidden, positions), whole)
    rebuild = of_positions(layer.project_kv)
    yield Operator(f"layer {index}: keys and values", (inputs, positions), rebuild)


def _own_operators(
    model: Model, rows: _Rows, index: int, layer: DecoderLayer, positions: torch.Tensor
) -> Iterator[Operator]:
    """Yield the operators of our own layer; parts of a whole before it, for a precise name."""
    shape = model.shape
    hidden, inputs = rows.of(shape.hidden_size), rows.of(shape.hidden_size)
    attended, inner = rows.of(shape.query_width), rows.of(shape.intermediate_size)

    def named(part: str, sizes: str = "") -> str:
        return f"layer {index}: {part}{sizes}"

    def linear(role: str, out_features: int, in_features: int) -> str:
        return named(f"the product {role}", f" [{out_features}, {in_features}]")

    yield Operator(named("the attention norm"), (hidden,), layer.attention_norm)
    yield Operator(named("the MLP norm"), (hidden,), layer.mlp_norm)
    width = shape.hidden_size
    yield Operator(linear("key_value", 2 * shape.kv_width, width), (inputs,), layer.key_value)
    yield Operator(linear("query", shape.query_width, width), (inputs,), layer.query)

    def begin(hidden: torch.Tensor, positions: torch.Tensor) -> Result:
        return layer.begin(hidden, model.rotary(positions))

    def rebuild(inputs: torch.Tensor, positions: torch.Tensor) -> Result:
        return layer.project_kv(inputs, model.rotary(positions))

    yield Operator(named("queries, keys and values"), (hidden, positions), begin)
    yield Operator(named("keys and values from X"), (inputs, positions), rebuild)
    output = linear("output", width, shape.query_width)
    yield Operator(output, (hidden, attended), layer.add_attention)
    activation = layer.activation
    if layer.gate is not None:
        gate = layer.gate
        name = linear("gate", shape.intermediate_size, width)
        yield Operator(name, (inputs,), lambda inputs: gate(inputs, activation))
        name = linear("up", shape.intermediate_size, width)
        yield Operator(name, (inputs, inner), layer.up.times)
    else:
        name = linear("up", shape.intermediate_size, width)
        yield Operator(name, (inputs,), lambda inputs: layer.up(inputs, activation))
    down = linear("down", width, shape.intermediate_size)
    yield Operator(down, (inner, hidden), layer.down.added_to)
    yield Operator(named("the output and the MLP"), (hidden, attended), layer.finish)


def _angles(model: Decoder) -> Apply:
    def angles(positions: torch.Tensor) -> Result:
        rotary = model.rotary(positions)
        if rotary is None:
            raise RuntimeError("the model has no rotary positions")
        found = [rotary, *([rotary.local] if rotary.local is not None else [])]
        return tuple(part for each in found for part in (each.cosine, each.sine))

    return angles


_ROWS = 3
_SAMPLING_SEED = 15
# Few steps between two logits, so that the largest occur twice, as they do in bfloat16.
_STEPS_PER_UNIT = 4
_SAMPLINGS = (
    Sampling(),
    Sampling(logprobs=4),
    Sampling(temperature=0.8, top_k=40, seed=3, logprobs=2),
    Sampling(temperature=1.1, top_p=0.9, min_p=0.01, seed=4),
)


def sampling_operator(vocabulary: int, device: torch.device) -> Operator:
    """Return the operator from fp32 logits `[N, vocabulary]` to numbers of each choice."""
    generator = torch.Generator().manual_seed(_SAMPLING_SEED)
    logits = torch.randn(_ROWS, vocabulary, generator=generator)
    logits = (3 * _STEPS_PER_UNIT * logits).round() / _STEPS_PER_UNIT

    def choices(logits: torch.Tensor) -> torch.Tensor:
        flags = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        found = []
        for sampling in _SAMPLINGS:
            _, chosen = choose_with_flags(logits, flags, [SamplingRow(sampling)] * len(logits))
            found.append(torch.stack([_numbers(each) for each in chosen]))
        return torch.cat(found, dim=1)

    return Operator("sampling", (logits.to(device),), choices, most_calls=1)


def _numbers(choice: object) -> torch.Tensor:
    """Return token ids, and log-probabilities by their bits, as int64 `[5]` or more."""
    if not isinstance(choice, Choice):
        raise RuntimeError("finite logits gave no choice")
    pairs = [(choice.token_id, choice.logprob or 0.0), *choice.top_logprobs]
    bits = [struct.unpack("<q", struct.pack("<d", logprob))[0] for _, logprob in pairs]
    return torch.tensor([*(token for token, _ in pairs), *bits])


log = logging.getLogger(__name__)


@torch.inference_mode()
def dependence(model: Model, chunk_tokens: int) -> str | None:
    """Return the first operator whose results depend on other rows, in words; None if none does.

    Takes about as long as a prefill of 2,000 tokens through one layer.
    """
    began = time.perf_counter()
    operators = itertools.chain(
        model_operators(model),
        attention_operators(model, chunk_tokens),
        [sampling_operator(model.shape.vocabulary_size, model.device)],
    )
    found = first_difference(operators)
    log.info("numerics checked in %.2g s: %s", time.perf_counter() - began, found or "invariant")
    return found
