"""The profile `cluster`: two hosts as containers of one, with disk tiers and a pool."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.compose.images import check_image
from tools.compose.stack import (
    BACK_SECONDS,
    Caller,
    Said,
    Stack,
    check_hardening,
    copy_access,
    expect,
    until,
)

PROFILES = ("cluster",)
# A service for each image that is built.
MASTER = "mooncake-master"
BUILT = ("setup", MASTER, "worker-a")
SERVICES = ("redis", MASTER, "store-a", "store-b", "worker-a", "worker-b")
# About 30 chunks, so that a few prompts push the first one out to the tiers.
ENVIRONMENT = {"SPLITPOINT_HOST_MEMORY": "24m"}
# Prompts that host b asks for, too, and that it does not; and how many come after them.
OLD, ON_DISK, PROMPTS = "subtract", "multiply", 5
SECONDS = 60.0


def prompt_of(name: str) -> str:
    """Return a text of several chunks of 64 tokens that no other name's shares."""
    return "\n".join(
        f"def {name}_{number}(left, right):\n    return left + right + {number}\n"
        for number in range(24)
    )


def services(said: Said) -> list[str]:
    return [*SERVICES, "cluster-scheduler"]


def check(stack: Stack, access: Path, said: Said) -> None:
    check_image(stack, "store-a", said)
    copy_access(stack, "cluster-scheduler", access)
    caller = Caller(os.environ["SPLITPOINT_PUBLISH"], access, with_certificate=True)
    check_transfer(stack, caller, said)
    cold = check_stopped_host(stack, caller, said)
    check_lost_master(stack, caller, cold, said)
    check_killed_store(stack, caller, said)
    check_hardening(stack, (MASTER,), said)


def check_transfer(stack: Stack, caller: Caller, said: Said) -> None:
    """What host a computed comes to host b by direct reads."""
    for host in ("a", "b"):
        await_tiers(stack, host, "transfer", "disk", "pool")
    prompt = prompt_of("add")
    cold = caller.generate("worker-a", prompt)
    expect(cold["usage"]["cached_tokens"] == 0, "a new stack has nothing cached")
    warm = reused(caller, "worker-b", prompt, cold, "store-a:50060")
    moved = store_of(stack, "b")["transfer"]
    expect(moved["read_chunk_count"] > 0, f"nothing came by direct reads: {moved}")
    expect(moved["failed_read_count"] == 0, f"reads failed: {moved}")
    said(
        f"worker-b reused {warm['usage']['cached_tokens']} of {warm['usage']['prompt_tokens']} "
        f"tokens of worker-a; {moved['read_chunk_count']} chunks, {moved['read_bytes']:,} bytes "
        f"came by direct reads from store-a at {moved['interface']}"
    )


def check_stopped_host(stack: Stack, caller: Caller, said: Said) -> dict[str, Any]:
    """The pool has what a stopped store held, and its disk tier is found again.

    Returns the answer to ON_DISK.
    """
    cold = caller.generate("worker-a", prompt_of(OLD))
    on_disk = caller.generate("worker-a", prompt_of(ON_DISK))
    for number in range(PROMPTS):
        caller.generate("worker-a", prompt_of(f"fill_{number}"))
    before = tier_of(store_of(stack, "a"), "disk")["chunk_count"]
    expect(before > 0, f"nothing left an arena of {os.environ['SPLITPOINT_HOST_MEMORY']}")
    stack.compose("stop", "store-a")
    ended = stack.state("store-a")["ExitCode"]
    expect(ended == 0, f"store-a stopped with {ended}")
    alone = caller.generate("worker-a", prompt_of(OLD))
    expect(alone["token_ids"] == cold["token_ids"], "a worker without a store answers alike")
    pooled = reused(caller, "worker-b", prompt_of(OLD), cold, "pool")
    said(
        f"store-a stopped: worker-a goes on; worker-b has {pooled['usage']['cached_tokens']} "
        f"tokens from the pool"
    )
    stack.compose("start", "store-a")
    took = until(stack.unhealthy, BACK_SECONDS)
    store = store_of(stack, "a")
    found = tier_of(store, "disk")["chunk_count"]
    expect(found >= before, f"store-a found {found} of {before} chunks on its disk")
    expect(store["sealed_slot_count"] > 0, "the arena was not adopted")
    said(
        f"store-a healthy {took:.1f} s after its start, with {store['sealed_slot_count']} chunks "
        f"in its arena and {found} on its disk"
    )
    return on_disk


