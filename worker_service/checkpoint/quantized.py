"""Reads matrices of quantised checkpoints: codes with their scales, in the form of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from splitpoint.checkpoint.quantized import INT4_IN_WORD, MXFP4_GROUP, Quantization, Stored
from splitpoint.errors import InvalidArgument

# What is stored of a matrix; the first of these that is there says how.
INT4_PARTS = ("qweight", "weight_packed")
SCALES = ("weight_scale", "weight_scale_inv")
PARTS = (
    *(*INT4_PARTS, *SCALES, "qzeros", "scales", "g_idx", "weight_zero_point", "weight_shape"),
    # Of activations, which are not rounded here.
    *("input_scale", "output_scale"),
)
# What a name of MXFP4 adds to that of a tensor of all experts: codes and scales.
MXFP4_PARTS = ("_blocks", "_scales")
# How the names end of which a quantised matrix has one.
STORED = tuple(f".{each}" for each in (*INT4_PARTS, *SCALES))
# MXFP4: value of each code, and the bias of scales.
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
_E8M0_BIAS = 127
FP8 = torch.float8_e4m3fn
# The outputs of an AWQ word, from its lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix `[out, in]` of `scale * (code - zero)`, or of MXFP4.

    Attributes:
        codes: int8 `[out, in]`; or int32 `[out, in / 8]` with 8 codes from 0 to 15 in each word,
            the first in the lowest bits.
        scales: fp32 `[out, groups]`, each of `group` inputs, the last one of the rest.
        zeros: int8 `[out, groups]`; None: MXFP4, whose codes are of E2M1, and scales uint8: the
            exponents of powers of 2, 127 for 1 (OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int

    @property
    def is_int4(self) -> bool:
        """True if a code has 4 bits."""
        return self.codes.dtype == torch.int32

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns * INT4_IN_WORD if self.is_int4 else columns

    def dequantized(self) -> torch.Tensor:
        """Return the matrix, fp32 `[out, in]`."""
        codes = _unpacked(self.codes) if self.is_int4 else self.codes
        places = torch.arange(codes.shape[1]) // self.group
        if self.zeros is None:
            powers = (self.scales.to(torch.int32) - _E8M0_BIAS)[:, places]
            return torch.ldexp(torch.tensor(_E2M1)[codes.to(torch.int64)], powers)
        return (codes - self.zeros[:, places]).to(torch.float32).mul_(self.scales[:, places])

    def of_outputs(self, which: slice) -> Codes:
        """Return the matrix of some outputs."""
        zeros = None if self.zeros is None else self.zeros[which]
        return Codes(self.codes[which], self.scales[which], zeros, self.group)


def stacked(parts: Sequence[torch.Tensor | Codes], dtype: torch.dtype) -> torch.Tensor | Codes:
    """Return matrices over the same input as one; of this type if not all are alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Codes):
        alike = [each for each in parts if isinstance(each, Codes) and each.group == first.group]
        zeros = [each.zeros for each in alike if each.zeros is not None]  # MXFP4 has none
        if len(zeros) == len(parts) and len({each.codes.dtype for each in alike}) == 1:
            codes = torch.cat([each.codes for each in alike])
            scales = torch.cat([each.scales for each in alike])
            return Codes(codes, scales, torch.cat(zeros), first.group)
    plain = (each.dequantized().to(dtype) if isinstance(each, Codes) else each for each in parts)
    return torch.cat([*plain])


def read_codes(
    how: Quantization, module: str, has: Callable[[str], bool], get: Callable[[str], torch.Tensor]
) -> torch.Tensor | Codes | None:
    """Return the matrix of a linear layer, fp32 if it is dequantised; None if it is stored plainly.

    `get` returns a stored tensor by its name, of those that `has` knows. Raises InvalidArgument for
    parts that do not fit each other.
    """
    if has(f"{module}.qweight"):
        return _grouped(how, module, has, get)
    if has(f"{module}.weight_packed"):
        words = _words_of(f"{module}.weight_packed", get)
        scales = get(f"{module}.weight_scale").to(torch.float32)
        zeros = torch.full_like(scales, 8, dtype=torch.int8)
        if has(f"{module}.weight_zero_point"):
            stored = _unpacked(_words_of(f"{module}.weight_zero_point", get).T).T
            zeros = stored[: len(words)].contiguous()
        return _checked(module, words, scales, zeros, how.group)
    scale = next((f"{module}.{each}" for each in SCALES if has(f"{module}.{each}")), None)
    if scale is None:
        return None
    weight, scales = get(f"{module}.weight"), get(scale).to(torch.float32)
    if weight.dtype == torch.int8:
        if scales.numel() not in (1, len(weight)):
            raise bad_checkpoint(f"{module}: {scales.numel()} scales of {len(weight)} outputs")
        scales = scales.reshape(-1, 1).expand(len(weight), 1).contiguous()
        return Codes(weight, scales, torch.zeros_like(scales, dtype=torch.int8), weight.shape[1])
    if weight.dtype != FP8:
        raise bad_checkpoint(f"{module}.weight is {weight.dtype}, and has scales")
    return weight.to(torch.float32).mul_(_spread(scales, weight.shape, how.block))


