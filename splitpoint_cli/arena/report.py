"""Description of an arena file, as the object of `--json` and as lines for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitpoint.arena.files import boot_id, is_locked
from splitpoint.arena.format import Superblock
from splitpoint.arena.mapping import Arena
from splitpoint.config import counted, format_size
from splitpoint_cli.arena.check import Contents, Damage


def describe_file(path: Path, copies: tuple[Superblock | Damage, ...]) -> dict[str, Any]:
    """Return the file, its users, and both copies of its superblock."""
    return {
        "path": str(path),
        "size_bytes": path.stat().st_size,
        "locked": is_locked(path),
        "superblocks": [
            {"valid": False, "invariant": copy.invariant, "message": copy.message}
            if isinstance(copy, Damage)
            else {
                "valid": True,
                "sequence": copy.sequence,
                "epoch": copy.epoch,
                "condition": copy.condition.name,
                "process_id": copy.process_id,
            }
            for copy in copies
        ],
    }


def describe_arena(arena: Arena) -> dict[str, Any]:
    """Return the superblock in force. Process ids mean nothing after a reboot."""
    superblock = arena.superblock
    is_this_boot = superblock.boot_id == boot_id()
    return {
        "instance_id": superblock.instance_id.hex(),
        "epoch": superblock.epoch,
        "condition": superblock.condition.name,
        "of_this_boot": is_this_boot,
        "owner_process_id": superblock.process_id,
        "owner_alive": is_this_boot and Path(f"/proc/{superblock.process_id}").exists(),
        "layout": json.loads(arena.layout.to_json()),
        "chunk_bytes": arena.layout.chunk_bytes,
        "slot_count": arena.slot_count,
    }


def describe_contents(contents: Contents) -> dict[str, Any]:
    return {
        "slots": {
            **{state.name.lower(): count for state, count in contents.states.items()},
            "damaged": len(contents.damages),
            "changing": contents.changing_count,
        },
        "chunk_count": contents.chunk_count,
        "token_count": contents.token_count,
        "salt_count": contents.salt_count,
        "damages": [asdict(damage) for damage in contents.damages],
    }


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Return the report for people, without missing parts."""
    use = "a store is running on it" if report["locked"] else "no store is running on it"
    yield f"arena       {report['path']}, {format_size(report['size_bytes'])}; {use}"
    for copy, found in enumerate(report["superblocks"]):
        yield f"superblock {copy} {_superblock_text(found)}"
    if "unusable" in report:
        yield f"unusable    {report['unusable']}"
        return
    alive = "alive" if report["owner_alive"] else "gone"
    boot = "" if report["of_this_boot"] else " (before the last reboot)"
    yield f"instance    {report['instance_id']}, epoch {report['epoch']}"
    yield f"store       process {report['owner_process_id']}, {alive}{boot}"
    yield f"layout      {_layout_text(report['layout'])}"
    slots = ", ".join(f"{count:,} {state}" for state, count in report["slots"].items() if count)
    yield f"slots       {report['slot_count']:,}: {slots}"
    has_pages = "page_bytes" in report["layout"]
    # A page has its key in place of tokens.
    tokens = "" if has_pages else f"{counted(report['token_count'], 'token')}, "
    yield (
        f"{'pages' if has_pages else 'chunks':11} {report['chunk_count']:,} of "
        f"{format_size(report['chunk_bytes'])}, {tokens}"
        f"{counted(report['salt_count'], 'salt')}"
        f"{', each compared with its checksum' if report['payload_compared'] else ''}"
    )
    for damage in report["damages"]:
        yield f"{damage['place']}: {damage['invariant']}: {damage['message']}"


def _layout_text(layout: Mapping[str, Any]) -> str:
    if "page_bytes" in layout:
        return f"pages of at most {format_size(layout['page_bytes'])}"
    activations = "with" if layout["has_activations"] else "without"
    return (
        f"{layout['layer_count']} layers, {layout['kv_head_count']} heads of "
        f"{layout['head_dim']}, hidden {layout['hidden_size']}, {layout['data_type']} "
        f"kept as {layout['encoding']}, {counted(layout['chunk_tokens'], 'token')} a chunk, "
        f"{activations} activations"
    )


def _superblock_text(found: Mapping[str, Any]) -> str:
    if not found["valid"]:
        return f"{found['invariant']}: {found['message']}"
    return f"sequence {found['sequence']}, epoch {found['epoch']}, {found['condition'].lower()}"
