"""Any decoder-only model of transformers, computed by transformers' own code.

Its attention is taken from it (divided.py): K and V of every layer go to the caller, which attends
over the cache. What a layer stores as X is what its attention module is given; that module alone,
on X, rebuilds K and V (KVPR Eq. 7).

Matrix products are ours (`Linear`), and so are norms and activations that are the plain thing: the
bits of a row then depend on no other row, as with our own decoder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from splitpoint.checkpoint.config import read_config, text_part, unsupported
from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.checkpoint.quantized import Quantization, Stored, read_quantization
from splitpoint.errors import InvalidArgument
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.progress import Counter, Ticker
from splitpoint.shapes import ModelShape, WeightFormat
from worker_service.checkpoint.quantized import (
    MXFP4_PARTS,
    STORED,
    Codes,
    bad_checkpoint,
    read_codes,
    read_mxfp4,
    stacked,
)
from worker_service.checkpoint.tensors import stored_tensors
from worker_service.device.cache import TORCH_TYPES
from worker_service.kernels import row_wise
from worker_service.kernels.choice import Layout
from worker_service.lanes.lanes import Lanes
from worker_service.model.attention import prefill_alone
from worker_service.model.divided import Arguments, DividedModel, LayerFacts, Stop
from worker_service.model.experts import (
    ExpertMatrices,
    RouterWeight,
    StoredExperts,
    expert_shape,
    expert_tensors,
    held_shapes,
    routers_of,
)
from worker_service.model.model import Attend, CarryOut, Enter, Layer, WriteLast, at_once
from worker_service.model.own_parts import Normed, Product, use_own_parts
from worker_service.model.plain_layer import plain_layer
from worker_service.weights.packing import held_bytes, layout_of
from worker_service.weights.stream import WeightStream

# Their annotations do not say what they return.
_TEXT: Any = AutoModelForCausalLM
_WRAPPER: Any = AutoModelForMultimodalLM
_LOGGING: Any = transformers_logging
# Nothing is downloaded, and no code of a checkpoint runs.
_LOCAL: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}


class StoredLinear(nn.Module):
    """A linear layer whose matrix is stored quantised, in the place of transformers' module.

    Attributes:
        codes: None: not yet read.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.size = (linear.out_features, linear.in_features)
        self.bias = linear.bias
        self.codes: Codes | None = None
        self._dtype = linear.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, made anew."""
        if self.codes is None:
            raise AttributeError("weight")
        return self.codes.dequantized().to(self._dtype)

    def dequantized(self, weight: torch.Tensor) -> nn.Linear:
        """Return an ordinary layer with this matrix, `[out, in]`."""
        made = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
        made.weight, made.bias = nn.Parameter(weight.to(self._dtype)), self.bias
        return made

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class TransformersLayer:
    """One layer of the model; see `Layer`."""

    index: int
    facts: LayerFacts
    model: DividedModel
    # Products of the attention module of which K and V are independent.
    beside: tuple[Product, ...]

    @property
    def head_dim(self) -> int:
        return self.facts.head_dim

    @property
    def scale(self) -> float:
        return self.facts.scale

    @property
    def cap(self) -> float | None:
        return self.facts.cap

    @property
    def window(self) -> int | None:
        return self.facts.window

    @property
    def sinks(self) -> torch.Tensor | None:
        return self.facts.sinks

    @property
    def structure(self) -> Hashable:
        """See `Layer`: dense layers and experts differ by their modules."""
        layer = self.model.layers[self.index]
        return tuple((name, type(each).__name__) for name, each in layer.named_modules())

    def await_weights(self, *pieces: WeightPiece) -> None:
        """All are on the device."""

    def project_kv(
        self, inputs: torch.Tensor, rotary: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layer`."""
        for each in self.beside:
            each.is_skipped = True
        try:
            _, _, keys, values = self.model.rebuild(self.index, inputs, rotary)
        finally:
            for each in self.beside:
                each.is_skipped = False
        return keys, self.widened(values)

    def ask(self, hidden: torch.Tensor, rotary: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layer`."""
        inputs, queries, _, _ = self.model.ask(self.index, hidden, rotary)
        return inputs, queries

    def work(self, hidden: torch.Tensor, rotary: Arguments) -> torch.Tensor:
        """See `Layer`."""

        def on_attention(_index: int, _inputs: torch.Tensor, *heads: torch.Tensor) -> torch.Tensor:
            return heads[0][..., : self.facts.value_dim]

        return self.model.layer(self.index, hidden, rotary, on_attention)

    def widened(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as wide as keys, with zeros behind: the cache has one width."""
        missing = self.facts.head_dim - self.facts.value_dim
        return functional.pad(values, (0, missing)) if missing else values


class TransformersModel:
    """See `Model`."""

    code = f"transformers {transformers_version}"

    def __init__(
        self,
        divided: DividedModel,
        shape: ModelShape,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        """Take a loaded model; its matrices become ours one by one."""
        self._divided = divided
        self.config = replace(attention_config(divided, shape), quantization=quantization)
        self.shape = shape
        self.device = device
        self.dtype = TORCH_TYPES[shape.data_type]
        self.weights = WeightFormat.NATIVE
        use_own_parts(divided.model, self.dtype)
        self.weight_bytes = _held_bytes(divided.model)
        self.layers: Sequence[TransformersLayer] = [
            TransformersLayer(index, facts, divided, ())
            for index, facts in enumerate(divided.facts)
        ]
        self._find_products_beside()
        self._find_plain_layers()

    # -- computing ----------------------------------------------------------------------------

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        carry_out: CarryOut = at_once,
        enter: Enter | None = None,
    ) -> torch.Tensor:
        """See `Model`. The lanes see no parts of its layers but their attention."""
        hidden = self._run(token_ids, positions, attend, enter)
        assert hidden is not None
        return hidden

    def fill(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        write_last: WriteLast,
    ) -> None:
        """See `Model`."""

        def attend_or_stop(index: int, layer: Any, *parts: torch.Tensor) -> torch.Tensor:
            if index == len(self.layers) - 1:
                write_last(parts[2], parts[3])
                raise Stop
            return attend(index, layer, parts[0], parts[1], parts[2], parts[3])

        self._run(token_ids, positions, attend_or_stop)

    def first_inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        found: list[torch.Tensor] = []

        def stop(_index: int, _layer: Any, *parts: torch.Tensor) -> torch.Tensor:
            found.append(parts[0])
            raise Stop

        self._run(token_ids, positions, stop)
        return found[0]

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        enter: Enter | None = None,
    ) -> torch.Tensor | None:
        """Return the last hidden; None if `attend` raised Stop."""

        def on_attention(
            index: int,
            inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            layer = self.layers[index]
            attended = attend(index, layer, inputs, queries, keys, layer.widened(values))
            return attended.view(queries.shape)[..., : layer.facts.value_dim]

        return self._divided.run(token_ids, positions, on_attention, enter)

    def rotary(self, positions: torch.Tensor) -> Arguments:
        """See `Model`."""
        return self._divided.arguments(positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self.head(self.final(hidden))

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`: the last norm is part of the pass."""
        return hidden

    def head(self, final: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._divided.logits(final).to(torch.float32)

    def visit(self) -> Generator[TransformersLayer]:
        """See `Model`."""
        yield from self.layers

    # -- weights on the host: none ------------------------------------------------------------

    @property
    def layer_weights(self) -> WeightStream | None:
        return None

    @property
    def is_resident(self) -> bool:
        return True

    @property
    def host_memory(self) -> list[torch.Tensor]:
        return []

    def host_weight_bytes(self, piece: WeightPiece | None = None) -> int:
        """None cross the link."""
        return 0

    def use_lanes(self, lanes: Lanes) -> None:
        """No weights stream."""

    def look_ahead(self) -> None:
        """No weights stream."""

    # -- checks -------------------------------------------------------------------------------

    @torch.inference_mode()
    def check_against(self, token_ids: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare with logits `[N, vocabulary]` of transformers' own attention.

        Raises InvalidArgument (UNSUPPORTED_MODEL) for a model that is computed wrongly, whose rows
        depend on what is computed beside them, or whose K and V do not follow from X.
        """
        positions = torch.arange(len(token_ids), device=self.device)
        hidden, stored = self._passed(token_ids, positions)
        self._require(
            self._far_rows(self.logits(hidden), wanted) <= _FAR_ROWS[self.dtype],
            "its logits differ from those of transformers' own attention",
        )
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(_SEED))
        order = order.to(self.device)
        _, disordered = self._passed(token_ids[order], positions[order])
        last = positions[-_TRIED_TOKENS:]
        rotary = self.rotary(last)
        for layer, rows, others in zip(self.layers, stored, disordered, strict=True):
            inputs, keys, values = rows
            far = max(self._far_rows(a, b[order]) for a, b in zip(others, rows, strict=True))
            self._require(
                far <= _FAR_ROWS[self.dtype],
                f"{layer.facts.name}: a token's rows depend on their order in a step",
            )
            rebuilt = layer.project_kv(inputs[last], rotary)
            self._require(
                not any(map(self._far_rows, rebuilt, (keys[last], values[last]))),
                f"{layer.facts.name}: its input alone does not give K and V",
            )

    def _passed(
        self, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """Return the last hidden of one sequence in any order, and X, K and V of each layer."""
        stored: list[tuple[torch.Tensor, ...]] = []
        order = positions.argsort()

        def attend(
            _index: int,
            layer: Layer,
            inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            stored.append((inputs.clone(), keys.clone(), values.clone()))
            attended = prefill_alone(
                *(queries[order], keys[order], values[order]),
                window=layer.window,
                scale=layer.scale,
                cap=layer.cap,
                sinks=layer.sinks,
            )
            return attended[positions]

        hidden = self.run(token_ids, positions, attend)
        self._require(len(stored) == len(self.layers), "its layers attend more than once")
        return hidden, stored

    def _far_rows(self, found: torch.Tensor, wanted: torch.Tensor) -> int:
        """Return how many rows differ by more than rounding."""
        wanted = wanted.to(torch.float32)
        off = (found.to(torch.float32) - wanted).abs().flatten(1).amax(dim=1)
        return int((~(off <= _OFF[self.dtype] * wanted.abs().max())).sum())

    def _require(self, is_right: bool, problem: str) -> None:
        if not is_right:
            raise unsupported(f"model_type {self.shape.family!r}: {problem}", "model_type")

    # -- building -----------------------------------------------------------------------------

    def _find_plain_layers(self) -> None:
        """Let our kernels compute the layers of which they compute the same.

        Positions up to the context's end show what depends on them beside RoPE, and residuals that
        are small beside what a layer adds show a factor of it.
        """
        last = self.shape.context_length - 1
        positions = torch.tensor(sorted({0, min(1, last), last // 2, last}), device=self.device)
        generator = torch.Generator().manual_seed(_SEED)
        hidden = torch.randn(len(positions), self.shape.hidden_size, generator=generator)
        hidden = (hidden * _SMALL_RESIDUALS).to(self.device, self.dtype)
        if not row_wise.takes(hidden):
            return
        arguments = self._divided.arguments(positions)

        def tried(layer: TransformersLayer) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
            asked = self._divided.ask(layer.index, hidden, arguments)
            return asked, layer.work(hidden, arguments)

        for layer, module in zip(self.layers, self._divided.layers, strict=True):
            try:
                own = plain_layer(module, layer.head_dim, self.dtype)
            except ValueError:  # its parts do not fit each other
                own = None
            if own is None:
                continue
            asked, worked = tried(layer)
            self._divided.use_own(layer.index, own)
            try:
                found, made = tried(layer)
                is_same = all(map(torch.equal, found, asked))
                off = (made.float() - worked.float()).abs().max()
                is_same = is_same and bool(off <= _PLAIN_OFF[self.dtype] * worked.abs().max())
            except Exception:  # of any family's code
                is_same = False
            if not is_same:
                self._divided.use_own(layer.index, None)

    def _find_products_beside(self) -> None:
        """Find the products of each layer's attention that a rebuild need not compute."""
        positions = torch.arange(_TRIED_TOKENS, device=self.device)
        arguments = self._divided.arguments(positions)
        generator = torch.Generator().manual_seed(_SEED)
        layers = []
        for layer, module in zip(self.layers, self._divided.attention, strict=True):
            inputs = torch.randn(_TRIED_TOKENS, layer.facts.input_width, generator=generator)
            inputs = inputs.to(self.device, self.dtype)
            wanted = layer.project_kv(inputs, arguments)
            products = [each for each in module.modules() if isinstance(each, Product)]
            beside = []
            for each in products:
                found = replace(layer, beside=(each,)).project_kv(inputs, arguments)
                if all(map(torch.equal, found, wanted)):
                    beside.append(each)
            layers.append(replace(layer, beside=tuple(beside)))
        self.layers = layers


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """A checkpoint's model without its weights.

    Attributes:
        config: its `shape` has the context that is served.
        model: on `meta`.
    """

    folder: Path
    config: AttentionConfig
    model: PreTrainedModel

    @classmethod
    def of(cls, folder: Path, shape: ModelShape) -> Blueprint:
        """Raises InvalidArgument for what this version does not compute."""
        if shape.family not in CONFIG_MAPPING:
            raise unsupported(
                f"transformers {transformers_version} has no model_type {shape.family!r}, and code "
                "of checkpoints is not run",
                "model_type",
            )
        with _quietly():
            try:
                config = _config_of(folder)
                # A wrapper's checkpoint has its weights by the names of the whole.
                is_wrapper = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
                auto = _WRAPPER if is_wrapper else _TEXT
                with torch.device("meta"):
                    model: PreTrainedModel = auto.from_config(
                        config, dtype=TORCH_TYPES[shape.data_type]
                    )
                _keep_text(model)
            except Exception as error:  # of any family's code
                raise unsupported(
                    f"transformers {transformers_version} makes no {shape.family} of this "
                    f"config.json: {' '.join(str(error).split()):.200}",
                    "model_type",
                ) from error
        _check_rope(config.get_text_config(), shape)
        how = read_quantization(text_part(read_config(folder)))
        try:
            divided = DividedModel(model.train(mode=False))
            if how is not None:
                _check_experts(model, how)
            size = sum(each.nbytes for each in model.parameters())
            for each in _coded(model, how):
                size += int(each.numel() * how.element_bytes) if how is not None else 0
                size -= each.nbytes
            weights = [each.weight for each in routers_of(model)]
            size += sum(4 * each.numel() for each in weights if each.dtype != torch.float32)
            shape = replace(shape, held_weight_bytes=size)
            return cls(folder, replace(attention_config(divided, shape), quantization=how), model)
        except InvalidArgument as error:
            raise unsupported(
                f"model_type {shape.family!r}: {error.message}", error.field
            ) from None

    @property
    def product_shapes(self) -> set[tuple[int, int]]:
        """`(out_features, in_features)` of all matrices that rows are multiplied with."""
        found = {(len(each.weight), each.weight.shape[1]) for each in routers_of(self.model)}
        for each in self.model.modules():
            size = _matrix_shape(each)
            found |= set() if size is None else {size}
            found |= {expert_shape(each, whole) for whole in expert_tensors(each).values()}
        return found

    def held_bytes(self, device: torch.device) -> int:
        """Return the bytes of all weights, each tensor once, as `TransformersModel` holds them."""
        dtype = TORCH_TYPES[self.config.shape.data_type]
        modules = list(self.model.modules())
        tables = {id(each.weight) for each in modules if isinstance(each, nn.Embedding)}
        tensors = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        is_plain = layout_of(device, dtype) is Layout.PLAIN
        how, packed = self.config.quantization, 0
        coded = {id(each) for each in _coded(self.model, how)}
        for each in modules:
            size, tensor = _matrix_shape(each), id(getattr(each, "weight", None))
            if size is None or (is_plain and tensor in tables):
                continue
            stored = how if tensor in coded else None
            packed += held_bytes(*size, device, dtype, stored=stored)
            if tensor not in tables:
                tensors.pop(tensor, None)
        for each in modules if not is_plain else ():
            layout = layout_of(device, dtype)
            for whole, size in held_shapes(each, layout):
                stored = how if id(whole) in coded else None
                packed += len(whole) * held_bytes(*size, device, dtype, stored=stored)
                tensors.pop(id(whole), None)
        for router in routers_of(self.model):
            weight, wide = router.weight, torch.float32
            if weight.dtype != wide or layout_of(device, wide) is not Layout.PLAIN:
                packed += held_bytes(len(weight), weight.shape[1], device, wide)
        return packed + sum(each.nbytes for each in tensors.values())

    def load(self, device: torch.device, tickers: Sequence[Ticker]) -> TransformersModel:
        """Read the weights. Raises InvalidArgument for files that do not fit the model."""
        shape, how = self.config.shape, self.config.quantization
        total = sum(each.nbytes for each in self.model.parameters())
        counter = Counter("loading", total, tickers)
        with ExitStack() as files, _quietly():
            tensors = {} if how is None else self._stored(files)
            quantized = _quantized(tensors)
            try:
                model, report = _text_class(type(self.model), quantized).from_pretrained(
                    self.folder,
                    config=_config_of(self.folder),
                    dtype=TORCH_TYPES[shape.data_type],
                    output_loading_info=True,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    **_LOCAL,
                )
            except Exception as error:  # of any family's code
                raise InvalidArgument(
                    f"transformers cannot load {self.folder}: {error!s:.300}", field="model"
                ) from error
            if how is not None:
                _read_stored(model, how, tensors, quantized)
        for name, found, wanted in sorted(report["mismatched_keys"]):
            raise InvalidArgument(
                f"{self.folder}: {name} is {list(found)}, and {list(wanted)} by config.json",
                field="model",
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise InvalidArgument(
                f"{self.folder} has no weights {', '.join(missing[:4])}", field="model"
            )
        counter.add(total)
        model.train(mode=False).requires_grad_(requires_grad=False).to(device)
        ids = _tried_ids(shape, device)
        try:
            with torch.inference_mode():
                wanted = model(input_ids=ids[None], use_cache=False).logits[0]
            made = TransformersModel(DividedModel(model), shape, device, how)
            made.check_against(ids, wanted)
        except InvalidArgument:
            raise
        except Exception as error:  # of any family's code
            message = f"model_type {shape.family!r}: its code fails: {error!s:.200}"
            raise unsupported(message, "model_type") from error
        return made

    def _stored(self, files: ExitStack) -> dict[str, Callable[[], torch.Tensor]]:
        """Return what reads each stored tensor, by the model's name of it, not the checkpoint's.

        What one expert has is named by the tensor of all experts, the expert, and the place in it.
        """
        mapping = get_model_conversion_mapping(self.model)
        rules = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        known, prefix = self.model.state_dict(), self.model.base_model_prefix
        kinds = {
            f"{name}.{kind}"
            for name, module in self.model.named_modules()
            for kind in expert_tensors(module)
        }
        how = self.config.quantization
        of_all = MXFP4_PARTS if how is not None and how.stored is Stored.MXFP4 else ()
        found: dict[str, Callable[[], torch.Tensor]] = {}
        for name, file in stored_tensors(self.folder, files):
            part = next((each for each in of_all if name.endswith(each)), "")
            asked = name.removesuffix(part)
            if not part:
                module, _, part = name.rpartition(".")
                asked, part = f"{module}.weight", f".{part}"
            here, pattern = rename_source_key(asked, rules, converters, prefix, known)
            expert = _EXPERT.search(name)
            if pattern is not None and here in kinds and expert is not None:
                sources = (each.source_patterns for each in converters)
                place = next(each.index(pattern) for each in sources if pattern in each)
                here = f"{here}:{expert[1]}:{place}"
            else:
                here, _ = rename_source_key(asked, rules, [], prefix, known)
            found[f"{here.removesuffix('.weight')}{part}"] = partial(file.get_tensor, name)
        return found


_EXPERT = re.compile(r"experts\.(\d+)\.")


def _quantized(names: Collection[str]) -> set[str]:
    """Return the names of modules, and of tensors of all experts, that are stored quantised."""
    found = {name.rpartition(".")[0].partition(":")[0] for name in names if name.endswith(STORED)}
    blocks, _ = MXFP4_PARTS
    return found | {each.removesuffix(blocks) for each in names if each.endswith(blocks)}


def _keep_text(model: Any) -> None:
    """Drop what a wrapper has beside its decoder and its head: parts for images or sound."""
    if not model.config.sub_configs:
        return
    kept = {model.get_decoder(), model.get_output_embeddings()}
    path: list[Any] = [model]
    for module in path:
        for name, child in list(module.named_children()):
            if kept.isdisjoint(child.modules()):
                setattr(module, name, None)
            elif child not in kept:
                path.append(child)


def _text_class(kind: type[PreTrainedModel], quantized: Collection[str]) -> Any:
    """Return a class whose models never have the parts for images or sound: none are read.

    Nor are the matrices of modules that are `quantized`: they have none.
    """

    def make(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, *args, **options)
        _keep_text(self)
        for name, module in list(self.named_modules()):
            if name in quantized and type(module) is nn.Linear:
                self.set_submodule(name, StoredLinear(module))
            for part, whole in expert_tensors(module).items():
                if f"{name}.{part}" in quantized:
                    delattr(module, part)
                    setattr(module, part, StoredExperts(module, whole))
                    # The way of transformers' code that reads one expert's matrix at a time.
                    module.config._experts_implementation_internal = "eager"

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def _coded(model: nn.Module, how: Quantization | None) -> list[torch.Tensor]:
    """Return the weights that are held as codes: of linear layers, and of all experts at once."""
    if how is None:
        return []
    # A tied head is the table.
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    found: list[Any] = []
    for name, each in model.named_modules():
        if type(each) is nn.Linear and how.covers(name) and id(each.weight) not in tables:
            found.append(each.weight)
        if how.covers(_one_expert(name)):
            found += expert_tensors(each).values()
    return found


def _one_expert(name: str) -> str:
    """Return the name that a checkpoint has for a matrix in a module of experts."""
    return f"{name}.0.down_proj"


def _check_experts(model: nn.Module, how: Quantization) -> None:
    """Refuse experts of which it is not known how they are stored in the format."""
    for each in model.modules():
        has_stacked = any(tensor.dim() > 2 for tensor in each.parameters(recurse=False))
        is_usual = expert_tensors(each) and (how.stored is Stored.MXFP4) == each.is_transposed
        if has_stacked and not is_usual:
            raise unsupported(f"experts stored as {how.text}", "quantization_config")


def _read_stored(
    model: nn.Module,
    how: Quantization,
    tensors: Mapping[str, Callable[[], torch.Tensor]],
    quantized: Collection[str],
) -> None:
    """Read the matrices that transformers did not. Raises InvalidArgument."""
    own = StoredLinear | StoredExperts
    found = {name: each for name, each in model.named_modules() if isinstance(each, own)}
    for name, module in model.named_modules():
        kinds = {f"{name}.{kind}" for kind in expert_tensors(module)}
        left = kinds - set(found)
        if left and (left != kinds or not how.ignores(_one_expert(name))):
            message = f"{min(left)} is not stored as {how.text}, expert by expert"
            raise unsupported(message, "quantization_config")
    # Tensors of layers that the model lacks, such as MTP layers, are not read.
    if left := {each for each in quantized if not _is_unexpected(model, each)} - set(found):
        raise unsupported(
            f"{min(left)} is stored as {how.text}, and is no linear layer", "quantization_config"
        )

    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise bad_checkpoint(f"the checkpoint has no weights {name}")
        return tensors[name]()

    for name, module in found.items():
        if isinstance(module, StoredExperts):
            _read_experts(how, name, module, tensors.__contains__, get)
            dense = module.dequantized()
            if dense is not None:
                parent, _, kind = name.rpartition(".")
                delattr(model.get_submodule(parent), kind)
                setattr(model.get_submodule(parent), kind, dense)
            continue
        stored = read_codes(how, name, tensors.__contains__, get)
        if stored is None or tuple(stored.shape) != module.size:
            raise bad_checkpoint(f"{name} is not {list(module.size)}")
        if module.bias is None and f"{name}.bias" in tensors and get(f"{name}.bias").any():
            raise bad_checkpoint(f"{name}.bias is not zero, and the model has no such bias")
        if isinstance(stored, Codes):
            module.codes = stored
        else:
            model.set_submodule(name, module.dequantized(stored))


def _is_unexpected(model: Any, name: str) -> bool:
    """Return True if a tensor is of a layer beyond the last, or the model's class ignores it."""
    layer = _LAYER.search(name)
    if layer is not None and int(layer[1]) >= model.config.get_text_config().num_hidden_layers:
        return True
    unread = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(each, name) for each in unread)


_LAYER = re.compile(r"\blayers\.(\d+)\.")


def _read_experts(
    how: Quantization,
    name: str,
    module: StoredExperts,
    has: Callable[[str], bool],
    get: Callable[[str], torch.Tensor],
) -> None:
    """Read the matrices of one kind of a layer's experts. Raises InvalidArgument."""
    if how.stored is Stored.MXFP4:
        module.matrices = [*read_mxfp4(name, get)]
    for expert in range(len(module)) if how.stored is not Stored.MXFP4 else ():
        # Gate and up are stored by themselves.
        places = (read_codes(how, f"{name}:{expert}:{place}", has, get) for place in (0, 1))
        parts = [each for each in places if each is not None]
        biases = (f"{name}:{expert}:{place}.bias" for place in (0, 1))
        if any(bool(get(each).any()) for each in biases if has(each)):
            raise bad_checkpoint(f"{name} has biases that are not zero, and the model has none")
        kinds = {each.is_int4 if isinstance(each, Codes) else None for each in parts}
        if kinds != {how.stored is not Stored.INT8 if how.holds_codes else None}:
            raise bad_checkpoint(f"expert {expert} of {name} is not stored as {how.text}")
        matrix = stacked(parts, module.dtype)
        module.matrices.append(matrix if isinstance(matrix, Codes) else matrix.to(module.dtype))
    sizes = {tuple(each.shape) for each in module.matrices}
    if sizes != {module.size} or len(module.matrices) != len(module):
        raise bad_checkpoint(f"{name} is not {len(module)} times {list(module.size)}")


def _config_of(folder: Path) -> Any:
    """Return the configuration, without its wishes for the code of attention and experts."""
    config: Any = AutoConfig.from_pretrained(folder, **_LOCAL)
    for each in (config, config.get_text_config()):
        each._attn_implementation_internal = None
        each.quantization_config = None
        each._experts_implementation_internal = None
        each.return_dict = True
    return config


def _matrix_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return `(out_features, in_features)` of a plain product; None of anything else."""
    if type(module) is nn.Linear:
        return module.out_features, module.in_features
    if type(module) is Conv1D:
        return module.weight.shape[1], module.weight.shape[0]
    return None


def _check_rope(config: Any, shape: ModelShape) -> None:
    """Refuse angles that depend on the longest sequence of a step."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [found, *(each for each in found.values() if isinstance(each, dict))]
    for each in kinds:
        if each.get("rope_type") == "dynamic":
            raise unsupported("dynamic RoPE: its angles depend on lengths", "rope_parameters")
        original = each.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        if each.get("rope_type") == "longrope" and original and shape.context_length > original:
            raise unsupported(
                f"LongRoPE has other angles beyond {original:,} positions: serve it with "
                f"--max-model-len {original}",
                "rope_parameters",
            )


# Largest difference of two ways to compute the same, as a part of the largest value; and how many
# rows may differ by more, because in half precision they choose other experts.
_OFF = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_FAR_ROWS = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 4}
# The same of what a plain layer gives, whose products round once more or less; and the size of
# residuals beside it.
_PLAIN_OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 5e-3}
_SMALL_RESIDUALS = 1 / 64


def _tried_ids(shape: ModelShape, device: torch.device) -> torch.Tensor:
    """Return ids with which a model is checked."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(shape.vocabulary_size, (_CHECKED_TOKENS,), generator=generator)
    return ids.to(device)


_CHECKED_TOKENS = 8
_TRIED_TOKENS = 3
_SEED = 17


def attention_config(divided: DividedModel, shape: ModelShape) -> AttentionConfig:
    """Return the attention of all layers. Raises InvalidArgument if they are not alike."""
    first = divided.facts[0]
    for each in divided.facts:
        for field in ("query_heads", "kv_heads", "head_dim", "scale", "cap", "input_width"):
            mine, its = getattr(first, field), getattr(each, field)
            if mine != its:
                raise unsupported(
                    f"{each.name} has another {field} ({its}) than {first.name} ({mine})",
                    "model_type",
                )
    if first.value_dim > first.head_dim:
        raise unsupported(f"{first.name} has values wider than keys", "model_type")
    _check_windows(divided, shape)
    read = (shape.query_head_count, shape.kv_head_count, shape.head_dim, shape.hidden_size)
    found = (first.query_heads, first.kv_heads, first.head_dim, first.input_width)
    if read != found or len(divided.facts) != shape.layer_count:
        raise unsupported(
            f"config.json says {shape.layer_count} layers with (query heads, KV heads, head "
            f"width, hidden size) {read}, the model has {len(divided.facts)} with {found}",
            "model_type",
        )
    return AttentionConfig(
        shape=shape,
        windows=tuple(each.window for each in divided.facts),
        score_scale=first.scale,
        score_cap=first.cap,
    )


def _check_windows(divided: DividedModel, shape: ModelShape) -> None:
    """Refuse attention in chunks, and a cache that forgets what the mask shows or has own rules."""
    for each in divided.facts:
        if each.most_tokens is not None and each.most_tokens < shape.context_length:
            raise unsupported(
                f"{each.name}: attention in chunks of {each.most_tokens} tokens: serve it with "
                f"--max-model-len {each.most_tokens}",
                "attention_chunk_size",
            )
    layers: list[Any] = DynamicCache(config=divided.model.config).layers
    for each, cached in zip(divided.facts, layers, strict=False):
        if type(cached) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise unsupported(
                f"{each.name}: its cache ({type(cached).__name__}) has rules of its own",
                "model_type",
            )
        kept = cached.sliding_window if isinstance(cached, DynamicSlidingWindowLayer) else None
        if kept is not None and kept != each.window and kept < shape.context_length:
            raise unsupported(
                f"{each.name}: transformers' cache keeps {kept} tokens, its mask shows more: serve "
                f"it with --max-model-len {kept}",
                "sliding_window",
            )


def _held_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights; a head that is the table counts once."""
    plain = [*model.parameters(), *model.buffers()]
    plain += [each.weight for each in model.modules() if isinstance(each, Normed)]
    matrices = []
    for each in model.modules():
        if isinstance(each, Product):
            matrices.append(each.matrix)
            plain += [] if each.bias is None else [each.bias]
        elif isinstance(each, ExpertMatrices):
            matrices += each.matrices
            plain += [] if each.bias is None else [each.bias]
    matrices += [each.matrix for each in plain if isinstance(each, RouterWeight)]
    by_id = {id(each): each for each in plain}
    size = sum(each.nbytes for each in by_id.values())
    addresses = {each.data_ptr() for each in by_id.values()}
    for matrix in matrices:
        if matrix.weight.is_mkldnn or matrix.weight.data_ptr() not in addresses:
            size += matrix.size_bytes
    return size


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the progress bars and hints that transformers writes to the terminal."""
    verbosity, has_bars = _LOGGING.get_verbosity(), _LOGGING.is_progress_bar_enabled()
    _LOGGING.set_verbosity_error()
    _LOGGING.disable_progress_bar()
    try:
        yield
    finally:
        _LOGGING.set_verbosity(verbosity)
        if has_bars:
            _LOGGING.enable_progress_bar()
