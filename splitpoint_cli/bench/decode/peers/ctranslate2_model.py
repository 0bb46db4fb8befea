"""CTranslate2 as a peer: its own specification of OPT and Llama, filled from a checkpoint.

Imported in the peer's own interpreter; `module` is the package `ctranslate2`.
"""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy

from splitpoint_cli.bench.decode.peers.checkpoint import Array, Checkpoint, rope_base
from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Unsupported, Work

_OPT_POSITION_OFFSET = 2


class CTranslate2Model:
    """A Generator with greedy search over one batch."""

    def __init__(self, module: Any, load: Load) -> None:
        types = module.get_supported_compute_types("cpu")
        if load.data_type not in types:
            raise Unsupported(
                f"on this processor it computes {', '.join(sorted(types))}, not {load.data_type}"
            )
        self.variants: tuple[str, ...] = ("",)
        self.version = f"ctranslate2 {module.__version__}"
        checkpoint = Checkpoint(Path(load.checkpoint))
        specification = _llama(checkpoint) if _is_llama(checkpoint) else _opt(checkpoint)
        specification.validate()
        # Without this a tied table is stored, and read, twice.
        specification.optimize()
        specification.save(load.scratch)
        self._generator = module.Generator(
            load.scratch,
            device="cpu",
            compute_type=load.data_type,
            inter_threads=1,
            intra_threads=load.threads,
        )

    def run(self, work: Work) -> Timing:
        prompts = [[_spelling(token) for token in prompt] for prompt in work.prompts]
        counts = [0] * len(prompts)
        first = threading.Event()
        seen = {"seconds": 0.0, "before": 0}
        started = time.perf_counter()

        def told(result: Any) -> bool:
            counts[result.batch_id] += 1
            if not first.is_set() and all(counts):
                first.set()
                seen.update(seconds=time.perf_counter() - started, before=sum(counts))
            return False

        answers = self._generator.generate_batch(
            prompts,
            beam_size=1,
            sampling_topk=1,
            # No token ends an answer.
            end_token=[],
            max_length=work.new_tokens,
            include_prompt_in_result=False,
            callback=told,
        )
        seconds = time.perf_counter() - started
        tokens = [[int(token) for token in answer.sequences_ids[0]] for answer in answers]
        return Timing(seconds, float(seen["seconds"]), int(seen["before"]), tokens)


def _spelling(token: int) -> str:
    return f"<{token}>"


def _is_llama(checkpoint: Checkpoint) -> bool:
    return str(checkpoint.config["model_type"]) == "llama"


def _specs() -> Any:
    return importlib.import_module("ctranslate2.specs")


def _finished(specification: Any, vocabulary_size: int, epsilon: float) -> Any:
    """Name the vocabulary. Its special tokens mean nothing: `run` heeds no ends."""
    specification.register_vocabulary([_spelling(token) for token in range(vocabulary_size)])
    config = specification.config
    config.unk_token = config.bos_token = config.eos_token = _spelling(0)
    config.layer_norm_epsilon = epsilon
    return specification


def _llama(checkpoint: Checkpoint) -> Any:
    """Return the specification of a Llama."""
    config = checkpoint.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    activations = importlib.import_module("ctranslate2.specs.common_spec").Activation
    specification = _specs().TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        heads,
        activation=activations.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=rope_base(config),
        num_heads_kv=None if kv_heads == heads else kv_heads,
    )
    decoder = specification.decoder
    decoder.scale_embeddings = False
    table = checkpoint.floats("model.embed_tokens.weight")
    decoder.embeddings.weight = table
    untied = "lm_head.weight" in checkpoint
    decoder.projection.weight = checkpoint.floats("lm_head.weight") if untied else table
    decoder.layer_norm.gamma = checkpoint.floats("model.norm.weight")
    for index, layer in enumerate(decoder.layer):

        def weight(name: str, prefix: str = f"model.layers.{index}") -> Array:
            return checkpoint.floats(f"{prefix}.{name}.weight")

        attention, mlp = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = weight("input_layernorm")
        mlp.layer_norm.gamma = weight("post_attention_layernorm")
        parts = [weight(f"self_attn.{name}_proj") for name in "qkv"]
        attention.linear[0].weight = numpy.concatenate(parts)
        attention.linear[1].weight = weight("self_attn.o_proj")
        mlp.linear_0.weight = weight("mlp.gate_proj")
        mlp.linear_0_noact.weight = weight("mlp.up_proj")
        mlp.linear_1.weight = weight("mlp.down_proj")
    return _finished(specification, config["vocab_size"], config["rms_norm_eps"])


def _opt(checkpoint: Checkpoint) -> Any:
    """Return the specification of an OPT with norms before its layers."""
    config = checkpoint.config
    if not config.get("do_layer_norm_before", True):
        raise Unsupported("an OPT with norms behind its layers is not converted here")
    activations = importlib.import_module("ctranslate2.specs.common_spec").Activation
    specification = _specs().TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        pre_norm=True,
        activation=activations.RELU,
    )

    def fill(target: Any, *names: str, is_norm: bool = False) -> None:
        """Set weight and bias from one linear layer or several, or from a norm."""
        weights = [checkpoint.floats(f"model.decoder.{name}.weight") for name in names]
        biases = [checkpoint.floats(f"model.decoder.{name}.bias") for name in names]
        if is_norm:
            target.gamma, target.beta = weights[0], biases[0]
        else:
            target.weight, target.bias = numpy.concatenate(weights), numpy.concatenate(biases)

    decoder = specification.decoder
    decoder.scale_embeddings = False
    table = checkpoint.floats("model.decoder.embed_tokens.weight")
    decoder.embeddings.weight = decoder.projection.weight = table
    positions = checkpoint.floats("model.decoder.embed_positions.weight")
    decoder.position_encodings.encodings = positions[_OPT_POSITION_OFFSET:]
    fill(decoder.layer_norm, "final_layer_norm", is_norm=True)
    for index, layer in enumerate(decoder.layer):
        prefix = f"layers.{index}"
        attention, mlp = layer.self_attention, layer.ffn
        fill(attention.layer_norm, f"{prefix}.self_attn_layer_norm", is_norm=True)
        fill(attention.linear[0], *(f"{prefix}.self_attn.{name}_proj" for name in "qkv"))
        fill(attention.linear[1], f"{prefix}.self_attn.out_proj")
        fill(mlp.layer_norm, f"{prefix}.final_layer_norm", is_norm=True)
        fill(mlp.linear_0, f"{prefix}.fc1")
        fill(mlp.linear_1, f"{prefix}.fc2")
    return _finished(specification, config["vocab_size"], 1e-5)
