"""Selection of the cached tokens that attention reads, as requests and workers name it.

The text form is `METHOD[:RATIO][,NAME=VALUE...]`: `columns:0.1`, `infinigen:alpha=4,cap=0.2`,
`lowrank:0.05,columns=30,int8`. `str` writes what `Selection.parsed` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum, auto

from splitpoint.errors import InvalidArgument
from splitpoint.speculation import PLAIN, DraftMethod, Speculation


class Trait(Enum):
    """What holds for a method of selection, where it does not hold for all."""

    # Its scores approximate logits, which the alpha rule compares.
    LOGITS = auto()
    # It keeps int8 rows unless a selection says otherwise.
    INT8 = auto()
    # It needs artefacts of `splitpoint calibrate`.
    CALIBRATED = auto()
    # No worker can serve it: `splitpoint eval` measures it.
    MEASURED = auto()
    # Its tokens can leave one by one, each head's its own: bounded pools are served with it.
    POOLED = auto()
    # It keeps nothing of a token.
    KEEPS_NOTHING = auto()
    # It makes what it keeps from X of each token, which the store has to keep.
    KEEPS_INPUTS = auto()


class SelectionMethod(StrEnum):
    """How the tokens that matter to a query are guessed before their K and V are fetched.

    A new method needs a line here, and `MAKERS` of a module in worker_service/selection/.
    """

    traits: frozenset[Trait]

    def __new__(cls, name: str, *traits: Trait) -> SelectionMethod:
        member = str.__new__(cls, name)
        member._value_ = name
        member.traits = frozenset(traits)
        return member

    # Every token is read: exact.
    FULL = "full"
    # Skewed partial keys (InfiniGen): the columns of `RoPE(k) A` with the largest sums.
    INFINIGEN = "infinigen", Trait.LOGITS, Trait.CALIBRATED, Trait.POOLED
    # Trained low-rank queries and keys of X (MAPLE).
    MAPLE = "maple", Trait.LOGITS, Trait.INT8, Trait.CALIBRATED, Trait.KEEPS_INPUTS
    # The columns of keys after RoPE with the largest sums.
    COLUMNS = "columns", Trait.LOGITS, Trait.POOLED
    # The best bilinear approximation of q.k on calibration text, in closed form.
    LOWRANK = "lowrank", Trait.LOGITS, Trait.CALIBRATED, Trait.POOLED
    # The first and the newest tokens (StreamingLLM).
    WINDOW = "window", Trait.KEEPS_NOTHING
    # The tokens that were attended to most so far; evicted ones never return (H2O).
    H2O = "h2o", Trait.MEASURED
    # The true logits, of whole keys: what the best screen would read.
    ORACLE = "oracle", Trait.LOGITS, Trait.MEASURED

    @property
    def has_logits(self) -> bool:
        """True if its scores approximate logits, which the alpha rule compares."""
        return Trait.LOGITS in self.traits

    @property
    def is_int8(self) -> bool:
        """True if it keeps int8 rows unless a selection says otherwise."""
        return Trait.INT8 in self.traits

    @property
    def is_calibrated(self) -> bool:
        """True if it needs artefacts of `splitpoint calibrate`."""
        return Trait.CALIBRATED in self.traits

    @property
    def keeps_inputs(self) -> bool:
        """True if it makes what it keeps from X of each token, not from K."""
        return Trait.KEEPS_INPUTS in self.traits


SERVED_METHODS = tuple(
    method
    for method in SelectionMethod
    if method is not SelectionMethod.FULL and Trait.MEASURED not in method.traits
)


class PoolPolicy(StrEnum):
    """Which tokens leave a bounded pool first (InfiniGen, section 4.4)."""

    # The oldest.
    FIFO = "fifo"
    # Those whose last reading is longest ago.
    LRU = "lru"
    # Those that were read least often; counts age.
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How one request selects. Every method but FULL names one of ratio, alpha and budget_tokens.

    Attributes:
        ratio: fraction of the visible tokens that a query reads, in (0, 1]; 1 is exact.
        alpha: heads count the tokens whose guessed logit is above their largest minus this; each
            KV head reads as many of its best as the counts are in the mean (InfiniGen, section
            4.3), and those that are always read. Infinity with `cap` 1 is exact.
        budget_tokens: tokens that a query chooses at most. Served steps also read what else is on
            the device: the window, the tail, and, as with a ratio, all rows of the pages that hold
            chosen ones.
        cap: with alpha, the largest fraction of the visible tokens.
        columns: dimensions that a screen keeps of each key head; None: 30 % of them, or those
            of the artefacts if they are trained (MAPLE).
        int8: keep what screens keys in int8, with a scale per row; None: the method's own.
        sinks: first tokens that are always read.
        recent: newest tokens that are always read, the query's own included.
        full_layers: first layers that read everything; see `exact_layers`.
        verify: the selection only drafts, and steps that read everything verify: exact.
        pool: fraction of the tokens so far that may be left in each layer and KV head; others
            are evicted and never read again. None: all are left.
        policy: which leave first; sinks and the newest tokens never do.

    Tokens that are always read count within ratio, cap and budget_tokens, which never lie
    below them; not within what alpha counts.
    """

    method: SelectionMethod = SelectionMethod.FULL
    ratio: float | None = None
    alpha: float | None = None
    budget_tokens: int | None = None
    cap: float = 0.2
    columns: int | None = None
    int8: bool | None = None
    sinks: int = 4
    recent: int = 16
    full_layers: int = 2
    verify: bool = False
    pool: float | None = None
    policy: PoolPolicy = PoolPolicy.COUNTER

    def __post_init__(self) -> None:
        """Raise InvalidArgument for the first setting that is out of its bounds."""
        rules = [name for name in _RULES if getattr(self, name) is not None]
        if self.is_full:
            if rules:
                raise _wrong(rules[0], "method full reads every token and takes no budget")
        elif not rules:
            raise _wrong(
                "ratio",
                f"is missing; it, alpha or budget_tokens is needed, as in {self.method}:0.1",
            )
        elif len(rules) > 1:
            raise _wrong("ratio", "excludes alpha and budget_tokens, and they each other")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise _wrong("ratio", f"must be in (0, 1], not {self.ratio:g}")
        if self.alpha is not None and not self.alpha >= 0:
            raise _wrong("alpha", f"must be at least 0, not {self.alpha:g}")
        if self.alpha is not None and not self.method.has_logits:
            raise _wrong("alpha", f"{self.method} guesses no logits: use ratio")
        if self.int8 and not self.method.has_logits:
            raise _wrong("int8", f"{self.method} keeps no rows that could be int8")
        if self.method is SelectionMethod.MAPLE and (self.columns or 0) % 2:
            raise _wrong(
                "columns", f"must be even, not {self.columns}: maple rotates pairs of them"
            )
        if not 0 < self.cap <= 1:
            raise _wrong("cap", f"must be in (0, 1], not {self.cap:g}")
        self._check_pool()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise _wrong(name, f"must be at least {least}, not {value}")

    def _check_pool(self) -> None:
        """Raise InvalidArgument for a pool out of its bounds, or where there can be none."""
        if self.pool is None:
            if self.policy is not PoolPolicy.COUNTER:
                raise _wrong("policy", "is of a pool: give pool, too")
            return
        if self.method in (SelectionMethod.FULL, SelectionMethod.H2O):
            why = "reads every token" if self.is_full else "evicts tokens by itself"
            raise _wrong("pool", f"is not for {self.method}, which {why}")
        if not 0 < self.pool <= 1:
            raise _wrong("pool", f"must be in (0, 1], not {self.pool:g}")

    @property
    def is_full(self) -> bool:
        """True if the method reads every token."""
        return self.method is SelectionMethod.FULL

    @property
    def reads_all(self) -> bool:
        """True if it reads every token of every sequence, so that it is exact."""
        has_no_threshold = self.alpha is not None and math.isinf(self.alpha) and self.cap == 1
        reads_what_is_left = self.is_full or self.ratio == 1 or has_no_threshold
        return reads_what_is_left and self.pool in (None, 1)

    @property
    def is_approximate(self) -> bool:
        """True if the text may depend on it."""
        return not (self.reads_all or self.verify)

    @property
    def exact_layers(self) -> int:
        """First layers that read everything: none in drafts, which a whole pull verifies."""
        return 0 if self.verify else self.full_layers

    @property
    def keeps_int8(self) -> bool:
        """True if a screen keeps its rows in int8."""
        return self.method.is_int8 if self.int8 is None else self.int8

    def kept_columns(self, head_dim: int) -> int:
        """Return the dimensions that a screen keeps of heads of this size."""
        if self.columns is None and self.method is SelectionMethod.MAPLE:
            return 2 * max(1, round(_COLUMN_SHARE * head_dim / 2))
        if self.columns is None:
            return max(1, round(_COLUMN_SHARE * head_dim))
        return min(self.columns, head_dim)

    @classmethod
    def parsed(cls, text: str) -> Selection:
        """Return the selection that `text` names; see the module. Raises InvalidArgument."""
        name, _, rest = text.strip().partition(":" if ":" in text else ",")
        try:
            method = SelectionMethod(name)
        except ValueError:
            names = ", ".join(SelectionMethod)
            raise _wrong("method", f"{name!r} is not one of {names}") from None
        settings: dict[str, float | int | bool | PoolPolicy] = {}
        for word in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = word.partition("=")
            if not equals:
                key, value = (word, "yes") if word in _KINDS else ("ratio", word)
            if key in settings:
                raise _wrong(key, "is given twice")
            settings[key] = _value(key, value)
        return cls(method=method, **settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = list(self._words())
        return self.method + (f":{','.join(words)}" if words else "")

    def _words(self) -> Iterator[str]:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "method" or value == each.default:
                continue
            if each.name == "ratio":
                yield f"{value!r}"
            elif isinstance(value, bool):
                yield each.name if value else f"{each.name}=no"
            else:
                yield f"{each.name}={value}"


# Fraction of the dimensions of a head (InfiniGen).
_COLUMN_SHARE = 0.3
_RULES = ("ratio", "alpha", "budget_tokens")
_LEAST = {"budget_tokens": 1, "columns": 1, "sinks": 0, "recent": 1, "full_layers": 0}
_KINDS: dict[str, type[float] | type[int] | type[bool] | type[PoolPolicy]] = {
    **dict.fromkeys(("ratio", "alpha", "cap", "pool"), float),
    **dict.fromkeys(_LEAST, int),
    **dict.fromkeys(("int8", "verify"), bool),
    "policy": PoolPolicy,
}
_SWITCH = {"yes": True, "no": False}

FULL = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionUsage:
    """What selection came to: in one step of a sequence, or summed; fields as on the wire.

    Attributes:
        step_count: decode steps that read by selection; with `verify`, the drafted tokens.
        visible_token_count: tokens that these steps could attend to.
        read_token_count: those of them that they did, in a layer that selects.
        fetched_row_count: rows that crossed the link; a row is K and V of one token in one
            layer and KV head.
        reused_row_count: rows that were wanted and on the device from steps before.
        link_bytes: of the rows that crossed.
        evicted_token_count: tokens that left a bounded pool, in each layer and KV head; the sum
            over all attempts.
        pool_bytes: the most host memory that a bounded pool took.
        off_reason: why steps read everything although a selection was asked for; empty: none.
        is_approximate: the text may differ from the exact one.
    """

    step_count: int = 0
    visible_token_count: int = 0
    read_token_count: int = 0
    fetched_row_count: int = 0
    reused_row_count: int = 0
    link_bytes: int = 0
    evicted_token_count: int = 0
    pool_bytes: int = 0
    off_reason: str = ""
    is_approximate: bool = False

    def __add__(self, other: SelectionUsage) -> SelectionUsage:
        """Return the sums of the counts, with the newer reason and the larger pool."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return SelectionUsage(
            **sums,
            pool_bytes=max(self.pool_bytes, other.pool_bytes),
            off_reason=other.off_reason or self.off_reason,
            is_approximate=self.is_approximate or other.is_approximate,
        )

    @property
    def read_ratio(self) -> float:
        """Tokens read over visible ones, in the layers and steps that selected; 1 without any."""
        visible = self.visible_token_count
        return self.read_token_count / visible if visible else 1.0

    @property
    def mean_read_tokens(self) -> float:
        """Tokens that a step read in a layer that selects, on average; 0 without a step."""
        return self.read_token_count / self.step_count if self.step_count else 0.0

    @property
    def skipped_token_count(self) -> int:
        """Visible tokens that were not read, over all steps."""
        return self.visible_token_count - self.read_token_count


_COUNTS = tuple(
    field.name
    for field in fields(SelectionUsage)
    if field.name.endswith("_count") or field.name == "link_bytes"
)
UNUSED = SelectionUsage()


def check_served(selection: Selection) -> None:
    """Raise InvalidArgument for what no worker can serve."""
    if not selection.is_full and selection.method not in SERVED_METHODS:
        raise _wrong(
            "method",
            f"{selection.method} is measured, not served; served are {', '.join(SERVED_METHODS)}",
        )
    if selection.pool is not None:
        _check_served_pool(selection)
    if selection.alpha is not None and selection.method.keeps_inputs:
        raise _wrong(
            "alpha",
            f"{selection.method} has no scores of tokens whose X is not in the store: use ratio",
        )


def _check_served_pool(selection: Selection) -> None:
    """Raise InvalidArgument for a pool that only `splitpoint eval` can have."""
    if Trait.POOLED not in selection.method.traits:
        served = ", ".join(each for each in SERVED_METHODS if Trait.POOLED in each.traits)
        raise _wrong("pool", f"of {selection.method} is for `splitpoint eval`; served: {served}")
    if selection.verify:
        raise _wrong("pool", "and verify exclude each other: no step can read what has left")
    if selection.full_layers:
        raise _wrong(
            "pool",
            "is of all layers, and those that read everything keep all tokens: add full_layers=0",
        )


def check_speculation(selection: Selection, asked: Speculation | None) -> None:
    """Raise InvalidArgument for drafts that cannot be beside a selection. None: not asked for."""
    if asked is None or selection.reads_all:
        return
    if not selection.verify and asked.is_on:
        raise InvalidArgument(
            f"{asked.method} cannot draft beside an approximate selection: let it verify, or turn "
            "either off",
            field="speculation.method",
        )
    if selection.verify and asked.method is not DraftMethod.SELF:
        raise InvalidArgument(
            f"a selection that verifies drafts by self, not by {asked.method}",
            field="speculation.method",
        )


def speculation_beside(selection: Selection, speculation: Speculation) -> Speculation:
    """Return how a request drafts that selects so.

    None if the selection is approximate, by itself if it verifies, else as it would without.
    """
    if selection.reads_all:
        return speculation
    return replace(speculation, method=DraftMethod.SELF) if selection.verify else PLAIN


def _value(name: str, text: str) -> float | int | bool | PoolPolicy:
    """Return a setting's value. Raises InvalidArgument for an unknown name or a wrong value."""
    kind = _KINDS.get(name)
    if kind is None:
        raise _wrong(name, f"is not one of {', '.join(_KINDS)}")
    if kind is bool:
        if text not in _SWITCH:
            raise _wrong(name, f"must be yes or no, not {text!r}")
        return _SWITCH[text]
    try:
        value = kind(text)
    except ValueError:
        wanted = f"one of {', '.join(PoolPolicy)}" if kind is PoolPolicy else "a number"
        raise _wrong(name, f"{text!r} is not {wanted}") from None
    if isinstance(value, float) and math.isnan(value):
        raise _wrong(name, f"{text!r} is not a number")
    return value


def _wrong(name: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"selection: {name} {text}", field=f"selection.{name}")
