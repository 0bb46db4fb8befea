"""Writes the digests of all base images into what names them: `make pin-images`.

    python -m tools.pin_images [--engine docker]

NAME:TAG becomes NAME:TAG@sha256:DIGEST in deploy/Dockerfile, docker-compose.yml, what
`splitpoint compose` writes and the chart's values (`make chart` afterwards); a digest that is
there is replaced. The engine pulls each image, so its registry must be reachable. A digest is
only ever what a registry answers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "deploy/Dockerfile",
    "docker-compose.yml",
    "splitpoint_cli/compose.py",
    "deploy/helm/splitpoint/values.yaml",
)
_IMAGE = r"([a-z0-9./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?"
# Where an image that is not ours is named.
_NAMED = re.compile(
    rf"(?<=ARG PYTHON_IMAGE=){_IMAGE}|(?<=_IMAGE:-){_IMAGE}(?=}})"
    rf"|(?<=  image: )(?!splitpoint-){_IMAGE}$",
    re.MULTILINE,
)
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$", re.MULTILINE)


def images_in(text: str) -> set[str]:
    """NAME:TAG of every base image that a file names, without digests."""
    return {_tagged(found) for found in _NAMED.finditer(text)}


def pinned(text: str, digests: dict[str, str]) -> str:
    """Return the text with the digest of each image in `digests` behind its tag."""

    def pin(found: re.Match[str]) -> str:
        image = _tagged(found)
        return f"{image}@{digests[image]}" if image in digests else found[0]

    return _NAMED.sub(pin, text)


def digest_of(image: str, engine: str) -> str:
    """Return the image's digest in its registry. Exits with the engine's message on failure."""
    _run(engine, "pull", "--quiet", image)
    shown = _run(engine, "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', image)
    if (found := _DIGEST.search(shown)) is None:
        sys.exit(f"{image} has no digest: it was made here and comes from no registry")
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="docker", help="command of the engine")
    engine = parser.parse_args().engine
    texts = {name: (ROOT / name).read_text() for name in FILES}
    images = sorted({image for text in texts.values() for image in images_in(text)})
    digests = {image: digest_of(image, engine) for image in images}
    for name, text in texts.items():
        (ROOT / name).write_text(pinned(text, digests))
    for image, digest in digests.items():
        print(f"{image}@{digest}")


def _tagged(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
