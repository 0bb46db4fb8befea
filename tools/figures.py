"""Print the sentences and table rows of docs/figures.toml with the numbers of their result files.

Each `[[figure]]` binds a text of README.md or docs/lab/measurements.md to a file of
`benchmarks/results`, which has one JSON object a line: one line for each run. In the text
`{NAME}` stands for a value:

    {ratios.pipelined_to_load:.2f}        the key, then a format of Python
    {peer.seconds / ours.seconds:.2f}     a quotient; ` * ` is a product
    {bf16/decode_ratio:.2f}               of the file named bf16, where `results` names several
    {sum streams:,}                       over the runs: sum, max, min or median

Without such a word all runs are shown: one number where they agree, else "lowest to highest".

tests/tools/test_tools_figures.py compares these texts with the pages. Run `python -m tools.figures`
after a measurement, and copy what it prints into the page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/lab/measurements.md")

Run = Mapping[str, Any]
_VALUE = re.compile(r"\{([^{}]+)\}")
_OVER_RUNS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "median": statistics.median,
}
_NUMBER_WORDS = ("no", "one", "two", "three", "four")
_ENOUGH_REPEATS = 5
# A number with a unit of time, rate, size or proportion, or one with a decimal point.
_MEASURED = re.compile(
    r"(?<![\w.,])(?:\d[\d,.]*? ?(?:ms|s|min|µs|us|×|x|times|%|MiB|GiB|[MG]B(?:/s)?|"
    r"(?:tokens|calls|chunks)(?:/s| a second))(?!\w)|\d[\d,]*\.\d+(?![\w.]))"
)
# Versions, licences and sizes of models, which no benchmark measures.
_NOT_MEASURED = re.compile(r"(?:Python|torch|License) \d[\d.]*|\d[\d.]* M parameters")


@dataclass(frozen=True)
class Figure:
    """A text with numbers, and the result files they come from."""

    page: str
    text: str
    results: str | dict[str, str]
    # Only runs whose keys have these values.
    where: dict[str, Any] = field(default_factory=dict)
    # True if the numbers are counts, which a repetition cannot change.
    counted: bool = False

    @property
    def files(self) -> dict[str, str]:
        """Return the file names of the results by their short names; the only file's is empty."""
        return {"": self.results} if isinstance(self.results, str) else self.results

    def runs(self, name: str = "") -> list[Run]:
        """Return the runs of a file that `where` selects."""
        runs = runs_of(RESULTS / self.files[name])
        return [run for run in runs if all(run.get(key) == is_ for key, is_ in self.where.items())]

    def rendered(self) -> str:
        """Return the text with its numbers.

        Raises:
            ValueError: A value that the text names is in no run.
        """
        return _VALUE.sub(self._number, self.text)

    def _number(self, match: re.Match[str]) -> str:
        expression, _, spec = match[1].rpartition(":")
        name, slash, rest = expression.partition("/")
        if slash and name in self.files:
            expression = rest
        else:
            name = ""
        word, _, rest = expression.partition(" ")
        over_runs = _OVER_RUNS.get(word)
        values = [_value(rest if over_runs else expression, run) for run in self.runs(name)]
        numbers = [value for value in values if value is not None]
        if not numbers:
            raise ValueError(f"no run of {self.files[name]} has {expression!r}")
        if over_runs:
            numbers = [over_runs(numbers)]
        lowest, highest = (format(number, spec) for number in (min(numbers), max(numbers)))
        return lowest if lowest == highest else f"{lowest} to {highest}"

    def unstated_repeats(self) -> list[str]:
        """Return the files of fewer than five repetitions whose number the text does not state."""
        if self.counted:
            return []
        return [
            f"{file}: {repeats}"
            for name, file in self.files.items()
            if (repeats := _repeats(self.runs(name))) < _ENOUGH_REPEATS
            and not re.search(
                rf"\b({repeats}|{_NUMBER_WORDS[repeats]})( \w+)? (runs?|rounds?|passes)\b",
                " ".join(self.text.split()),
                re.IGNORECASE,
            )
        ]


def _repeats(runs: Sequence[Run]) -> int:
    """Return how often the least repeated of these runs repeats, or how many runs there are."""
    return min(_count(run.get("repeats", run.get("rounds", len(runs)))) for run in runs)


def _count(repeats: Any) -> int:
    """Return a number of rounds: given, or that of a list, or the least of several lists."""
    if isinstance(repeats, dict):
        return min(map(_count, repeats.values()))
    return len(repeats) if isinstance(repeats, list) else int(repeats)


def _value(expression: str, run: Run) -> float | None:
    """Return the value in a run; None if the run did not measure it."""
    first, *others = re.split(r" ([*/]) ", expression)
    value = _operand(first, run)
    for operator, operand in zip(others[::2], others[1::2], strict=True):
        number = _operand(operand, run)
        if value is None or number is None:
            return None
        value = value * number if operator == "*" else value / number
    return value


def _operand(text: str, run: Run) -> float | None:
    try:
        return float(text)
    except ValueError:
        found = _found(text, run)
    # Whole numbers stay whole, so that a format of integers takes them.
    return None if isinstance(found, bool) or not isinstance(found, int | float) else found


def _found(path: str, value: Any) -> Any:
    """Return what a dotted path leads to, or None. Keys may have dots: the longest wins."""
    if not path:
        return value
    if isinstance(value, list):
        index, _, rest = path.partition(".")
        return _found(rest, value[int(index)]) if int(index) < len(value) else None
    for key in sorted(value if isinstance(value, dict) else (), key=len, reverse=True):
        if path == key or path.startswith(f"{key}."):
            return _found(path[len(key) + 1 :], value[key])
    return None


def runs_of(path: Path) -> list[Run]:
    """Return the JSON objects of a result file, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def figures() -> list[Figure]:
    """Return the figures of docs/figures.toml."""
    table = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
    return [Figure(**entry) for entry in table["figure"]]


def words_of(text: str) -> str:
    """Return a text with single spaces, as Markdown reads it."""
    return " ".join(text.split())


def unbound(page: str, texts: Sequence[str]) -> list[str]:
    """Return the measured numbers of a page outside these texts, code, links and versions."""
    page = re.sub(r"^```.*?^```|^(?: {4}|\t).*?$", " ", page, flags=re.DOTALL | re.MULTILINE)
    page = words_of(page)
    for text in texts:
        page = page.replace(words_of(text), " ")
    page = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", page)
    page = _NOT_MEASURED.sub(" ", page)
    return [page[max(0, found.start() - 60) : found.end()] for found in _MEASURED.finditer(page)]


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.figures",
        description="Print the texts of docs/figures.toml with their numbers.",
    ).parse_args()
    for page in PAGES:
        print(f"# {page}\n")
        for figure in figures():
            if figure.page == page:
                print(f"{figure.rendered().strip()}\n")


if __name__ == "__main__":
    main()
