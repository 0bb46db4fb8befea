"""vLLM's configuration as this connector needs it, and the parts that vLLM makes by it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.version import __version__ as vllm_version

from splitpoint.checkpoint.files import read_bytes
from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.transport.store_session import GOODBYE_SECONDS
from splitpoint.transport.tls import read_identity
from splitpoint_vllm.copies import Part, Parts, copier_for
from splitpoint_vllm.manager import Metric, SplitpointManager
from splitpoint_vllm.namespace import EngineFacts, PageGroup, hash_seed
from splitpoint_vllm.pages import LoadedPages, StoredPages
from splitpoint_vllm.store import PageWriter, StoreSettings
from splitpoint_vllm.worker import Ended, Transfers

log = logging.getLogger("vllm.splitpoint.spec")

# How long a request waits for the store's answer. With the event loop's grace at most 0.2 s.
LOOKUP_SECONDS = 0.15
# Options of vLLM's cache that decide the bytes of a block.
_CACHE_OPTIONS = (
    *("cache_dtype", "kv_cache_layout", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
)
# Of vLLM's versions; its interface for connectors may change with any.
SUPPORTED_VERSIONS = ("0.32.",)


class SplitpointSpec(OffloadingSpec):
    """The parts of an offloading connector: a manager in the scheduler, a worker on each rank.

    Options in `kv_connector_extra_config`: store (HOST:PORT or unix:PATH), tls_ca,
    tls_certificate, tls_key, token_file, lookup_seconds, link_rate (bytes per second of an
    emulated link, for tests).
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Raise ValueError for options that this connector cannot serve."""
        super().__init__(config)
        if not self.extra_config.get("store"):
            raise ValueError("splitpoint: kv_connector_extra_config lacks the address of the store")
        if self.blocks_per_chunk != 1 or config.canonical_layout:
            raise ValueError(
                "splitpoint: a page is one block as vLLM has it: leave out block_size, "
                "blocks_per_chunk and canonical_layout"
            )
        self.lookup_seconds = float(self.extra_config.get("lookup_seconds", LOOKUP_SECONDS))
        self.worker: SplitpointWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        counts = {
            Metric.FOUND_TOKENS: "Tokens that the KV store had and the engine lacked.",
            Metric.LOADED_TOKENS: "Tokens that were loaded from the KV store.",
            Metric.STORED_BLOCKS: "Blocks that were stored, or that the KV store had by then.",
            Metric.UNSTORED_BLOCKS: "Blocks that the KV store did not take in time.",
        }
        return {
            **{name: OffloadingCounterMetadata(text) for name, text in counts.items()},
            Metric.REQUESTS: OffloadingCounterMetadata(
                "Look-ups of requests in the KV store by what became of them.", ("reason",)
            ),
            Metric.LOOKUP_SECONDS: OffloadingHistogramMetadata(
                "Time from a request's look-up to its answer or deadline, in seconds.",
                buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
            ),
        }

    def get_manager(self) -> SplitpointManager:
        return SplitpointManager(self.lookup_seconds, self.kv_events_config.enable_kv_cache_events)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self.worker = SplitpointWorker(self, kv_caches)
        return self.worker

    def store_settings(self, role: str, page_bytes: int) -> StoreSettings:
        """Return how to reach the store. `role`: of this process, for the store's records."""
        extra = self.extra_config
        identity = read_identity(
            certificate=extra.get("tls_certificate"),
            key=extra.get("tls_key"),
            authorities=extra.get("tls_ca"),
            token_file=extra.get("token_file"),
        )
        # A UUID, and the rank of data parallelism.
        engine = self.config.engine_id[:8] + self.config.engine_id[36:]
        name = f"vllm-{role}-{engine[:32]}"
        return StoreSettings(str(extra["store"]), name, page_bytes, identity)


