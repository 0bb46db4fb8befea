"""Tiers: where a store keeps chunks; and the names of the sources that chunks come from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where a store keeps chunks, fastest first."""

    ARENA = "arena"
    DISK = "disk"
    POOL = "pool"  # several hosts' memory


class Transfer(StrEnum):
    """How chunks move between the stores of two hosts."""

    STREAM = "stream"  # a gRPC stream from the other store
    DIRECT = "direct"  # the own store's transfer engine reads the other store's arena


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """Where chunks come from into a worker's own arena.

    Attributes:
        address: another store. Empty: a tier of the own store.
        tier: the tier of the own store; ARENA if the source is another store's arena.
    """

    address: str = ""
    tier: Tier = Tier.ARENA

    def __post_init__(self) -> None:
        if bool(self.address) == (self.tier is not Tier.ARENA):
            raise ValueError("a source is another store, or a tier of the own store")

    def rate_key(self, transfer: Transfer = Transfer.STREAM) -> str:
        """Return the source's key in `Profile.remote_bytes_per_second`."""
        if not self.address:
            return self.tier.value
        return self.address if transfer is Transfer.STREAM else f"{self.address} {transfer.value}"

    @staticmethod
    def transfer_of(rate_key: str) -> Transfer:
        """Return the transfer that the rate of a key is of; STREAM also for tiers."""
        is_direct = rate_key.endswith(f" {Transfer.DIRECT.value}")
        return Transfer.DIRECT if is_direct else Transfer.STREAM

    @staticmethod
    def words_of(rate_key: str) -> str:
        """Return the source and the transfer of a key in words."""
        if ChunkSource.transfer_of(rate_key) is Transfer.DIRECT:
            return f"{rate_key.removesuffix(f' {Transfer.DIRECT.value}')} by direct reads"
        return f"the {rate_key} tier" if rate_key in list(Tier) else rate_key

    def __str__(self) -> str:
        return self.address or f"the {self.tier.value} tier"
