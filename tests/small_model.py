"""The model of fleets: the bundled one's tokenizer before few weights, so that a step costs little.

What these tests are about, kills and restarts and routes, costs the same with any weights.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import reference_cache
from tiny_models import write_tiny

ROOT = Path(__file__).resolve().parent.parent
_BUNDLED = ROOT / "models" / "stdlib-llama"
# Beside the configuration and the weights.
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SIZES = {
    "vocab_size": 4096,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The widths of the bundled model: for tests of the order of sums, or of bytes a token.
WIDE = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64}


def small_model(**sizes: int) -> Path:
    """Return its folder, written once in a test session. `sizes`: those to change."""
    name = "-".join(["small-llama", *(f"{key}-{value}" for key, value in sorted(sizes.items()))])
    folder = reference_cache.session_folder() / name
    if not folder.exists():
        working = folder.with_name(f"{name}.{os.getpid()}")
        write_tiny("llama", working, **{**_SIZES, **sizes})
        for file in _TEXT_FILES:
            shutil.copy(_BUNDLED / file, working)
        try:
            working.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(working)
    return folder
