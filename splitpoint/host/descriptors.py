"""Limits of a service's file descriptors and connections.

Each connection uses a descriptor. Without free ones a service can neither accept nor
reconnect, nor open a file, so connections get at most half of them.
"""

from __future__ import annotations

import logging
import resource

_log = logging.getLogger(__name__)

# Connections to one port; with fewer descriptors than twice as many, half of those.
MOST_CONNECTIONS = 4096


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process to its hard one, if the kernel allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a hard limit above fs.nr_open
        _log.warning(
            "open files stay limited to %s, the hard limit of %s is refused: %s", soft, hard, error
        )


def connection_limit() -> int:
    """Return the most connections to a port of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(1, soft // 2))
