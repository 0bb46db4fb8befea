"""Options of the store."""

from __future__ import annotations

from pathlib import Path

from splitpoint.host.huge_pages import WISHES
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.option import RATE, SIZE, Option, Section
from splitpoint.options.service import ADVERTISE, COMMON
from splitpoint.shapes import DataType, Encoding, WeightFormat

# Distance of --evict-to below --evict-above if it is not given.
WATERMARK_GAP = 0.05
# Shortest pass of the scrubber in seconds.
LEAST_SCRUB_SECONDS = 0.1

LAYOUT: Option[str | None] = Option(
    "layout", str, None, "Layout of the arena, in place of --model.", unit="JSON"
)
MODEL: Option[Path | None] = Option(
    "model", Path, None, "Checkpoint folder that decides the layout of the arena.", unit="DIR"
)
PAGE_SIZE: Option[str | None] = Option(
    "page-size",
    str,
    None,
    "Keep pages of another engine of at most this many bytes, in place of --model; auto: as large "
    "as the first engine asks for (docs/vllm.md).",
    unit=f"{AUTO}|{SIZE}",
)
DTYPE: Option[str] = Option(
    "dtype",
    str,
    "auto",
    "Element type of weights and cache; auto: the checkpoint's.",
    choices=("auto", *(kind.value for kind in DataType)),
)
INT8_NEEDS_OWN = "--weights int8 takes a model that our own decoder computes (docs/models.md)"
WEIGHTS: Option[str] = Option(
    "weights",
    str,
    WeightFormat.NATIVE.value,
    "Format of the weights of the workers, all of them alike: int8 is a quarter of float32's "
    "bytes, approximate, and for CPU workers with a C++ compiler (docs/memory.md).",
    choices=tuple(each.value for each in WeightFormat),
)
ACTIVATIONS: Option[str] = Option(
    "activations",
    str,
    "auto",
    "When the store keeps layer inputs; auto: when loading them can pay.",
    choices=("auto", "always", "never"),
    is_rare=True,
)
KV_ENCODING: Option[str] = Option(
    "kv-encoding",
    str,
    Encoding.NATIVE.value,
    "Encoding of stored keys, values and layer inputs; int8 and int4 are smaller and lossy "
    "(docs/memory.md).",
    choices=tuple(encoding.value for encoding in Encoding),
)
CHUNK_TOKENS: Option[int] = Option(
    "chunk-tokens", int, 64, "Tokens in a chunk of the store.", unit="N", least=1, most=4096
)
PAGE_REASON: Option[str] = Option(
    "page-reason",
    str,
    "",
    "Why chunks have this many tokens, for `splitpoint status`; `up --page-tokens auto` gives it.",
    unit="TEXT",
)
HOST_MEMORY: Option[str] = Option(
    "host-memory", str, "", "Largest size of the arena in bytes.", unit=SIZE, is_required=True
)
ARENA: Option[Path] = Option(
    "arena",
    Path,
    Path(),
    "File of the arena, in a folder of mode 0700.",
    unit="PATH",
    is_required=True,
)
KEEP_ARENA = Option(
    "keep-arena", bool, False, "Leave the file of the arena on exit, for the next start."
)
REPLACE_ARENA = Option(
    "replace-arena",
    bool,
    False,
    "Replace an arena of another model or size that an earlier start left, instead of refusing.",
)
LEASE_SECONDS: Option[float] = Option(
    "lease-seconds",
    float,
    10.0,
    "Seconds without a heartbeat after which a worker's leases expire.",
    unit="SECONDS",
    least=0.1,
    is_rare=True,
)

EVICTION: Option[str] = Option(
    "eviction",
    str,
    "lru",
    "Order in which chunks are evicted when the arena is full.",
    choices=("lru", "fifo", "counter"),
    is_rare=True,
)
EVICT_ABOVE: Option[float | None] = Option(
    "evict-above",
    float,
    None,
    "Evict in the background above this fraction of slots in use; absent: never.",
    unit="FRACTION",
    least=0,
    most=1,
    is_rare=True,
)
EVICT_TO: Option[float | None] = Option(
    "evict-to",
    float,
    None,
    "Stop evicting in the background at this fraction of slots in use; absent: "
    f"{WATERMARK_GAP} below --evict-above.",
    unit="FRACTION",
    least=0,
    most=1,
    is_rare=True,
)
ADMISSION: Option[str] = Option(
    "admission",
    str,
    "always",
    "When a chunk is stored; second-use: when it was asked for before.",
    choices=("always", "second-use"),
    is_rare=True,
)

