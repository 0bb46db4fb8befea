"""OpenVINO as a peer: OPT and Llama as graphs with a stateful cache, as its own exporters make.

Imported in the peer's own interpreter; `module` is the package `openvino`. The plugin for CPUs
joins the cache's variables and attention into one operation that updates the cache in place.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import numpy

from splitpoint_cli.bench.decode.peers.checkpoint import Array, Checkpoint, rope_base
from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Work

_OPT_POSITION_OFFSET = 2
_OPT_EPSILON = 1e-5
_TYPES = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoModel:
    """A compiled graph; all sequences of a batch have equal lengths."""

    def __init__(self, module: Any, load: Load) -> None:
        self.variants: tuple[str, ...] = ("",)
        self.version = f"openvino {module.__version__}"
        checkpoint = Checkpoint(Path(load.checkpoint))
        config = checkpoint.config
        self._is_llama = config["model_type"] == "llama"
        self._graph = _Graph(module, checkpoint)
        model = self._graph.llama() if self._is_llama else self._graph.opt()
        kind = _TYPES[load.data_type]
        compiled = module.Core().compile_model(
            model,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": str(load.threads),
                "INFERENCE_PRECISION_HINT": kind,
                # Its default quantizes the cache.
                "KV_CACHE_PRECISION": kind,
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            },
        )
        self._request = compiled.create_infer_request()

    def run(self, work: Work) -> Timing:
        self._request.reset_state()
        started = time.perf_counter()
        ids = numpy.array(work.prompts, dtype=numpy.int64)
        chosen = self._step(ids, 0)
        first = time.perf_counter() - started
        answers = [chosen]
        for step in range(work.new_tokens - 1):
            chosen = self._step(chosen[:, None], ids.shape[1] + step)
            answers.append(chosen)
        seconds = time.perf_counter() - started
        tokens = numpy.stack(answers, axis=1).tolist()
        return Timing(seconds, first, len(tokens), tokens)

    def _step(self, ids: Array, before: int) -> Array:
        """Compute rows `[batch, new]` after `before` tokens; return each sequence's choice."""
        new = ids.shape[1]
        positions = numpy.arange(before, before + new)
        seen = numpy.arange(before + new)[None, :] <= positions[:, None]
        lowest = numpy.finfo(numpy.float32).min
        inputs = {
            "ids": ids,
            "lanes": numpy.arange(len(ids), dtype=numpy.int32),
            "mask": numpy.where(seen, 0, lowest).astype(numpy.float32)[None, None],
        }
        if self._is_llama:
            inputs["cosines"], inputs["sines"] = self._graph.angles(positions)
        else:
            inputs["positions"] = positions + _OPT_POSITION_OFFSET
        self._request.infer(inputs)
        logits: Array = self._request.get_output_tensor(0).data
        chosen: Array = logits.argmax(-1)
        return chosen


