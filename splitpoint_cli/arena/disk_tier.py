"""The folder of a disk tier for `splitpoint arena inspect` and `verify`, as object and as lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore_service.tiers.disk.folder import find_segments, holder_of
from kvstore_service.tiers.disk.inspection import FolderContents, RecordDamage, read_folder
from splitpoint.config import counted, format_size


def folder_bytes(path: Path) -> int:
    """Return the size of all segments. Raises OSError."""
    return sum(found.disk_bytes for found in find_segments(path))


def describe_folder(
    path: Path, *, with_payload: bool, done: Callable[[int], None]
) -> dict[str, Any]:
    """Return what a folder holds and what is damaged. Raises OSError.

    `with_payload` compares each payload with its checksum, too. `done` is called with the bytes of
    each segment.
    """
    contents = read_folder(path, with_payload=with_payload, done=done)
    return {
        "path": str(path),
        "holder": holder_of(path),
        "size_bytes": contents.disk_bytes,
        "payload_compared": with_payload,
        "layouts": _layouts(contents),
        "damages": [_damage(damage, path) for damage in contents.damages],
    }


def _layouts(contents: FolderContents) -> list[dict[str, Any]]:
    return [
        {
            "layout_hash": name,
            "layout": json.loads(part.layout.to_json()),
            "segment_count": part.segment_count,
            "size_bytes": part.disk_bytes,
            "chunk_bytes": part.layout.chunk_bytes,
            "chunk_count": len(part.keys),
            "token_count": len(part.keys) * part.layout.chunk_tokens,
            "salt_count": len(part.salt_tags),
            "removed_count": part.removed_count,
        }
        for name, part in contents.layouts.items()
    ]


def _damage(damage: RecordDamage, folder: Path) -> dict[str, Any]:
    place = str(damage.path.relative_to(folder))
    return {
        "place": place if damage.index is None else f"{place}, record {damage.index}",
        "invariant": type(damage.error).__name__,
        "message": damage.error.message,
    }


def folder_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report for people."""
    use = f"used by {report['holder']}" if report["holder"] else "no store uses it"
    yield f"disk tier   {report['path']}, {format_size(report['size_bytes'])}; {use}"
    for part in report["layouts"]:
        layout = part["layout"]
        yield (
            f"layout      {part['layout_hash']}: {layout['layer_count']} layers, "
            f"{layout['kv_head_count']} heads of {layout['head_dim']}, {layout['data_type']} kept "
            f"as {layout['encoding']}, {counted(layout['chunk_tokens'], 'token')} a chunk"
        )
        yield (
            f"chunks      {part['chunk_count']:,} of {format_size(part['chunk_bytes'])} in "
            f"{counted(part['segment_count'], 'segment')} of together "
            f"{format_size(part['size_bytes'])}, {counted(part['token_count'], 'token')}, "
            f"{counted(part['salt_count'], 'salt')}"
        )
    for damage in report["damages"]:
        yield f"{damage['place']}: {damage['invariant']}: {damage['message']}"
    if report["payload_compared"]:
        yield counted(len(report["damages"]), "damage")