SCRUB_SECONDS: Option[float] = Option(
    "scrub-seconds",
    float,
    600.0,
    "Seconds within which every sealed chunk is read back and compared, again and again; 0: never.",
    unit="SECONDS",
    least=0,
    is_rare=True,
)
SCRUB_RATE: Option[str] = Option(
    "scrub-rate",
    str,
    "500MB",
    "Largest number of bytes per second that are read back, even if a pass takes longer.",
    unit=RATE,
    is_rare=True,
)

TIER_DISK: Option[Path | None] = Option(
    "tier-disk",
    Path,
    None,
    "Folder of the disk tier, of mode 0700, which keeps chunks that leave the arena; absent: none.",
    unit="DIR",
)
TIER_DISK_SIZE: Option[str] = Option(
    "tier-disk-size", str, "0", "Largest size of the disk tier's files in bytes.", unit=SIZE
)
TIER_POOL: Option[str | None] = Option(
    "tier-mooncake",
    str,
    None,
    "Address of a Mooncake master, whose pool of memory keeps chunks, too; absent: none.",
    unit="HOST:PORT",
    is_rare=True,
    dest="tier_pool",
)
TIER_POOL_MEMORY: Option[str] = Option(
    "tier-mooncake-memory",
    str,
    "0",
    "Memory in bytes that this store gives to Mooncake's pool.",
    unit=SIZE,
    is_rare=True,
    dest="tier_pool_memory",
)
TIER_POOL_REPLICAS: Option[int] = Option(
    "tier-mooncake-replicas",
    int,
    1,
    "Copies of each chunk in Mooncake's pool.",
    unit="N",
    least=1,
    most=8,
    is_rare=True,
    dest="tier_pool_replicas",
)
TIER_ADMISSION: Option[str] = Option(
    "tier-admission",
    str,
    "eviction",
    "When a chunk goes down to the tiers; second-use: when it is used again in the arena.",
    choices=("eviction", "second-use"),
    is_rare=True,
)
TIER_RATE: Option[str | None] = Option(
    "tier-rate",
    str,
    None,
    "Largest number of bytes per second that are loaded from tiers; absent: no limit.",
    unit=RATE,
    is_rare=True,
)
# The transfer engine, which has a pool, too; its extra, lock and image have this name.
ENGINE = "mooncake"
OPEN_NETWORK = "Mooncake has neither encryption nor authentication"
TRANSFER: Option[str] = Option(
    "transfer",
    str,
    "grpc",
    "How chunks come from other hosts' stores; mooncake: by its Transfer Engine, which has neither "
    "encryption nor authentication.",
    is_rare=True,
    choices=("grpc", ENGINE),
)
TRANSFER_INTERFACE: Option[str | None] = Option(
    "transfer-interface",
    str,
    None,
    "Network interface on which Mooncake listens, such as eth1.",
    unit="NAME",
    is_rare=True,
)
TRUSTED_NETWORK = Option(
    "trusted-network",
    bool,
    False,
    "Allow Mooncake beside --tokens: every host that reaches the interface can read the chunks of "
    "all tenants, and write to the pool.",
    is_rare=True,
)

HUGE_PAGES: Option[str] = Option(
    "huge-pages",
    str,
    "auto",
    "Use of huge pages for the arena; auto: where the file system has them.",
    choices=WISHES,
    is_rare=True,
)
NUMA_NODE: Option[str] = Option(
    "numa-node",
    str,
    "auto",
    "NUMA node of the arena's memory; auto: the node of the GPUs.",
    unit="auto|none|N",
    is_rare=True,
)

SECTIONS = (
    *COMMON,
    Section(
        "arena",
        (
            LAYOUT,
            MODEL,
            PAGE_SIZE,
            DTYPE,
            WEIGHTS,
            ACTIVATIONS,
            KV_ENCODING,
            CHUNK_TOKENS,
            PAGE_REASON,
            HOST_MEMORY,
            ARENA,
            KEEP_ARENA,
            REPLACE_ARENA,
            LEASE_SECONDS,
        ),
    ),
    Section(
        "what stays in the arena (docs/memory.md)", (EVICTION, EVICT_ABOVE, EVICT_TO, ADMISSION)
    ),
    Section(
        "tiers behind the arena (docs/tiers.md)",
        (
            TIER_DISK,
            TIER_DISK_SIZE,
            TIER_POOL,
            TIER_POOL_MEMORY,
            TIER_POOL_REPLICAS,
            TIER_ADMISSION,
            TIER_RATE,
        ),
    ),
    Section(
        "transfers between hosts (docs/tiers.md)", (TRANSFER, TRANSFER_INTERFACE, TRUSTED_NETWORK)
    ),
    Section("reading chunks back (docs/operations.md)", (SCRUB_SECONDS, SCRUB_RATE)),
    Section("memory of the arena (docs/memory.md)", (HUGE_PAGES, NUMA_NODE)),
    Section("discovery", (ADVERTISE,)),
)
