"""Where a result is kept: `--save-result` and its folder, file name and form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitpoint.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Saving:
    """Where to and what.

    Attributes:
        filename: None: made of the run's facts.
        appends: add a line to the file.
        is_detailed: with the values of each request.

    Raises InvalidArgument for a folder that is missing.
    """

    folder: Path
    filename: str | None = None
    appends: bool = False
    is_detailed: bool = False

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise InvalidArgument(f"{self.folder} is no folder", field="result_dir")
        if self.filename is not None and Path(self.filename).name != self.filename:
            raise InvalidArgument(f"{self.filename!r} is no file name", field="result_filename")

    def write(self, result: Mapping[str, Any]) -> Path:
        """Write the result as one line of JSON, and return where."""
        path = self.folder / (self.filename or file_name(result))
        with path.open("a" if self.appends else "w", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
        return path


def file_name(result: Mapping[str, Any]) -> str:
    """Return the name that `vllm bench serve` would choose."""
    most = result["max_concurrency"]
    parts = (
        result["label"] or result["backend"],
        f"{result['request_rate']}qps",
        *(() if most is None else (f"concurrency{most}",)),
        str(result["model_id"]).rpartition("/")[2],
        result["date"],
    )
    return "-".join(parts) + ".json"


def read_metadata(words: list[str]) -> dict[str, str]:
    """Return KEY=VALUE words as a dict. Raises InvalidArgument."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise InvalidArgument(f"{word!r} is not KEY=VALUE", field="metadata")
        found[key] = value
    return found
