"""A causal language model of transformers, cut at the attention of each layer.

Nothing here is about any family: where the layers are, what their attention does, and what they
store is seen in a first pass, which computes no layer and works without weights (`meta` tensors).
What it sees and this version does not compute is refused, with the layer's name.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from splitpoint.checkpoint.config import unsupported
from splitpoint.errors import InvalidArgument
from worker_service.kernels.row_wise import Angles

# Two names of our attention: the first pass is told masks, all other passes are not.
_SEEING, _ATTENDING = "splitpoint-seeing", "splitpoint"
# Options of attention that are computed, or that change nothing of what is computed.
_KNOWN = frozenset(
    {
        *("mask", "scaling", "softcap", "is_causal", "sliding_window", "dropout"),
        *("position_ids", "position_embeddings", "use_cache", "cache_position"),
        *("past_key_values", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "s_aux"),
    }
)
# Tokens of the first pass.
_SEEN_TOKENS = 7


class Stop(Exception):
    """Ends a pass where nothing behind it is wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerFacts:
    """One layer's attention.

    Attributes:
        input_width: elements of X, which the attention module is given.
        head_dim: elements of a key; value_dim: of a value.
        window: tokens that a query sees, itself included; None: all.
        most_tokens: the longest sequence of which this is true; None: any.
        sinks: fp32 `[n_q]`, see `Layer`; None: none.
        like: the first layer that is given the same arguments of positions.
    """

    name: str
    input_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    cap: float | None
    window: int | None
    most_tokens: int | None
    sinks: torch.Tensor | None
    like: int


# Called with the layer's index, X `[N, h]`, q `[N, n_q, d]`, k `[N, n_kv, d]` and v
# `[N, n_kv, d_v]`; returns `[N, n_q, d_v]`.
OnAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# X `[N, h]`, q `[N, n_q, d]`, k `[N, n_kv, d]` and v `[N, n_kv, d_v]`.
Asked = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# What layers are given beside the hidden for N positions, by their `LayerFacts.like`.
Arguments = Mapping[int, dict[str, Any]]


