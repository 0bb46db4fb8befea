"""Put the output of commands into the documentation: `python -m tools.pages`.

A page marks the place: `<!-- begin splitpoint size --examples -->` and `<!-- end -->` surround what
that command prints. A benchmark is named by its module: `<!-- begin benchmarks.kvpr_tables -->`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
_BLOCK = re.compile(
    r"(<!-- begin ((?:splitpoint |benchmarks\.|gateway_service\.)[^>]+) -->\n).*?(<!-- end -->\n)",
    re.DOTALL,
)


def updated(page: str) -> str:
    """Return the page with the present output of its commands."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_output(match[2])}\n{match[3]}", page)


def _output(command: str) -> str:
    module, *options = command.split()
    module = "splitpoint_cli" if module == "splitpoint" else module
    arguments = [sys.executable, "-m", module, *options]
    answer = subprocess.run(
        arguments, stdout=subprocess.PIPE, text=True, check=True, cwd=DOCS.parent
    )
    return answer.stdout


def pages() -> list[Path]:
    """Return the pages that have such a place."""
    return [path for path in sorted(DOCS.rglob("*.md")) if _BLOCK.search(path.read_text())]


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.pages",
        description="Put the present output of commands into the pages of docs.",
    ).parse_args()
    for path in pages():
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
