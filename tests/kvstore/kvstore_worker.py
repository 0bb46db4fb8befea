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
from typing import Any

import grpc
from kvstore_helpers import granted_slots, pieces_of, write_chunks

from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.convert import to_message
from splitpoint.transport.local_session import attach_request, mapped_arena
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc


def main() -> None:
    address, tokens, seals = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "seal"
    stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(open_sync_channel(address))
    session = stub.Attach(attach_request("worker"))
    arena = mapped_arena(session)
    stop = threading.Event()

    def beats() -> Iterator[pb.KeepAliveRequest]:
        while not stop.is_set():
            yield pb.KeepAliveRequest(session_id=session.session_id)
            stop.wait(0.2)

    stream = stub.KeepAlive(beats())
    next(stream)
    pieces = pieces_of(tokens)
    granted = stub.Reserve(
        pb.ReserveRequest(session_id=session.session_id, request_id=b"1", slot_count=len(pieces))
    )
    written = write_chunks(arena, granted_slots(granted.runs), pieces)
    chunks = [to_message(pb.SealChunk, each, page_key=b"") for each in written]
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