@dataclass(slots=True)
class _Pass:
    """What happens at the cuts of a pass.

    Attributes:
        on_layer: is given a layer's index, its forward, the hidden `[1, N, h]` and its other
            arguments; None: the layer computes.
        layer: index of the layer under way.
        inputs: X in the place of what the attention module is given; None: none.
        hidden: `[M, h]` in the place of what the stack computes; None: it computes.
        seen_inputs: X of the layer under way.
        positions: `[1, N]`, what it is given as those of its tokens, until it attends.
        numbers: whether a layer numbered its tokens by itself.
        angles: of our own layers, by what they are made of, which stays alive.
    """

    on_attention: Callable[..., torch.Tensor]
    on_layer: Callable[..., Any] | None = None
    layer: int = 0
    inputs: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    seen_inputs: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    numbers: bool = False
    angles: dict[int, tuple[Any, Angles]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What reached a layer's attention.

    Attributes:
        hidden: `[N, h]`, which the layer was given.
        heads: q, k and v, `[N, heads, d]`.
        more: what the layer was given beside the hidden.
    """

    module: nn.Module
    hidden: torch.Tensor
    inputs: torch.Tensor | None
    heads: tuple[torch.Tensor, ...]
    options: dict[str, Any]
    more: dict[str, Any]


class _Misunderstood(Exception):
    """Layers return the hidden in another form than was supposed."""


class _Current(threading.local):
    # The passes under way in this thread; the last one counts.
    passes: list[_Pass]

    def __init__(self) -> None:
        self.passes = []


_current = _Current()


def _attend(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: object = None,
    **_options: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: heads first, one row of N tokens."""
    current = _current.passes[-1]
    current.positions = None
    heads = (each[0].transpose(0, 1) for each in (query, key, value))
    attended = current.on_attention(current.layer, current.seen_inputs, *heads)
    return attended[None], None


def _see(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of the first pass."""
    heads = (each[0].transpose(0, 1) for each in (query, key, value))
    seen = _current.passes[-1].on_attention(module, *heads, mask=attention_mask, **options)
    return seen, None


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a mask function of transformers lets queries see.

    Attributes:
        most_tokens: the longest sequence of which this is true; None: any.
    """

    window: int | None
    problem: str = ""
    most_tokens: int | None = None


class _Numbering(TorchFunctionMode):
    """Gives code that numbers its N tokens from 0, as the only ones of a step, their positions."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Sequence[Any] = (), named: Any = None
    ) -> Any:
        current = _current.passes[-1]
        positions = current.positions
        if function is torch.arange and positions is not None and args == (positions.shape[1],):
            current.numbers = True
            return positions[0].clone()
        return function(*args, **(named or {}))


class _NoPadding(TorchFunctionMode):
    """Takes one number of each sequence without its value for 0: a count of padding before it."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Sequence[Any] = (), named: Any = None
    ) -> Any:
        def known(each: Any) -> Any:
            is_unknown = isinstance(each, torch.Tensor) and each.is_meta and each.dim() == 1
            return torch.zeros_like(each, device="cpu") if is_unknown else each

        return function(*map(known, args), **(named or {}))


def _mask(mask_function: Callable[..., Any], local_size: int | None = None, **_: object) -> _Mask:
    """Return what a query sees, in the place of a mask."""

    def sees(query: int, key: int) -> bool:
        at = (torch.tensor(each) for each in (0, 0, query, key))
        with _NoPadding():
            return bool(mask_function(*at))

    window = local_size
    far = 3 * (window or 1 << 20) // 2
    first = 0 if window is None else far - window + 1
    try:
        sees_later = sees(far, far + 1)
    except NotImplementedError:  # it looks into `meta` tensors
        return _Mask(window, "a mask that depends on other tokens")
    if sees_later:
        return _Mask(window, "tokens see later tokens")
    if not all(sees(query, query) for query in range(far - 4, far + 1)):
        return _Mask(window, "a mask of its own kind")
    if not sees(far, first) or (first and sees(far, first - 1)):
        if window is None or not sees(window - 1, 0):
            return _Mask(window, "a mask of its own kind")
        return _Mask(window, most_tokens=window)
    return _Mask(window)


AttentionInterface.register(_SEEING, _see)
AttentionInterface.register(_ATTENDING, _attend)
AttentionMaskInterface.register(_SEEING, _mask)


class OwnLayer(Protocol):
    """A layer by kernels of ours; see `WholeLayer`."""

    def begin(self, hidden: torch.Tensor, angles: Angles | None, /) -> Asked: ...

    def end(self, hidden: torch.Tensor, attended: torch.Tensor, /) -> torch.Tensor: ...


class DividedModel:
    """The passes through a model of transformers. Its weights may be on `meta`.

    Attributes:
        stack: computes the hidden of ids and positions through all layers.
        layers: the decoder layers, in order.
        attention: the attention module of each layer.
        facts: of each layer.
        own: what computes a layer instead of its own code, by index.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InvalidArgument (UNSUPPORTED_MODEL) for what this version does not compute."""
        self.model = model
        self.stack, self.layers, self._names = _layers_of(model)
        if not _takes_positions(self.stack):
            raise _refusal(
                f"{type(self.stack).__name__} takes no position ids: no model with ALiBi, with a "
                "state, or of an encoder does"
            )
        self.own: dict[int, OwnLayer] = {}
        self.stack.forward = partial(self._stack, self.stack.forward)
        for index, layer in enumerate(self.layers):
            names = tuple(inspect.signature(layer.forward).parameters)
            layer.forward = partial(self._layer, index, names, layer.forward)
        # The stack of a wrapper for images has a configuration of its own.
        attending = self.stack if isinstance(self.stack, PreTrainedModel) else model
        _use(attending, _SEEING)
        # What a layer returns is seen by trial: most return the hidden, some a tuple.
        self._returns_tuple = False
        try:
            seen = self._see()
        except _Misunderstood:
            self._returns_tuple = True
            try:
                seen = self._see()
            except _Misunderstood:
                raise _refusal("its layers pass on more than one hidden") from None
        self.attention = [each.module for each in seen]
        if len({id(each) for each in self.attention}) != len(self.layers):
            raise _refusal("layers share an attention")
        for module in self.attention:
            module.forward = partial(self._attention_module, module.forward)
        self.facts = [self._facts(index, seen) for index in range(len(seen))]
        self._last_argument_layer = max(each.like for each in self.facts)
        _use(attending, _ATTENDING)
        try:
            self.logits(seen[0].hidden)
        except Exception as error:
            raise _refusal(f"{type(model).__name__} {_trouble(error)}") from error

    # -- the first pass -----------------------------------------------------------------------

    def _see(self) -> list[_Seen]:
        """Return what reaches the attention of each layer, of a pass that computes none."""
        found: list[_Seen] = []
        # Which modules attend is not known yet: what each is given.
        given: dict[nn.Module, object] = {}

        def note(module: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            given[module] = args[0] if args else more.get("hidden_states")

        def on_layer(index: int, inner: Callable[..., Any], hidden: torch.Tensor, more: Any) -> Any:
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
                raise _Misunderstood

            def on_attention(module: nn.Module, *heads: torch.Tensor, **options: Any) -> Any:
                first = given[module]
                inputs = first[0] if isinstance(first, torch.Tensor) else None
                found.append(_Seen(module, hidden[0], inputs, heads, options, more))
                raise Stop

            current.on_attention = on_attention
            layer = f"layer {index} ({type(self.layers[index]).__name__})"
            try:
                with _Numbering():
                    inner(hidden, **more)
            except Stop:
                return self._returned(hidden)
            except Exception as error:
                raise _refusal(f"{layer} {_trouble(error)}") from error
            raise _refusal(f"{layer} keeps a state that is no K and V")

        current = _Pass(_no_attention, on_layer)
        positions = torch.arange(_SEEN_TOKENS, device=self.model.device)
        parts = [part for layer in self.layers for part in layer.modules()]
        hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
        try:
            # With a mask of its own, transformers does not look for sequences in the positions.
            mask = torch.ones_like(positions)[None]
            self._through_stack(current, positions, positions, attention_mask=mask)
        except (InvalidArgument, _Misunderstood):
            raise
        except Exception as error:
            if not self._returns_tuple:
                raise _Misunderstood from error
            raise _refusal(f"{type(self.stack).__name__} {_trouble(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if len(found) != len(self.layers):
            raise _refusal(f"{len(self.layers)} layers attend {len(found)} times")
        self._numbers = current.numbers
        return found

    def _facts(self, index: int, seen: Sequence[_Seen]) -> LayerFacts:
        """Return the facts of a layer. Raises InvalidArgument for what is not computed."""
        name, own = self._names[index], seen[index]
        query, key, value = own.heads
        mask, options = own.options["mask"], own.options
        problem = mask.problem if isinstance(mask, _Mask) else "a mask of its own kind"
        unknown = {each for each, value in options.items() if value is not None} - _KNOWN
        if unknown:
            problem = f"the option {min(unknown)}"
        if options.get("is_causal") is False:
            problem = "tokens that see later tokens"
        sinks = options.get("s_aux")
        if sinks is not None and sinks.numel() != query.shape[1]:
            problem = f"sinks {list(sinks.shape)} for {query.shape[1]} heads"
        if own.inputs is None:
            problem = "inputs that are no tensor"
        if problem or own.inputs is None or not isinstance(mask, _Mask):
            raise _refusal(f"{name}: attention with {problem}")
        scale = options.get("scaling")
        return LayerFacts(
            name=name,
            input_width=own.inputs.shape[-1],
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[2],
            value_dim=value.shape[2],
            scale=float(query.shape[2] ** -0.5 if scale is None else scale),
            cap=options.get("softcap"),
            window=mask.window,
            most_tokens=mask.most_tokens,
            sinks=None if sinks is None else sinks.detach().flatten().to(torch.float32),
            like=next(i for i in range(index + 1) if _are_same(seen[i].more, own.more)),
        )

    # -- passes -------------------------------------------------------------------------------

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        on_attention: OnAttention,
        enter: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Return the hidden `[N, h]` behind the stack; None if `on_attention` raised Stop."""

        def on_layer(index: int, inner: Callable[..., Any], hidden: torch.Tensor, more: Any) -> Any:
            if enter is not None:
                enter(index, hidden[0])
            given.layer = index
            return inner(hidden, **more)

        given = _Pass(on_attention, on_layer)
        found = self._through_stack(given, token_ids, positions)
        return None if found is None else found.last_hidden_state[0]

    def arguments(self, positions: torch.Tensor) -> Arguments:
        """Return what layers are given for positions `[N]`, without computing any layer."""
        found: dict[int, dict[str, Any]] = {}

        def on_layer(
            index: int, _inner: Callable[..., Any], hidden: torch.Tensor, more: Any
        ) -> Any:
            found[index] = more
            if index == self._last_argument_layer:
                raise Stop
            return self._returned(hidden)

        ids = torch.zeros_like(positions)
        self._through_stack(_Pass(_no_attention, on_layer), ids, positions)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[M, vocabulary]` of the hidden `[M, h]` behind the stack."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with _under_way(_Pass(_no_attention, hidden=hidden)):
            found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return found

    def ask(self, index: int, hidden: torch.Tensor, arguments: Arguments) -> Asked:
        """Return X, q, k and v of a layer, of residuals `[N, h]`."""
        return self._asked(index, hidden, arguments, None)

    def rebuild(self, index: int, inputs: torch.Tensor, arguments: Arguments) -> Asked:
        """Return X, q, k and v of a layer, of its X `[N, h]`."""
        return self._asked(index, inputs, arguments, inputs)

    def _asked(
        self, index: int, hidden: torch.Tensor, arguments: Arguments, inputs: torch.Tensor | None
    ) -> Asked:
        found: list[Asked] = []

        def on_attention(_index: int, *parts: torch.Tensor) -> torch.Tensor:
            found.append((parts[0], parts[1], parts[2], parts[3]))
            raise Stop

        self._through_layer(index, hidden, arguments, on_attention, inputs)
        return found[0]

    def layer(
        self, index: int, hidden: torch.Tensor, arguments: Arguments, on_attention: OnAttention
    ) -> torch.Tensor:
        """Return the next hidden `[N, h]` of one layer."""
        found = self._through_layer(index, hidden, arguments, on_attention, None)
        assert found is not None
        return found

    def _through_layer(
        self,
        index: int,
        hidden: torch.Tensor,
        arguments: Arguments,
        on_attention: OnAttention,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor | None:
        given = _Pass(on_attention, None, layer=index, inputs=inputs)
        more = arguments[self.facts[index].like]
        with _under_way(given):
            try:
                found = self.layers[index](hidden[None], **more)
            except Stop:
                return None
        return _hidden_of(found)

    def _through_stack(
        self, given: _Pass, token_ids: torch.Tensor, positions: torch.Tensor, **more: torch.Tensor
    ) -> Any:
        ids, places = token_ids[None], positions[None]
        with _under_way(given):
            try:
                return self.stack(input_ids=ids, position_ids=places, use_cache=False, **more)
            except Stop:
                return None

    # -- the cuts -----------------------------------------------------------------------------

    def _stack(self, inner: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Stand for the forward of the stack."""
        hidden = _current.passes[-1].hidden if _current.passes else None
        if hidden is not None:
            return _StackOutput(hidden[None])
        return inner(*args, **more)

    def _layer(
        self,
        index: int,
        names: Sequence[str],
        inner: Callable[..., Any],
        *args: Any,
        **more: Any,
    ) -> Any:
        """Stand for the forward of a layer, whose parameters have these names."""
        named = {**dict(zip(names, args, strict=False)), **more}
        hidden = named.pop(names[0])
        if not _current.passes:
            return inner(hidden, **named)
        current = _current.passes[-1]
        current.positions = named.get("position_ids")
        on_layer = current.on_layer
        own = self.own.get(index)
        if own is not None and current.inputs is None:
            inner = partial(self._by_own, own)
        return inner(hidden, **named) if on_layer is None else on_layer(index, inner, hidden, named)

    def _by_own(self, own: OwnLayer, hidden: torch.Tensor, **more: Any) -> Any:
        """Stand for the forward of a layer that is computed by kernels of ours."""
        current = _current.passes[-1]
        current.positions = None
        rows, angles = hidden[0], None
        given = more.get("position_embeddings")
        if given is not None:
            if id(given) not in current.angles:
                current.angles[id(given)] = (given, _angles(*given))
            angles = current.angles[id(given)][1]
        current.seen_inputs, *heads = own.begin(rows, angles)
        attended = current.on_attention(current.layer, current.seen_inputs, *heads)
        return self._returned(own.end(rows, attended.flatten(1))[None])

    def use_own(self, index: int, own: OwnLayer | None) -> None:
        """Let kernels of ours compute a layer; None: its own code, as always if X is given."""
        self.own.pop(index, None)
        if own is not None:
            self.own[index] = own

    def _attention_module(self, inner: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Stand for the forward of an attention module: note X, or put another in its place."""
        current = _current.passes[-1]
        first = args[0] if args else more.get("hidden_states")
        if current.inputs is not None:
            first = current.inputs[None]
        current.seen_inputs = first[0] if isinstance(first, torch.Tensor) else None
        with _Numbering() if self._numbers else nullcontext():
            if args:
                return inner(first, *args[1:], **more)
            return inner(**{**more, "hidden_states": first})

    def _returned(self, hidden: torch.Tensor) -> Any:
        return (hidden,) if self._returns_tuple else hidden


class _StackOutput:
    """What a head reads of a stack's output: the hidden `[1, M, h]`, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


def _hidden_of(found: Any) -> torch.Tensor:
    hidden: torch.Tensor = (found[0] if isinstance(found, tuple) else found)[0]
    return hidden


def _angles(cosine: torch.Tensor, sine: torch.Tensor) -> Angles:
    """Return cosine and sine `[1, N, d]` as `Rotary` has them."""
    first, second = sine.chunk(2, dim=-1)
    return cosine.contiguous(), torch.cat((-first, second), dim=-1)


def _no_attention(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("a layer attends in a pass that computes none")


@contextmanager
def _under_way(given: _Pass) -> Iterator[None]:
    _current.passes.append(given)
    try:
        yield
    finally:
        _current.passes.pop()


def _use(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _refusal(f"{type(model).__name__} takes no attention function from outside")


def _layers_of(model: PreTrainedModel) -> tuple[nn.Module, list[nn.Module], list[str]]:
    """Return what computes the layers, the layers, and their names."""
    count = model.config.get_text_config().num_hidden_layers
    found: list[tuple[nn.Module, list[nn.Module], list[str]]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            stack = model.get_submodule(name.rpartition(".")[0])
            found.append((stack, list(module), [f"{name}.{index}" for index in range(count)]))
    if not found:
        raise _refusal(f"{type(model).__name__} has no list of {count} layers")
    # What reads images may have as many layers, and stand inside the decoder.
    return next((each for each in found if _takes_positions(each[0])), found[0])


def _takes_positions(stack: nn.Module) -> bool:
    return "position_ids" in inspect.signature(stack.forward).parameters


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two layers are given the same: the same tensors, equal other values."""
    if one.keys() != other.keys():
        return False
    return all(_is_same(one[name], other[name]) for name in one)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)


def _trouble(error: Exception) -> str:
    """Return what code does that fails in the first pass."""
    if _Mask.__name__ in str(error):
        return "computes with the attention mask"
    if "meta tensor" in str(error):
        return "reads values, or keeps a state, before it attends"
    return f"fails under our attention: {error!s:.200}"


def _refusal(problem: str) -> InvalidArgument:
    return unsupported(problem, "model_type")
