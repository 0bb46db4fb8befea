"""What `splitpoint eval` reads, and under which selections; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.resolve import BUNDLED_MODEL
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint.selection import FULL, PoolPolicy, Selection, SelectionMethod

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.5)
# The papers' own settings: alpha 4 (OPT) and 5 (Llama) with at most 20 %, and 12.5 %.
_PAPERS = ("infinigen:alpha=4.0", "infinigen:alpha=5.0", "maple:0.125")
# What 12 % of the bytes of K and V hold: a key's row in int8 with its scale.
_SMALL = tuple(
    f"{method}:{ratio},columns=28,int8"
    for method in ("columns", "lowrank")
    for ratio in (0.02, 0.05, 0.1)
)
_POOLS = tuple(f"columns:0.1,pool=0.8,policy={policy}" for policy in PoolPolicy)
LEAST_TOKENS = 64
# What queries are guessed from, and whose norm is applied.
_CHOICES = {"guess": ("own", "previous"), "norm": ("own", "previous")}


def default_selections() -> tuple[Selection, ...]:
    """Return every screen at every ratio, the papers' own settings, small screens and pools."""
    methods = [method for method in SelectionMethod if method is not SelectionMethod.FULL]
    swept = [Selection(method=method, ratio=ratio) for method in methods for ratio in RATIOS]
    named = [Selection.parsed(text) for text in (*_PAPERS, *_SMALL, *_POOLS)]
    return tuple(dict.fromkeys((*swept, *named)))


def read_selections(texts: Sequence[str]) -> tuple[Selection, ...]:
    """Return the selections named, without repetitions and without `full`, which always runs.

    Raises InvalidArgument.
    """
    return tuple(each for each in dict.fromkeys(map(Selection.parsed, texts)) if each != FULL)


@dataclass(frozen=True, slots=True)
class EvalWorkload:
    """One evaluation.

    Attributes:
        model: as named by the user; None: the bundled one.
        is_default: True if the user named no selections.
        tokens: of each text; the first `prompt` of them are computed exactly.
        windows: texts of each unseen package, or of `text` together.
        tasks: needles, and tables.
        text: files to read instead of the unseen packages.
        guess, norm: see GuessFrom and GuessNorm.
        kv_heads: KV heads after averaging in groups; None: the checkpoint's own.
    """

    model: str | None
    selections: tuple[Selection, ...]
    is_default: bool
    tokens: int
    prompt: int
    windows: int
    tasks: int
    text: tuple[Path, ...]
    guess: str
    norm: str
    kv_heads: int | None
    artifacts: Path | None
    threads: int
    seed: int

    def __post_init__(self) -> None:
        if self.tokens < LEAST_TOKENS:
            raise InvalidArgument(f"tokens must be at least {LEAST_TOKENS}", field="tokens")
        if not 0 < self.prompt <= self.tokens - 2:
            raise InvalidArgument(
                f"prompt must leave two of the {counted(self.tokens, 'token')}, not {self.prompt}",
                field="prompt",
            )
        for name, values in _CHOICES.items():
            if (value := getattr(self, name)) not in values:
                raise InvalidArgument(
                    f"{name} must be one of {', '.join(values)}, not {value!r}", field=name
                )

    @property
    def model_name(self) -> str:
        """The model's name, for people."""
        return BUNDLED_MODEL if self.model is None else Path(self.model).name
