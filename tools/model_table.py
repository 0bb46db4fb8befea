"""Writes the table of docs/models.md from what a test run found: see `make models`.

    python -m tools.model_table ROWS

ROWS has a JSON object in each line: the family, whose code computes it ("own", "transformers" or
""), why it is refused, whether only its text part is tried, and whether it read rows of the store
by a selection.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
_BLOCK = re.compile(r"(<!-- begin families -->\n).*?(<!-- end -->\n)", re.DOTALL)
_WIDTH = 118


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the families that are served, then the others with their reasons, as Markdown."""
    by_name = {row["family"]: row for row in rows}
    selecting = sum(bool(row.get("selects")) for row in by_name.values())
    served: dict[str, list[str]] = {"own": [], "transformers": [], "text part": []}
    refused: list[str] = []
    untried: list[str] = []
    for name, row in sorted(by_name.items()):
        if row["by"]:
            served["text part" if row.get("is_wrapper") else row["by"]].append(name)
        elif row["reason"].startswith("not tried"):
            untried.append(name)
        else:
            reason = " ".join(row["reason"].removeprefix(f"model_type '{name}': ").split())
            refused.append(f"| {name} | {reason.replace('|', '/'):.160} |")
    parts = [
        f"**By our own decoder: {len(served['own'])}.**",
        _listed(served["own"]),
        f"**By transformers' code: {len(served['transformers'])}.**",
        _listed(served["transformers"]),
        f"**The text part of what reads images or sound, by either: {len(served['text part'])}.**",
        _listed(served["text part"]),
        f"**Of all these, by verified selection, too: {selecting}.** The others have no "
        "layer behind the first one that sees all tokens.",
        f"**Refused: {len(refused)}.**",
        "\n".join(["| model_type | why |", "| --- | --- |", *refused]),
    ]
    if untried:
        parts.append(f"**Not tried: {len(untried)}.** Their default configuration is not valid.")
        parts.append(_listed(untried))
    return "\n\n".join(parts)


def _listed(names: list[str]) -> str:
    """Return the names in lines of at most _WIDTH characters."""
    lines = [""]
    for name in names:
        word = f"{name}," if name != names[-1] else name
        if len(lines[-1]) + len(word) + 1 > _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.model_table",
        description="Write the families of docs/models.md from the rows of a test run.",
    )
    parser.add_argument("rows", type=Path, help="a file with a JSON object in each line")
    rows = [json.loads(line) for line in parser.parse_args().rows.read_text().splitlines()]
    page = PAGE.read_text()
    PAGE.write_text(_BLOCK.sub(lambda match: f"{match[1]}\n{table(rows)}\n\n{match[2]}", page))


if __name__ == "__main__":
    main()
