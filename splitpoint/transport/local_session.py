"""What a client on the store's host adds to a session: its process, and the arena, mapped."""

from __future__ import annotations

import os
from pathlib import Path

from splitpoint.arena.mapping import Arena
from splitpoint.transport.convert import layout_from_proto
from splitpoint.v1 import kvstore_pb2 as pb


def attach_request(
    client_name: str,
    *,
    layout_hash: bytes = b"",
    previous_session_id: bytes = b"",
    page_bytes: int = 0,
) -> pb.AttachRequest:
    """Return what attaches this process, which the store may watch for its end."""
    return pb.AttachRequest(
        client_name=client_name,
        process_id=os.getpid(),
        process_start_ticks=process_start_ticks(),
        layout_hash=layout_hash,
        previous_session_id=previous_session_id,
        page_bytes=page_bytes,
    )


def mapped_arena(answer: pb.AttachResponse) -> Arena:
    """Map the arena of a session. Raises what `Arena.attach` raises."""
    return Arena.attach(
        Path(answer.arena_path),
        layout=layout_from_proto(answer.layout),
        slot_count=answer.slot_count,
        instance_id=answer.instance_id,
        epoch=answer.epoch,
        session_id=answer.session_id,
    )


def process_start_ticks() -> int:
    """Return this process's start time in clock ticks since boot (/proc/self/stat field 22)."""
    stat = Path("/proc/self/stat").read_text()
    # The command name, field 2, may contain spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[19])
