"""Limits of the wire contract that servers and clients share."""

from __future__ import annotations

from typing import Any

MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024
METADATA_LIMIT_BYTES = 8 * 1024

Options = list[tuple[str, Any]]

SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # Soft and hard limit are equal: between the two gRPC rejects by chance.
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_timeout_ms", 10_000),
]
