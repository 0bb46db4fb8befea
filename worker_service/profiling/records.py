"""Files of a host in which its processes keep what one of them measured."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def keep(path: Path, record: Mapping[str, object]) -> None:
    """Write this file, whole or not at all.

    A disk that is full costs the file and not what was measured: others measure it again.
    """
    working = path.with_suffix(f".{os.getpid()}")
    try:
        working.write_text(json.dumps(record, indent=1))
        working.rename(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path, error)
    finally:
        with suppress(OSError):
            working.unlink(missing_ok=True)
