"""Digests of base images: written behind every tag, and never invented."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import pin_images
from tools.pin_images import FILES, ROOT, digest_of, images_in, pinned

TEXTS = {name: (ROOT / name).read_text() for name in FILES}
IMAGES = {image for text in TEXTS.values() for image in images_in(text)}


def engine(folder: Path, answer: str, status: int = 0) -> str:
    """A program in place of the engine, that answers `image inspect` with this."""
    path = folder / "engine"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"print({answer!r}) if sys.argv[1] == 'image' else None\n"
        f"print('no such host', file=sys.stderr)\n"
        f"sys.exit({status})\n"
    )
    path.chmod(0o700)
    return str(path)


def test_every_base_image_is_named_by_a_version() -> None:
    assert {image.partition(":")[0] for image in IMAGES} == {
        "python",
        "redis",
        "prom/prometheus",
        "grafana/grafana",
    }
    for text in TEXTS.values():
        assert images_in(text)
    assert not any(image.endswith(":latest") for image in IMAGES)


@pytest.mark.parametrize("name", FILES)
def test_a_digest_stands_behind_each_tag_and_is_replaced(name: str) -> None:
    text = TEXTS[name]
    first = pinned(text, dict.fromkeys(IMAGES, f"sha256:{'a' * 64}"))
    assert first.count(f"@sha256:{'a' * 64}") >= len(images_in(text))
    assert images_in(first) == images_in(text)
    second = pinned(first, dict.fromkeys(IMAGES, f"sha256:{'b' * 64}"))
    assert second == first.replace("a" * 64, "b" * 64)
    assert pinned(text, {}) == text


def test_a_digest_is_what_the_engine_says(tmp_path: Path) -> None:
    found = f"sha256:{'c' * 64}"
    assert digest_of("redis:7-bookworm", engine(tmp_path, f"redis@{found}")) == found
    with pytest.raises(SystemExit, match="has no digest"):
        digest_of("redis:7-bookworm", engine(tmp_path, ""))
    with pytest.raises(SystemExit, match="no such host"):
        digest_of("redis:7-bookworm", engine(tmp_path, "", status=1))


def test_nothing_is_written_where_no_registry_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pin_images", "--engine", engine(tmp_path, "", status=1)])
    with pytest.raises(SystemExit):
        pin_images.main()
    assert {name: (ROOT / name).read_text() for name in FILES} == TEXTS
