"""What an image holds: no pip, each model once, labels, and the source in a small layer on top."""

from __future__ import annotations

import json

from tools.compose.stack import Said, Stack, expect, run

# Most that a change of the source may ship.
SOURCE_BYTES = 20_000_000

# Without a shell's help: what an image holds of pip, and of the model.
LOOK = """
import importlib.util, os
for name in ("pip", "ensurepip"):
    assert importlib.util.find_spec(name) is None, name
found = [
    os.path.join(folder, "model.safetensors")
    for top in ("/models", "/opt/splitpoint", "/usr", "/var")
    for folder, _, files in os.walk(top)
    if "model.safetensors" in files
]
bundled = ("stdlib-llama", "stdlib-llama-draft")
assert set(found) == {f"/models/{name}/model.safetensors" for name in bundled}, found
assert len(found) == len(bundled), found
from splitpoint.checkpoint.resolve import resolve_model
assert resolve_model(None).samefile("/models/stdlib-llama")
"""


def check_image(stack: Stack, service: str, said: Said) -> None:
    """Look into a service's container and at the image that it runs."""
    image = stack.inspect(service)["Config"]["Image"]
    inside = ("exec", "-T", service)
    stack.compose(*inside, "python", "-c", LOOK)
    stack.compose(
        *inside, "sh", "-c", "! command -v pip && ! /usr/bin/env python3 -m pip --version"
    )
    labels = json.loads(run("docker", "inspect", image).stdout)[0]["Config"]["Labels"]
    for label in ("title", "description", "licenses", "version", "revision"):
        expect(f"org.opencontainers.image.{label}" in labels, f"{image}: no label {label}")
    shown = run("docker", "history", "--human=false", "--format", "{{.Size}}", image).stdout
    layers = [int(size) for size in shown.split() if int(size)]
    expect(layers[0] < SOURCE_BYTES, f"{image}: the source's layer has {layers[0]:,} bytes")
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in layers)
    said(f"{image}: no pip, each model once, labels; layers of {sizes} MB, the source on top")
