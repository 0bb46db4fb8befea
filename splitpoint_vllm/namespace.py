"""What makes pages comparable: the namespace of an engine's pages, and their keys in it.

Two engines see each other's pages only if their namespaces are equal: the store takes it as the
salt of its tenants. vLLM's own keys of blocks hash tokens, salts and multimodal inputs, but neither
the model nor the bytes of a block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from splitpoint.errors import FailedPrecondition

PAGE_KEY_BYTES = 32
# vLLM's seed of a cryptographic hash when the user sets none (`DEFAULT_NONE_HASH_SEED`).
_DEFAULT_SEED = "vllm-none-hash"


@dataclass(frozen=True, slots=True)
class PageGroup:
    """One group of vLLM's cache: layers whose blocks are allocated together.

    `block_bytes`: of one block in all layers of the group on one rank, padding included; 0 if
    ranks have different layers.
    """

    kind: str
    tokens_per_block: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Everything that a page's bytes depend on, beside what vLLM's key of its block hashes.

    Attributes:
        weights: fingerprints of the checkpoint, and of a draft model's, in hexadecimal.
        model: what vLLM makes of the checkpoint: dtype, quantisation, overridden configuration.
        device: processor with the instruction sets that choose kernels, or the accelerator.
        cache: dtype and layout of blocks.
        ranks: sizes of tensor, pipeline, prefill context and decode context parallelism, and how
            tokens go to the ranks of a context.
        stages: which layers each stage of a pipeline has, if that was chosen.
        hashes: hash algorithm of blocks, its seed, and tokens per hash.
    """

    engine: str
    weights: tuple[str, ...]
    model: tuple[str, ...]
    device: str
    cache: tuple[str, ...]
    groups: tuple[PageGroup, ...]
    ranks: tuple[int, ...]
    hashes: tuple[str, ...]
    stages: str = ""


def namespace_of(facts: EngineFacts) -> bytes:
    """Return 32 bytes that are equal for engines whose pages can stand for each other's."""
    text = json.dumps(asdict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(
        text.encode(), digest_size=PAGE_KEY_BYTES, person=b"splitpoint pages"
    ).digest()


def page_key(block_key: bytes, rank: int) -> bytes:
    """Return the key of one rank's page of a block.

    `block_key`: vLLM's key: the block's hash and its group.
    """
    message = b"%b%b" % (block_key, rank.to_bytes(4, "little"))
    return hashlib.blake2b(message, digest_size=PAGE_KEY_BYTES).digest()


def hash_seed(algorithm: str, environment: Mapping[str, str]) -> str:
    """Return the seed that vLLM's hashes of blocks begin with.

    Raises FailedPrecondition if each process would have another one.
    """
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm.startswith("xxhash"):
        raise FailedPrecondition(
            f"blocks are hashed by {algorithm} with another seed in every process: set "
            "PYTHONHASHSEED to one number for all engines, or use sha256",
            reason="HASHES_DIFFER",
        )
    return _DEFAULT_SEED
