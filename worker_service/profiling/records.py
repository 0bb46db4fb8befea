"""Files of a host in which its processes keep what one of them measured.

A file belongs to facts: all that the measurement depends on. Other facts have another file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from splitpoint.host.processor import instruction_sets, processor_name
from worker_service.kernels.compiled import cache_folder

log = logging.getLogger(__name__)


Facts = Mapping[str, object]
Kept = TypeVar("Kept")


def host_facts(file_format: int, dtype: torch.dtype, **others: object) -> Facts:
    """Return the facts of a measurement with this type on this host."""
    return {
        "format": file_format,
        "processor": processor_name(),
        "flags": sorted(instruction_sets()),
        "torch": torch.__version__,
        "type": str(dtype),
        **others,
    }


def path_of(name: str, facts: Facts) -> Path:
    """Return the file of a measurement of this name with these facts. Raises NoKernels."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    return cache_folder() / f"{name}-{digest}.json"


def kept(path: Path, facts: Facts, parsed: Callable[[dict[str, Any]], Kept]) -> Kept | None:
    """Return what `parsed` makes of a file of these facts; None if there is none, or it is damaged.

    Any error of `parsed` means that the file is damaged.
    """
    try:
        record = json.loads(path.read_text())
        return parsed(record) if record["facts"] == facts else None
    except FileNotFoundError:
        return None
    except Exception as error:
        log.warning("%s is damaged (%s): measured again", path, error)
        return None


def keep(path: Path, facts: Facts, **measured: object) -> None:
    """Write the file of these facts, whole or not at all.

    A disk that is full costs the file and not what was measured: others measure it again.
    """
    working = path.with_suffix(f".{os.getpid()}")
    try:
        working.write_text(json.dumps({"facts": facts, **measured}, indent=1))
        working.rename(path)
    except OSError as error:
        log.warning("%s is not kept: %s", path, error)
    finally:
        with suppress(OSError):
            working.unlink(missing_ok=True)
