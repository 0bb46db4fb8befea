"""What a store's options say about Mooncake, checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvstore_service.mooncake.installed import has_wheel
from kvstore_service.mooncake.interface import address_of
from splitpoint.config import check_address, parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.extras import MissingExtra
from splitpoint.tiers import Transfer


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The pool of several hosts' memory.

    Attributes:
        master: address of the Mooncake master, "HOST:PORT".
        memory_bytes: what this store gives to the pool.
        replicas: copies of each chunk.
    """

    master: str
    memory_bytes: int
    replicas: int


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How a store uses Mooncake.

    Attributes:
        interface: the network interface that the engine is confined to.
        has_transfer: other stores read this arena, and this store reads theirs.
        pool: None if the store uses no pool.
    """

    interface: str
    has_transfer: bool
    pool: PoolSettings | None


def settings_of(arguments: argparse.Namespace) -> MooncakeSettings | None:
    """Return None if the options use no Mooncake. Raises InvalidArgument, MissingExtra."""
    has_transfer = arguments.transfer == Transfer.MOONCAKE
    pool = _pool_of(arguments)
    interface = arguments.transfer_interface
    if not has_transfer and pool is None:
        for name, is_given in (
            ("transfer-interface", interface is not None),
            ("trusted-network", arguments.trusted_network),
        ):
            if is_given:
                raise InvalidArgument(
                    f"--{name} needs --transfer mooncake or --tier-mooncake", field=name
                )
        return None
    option = "--transfer mooncake" if has_transfer else "--tier-mooncake"
    if interface is None:
        raise InvalidArgument(
            f"{option} needs --transfer-interface NAME: Mooncake has neither encryption nor "
            "authentication, so name the private network that it may listen on",
            field="transfer-interface",
        )
    if arguments.tokens is not None and not arguments.trusted_network:
        raise InvalidArgument(
            f"{option} beside --tokens needs --trusted-network: Mooncake asks for no token, so "
            "every host on that network can read the chunks of all tenants",
            field="trusted-network",
        )
    address_of(interface)
    if not has_wheel():
        raise MissingExtra(option, "mooncake", "mooncake")
    return MooncakeSettings(interface, has_transfer, pool)


def _pool_of(arguments: argparse.Namespace) -> PoolSettings | None:
    master = arguments.tier_mooncake
    memory = parse_size(arguments.tier_mooncake_memory, field="tier-mooncake-memory")
    if master is None:
        for name, is_given in (
            ("tier-mooncake-memory", memory != 0),
            ("tier-mooncake-replicas", arguments.tier_mooncake_replicas != 1),
        ):
            if is_given:
                raise InvalidArgument(f"--{name} needs --tier-mooncake", field=name)
        return None
    try:
        is_of_network = not check_address(master).startswith("unix:")
    except InvalidArgument:
        is_of_network = False
    if not is_of_network:
        raise InvalidArgument(
            f"--tier-mooncake: {master!r} is not the HOST:PORT of a Mooncake master (example: "
            "rack-1:50051)",
            field="tier-mooncake",
        )
    return PoolSettings(master, memory, arguments.tier_mooncake_replicas)
