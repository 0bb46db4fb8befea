"""Limits of the wire contract that servers and clients share."""

from __future__ import annotations

from typing import Any

MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024
METADATA_LIMIT_BYTES = 8 * 1024

Options = list[tuple[str, Any]]

# A peer is given up if it leaves a ping unanswered. gRPC answers pings below Python, so a process
# that computes, even without ever letting go of the interpreter, is not given up; one that is
# stopped, or cut off, is.
# A watched worker is pinged this long after it sent something last, and given so long to answer.
WATCH_SECONDS = 1.0
WATCH_ANSWER_SECONDS = 1.5
# The same for the schedulers of a worker: their requests end when they are given up.
WATCHER_SECONDS = 5.0


def answer_pings_within(seconds: float) -> Options:
    """Return the options by which a peer is given up this long after a ping.

    Both are needed: pings have a time limit of their own, a minute by default.
    """
    milliseconds = round(seconds * 1000)
    return [
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),
    ]


SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # Soft and hard limit are equal: between the two gRPC rejects by chance.
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise gRPC sends only a few pings between data.
    ("grpc.http2.max_pings_without_data", 0),
    *answer_pings_within(10.0),
]