class SplitpointWorker(OffloadingWorker):
    """One rank's transfers, as vLLM drives them.

    vLLM takes a failed transfer for a bug, so each is reported as a success; the connector
    tells it of failed loads by request (`ended`).

    Attributes:
        ended: the jobs of the last `get_finished`.
    """

    def __init__(self, spec: SplitpointSpec, kv_caches: CanonicalKVCaches) -> None:
        rank = spec.config.parallel.rank
        tensors = [each.tensor for each in kv_caches.tensors]
        parts = Parts(
            [
                [Part(tensors[ref.tensor_idx], ref.page_size_bytes) for ref in group]
                for group in kv_caches.group_data_refs
            ]
        )
        # With padding, as the scheduler counts: both must name the size of one slot.
        padded = (
            sum(kv_caches.tensors[ref.tensor_idx].page_size_bytes for ref in group)
            for group in kv_caches.group_data_refs
        )
        page_bytes = max(*parts.page_bytes, *padded)
        self.ended: list[Ended] = []
        self._rank = rank
        self._transfers: Transfers | None = None
        self._refused: list[Ended] = []  # jobs, without transfers
        try:
            settings = spec.store_settings(f"worker-{rank}", page_bytes)
            link_rate = float(spec.extra_config.get("link_rate", 0.0))
            copier = copier_for(parts.device)
            writer = PageWriter(settings, copier.pin)
            self._transfers = Transfers(writer, parts, copier, rank, link_rate)
        except Exception:  # such as a certificate that cannot be read
            log.exception("Splitpoint: rank %d serves without the KV store", rank)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, LoadedPages)
        pages = [ranks[self._rank] for ranks in src_spec.pages]
        if self._transfers is None:
            self._refused.append(Ended(job_id, True, "this rank has no store", 0, 0.0))
            return True
        self._transfers.submit_load(
            job_id, dst_spec.group_sizes, dst_spec.block_ids, pages, src_spec.arena_name
        )
        return True

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, StoredPages)
        if self._transfers is None:
            keys = frozenset(dst_spec.block_keys)
            self._refused.append(Ended(job_id, False, "this rank has no store", 0, 0.0, keys))
            return True
        self._transfers.submit_store(
            job_id,
            src_spec.group_sizes,
            src_spec.block_ids,
            dst_spec.namespace,
            dst_spec.block_keys,
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        self.ended, self._refused = self._refused, []
        if self._transfers is not None:
            self.ended += self._transfers.finished()
        return [
            TransferResult(each.job_id, True, each.byte_count, each.seconds)
            if each.byte_count
            else TransferResult(each.job_id, True)
            for each in self.ended
        ]

    def wait(self, job_ids: set[int]) -> None:
        if self._transfers is not None:
            self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close(GOODBYE_SECONDS)


# -- what pages depend on ----------------------------------------------------------------


def engine_facts(
    config: VllmConfig, cache: KVCacheConfig, environment: Mapping[str, str] = os.environ
) -> EngineFacts:
    """Return what the bytes of this engine's pages depend on.

    Raises FailedPrecondition or InvalidArgument if they cannot be told from another engine's.
    """
    model, parallel = config.model_config, config.parallel_config
    algorithm = config.cache_config.prefix_caching_hash_algo
    weights = [_fingerprint(config, model.model, model.revision)]
    speculation = config.speculative_config
    if speculation is not None and speculation.draft_model_config is not None:
        draft = speculation.draft_model_config
        weights.append(_fingerprint(config, draft.model, draft.revision))
    configuration = _configuration(model.hf_config)
    return EngineFacts(
        engine=f"vllm {vllm_version}",
        weights=tuple(weights),
        model=(
            str(model.dtype),
            str(model.quantization),
            str(None if speculation is None else speculation.method),
            _digest(configuration),
            _rotation(configuration, model.max_model_len),
        ),
        device=_device(),
        cache=(
            *(str(getattr(config.cache_config, name, None)) for name in _CACHE_OPTIONS),
            str(config.attention_config.backend),
        ),
        groups=tuple(page_groups(config, cache)),
        ranks=(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
        ),
        stages=environment.get("VLLM_PP_LAYER_PARTITION", ""),
        hashes=(
            algorithm,
            hash_seed(algorithm, environment),
            str(config.cache_config.block_size),
        ),
    )


def page_groups(config: VllmConfig, cache: KVCacheConfig) -> list[PageGroup]:
    """Return the groups whose blocks are stored, in the order of their numbers."""
    has_one_stage = config.parallel_config.pipeline_parallel_size == 1
    groups = (cache.kv_cache_groups[number] for number in cache.prefix_cacheable_group_ids)
    return [
        PageGroup(_kind(group), group.kv_cache_spec.block_size, block_bytes(group) * has_one_stage)
        for group in groups
    ]


def block_bytes(group: KVCacheGroupSpec) -> int:
    """Return the bytes of one block in all layers of the group on this rank, padding included."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(group.layer_names)


def _kind(group: KVCacheGroupSpec) -> str:
    """Return the class of a group's layers, and a digest of what a block has of each."""
    spec = group.kv_cache_spec
    return f"{type(spec).__name__} {_digest(repr((group.layer_names, spec)))}"


def _fingerprint(config: VllmConfig, name: str, revision: str | None) -> str:
    """Return the fingerprint of a checkpoint on this host, in hexadecimal."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _cached_folder(config, name, revision)
    if config.load_config.load_format == "dummy":
        # vLLM fills weights with numbers that depend on nothing else.
        return "dummy " + _digest(read_bytes(folder / "config.json").hex())
    # In the hub's cache a file is a link to one that is named by the hash of all its bytes.
    links = sorted(path.readlink().name for path in folder.iterdir() if path.is_symlink())
    return " ".join((model_fingerprint(folder).hex(), *links))


def _cached_folder(config: VllmConfig, name: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:
        raise InvalidArgument(
            f"the weights of {name} are neither a folder nor in the hub's cache: {error}"
        ) from error


def _rotation(configuration: str, max_model_len: int) -> str:
    """Return what keys are rotated by, beside the configuration.

    vLLM takes LongRoPE's factors for long or for short texts by the longest one that it serves.
    """
    has_two = any(name in configuration for name in ('"longrope"', '"su"'))
    return f"texts of {max_model_len}" if has_two else ""


def _configuration(hf_config: Any) -> str:
    """Return the model's configuration, overrides included, without where it came from."""
    facts = hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        facts.pop(name, None)
    # A text of anything else could be of where it lies in memory.
    return json.dumps(facts, sort_keys=True, default=lambda value: type(value).__name__)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _device() -> str:
    if not current_platform.is_cpu():
        name, capability = (
            current_platform.get_device_name(),
            current_platform.get_device_capability(),
        )
        return f"{current_platform.device_type} {name} {capability}"
    features = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    for feature in ("avx512_bf16", "amx_tile"):
        # Each chooses other kernels of vLLM.
        if getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)():
            features.append(feature)
    return " ".join(["cpu", *features])


def check_version() -> None:
    """Raise FailedPrecondition for a version of vLLM whose interface is not known here."""
    if not vllm_version.startswith(SUPPORTED_VERSIONS):
        wanted = ", ".join(f"{version}x" for version in SUPPORTED_VERSIONS)
        raise FailedPrecondition(
            f"vLLM {vllm_version}: this connector is for {wanted}", reason="OTHER_VERSION"
        )
