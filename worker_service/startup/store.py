"""The worker's store: its client, and whether it was made for the worker's checkpoint."""

from __future__ import annotations

import torch

from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.errors import FailedPrecondition
from splitpoint.shapes import ArenaLayout, ModelShape, WeightFormat
from worker_service.device.pinning import Pinning
from worker_service.device.populating import Populator
from worker_service.device.registrar import CudaRegistrar
from worker_service.startup.options import WorkerOptions
from worker_service.store.client import StoreClient
from worker_service.store.remote_client import RemoteStoreClient


def store_client(
    options: WorkerOptions, device: torch.device, populator: Populator | None
) -> StoreClient | None:
    """Return a client of the worker's store, not yet connected; None if it has no store.

    `populator` populates the mapping of its arena.
    """
    if options.kvstore_address is None:
        return None
    name, pinning = f"worker-{options.worker_id}", None
    if device.type == "cuda" and options.pin_limit_bytes != 0:
        pinning = Pinning(
            CudaRegistrar(device),
            limit_bytes=options.pin_limit_bytes,
            progress_seconds=options.progress_seconds,
        )
    if options.mirror_memory_bytes is None:
        return StoreClient(
            options.kvstore_address,
            name,
            identity=options.identity,
            pinning=pinning,
            populator=populator,
        )
    return RemoteStoreClient(
        options.kvstore_address,
        name,
        identity=options.identity,
        mirror_bytes=options.mirror_memory_bytes,
        pinning=pinning,
    )


def check_layout(layout: ArenaLayout, shape: ModelShape, options: WorkerOptions) -> None:
    """Raise FailedPrecondition unless the store was made for this checkpoint, dtype and format."""
    folder = options.model_folder

    def layout_for(weights: WeightFormat) -> ArenaLayout:
        return ArenaLayout.of(
            shape,
            chunk_tokens=layout.chunk_tokens,
            has_activations=layout.has_activations,
            model_fingerprint=model_fingerprint(folder, weights),
            encoding=layout.encoding,
        )

    expected = layout_for(options.weights)
    if expected.layout_hash != layout.layout_hash:
        for other in WeightFormat:
            if layout_for(other).layout_hash == layout.layout_hash:
                raise FailedPrecondition(
                    f"the KV store was made for --weights {other.value}, this worker has "
                    f"{options.weights.value}: their caches differ",
                    reason="LAYOUT_MISMATCH",
                )
        differing = [
            name
            for name in ArenaLayout.__dataclass_fields__
            if getattr(expected, name) != getattr(layout, name)
        ]
        raise FailedPrecondition(
            f"the KV store was made for another model: {', '.join(differing)} differ",
            reason="LAYOUT_MISMATCH",
        )
