"""The line on stdout with which a service tells its supervisor why it ends.

FAILED {"code": 3, "reason": "...", "message": "..."}
"""

from __future__ import annotations

import json

from splitpoint.errors import SplitpointError, from_code

FAILED_PREFIX = "FAILED "


def failure_line(error: SplitpointError) -> str:
    facts = {"code": error.code, "reason": error.reason, "message": error.message}
    return FAILED_PREFIX + json.dumps(facts)


def read_failure(line: str) -> SplitpointError | None:
    """Return the error in a `failure_line`; None for any other line."""
    if not line.startswith(FAILED_PREFIX):
        return None
    try:
        facts = json.loads(line.removeprefix(FAILED_PREFIX))
        return from_code(int(facts["code"]), str(facts["message"]), str(facts["reason"]))
    except (ValueError, KeyError, TypeError):
        return None
