"""What a scheduler sends to a worker for a request of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitpoint.v1 import types_pb2, worker_pb2


def admitting(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    method: types_pb2.RestoreMethod = types_pb2.RESTORE_METHOD_LOAD,
    **changes: Any,
) -> worker_pb2.RunRequest:
    """Admit a resident request that generates `max_tokens`; `changes`: other fields."""
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": prompt,
        "sampling": types_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        "plan": types_pb2.Plan(residency=types_pb2.RESIDENCY_RESIDENT, method=method),
        **changes,
    }
    return worker_pb2.RunRequest(admit=worker_pb2.AdmitCommand(**fields))