def _grouped(
    how: Quantization, module: str, has: Callable[[str], bool], get: Callable[[str], torch.Tensor]
) -> Codes:
    """Read GPTQ, whose words hold inputs, and AWQ, whose words hold outputs."""
    words, scales = _words_of(f"{module}.qweight", get), get(f"{module}.scales").T.to(torch.float32)
    zeros = _unpacked(_words_of(f"{module}.qzeros", get))
    if how.stored is Stored.AWQ:
        return _checked(
            module, _words(_in_order(_unpacked(words)).T), scales, _in_order(zeros).T, how.group
        )
    if how.stored is Stored.GPTQ:
        zeros = zeros + 1
    group = how.group or len(words) * INT4_IN_WORD
    if has(f"{module}.g_idx"):
        places = get(f"{module}.g_idx")
        if not torch.equal(places, torch.arange(len(places), dtype=places.dtype) // group):
            raise bad_checkpoint(
                f"{module}: its g_idx is not that of groups of {group} inputs in order (act-order, "
                "or another group_size)"
            )
    return _checked(module, words.T, scales, zeros.T, how.group)


def read_mxfp4(module: str, get: Callable[[str], torch.Tensor]) -> list[Codes]:
    """Return the matrices of all experts. Raises InvalidArgument for what is not stored so."""
    blocks, scales = get(f"{module}_blocks"), get(f"{module}_scales")
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.shape[:-1] != scales.shape:
        raise bad_checkpoint(f"{module}: blocks {list(blocks.shape)}, scales {list(scales.shape)}")
    if blocks.dim() != 4 or blocks.shape[-1] * 2 != MXFP4_GROUP:
        raise bad_checkpoint(f"{module}_blocks is {list(blocks.shape)}, not of {MXFP4_GROUP} codes")
    words = blocks.flatten(2).contiguous().view(torch.int32)
    return [Codes(*each, None, MXFP4_GROUP) for each in zip(words, scales, strict=True)]


def _checked(
    module: str, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int
) -> Codes:
    group = group or words.shape[1] * INT4_IN_WORD
    size = (len(words), -(-words.shape[1] * INT4_IN_WORD // group))
    if scales.shape != size or zeros.shape != size:
        raise bad_checkpoint(f"{module}: scales and zeros do not fit groups of {group} inputs")
    return Codes(words.contiguous(), scales.contiguous(), zeros.contiguous(), group)


def _words_of(name: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    words = get(name)
    if words.dtype != torch.int32 or words.dim() != 2:
        raise bad_checkpoint(f"{name} is {words.dtype} {list(words.shape)}, not rows of int32")
    return words


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return codes, int8 `[n, 8 m]`, of words `[n, m]`."""
    codes = words.contiguous().view(torch.uint8)
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).view(torch.int8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return words `[n, m]` of codes, int8 `[n, 8 m]`."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Return what AWQ words hold, in the order of the outputs."""
    places = torch.tensor(_AWQ_ORDER).argsort()
    return codes.view(len(codes), -1, INT4_IN_WORD)[:, :, places].flatten(1)


def _spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None) -> torch.Tensor:
    """Return scales of FP8 for each element; of a tensor, of each output, or of blocks."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.numel() == shape[0] and (scales.dim() == 1 or scales.shape[1] == 1):
        return scales.reshape(-1, 1)
    if block is None or scales.shape != tuple(
        -(-n // b) for n, b in zip(shape, block, strict=True)
    ):
        raise bad_checkpoint(f"scales {tuple(scales.shape)} do not fit {tuple(shape)}")
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def bad_checkpoint(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="model", reason="BAD_CHECKPOINT")
