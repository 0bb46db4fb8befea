"""Small random checkpoints of quantised formats, packed here as the formats are defined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from any_models import small_model, write
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

GROUP = 32
# Where AWQ puts the outputs of a word, from its lowest bits on.
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
# Makes what is stored of a matrix, and the matrix that this stands for.
Form = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Return int32 `[n, m]` of codes `[n, 8 m]`, the first in the lowest bits."""
    words = codes.long().view(len(codes), -1, 8) << (4 * torch.arange(8))
    words = words.sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _grouped(
    weight: torch.Tensor, *, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes from 0 to 15, zeros and fp16 scales of groups, and what they stand for."""
    groups = weight.view(len(weight), -1, GROUP)
    if is_symmetric:
        scales = groups.abs().amax(dim=2) / 7
        zeros = torch.full_like(scales, 8)
    else:
        least, most = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = (most - least) / 15
        zeros = (-least / scales).round()
    scales = scales.to(torch.float16)
    wide = scales.float()[..., None]
    codes = (groups / wide + zeros[..., None]).round().clamp(0, 15)
    made = ((codes - zeros[..., None]) * wide).view(weight.shape)
    return codes.view(weight.shape).long(), zeros.long(), scales, made


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Zeros are stored less by 1."""
    codes, zeros, scales, made = _grouped(weight, is_symmetric=True)
    return {
        "qweight": _packed(codes).T.contiguous(),
        "qzeros": _packed((zeros - 1).T.contiguous()),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }, made


def gptq_v2(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, made = _grouped(weight, is_symmetric=False)
    return {
        "qweight": _packed(codes).T.contiguous(),
        "qzeros": _packed(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }, made


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Words hold outputs, in an order of their own."""
    codes, zeros, scales, made = _grouped(weight, is_symmetric=False)

    def packed(rows: torch.Tensor) -> torch.Tensor:
        return _packed(rows.view(len(rows), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1))

    return {
        "qweight": packed(codes.T.contiguous()),
        "qzeros": packed(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }, made


def packed_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors: signed codes, packed more by 8."""
    codes, _, scales, made = _grouped(weight, is_symmetric=True)
    return {
        "weight_packed": _packed(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }, made


def packed_int4_with_zeros(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, made = _grouped(weight, is_symmetric=False)
    return {
        "weight_packed": _packed(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": _packed(zeros.T.contiguous()).T.contiguous(),
    }, made


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def fp8_of_outputs(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scales).to(_FP8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8_of_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(_FP8)
    stored = {"weight": codes, "weight_scale": scale.view(1), "input_scale": torch.ones(1)}
    return stored, codes.float() * scale


def fp8_of_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 48 x 32, so that the last ones are smaller."""
    rows, columns = -(-weight.shape[0] // 48), -(-weight.shape[1] // 32)
    scales = torch.rand(rows, columns) * 0.01 + 0.001
    scale = scales.repeat_interleave(48, 0).repeat_interleave(32, 1)
    scale = scale[: weight.shape[0], : weight.shape[1]]
    codes = (weight / scale).clamp(-448, 448).to(_FP8)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * scale


# The sizes of E2M1, and inputs that share a power of 2.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MX_GROUP = 32


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two codes in a byte, the first in the lower bits; a sign is the highest bit of each."""
    groups = weight.reshape(len(weight), -1, _MX_GROUP)
    powers = groups.abs().amax(dim=2).log2().floor() - 2
    scaled = groups / powers.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(dim=-1)
    made = _E2M1[codes] * scaled.sign() * powers.exp2()[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    stored = {
        "_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "_scales": (powers + 127).to(torch.uint8),
    }
    return stored, made.view(weight.shape)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq v2": (
        gptq_v2,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (packed_int4, _compressed("pack-quantized", **_INT4, symmetric=True)),
    "packed with zeros": (
        packed_int4_with_zeros,
        _compressed("pack-quantized", **_INT4, symmetric=False),
    ),
    "int8": (
        int8,
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    ),
    "fp8 of outputs": (
        fp8_of_outputs,
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "fp8 of a tensor": (fp8_of_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 of blocks": (fp8_of_blocks, {"quant_method": "fp8", "weight_block_size": [48, 32]}),
}
# Of experts alone: all of a kind are one tensor.
MXFP4 = "mxfp4"
_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_EXPERTS_ALONE: dict[str, tuple[Form, dict[str, Any]]] = {
    MXFP4: (mxfp4, {"quant_method": MXFP4, "modules_to_not_convert": _PLAIN})
}
# One expert's matrix in a checkpoint, and its place in what the model has of gate and up.
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight$")
_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def _expert_matrix(decoder: Any, name: str) -> torch.Tensor | None:
    """Return the part of the model that is stored by this name; None if it is of no expert."""
    found = _EXPERT.search(name)
    if found is None:
        return None
    layer, expert, kind = found.groups()
    modules = decoder.layers[int(layer)].modules()
    experts: Any = next(each for each in modules if hasattr(each, "is_transposed"))
    if kind not in _PLACES:
        matrix: torch.Tensor = experts.down_proj[int(expert)]
        return matrix
    both: torch.Tensor = experts.gate_up_proj[int(expert)]
    return both.chunk(2)[_PLACES[kind]]


def quantized_model(
    family: str, form: str, folder: Path, *, with_head: bool = False, **changes: Any
) -> PreTrainedModel:
    """Write a quantised checkpoint into `folder`; return the model that it stands for, in fp32.

    `with_head`: the head, too, which the configuration must then say.
    """
    make, config = {**FORMS, **_EXPERTS_ALONE}[form]
    model = small_model(family, **changes)
    write(model, folder)
    tensors: Tensors = {}
    untyped: Any = model
    decoder: torch.nn.Module = untyped.get_decoder()
    # By names below the decoder: what reads images has a checkpoint with other names above.
    linears = {
        f"{name}.weight": module.weight
        for name, module in decoder.named_modules()
        if type(module) is torch.nn.Linear and name.startswith("layers.")
    }
    if with_head:
        linears["lm_head.weight"] = untyped.lm_head.weight
    with torch.no_grad():
        for name, tensor in load_file(folder / "model.safetensors").items():
            if form == MXFP4:
                tensors |= _of_all_experts(make, decoder, name, tensor)
                continue
            linear = linears.get(name[max(0, name.find("layers.")) :])
            if linear is None:
                linear = _expert_matrix(decoder, name)
            if linear is None or "vision" in name:
                tensors[name] = tensor
                continue
            stored, made = make(tensor)
            linear.copy_(made)
            tensors |= {
                f"{name.removesuffix('weight')}{part}": each for part, each in stored.items()
            }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return model


def _of_all_experts(make: Form, decoder: Any, name: str, tensor: torch.Tensor) -> Tensors:
    """Return what is stored of a tensor; it is quantised if it is the matrices of all experts."""
    if tensor.dim() != 3:
        return {name: tensor}
    model = decoder.get_parameter(name[name.find("layers.") :])
    parts = []
    for expert, matrix in enumerate(tensor):
        stored, made = make(matrix.T)
        model[expert].copy_(made.T)
        parts.append(stored)
    return {f"{name}{part}": torch.stack([each[part] for each in parts]) for part in parts[0]}
