"""The options of a worker, as its command line and tests give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.errors import InvalidArgument
from splitpoint.options import worker as options
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.progress import Progress
from splitpoint.shapes import DataType, WeightFormat
from splitpoint.transport.tls import PLAIN, Identity


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of splitpoint/options/worker.py. Those that are None are decided at the start.

    `on_loading` is called with the progress of loading, more often than the log is written.
    """

    worker_id: str
    model_folder: Path
    kvstore_address: str | None = None
    device: str = "auto"
    data_type: DataType | None = None
    device_memory_bytes: int | None = None
    max_batch_size: int | None = options.MAX_BATCH.default
    max_batched_tokens: int = options.MAX_BATCHED_TOKENS.default
    weight_objective: WeightObjective = WeightObjective.BALANCED
    threads: int | None = None
    cpu_kernels: str = options.CPU_KERNELS.default
    model_backend: ModelBackend = ModelBackend.AUTO
    numerics: str = options.NUMERICS.default
    weights: WeightFormat = WeightFormat.NATIVE
    max_model_len: int | None = None
    chunk_tokens: int = options.CHUNK_TOKENS.default
    pin_limit_bytes: int | None = None
    verify_rate: float = options.VERIFY_RATE.default
    identity: Identity = PLAIN
    shares_prefixes: bool = True
    is_serial: bool = False
    is_eager: bool = False
    link_bytes_per_second: int | None = None
    trace_file: Path | None = None
    speculation: SpeculativeConfig | None = None
    artifacts: Path | None = None
    progress_seconds: float = options.PROGRESS_SECONDS.default
    on_loading: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_batched_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} must be at least 1", field=name)
        if not 0 <= self.verify_rate <= 1:
            raise InvalidArgument("must be between 0 and 1", field="verify-rate")
        if not 1 <= len(self.worker_id) <= 64:
            raise InvalidArgument("worker_id must have 1 to 64 characters", field="worker_id")
        if not self.progress_seconds > 0:
            raise InvalidArgument("must be above 0", field="progress-seconds")
        if self.trace_file is not None and not self.trace_file.parent.is_dir():
            raise InvalidArgument(f"{self.trace_file.parent} is no folder", field="trace")
        if self.artifacts is not None and not self.artifacts.is_dir():
            raise InvalidArgument(f"{self.artifacts} is no folder", field="artifacts")