class _Graph:
    """Builds the operations of one checkpoint."""

    def __init__(self, module: Any, checkpoint: Checkpoint) -> None:
        self._module = module
        self._ops: Any = importlib.import_module("openvino.opset13")
        self._checkpoint = checkpoint
        config = checkpoint.config
        self._hidden = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        self._dim = int(config.get("head_dim") or self._hidden // self._heads)
        self._assigns: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._ids = self._input("ids", [-1, -1], numpy.int64)
        self._lanes = self._input("lanes", [-1], numpy.int32)
        self._mask = self._input("mask", [1, 1, -1, -1], numpy.float32)

    def llama(self) -> Any:
        ops, config = self._ops, self._checkpoint.config
        epsilon = float(config["rms_norm_eps"])
        cosines = self._input("cosines", [1, 1, -1, self._dim], numpy.float32)
        sines = self._input("sines", [1, 1, -1, self._dim], numpy.float32)

        def norm(x: Any, name: str) -> Any:
            mean = ops.reduce_mean(ops.multiply(x, x), self._integers(-1), keep_dims=True)
            scale = ops.divide(self._number(1.0), ops.sqrt(ops.add(mean, self._number(epsilon))))
            return ops.multiply(ops.multiply(x, scale), self._weight(f"{name}.weight"))

        def rotated(x: Any) -> Any:
            first, second = ops.split(x, self._integer(-1), 2).outputs()
            turned = ops.concat([ops.multiply(second, self._number(-1.0)), first], -1)
            return ops.add(ops.multiply(x, cosines), ops.multiply(turned, sines))

        table = self._weight("model.embed_tokens.weight")
        x = ops.gather(table, self._ids, self._integer(0))
        for layer in range(int(config["num_hidden_layers"])):
            prefix = f"model.layers.{layer}"
            normed = norm(x, f"{prefix}.input_layernorm")
            q, k, v = (
                self._heads_of(self._linear(normed, f"{prefix}.self_attn.{name}_proj"), heads)
                for name, heads in zip(
                    "qkv", (self._heads, self._kv_heads, self._kv_heads), strict=True
                )
            )
            attended = self._attention(layer, rotated(q), rotated(k), v)
            x = ops.add(x, self._linear(attended, f"{prefix}.self_attn.o_proj"))
            normed = norm(x, f"{prefix}.post_attention_layernorm")
            gate = ops.swish(self._linear(normed, f"{prefix}.mlp.gate_proj"))
            wide = ops.multiply(gate, self._linear(normed, f"{prefix}.mlp.up_proj"))
            x = ops.add(x, self._linear(wide, f"{prefix}.mlp.down_proj"))
        untied = "lm_head.weight" in self._checkpoint
        head = self._weight("lm_head.weight") if untied else table
        return self._model(norm(self._last(x), "model.norm"), head)

    def opt(self) -> Any:
        ops, config = self._ops, self._checkpoint.config
        positions = self._input("positions", [-1], numpy.int64)

        def norm(x: Any, name: str) -> Any:
            normed = ops.mvn(x, self._integers(-1), True, _OPT_EPSILON, "inside_sqrt")
            scaled = ops.multiply(normed, self._weight(f"{name}.weight"))
            return ops.add(scaled, self._weight(f"{name}.bias"))

        decoder = "model.decoder"
        table = self._weight(f"{decoder}.embed_tokens.weight")
        places = self._weight(f"{decoder}.embed_positions.weight")
        x = ops.add(
            ops.gather(table, self._ids, self._integer(0)),
            ops.gather(places, positions, self._integer(0)),
        )
        for layer in range(int(config["num_hidden_layers"])):
            prefix = f"{decoder}.layers.{layer}"
            normed = norm(x, f"{prefix}.self_attn_layer_norm")
            q, k, v = (
                self._heads_of(
                    self._linear(normed, f"{prefix}.self_attn.{name}_proj", bias=True), self._heads
                )
                for name in "qkv"
            )
            attended = self._attention(layer, q, k, v)
            x = ops.add(x, self._linear(attended, f"{prefix}.self_attn.out_proj", bias=True))
            normed = norm(x, f"{prefix}.final_layer_norm")
            wide = ops.relu(self._linear(normed, f"{prefix}.fc1", bias=True))
            x = ops.add(x, self._linear(wide, f"{prefix}.fc2", bias=True))
        return self._model(norm(self._last(x), f"{decoder}.final_layer_norm"), table)

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Return cosines and sines `[1, 1, positions, d]` of rotary positions."""
        base = rope_base(self._checkpoint.config)
        rates = base ** -(numpy.arange(0, self._dim, 2) / self._dim)
        half = positions[:, None] * rates[None, :]
        both = numpy.concatenate([half, half], -1)[None, None]
        return numpy.cos(both).astype(numpy.float32), numpy.sin(both).astype(numpy.float32)

    # -- parts ---------------------------------------------------------------------------

    def _attention(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Append k and v to the layer's cache, attend to it and join the heads."""
        ops = self._ops
        keys, values = self._cached(f"{layer}.k", k), self._cached(f"{layer}.v", v)
        mixed = ops.scaled_dot_product_attention(
            q, self._repeated(keys), self._repeated(values), self._mask
        )
        joined = ops.transpose(mixed, self._integers(0, 2, 1, 3))
        return ops.reshape(joined, self._integers(0, 0, self._heads * self._dim), True)

    def _cached(self, name: str, new: Any) -> Any:
        """Return the variable with `[batch, heads, new, d]` appended, which it then holds."""
        ops = self._ops
        batch = ops.gather(ops.shape_of(self._ids), self._integers(0), self._integer(0))
        shape = ops.concat([batch, self._integers(self._kv_heads, 0, self._dim)], 0)
        empty = ops.broadcast(self._number(0.0), shape)
        variable = self._module.op.util.VariableInfo()
        variable.data_shape = self._module.PartialShape([-1, self._kv_heads, -1, self._dim])
        variable.data_type = self._module.Type.f32
        variable.variable_id = name
        held = self._module.op.util.Variable(variable)
        opset6 = importlib.import_module("openvino.op")
        past = opset6.read_value(empty, held)
        past = ops.gather(past, self._lanes, self._integer(0))
        both = ops.concat([past, new], -2)
        self._assigns.append(opset6.assign(both, held))
        return both

    def _repeated(self, x: Any) -> Any:
        """Return K or V for every query head, in the form that the plugin takes in."""
        group = self._heads // self._kv_heads
        if group == 1:
            return x
        ops = self._ops
        spread = ops.unsqueeze(x, self._integers(2))
        shape = ops.shape_of(x)
        batch = ops.gather(shape, self._integers(0), self._integer(0))
        rows = ops.gather(shape, self._integers(2), self._integer(0))
        dim = self._integers(self._dim)
        kv_heads = self._integers(self._kv_heads)
        wide = ops.broadcast(
            spread,
            ops.concat([batch, kv_heads, self._integers(group), rows, dim], 0),
            "BIDIRECTIONAL",
        )
        return ops.reshape(
            wide, ops.concat([batch, self._integers(self._heads), rows, dim], 0), False
        )

    def _heads_of(self, x: Any, heads: int) -> Any:
        ops = self._ops
        split = ops.reshape(x, self._integers(0, 0, heads, self._dim), True)
        return ops.transpose(split, self._integers(0, 2, 1, 3))

    def _last(self, x: Any) -> Any:
        """Return the last row of each sequence, `[batch, hidden]`."""
        return self._ops.gather(x, self._integer(-1), self._integer(1))

    def _linear(self, x: Any, name: str, *, bias: bool = False) -> Any:
        product = self._ops.matmul(x, self._weight(f"{name}.weight"), False, True)
        return self._ops.add(product, self._weight(f"{name}.bias")) if bias else product

    def _model(self, x: Any, head: Any) -> Any:
        logits = self._ops.matmul(x, head, False, True)
        result = self._ops.result(logits)
        return self._module.Model([result], self._assigns, [*self._inputs.values()], "peer")

    def _input(self, name: str, shape: list[int], kind: Any) -> Any:
        made = self._ops.parameter(shape, kind, name=name)
        made.output(0).set_names({name})
        self._inputs[name] = made
        return made

    def _weight(self, name: str) -> Any:
        return self._ops.constant(self._checkpoint.floats(name))

    def _number(self, value: float) -> Any:
        return self._ops.constant(numpy.float32(value))

    def _integer(self, value: int) -> Any:
        return self._ops.constant(numpy.int64(value))

    def _integers(self, *values: int) -> Any:
        return self._ops.constant(numpy.array(values, dtype=numpy.int64))
