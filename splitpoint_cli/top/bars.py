"""Bars and cells of a terminal: text of a known width, in ASCII if need be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of bars; the parts of a stacked bar differ without colours, too."""

    full: str
    empty: str
    parts: tuple[str, ...]


FANCY = Glyphs("█", "░", ("█", "▓", "▒", "×", "░"))
PLAIN = Glyphs("#", ".", ("#", "=", "+", "x", "."))


def bar(share: float | None, width: int, glyphs: Glyphs, style: str) -> Text:
    """Draw a share from 0 to 1; more shows as full, None as empty."""
    if share is None:
        return Text(glyphs.empty * width, style="dim")
    filled = min(width, round(share * width))
    if share > 0 and not filled:
        filled = 1  # little is not nothing
    return Text.assemble((glyphs.full * filled, style), (glyphs.empty * (width - filled), "dim"))


def stacked_bar(parts: Sequence[tuple[int, str]], width: int, glyphs: Glyphs) -> Text:
    """Draw counts, each with its colour, in the order of `glyphs.parts`; the last fills up."""
    total = sum(count for count, _ in parts)
    text = Text()
    left = width
    for position, (count, style) in enumerate(parts):
        is_last = position == len(parts) - 1
        share = round(count / total * width) if total else 0
        if count and not share:
            share = 1
        share = left if is_last else min(left, share)
        text.append(glyphs.parts[position] * share, style=style)
        left -= share
    return text


def cell(label: str, value: str | Text, width: int) -> Text:
    """Return a dim label and its value in `width` columns, so that cells of lines align."""
    text = Text.assemble((f"{label} ", "dim"), value)
    if text.cell_len < width:
        text.pad_right(width - text.cell_len)
    return text


def flow(cells: Iterable[Text], width: int, *, gap: int = 3) -> list[Text]:
    """Put as many cells on a line as fit; cut no cell unless it alone is too wide."""
    lines: list[Text] = []
    line = Text()
    for each in cells:
        if line.cell_len and line.cell_len + gap + each.cell_len > width:
            # Padding at the end must not push a cell to the next line.
            trimmed = each.copy()
            trimmed.rstrip()
            if line.cell_len + gap + trimmed.cell_len <= width:
                line.append(" " * gap).append_text(trimmed)
                continue
            lines.append(line)
            line = Text()
        if line.cell_len:
            line.append(" " * gap)
        line.append_text(each)
    if line.cell_len:
        lines.append(line)
    for done in lines:
        done.rstrip()
        done.truncate(width, overflow="ellipsis")
    return lines


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def amount(value: float | None, unit: str = "") -> str:
    """Return three significant digits: "0.25", "12.3", "4,560"."""
    if value is None:
        return NOTHING
    number = f"{value:,.0f}" if value >= 99.95 or value == 0 else f"{value:.3g}"
    return f"{number}{unit}"
