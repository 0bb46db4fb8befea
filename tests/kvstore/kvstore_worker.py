"""A worker in a process of its own: attaches, writes a sequence, perhaps seals it, and waits.

    python kvstore_worker.py ADDRESS TOKENS_AS_JSON seal|late|write|fork

Prints DONE, then keeps its session alive until a line comes on stdin. "fork" writes,
and then has a child that inherits everything and ends. "late" seals when the line has come, and
prints the status.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from kvstore_helpers import seed_of, write_payload

from splitpoint.arena.mapping import Arena
from splitpoint.keys import chunk_key
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc


def main() -> None:
    address, tokens, seals = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "seal"
    stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(open_sync_channel(address))
    stat = Path("/proc/self/stat").read_text()
    session = stub.Attach(
        pb.AttachRequest(
            client_name="worker",
            process_id=os.getpid(),
            process_start_ticks=int(stat.rpartition(")")[2].split()[19]),
        )
    )
    layout = layout_from_proto(session.layout)
    arena = Arena.attach(
        Path(session.arena_path),
        layout=layout,
        slot_count=session.slot_count,
        instance_id=session.instance_id,
        epoch=session.epoch,
        session_id=session.session_id,
    )
    stop = threading.Event()

    def beats() -> Iterator[pb.KeepAliveRequest]:
        while not stop.is_set():
            yield pb.KeepAliveRequest(session_id=session.session_id)
            stop.wait(0.2)

    stream = stub.KeepAlive(beats())
    next(stream)
    size = layout.chunk_tokens
    pieces = [tuple(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    granted = stub.Reserve(
        pb.ReserveRequest(session_id=session.session_id, request_id=b"1", slot_count=len(pieces))
    )
    slots = [
        (run.first_slot + offset, generation)
        for run in granted.runs
        for offset, generation in enumerate(run.generations)
    ]
    parent = b""
    chunks = []
    for piece, (slot, generation) in zip(pieces, slots, strict=True):
        checksum = write_payload(arena, slot, seed_of(parent, piece), len(piece))
        chunks.append(
            pb.SealChunk(
                slot=slot,
                generation=generation,
                parent_key=parent,
                token_ids=piece,
                checksum=checksum,
            )
        )
        parent = chunk_key(layout.layout_hash, b"", parent, piece)
    seal = pb.SealRequest(
        session_id=session.session_id, request_id=b"2", chunks=chunks, keep_leased=True
    )
    if seals:
        stub.Seal(seal)
    if sys.argv[3] == "fork":
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    print("DONE", flush=True)
    sys.stdin.readline()
    if sys.argv[3] == "late":
        try:
            stub.Seal(seal)
        except grpc.RpcError as error:
            print(error_of(error).reason, flush=True)
        else:
            print("SEALED", flush=True)
    stop.set()


if __name__ == "__main__":
    main()
