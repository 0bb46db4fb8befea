"""The entries that stores and workers write into Redis, and the names of the keys. Pure.

Everything that is read back is checked as untrusted input: a value that is not exactly an
entry is read as None.

    sp:stores                            set of the hex instance ids of stores
    sp:store:<instance>                  StoreEntry, expires
    sp:store:<instance>:<epoch>:chunks   hash: chunk key -> generation (0: not in the arena), and
                                         "d" if the store's disk tier holds it; expires
    sp:workers                           set of the hex instance ids of workers
    sp:worker:<instance>                 WorkerEntry, expires
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from splitpoint.config import check_address
from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument

HEARTBEAT_SECONDS = 1.0
# An entry survives two lost heartbeats.
LIFETIME_MILLISECONDS = 3000
# Owners remove dead instances from the index this often.
BEATS_BETWEEN_PRUNES = 30
STORES = "sp:stores"
WORKERS = "sp:workers"
# Field of the chunks hash with the name of its last write. Chunk keys are longer.
REVISION_FIELD = b"revision"

_FORMAT = 1
_LONGEST_ENTRY_BYTES = 64 * 1024
_INSTANCE_BYTES = 16
_HASH_BYTES = 16
_MOST_TIERS = 8


def entry_key(index: str, instance_id: bytes) -> str:
    """Return the key of one entry; `index` is STORES or WORKERS."""
    return f"{index.removesuffix('s')}:{instance_id.hex()}"


def chunks_key(instance_id: bytes, epoch: int) -> str:
    return f"{entry_key(STORES, instance_id)}:{epoch}:chunks"


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A live store. Its catalog belongs to this `instance_id` and `epoch`."""

    instance_id: bytes
    epoch: int
    # Address for workers on other hosts.
    address: str
    layout_hash: bytes
    slot_count: int
    # Full chunks in the catalog, and the name of the last write to it, for debugging.
    chunk_count: int = 0
    revision: str = ""
    # Names of the tiers behind its arena.
    tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "tiers", _check_names("tiers", self.tiers))
        _check_bytes("instance_id", self.instance_id, _INSTANCE_BYTES)
        _check_bytes("layout_hash", self.layout_hash, _HASH_BYTES)
        _check_count("epoch", self.epoch, 1 << 62)
        _check_count("slot_count", self.slot_count, 1 << 31)
        _check_count("chunk_count", self.chunk_count, 1 << 31)
        _check_text("revision", self.revision, 64)
        check_address(_check_text("address", self.address, 256))

    def to_json(self) -> str:
        return _to_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> StoreEntry | None:
        """Return the entry; None if the text is not an entry of this format."""
        entry: StoreEntry | None = _from_json(cls, text, ("instance_id", "layout_hash"))
        return entry


@dataclass(frozen=True, slots=True)
class ModelName:
    """The model facts that must be equal on a worker and its scheduler."""

    layer_count: int
    hidden_size: int
    vocabulary_size: int
    context_length: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check_count(name, getattr(self, name), 1 << 31)


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A live worker, as a scheduler finds it. Its gRPC stream decides whether it is up."""

    instance_id: bytes
    worker_id: str
    # Address for schedulers.
    address: str
    model: ModelName
    layout_hash: bytes
    model_fingerprint: bytes = b""
    # Its own store: the address that it uses, and the instance. Empty: none.
    store_address: str = ""
    store_instance_id: bytes = b""
    profile: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_bytes("instance_id", self.instance_id, _INSTANCE_BYTES)
        _check_bytes("layout_hash", self.layout_hash, _HASH_BYTES)
        if len(self.model_fingerprint) > 64:
            raise InvalidArgument("model_fingerprint has more than 64 bytes")
        if self.store_instance_id:
            _check_bytes("store_instance_id", self.store_instance_id, _INSTANCE_BYTES)
        if not _check_text("worker_id", self.worker_id, 64):
            raise InvalidArgument("worker_id is empty")
        check_address(_check_text("address", self.address, 256))
        if _check_text("store_address", self.store_address, 256):
            check_address(self.store_address)
        if not isinstance(self.profile, dict):
            raise InvalidArgument("profile is no object")
        if self.profile:
            Profile.from_json(json.dumps(self.profile))

    def to_json(self) -> str:
        return _to_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> WorkerEntry | None:
        """Return the entry; None if the text is not an entry of this format."""
        hexadecimal = ("instance_id", "layout_hash", "model_fingerprint", "store_instance_id")
        entry: WorkerEntry | None = _from_json(cls, text, hexadecimal, model=ModelName)
        return entry


def _to_json(entry: StoreEntry | WorkerEntry) -> str:
    fields = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in asdict(entry).items()
    }
    return json.dumps({"format": _FORMAT, **fields})


def _from_json(cls: Any, text: bytes, hexadecimal: tuple[str, ...], **nested: Any) -> Any:
    if len(text) > _LONGEST_ENTRY_BYTES:
        return None
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            return None
        for name in hexadecimal:
            fields[name] = bytes.fromhex(fields[name])
        for name, kind in nested.items():
            fields[name] = kind(**fields[name])
        return cls(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidArgument):
        return None


def _check_bytes(name: str, value: Any, size: int) -> None:
    if not isinstance(value, bytes) or len(value) != size:
        raise InvalidArgument(f"{name} has not {size} bytes", field=name)


def _check_count(name: str, value: Any, limit: int) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise InvalidArgument(f"{name} is no count", field=name)


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOST_TIERS:
        raise InvalidArgument(f"{name} is no list of at most {_MOST_TIERS} names", field=name)
    return tuple(_check_text(name, each, 16) for each in value)


def _check_text(name: str, value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise InvalidArgument(f"{name} is no line of at most {limit} characters", field=name)
    return value
