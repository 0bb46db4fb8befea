"""The files of the page, read once: each with its headers, its tag and its compressed form.

The page runs no inline script and loads nothing from elsewhere; its policy says so to the browser.
Knows no HTTP server.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFETY = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. `headers` are those of every answer with it; `compressed` is gzip's form."""

    content: bytes
    compressed: bytes
    tag: str
    headers: Mapping[str, str]

    def is_known(self, if_none_match: str) -> bool:
        """Return True if the browser's If-None-Match names this version."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in (self.tag, "*") for tag in tags)


def read_files() -> dict[str, PageFile]:
    """Return the files by name."""
    return {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-type": _TYPES[path.suffix],
        # Asked for again each time, and answered by 304: a new release shows at once.
        "cache-control": "no-cache",
        # Weak: the compressed form has it, too.
        "etag": f"W/{tag}",
        "vary": "accept-encoding",
        **_SAFETY,
    }
    return PageFile(content, gzip.compress(content, mtime=0), tag, headers)