def check_lost_master(stack: Stack, caller: Caller, cold: dict[str, Any], said: Said) -> None:
    """Without the pool's master requests go on, and stores join again when it is back."""
    stack.compose("kill", MASTER)
    for host in ("a", "b"):
        caller.generate(f"worker-{host}", prompt_of(f"divide_{host}"))
        await_tiers(stack, host, "pool", is_up=False)
    loaded = reused(caller, "worker-a", prompt_of(ON_DISK), cold, "disk")
    stack.compose("start", MASTER)
    for host in ("a", "b"):
        await_tiers(stack, host, "pool")
    said(
        f"the master killed: both workers went on, worker-a has {loaded['usage']['cached_tokens']} "
        f"tokens from its host's disk; both stores joined the master again"
    )


def check_killed_store(stack: Stack, caller: Caller, said: Said) -> None:
    """A store that is killed comes back with its arena and its disk tier."""
    before = tier_of(store_of(stack, "a"), "disk")["chunk_count"]
    took = stack.kill("store-a")
    store = store_of(stack, "a")
    found = tier_of(store, "disk")["chunk_count"]
    expect(found >= before, f"{found} of {before} chunks on disk were found again")
    expect(store["sealed_slot_count"] > 0, "the arena was not adopted")
    prompt = prompt_of(OLD)
    served = until(lambda: uncached(caller, "worker-a", prompt), SECONDS)
    said(
        f"store-a killed: healthy again after {took:.1f} s with {store['sealed_slot_count']} "
        f"chunks in its arena and {found} on its disk, reuse {served:.1f} s later"
    )


def reused(
    caller: Caller, worker: str, prompt: str, cold: dict[str, Any], source: str | None = None
) -> dict[str, Any]:
    """Ask until the worker reuses the prompt. Return its answer, which must equal the first one.

    `source`: the plan must name it, so the first reuse counts; None: any source, its own
    arena included.
    """
    found: dict[str, Any] = {}

    def ask() -> str | None:  # chunks are written back behind the answer
        nonlocal found
        found = caller.generate(worker, prompt)
        return None if found["usage"]["cached_tokens"] else f"{worker} found nothing cached"

    until(ask, SECONDS)
    expect(found["token_ids"] == cold["token_ids"], "what was loaded gives the same answer")
    if source is not None:
        plan = found["plan"]
        expect(plan["fetch_source"] == source, f"from {plan['fetch_source']!r}: {plan['reason']}")
        expect(plan["fetched_tokens"] > 0, f"nothing was fetched: {plan['reason']}")
    return found


def uncached(caller: Caller, worker: str, prompt: str) -> str | None:
    answer = caller.generate(worker, prompt)
    return None if answer["usage"]["cached_tokens"] else f"{worker} found nothing cached"


def store_of(stack: Stack, host: str) -> dict[str, Any]:
    """Return what `splitpoint status` says of a host's store; the address alone if it is away."""
    shown = stack.compose(
        *("exec", "-T", "cluster-scheduler", "splitpoint", "status", "--json"),
        *("--address", "localhost:50050"),
        *("--token-file", "/etc/splitpoint/access/admin.token"),
    )
    address = f"store-{host}:50060"
    stores: dict[str, dict[str, Any]] = {
        store["address"]: store for store in json.loads(shown)["stores"]
    }
    return stores.get(address, {"address": address})


def tier_of(store: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the state of a store's tier, or of its transfers."""
    tiers: dict[str, dict[str, Any]] = {tier["tier"]: tier for tier in store.get("tiers", ())}
    tiers["transfer"] = store.get("transfer") or {"is_up": False}
    return tiers.get(name, {"is_up": False, "chunk_count": 0})


def await_tiers(stack: Stack, host: str, *names: str, is_up: bool = True) -> None:
    """Wait until these of a host's store are up, or away."""

    def complaint() -> str | None:
        store = store_of(stack, host)
        found = {name: tier_of(store, name) for name in names}
        wrong = {name: tier for name, tier in found.items() if tier["is_up"] != is_up}
        return f"{store['address']} should have {is_up=}: {wrong}" if wrong else None

    until(complaint, SECONDS)
