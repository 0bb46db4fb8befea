"""Reads rotary positions from a `config.json`, in its older and newer forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitpoint.checkpoint.config import positive, positive_integer, refuse, shown, unsupported
from splitpoint.shapes import ModelShape

_DEFAULT_ROPE_THETA = 10000.0
# Gemma 3's default.
_GLOBAL_THETA = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `inv_freq = theta^(-2i/d)`, then scaled.

    `linear` divides all frequencies by `factor`. `llama3` divides the low ones by
    `factor`, keeps the high ones, and interpolates between the wavelengths
    `original_context / low_frequency_factor` and `.../ high_frequency_factor`. `dynamic`
    scales only beyond the context length, which no sequence exceeds: it is `default`.
    """

    theta: float
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0


def read_rope(config: Mapping[str, Any], shape: ModelShape) -> Rope:
    """Read `rope_parameters` of newer configs, or `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise unsupported(f"{key} must be an object, not {shown(given)}", key)
    parameters = dict(given)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise unsupported(f"{key} that differ between layers are not supported", key)
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = config.get("rope_theta")
    theta = positive(_DEFAULT_ROPE_THETA if theta is None else theta, f"{key}.rope_theta")
    for holder, path in ((parameters, f"{key}."), (config, "")):
        refuse(holder, "partial_rotary_factor", allowed=(None, 1, 1.0), path=path)
    parameters.pop("partial_rotary_factor", None)

    wanted: tuple[str, ...]
    if kind == "default":
        wanted = ()
    elif kind in ("linear", "dynamic"):
        wanted = ("factor",)
    elif kind == "llama3":
        wanted = ("factor", "low_freq_factor", "high_freq_factor")
    else:
        raise unsupported(
            f"{key}.rope_type {shown(kind)} is not supported (default, linear, dynamic, llama3)",
            f"{key}.rope_type",
        )
    numbers: dict[str, float] = {}
    for wanted_key in wanted:
        if wanted_key not in parameters:
            raise unsupported(f"{key} of type {kind} has no {wanted_key}", f"{key}.{wanted_key}")
        numbers[wanted_key] = positive(parameters.pop(wanted_key), f"{key}.{wanted_key}")
    original = parameters.pop("original_max_position_embeddings", None)
    for unknown, value in parameters.items():
        if value is not None:
            raise unsupported(f"{key}.{unknown} is not supported", f"{key}.{unknown}")
    if kind in ("default", "dynamic"):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", numbers["factor"])
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise unsupported(
            f"{key}.high_freq_factor must exceed low_freq_factor", f"{key}.high_freq_factor"
        )
    return Rope(
        theta,
        "llama3",
        numbers["factor"],
        numbers["low_freq_factor"],
        numbers["high_freq_factor"],
        shape.context_length
        if original is None
        else positive_integer(original, f"{key}.original_max_position_embeddings"),
    )


def read_layered_ropes(config: Mapping[str, Any], shape: ModelShape) -> tuple[Rope, Rope]:
    """Read Gemma 3's rotary positions: (of full layers, of layers with a window).

    Newer configs have `rope_parameters` by kind of layer, older ones `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`.
    """
    by_kind = config.get("rope_parameters")
    if by_kind is None:
        everywhere = {
            "rope_theta": config.get("rope_theta", _GLOBAL_THETA),
            "rope_scaling": config.get("rope_scaling"),
        }
        local = {"rope_theta": config.get("rope_local_base_freq", _DEFAULT_ROPE_THETA)}
        return read_rope(everywhere, shape), read_rope(local, shape)
    kinds = {"full_attention": _GLOBAL_THETA, "sliding_attention": _DEFAULT_ROPE_THETA}
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(kinds):
        raise unsupported(
            f"rope_parameters must be an object of {' and '.join(kinds)}", "rope_parameters"
        )
    everywhere, local = (
        {"rope_parameters": by_kind.get(kind), "rope_theta": theta} for kind, theta in kinds.items()
    )
    return read_rope(everywhere, shape), read_rope(local, shape)
