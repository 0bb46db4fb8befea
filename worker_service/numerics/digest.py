"""A digest of what decides the bits of an invariant worker's results.

Workers with equal digests and one checkpoint compute equal bits, so they may share chunks. Facts
that cannot change a bit are left out where that is known: on processors of one kind, threads and
counts of rows do not matter to panels. Where it is not known, a fact is in: a needless difference
costs reuse, a missing one an answer. The checkpoint is not in: chunk keys have it from the layout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from splitpoint.host.processor import processor_name, vector_sets
from worker_service.kernels import paged_attention, panel_gemm, row_counts
from worker_service.kernels.choice import Layout, in_use
from worker_service.model.model import Model
from worker_service.weights.packing import kinds_of, layout_of

# Hexadecimal digits: 64 bits.
DIGITS = 16
# What torch's libraries read to choose their kernels and the precision of their products.
_SETTINGS = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_PACKAGES = ("triton", "flashinfer-python")
# Folders whose code says what is computed, and in which order.
_ROOMS = ("checkpoint", "kernels", "model", "weights")
_WORKER = Path(__file__).parents[1]

Facts = Mapping[str, object]


def numerics_digest(facts: Facts) -> str:
    """Return DIGITS hexadecimal digits; the facts' order does not matter. Pure."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def facts_of(model: Model, page_tokens: int) -> Facts:
    """Return what decides the bits of the K, V and X of a loaded model's rows.

    `page_tokens`: of a page, the unit in which attention adds.
    """
    return {
        "data_type": model.shape.data_type.value,
        "model": model.code,
        "weights": model.weights.value,
        "page_tokens": page_tokens,
        "code": _code_digest(),
        "torch": torch.__version__,
        # MKL, oneDNN, and the instruction sets that torch uses.
        "torch_build": _short(torch.__config__.show()),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        **(_gpu_facts(model.device) if model.device.type == "cuda" else _cpu_facts(model)),
    }


def _cpu_facts(model: Model) -> Facts:
    kernels, layout = in_use(), layout_of(model.device, model.dtype)
    if kernels is None:
        raise RuntimeError("a CPU worker's kernels were not chosen")
    facts: dict[str, object] = {
        "device": "cpu",
        "processor": processor_name(),
        "vectors": sorted(vector_sets()),
        "kernels": str(kernels),
        "layout": layout.value,
        # The content stands for source, compiler, flags and processor.
        "attention": _short(paged_attention.library_digest(model.shape.head_dim, model.dtype)),
    }
    if layout is Layout.PANELS:
        kinds = kinds_of(model.weights, model.config.quantization)
        libraries = (panel_gemm.library_digest(model.dtype, each) for each in kinds)
        return {**facts, "products": [_short(each) for each in libraries]}
    counts = sorted((*shape, list(each)) for shape, each in row_counts.in_use().items())
    return {**facts, "threads": torch.get_num_threads(), "rows": counts}


def _gpu_facts(device: torch.device) -> Facts:
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": [found.major, found.minor],
        # A share of a GPU has fewer.
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    """Return a package's version; empty if it is not installed."""
    from importlib import metadata  # it takes long to load

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _code_digest() -> str:
    files = (file for room in _ROOMS for file in sorted((_WORKER / room).glob("*.py")))
    named = (f"{file.relative_to(_WORKER)}\0{file.read_text()}" for file in files)
    return _short("\0".join(named))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
