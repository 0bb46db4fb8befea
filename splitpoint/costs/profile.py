"""A worker's measured costs, the durations that follow from them, and machines by name.

Every cost is a line, `overhead + amount / rate`, fitted by least squares (KVPR's profiler,
Section 4.2 there; the intercepts are ours).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from splitpoint.errors import InvalidArgument

_NOT_NUMBERS = (
    *("description", "model", "device_type"),
    *("remote_bytes_per_second", "aged_sources"),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Link and compute costs of one worker. Rates per second, overheads in seconds."""

    link_bytes_per_second: float
    link_overhead_seconds: float
    rebuild_flops_per_second: float
    rebuild_overhead_seconds: float
    prefill_flops_per_second: float
    description: str = ""
    # Name of the model that it was measured with. Empty: unknown, or assumed for any model.
    model: str = ""
    # Kind of its device: cpu or cuda. Empty: unknown.
    device_type: str = ""
    # Measured rates of chunks from tiers and other stores, by `ChunkSource.rate_key`.
    remote_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    # Keys of these whose rate has aged: it was doubled since it was measured.
    aged_sources: Sequence[str] = ()
    # Seconds of one piece of a prefill, besides its FLOP.
    prefill_overhead_seconds: float = 0.0
    # Seconds of one decode step without its cache traffic. 0: not measured.
    step_compute_seconds: float = 0.0
    # Weights on the host, which cross the link in each step or piece of a prefill, and the
    # part of them for W_K and W_V. 0: all weights are on the device.
    host_weight_bytes: int = 0
    host_kv_weight_bytes: int = 0
    # Seconds of a restore, besides its copies and products: once, and for laying out each of them
    # and handing it to its lane. 0: not measured.
    restore_overhead_seconds: float = 0.0
    operation_overhead_seconds: float = 0.0
    # Seconds of reading one byte of device memory, as attention reads resident K and V. 0: not
    # measured; it is then part of step_compute_seconds.
    memory_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name not in _NOT_NUMBERS:
                above_zero = each.name.endswith("_per_second")
                _require_finite(each.name, getattr(self, each.name), above_zero=above_zero)
        for name in ("model", "device_type"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(f"{name} must be a name", field=name)
        if not isinstance(self.remote_bytes_per_second, Mapping):
            raise InvalidArgument(
                "remote_bytes_per_second must map addresses to rates",
                field="remote_bytes_per_second",
            )
        for rate in self.remote_bytes_per_second.values():
            _require_finite("remote_bytes_per_second", rate, above_zero=True)
        if isinstance(self.aged_sources, str):
            raise InvalidArgument("aged_sources must be a list of names", field="aged_sources")
        # A list, so that a profile read from JSON is equal to the one that was written.
        object.__setattr__(self, "aged_sources", list(map(str, self.aged_sources)))

    def prefill_seconds(self, flops: float, pieces: int = 1) -> float:
        """Return the seconds of a prefill in this many pieces, each of which reads all weights."""
        overhead = pieces * self.prefill_overhead_seconds
        computes = overhead + flops / self.prefill_flops_per_second
        return max(computes, pieces * self.weight_seconds)

    @property
    def is_of_gpu(self) -> bool:
        """False if it was measured on a CPU, whose workers hold weights in another layout."""
        return self.device_type != "cpu"

    @property
    def weight_seconds(self) -> float:
        """Seconds of the link for weights in each step."""
        return self.host_weight_bytes / self.link_bytes_per_second

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Parse an object with these fields. Raises InvalidArgument for anything else."""
        try:
            loaded = json.loads(text)
            known = {field.name for field in fields(cls)}
            if not isinstance(loaded, dict) or not set(loaded) <= known:
                raise ValueError(f"expected an object with the fields {', '.join(sorted(known))}")
            return cls(**loaded)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"not a profile: {error}", field="profile") from error


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = overhead + amount / rate."""

    overhead: float
    rate: float


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line by least squares over (amount, seconds), weighted by 1/seconds².

    The weights make relative errors count, so that a 64 KiB copy shapes the intercept as
    much as a 64 MiB copy shapes the slope. The intercept is at least zero, since with a
    negative overhead tiny copies would seem to pay. Needs at least two different amounts.
    """
    weights = [1.0 / (value * value) for value in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, amounts, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    covariance = sum(
        w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, amounts, seconds, strict=True)
    )
    variance = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, amounts, strict=True))
    if variance == 0:
        raise ValueError("a line needs at least two different amounts")
    slope = covariance / variance
    overhead = mean_y - slope * mean_x
    if overhead < 0 or slope <= 0:
        # Through the origin: small sizes looked free because of noise, or all sizes were too
        # small to tell the slope from the overhead.
        slope = sum(w * x * y for w, x, y in zip(weights, amounts, seconds, strict=True)) / sum(
            w * x * x for w, x in zip(weights, amounts, strict=True)
        )
        overhead = 0.0
    return Line(overhead, 1.0 / slope)


def load_profile(name_or_path: str) -> Profile:
    """Return a built-in profile by name, or that of a JSON file. Raises InvalidArgument.

    The file holds a profile or the output of `splitpoint status --json`, whose first
    measured worker counts. Its `model` is the one that the file names; empty if it names none.
    """
    built_in = BUILT_IN_PROFILES.get(name_or_path.lower())
    if built_in is not None:
        return built_in
    try:
        text = Path(name_or_path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"profile {name_or_path!r} is neither a file nor one of {', '.join(BUILT_IN_PROFILES)}",
            field="profile",
        ) from error
    try:
        return Profile.from_json(_profile_in_status(text))
    except InvalidArgument as error:
        raise InvalidArgument(f"{name_or_path}: {error.message}", field=error.field) from error


def _profile_in_status(text: str) -> str:
    """Return the first measured worker's profile if the text is a status; else the text.

    The description of the profile names the worker. A status of an older version names the model
    beside its workers only.
    """
    try:
        loaded = json.loads(text)
    except ValueError:
        return text
    workers = loaded.get("workers") if isinstance(loaded, dict) else None
    for worker in workers if isinstance(workers, list) else []:
        if isinstance(worker, dict) and isinstance(worker.get("profile"), dict):
            profile = worker["profile"]
            description = f"worker {worker.get('id')}: {profile.get('description', '')}"
            named = {"model": profile.get("model") or _first_model(loaded)}
            return json.dumps({**profile, **named, "description": description.rstrip(": ")})
    return text


def _first_model(status: Mapping[str, Any]) -> str:
    """Return the name of the first model of a status; empty if there is none."""
    models = status.get("models")
    first = models[0] if isinstance(models, list) and models else None
    return str(first.get("name") or "") if isinstance(first, dict) else ""


def _require_finite(field: str, value: float, *, above_zero: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise InvalidArgument(
            f"{field} must be {'above' if above_zero else 'at least'} 0, not {value}", field=field
        )


def assumed_profile(name: str, link_gb: float, peak_tflops: float, memory_tb: float) -> Profile:
    """Return what is assumed of a device by its data sheet.

    Args:
        link_gb: GB/s that pinned copies from the host reach.
        peak_tflops: dense bf16 peak.
        memory_tb: peak TB/s of device memory.
    """
    # Large GEMMs reach 60 % of the dense bf16 peak, whole prefills half of the peak, reads of
    # device memory 80 % of its peak. A pinned copy and a kernel take 10 us to launch; a
    # prefill launches some hundred kernels.
    return Profile(
        link_bytes_per_second=link_gb * 1e9,
        link_overhead_seconds=10e-6,
        rebuild_flops_per_second=0.6 * peak_tflops * 1e12,
        rebuild_overhead_seconds=10e-6,
        prefill_flops_per_second=0.5 * peak_tflops * 1e12,
        prefill_overhead_seconds=2e-3,
        memory_seconds_per_byte=1 / (0.8 * memory_tb * 1e12),
        description=f"{name}: assumed from data sheets, not measured",
        device_type="cuda",
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """A device with its link to host memory.

    Attributes:
        profile: rates of its link, compute and memory.
        memory_bytes: what a worker gets of its memory.
        idle_watts, full_watts: power at rest, and its limit; None: unknown.
        cache_bytes: what its worker was seen to have for K and V; None: `memory_bytes` is divided
            as a worker does at its start.
    """

    name: str
    profile: Profile
    memory_bytes: int
    idle_watts: float | None = None
    full_watts: float | None = None
    cache_bytes: int | None = None

    @property
    def prefill_watts(self) -> float | None:
        """Power while it prefills; None: unknown."""
        return None if self.full_watts is None else PREFILL_POWER * self.full_watts


# Part of a device's memory that a worker gets, after the driver and CUDA.
MEMORY_SHARE = 0.9
# Part of its power limit that it draws while it prefills: 70 to 100 % by the bottleneck paper, 2.4.
PREFILL_POWER = 0.85
# Link and its GB/s that copies reach, dense bf16 TFLOP/s, memory TB/s, memory GB, watts idle and
# limit: all from data sheets; idle watts are typical readings. NVLink-C2C has 450 GB/s in each
# direction. The last one is the bottleneck paper's thought (7.1): the host shares a GB200's memory.
_MACHINES = {
    "a100-40": ("A100 40 GB, PCIe 4 x16", 25, 312, 1.555, 42.94967296, 55, 400),
    "a100-80": ("A100 80 GB, PCIe 4 x16", 25, 312, 1.94, 85.89934592, 60, 400),
    "l40s": ("L40S, PCIe 4 x16", 25, 362, 0.864, 48.0, 35, 350),
    "h100": ("H100, PCIe 5 x16", 52, 989, 3.35, 85.89934592, 70, 700),
    "h200": ("H200, PCIe 5 x16", 54, 989, 4.8, 141.0, 75, 700),
    "b200": ("B200, PCIe 5 x16", 55, 2250, 8.0, 180.0, 140, 1000),
    "gh200": ("GH200, NVLink-C2C", 400, 989, 4.0, 96.0, 100, 700),
    "gb200": ("GB200, NVLink-C2C", 400, 2500, 8.0, 186.0, 140, 1200),
    "unified-hbm": ("GB200 with unified HBM", 6400, 2500, 8.0, 186.0, 140, 1200),
}

MACHINES: dict[str, Machine] = {
    name: Machine(
        name,
        assumed_profile(words, link, flops, memory),
        round(MEMORY_SHARE * size * 1e9),
        idle,
        full,
    )
    for name, (words, link, flops, memory, size, idle, full) in _MACHINES.items()
}
BUILT_IN_PROFILES = {name: machine.profile for name, machine in MACHINES.items()}
