"""The planner's input and its answer: data only.

The best split is affine in the sequence's length, so a plan carries a line, which a worker
follows as the sequence grows, and no new plan is needed for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding


@dataclass(frozen=True, slots=True)
class SplitLine:
    """l(s) = clamp(slope * s + intercept, 0, cap), all in tokens.

    Raises InvalidArgument for values that are not finite, and for a negative cap.
    """

    slope: float
    intercept: float
    cap: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.slope):
            raise InvalidArgument("must be finite", field="split_slope")
        if not math.isfinite(self.intercept):
            raise InvalidArgument("must be finite", field="split_intercept")
        if self.cap < 0:
            raise InvalidArgument("must be at least 0", field="split_cap")

    @classmethod
    def fixed(cls, split_tokens: int) -> SplitLine:
        """Return a line with the same split at every length that reaches it."""
        return cls(0.0, float(split_tokens), split_tokens)

    def at(self, tokens: int, quantum: int) -> int:
        """Return the split of this many tokens: a multiple of the quantum, or all of them."""
        wanted = min(max(self.slope * tokens + self.intercept, 0.0), float(self.cap))
        if wanted >= tokens:
            return tokens
        return min(round(wanted / quantum) * quantum, tokens)


class Residency(Enum):
    """The place of the cache while a request decodes."""

    RESIDENT = "resident"
    STREAMED = "streamed"


class RestoreMethod(Enum):
    """The way in which a cached prefix gets back onto the device."""

    NONE = "none"
    LOAD = "load"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    TOKENS = "tokens"

    @classmethod
    def of(cls, split_tokens: int, cached_tokens: int) -> RestoreMethod:
        """Return the method of a split, which is never TOKENS."""
        if cached_tokens == 0:
            return cls.NONE
        if split_tokens == 0:
            return cls.LOAD
        return cls.RECOMPUTE if split_tokens >= cached_tokens else cls.SPLIT


class Objective(Enum):
    """The quantity that a plan minimizes; see restore_choice.py."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class ReasonKind(StrEnum):
    """What led to a plan, or differed from it afterwards. The comments name the values.

    The names are the wire's: none is given to another meaning. `words.py` has their sentences.
    """

    # -- what the client asked for: wanted and possible tokens
    ASKED_SPLIT = auto()
    ASKED_TOKENS = auto()
    # -- what is done: split and all tokens, schedule
    SPLIT = auto()
    # the split for now, cached tokens
    AT_FIRST = auto()
    # recomputed and cached tokens
    RECOMPUTED = auto()
    # tokens, those that stay on the device
    LOADED = auto()
    # of what stays on the device in all steps: tokens, bytes
    KEYS_STAY = auto()
    INPUTS_STAY = auto()
    # seconds of it, and of loading everything: of a restore, and of a step
    PREDICTED = auto()
    STEP = auto()
    # busy seconds of link and device
    LIMIT = auto()
    # -- why it is not done in another way: rho
    CANNOT_PAY = auto()
    NO_ACTIVATIONS = auto()
    # tokens, seconds of that way, seconds of the chosen one
    SPLIT_INSTEAD = auto()
    TOKENS_INSTEAD = auto()
    # of a token and layer: seconds of rebuilding, of loading
    REBUILD_COSTS = auto()
    # busy seconds of device and link without rebuilding
    DEVICE_BUSY = auto()
    # tokens; chunks, 0 if these are not counted
    OVERHEADS = auto()
    # tokens of the first chunk, seconds of computing them, seconds of loading everything
    FIRST_CHUNK = auto()
    # the schedule without overlap
    TOKENS_NOT_CONSIDERED = auto()
    # seconds of the busier of link and device: chosen, with loading
    THROUGHPUT = auto()
    # seconds of each step, bytes
    HOST_WEIGHTS = auto()
    # -- why it is resident or streamed: bytes of its cache, of the worker's
    FITS = auto()
    EXCEEDS = auto()
    ASKED_STREAMED = auto()
    # seconds with streaming, with waiting, the objective
    STREAM_NOW = auto()
    # requests at once, streamed ones of them; tokens/s of these, and of residents alone
    FULL_BATCH = auto()
    # bytes; of these, pages for rows and screens; the selection
    CHARGED = auto()
    # bytes
    SPARE = auto()
    # tokens expected, at most
    EXPECTED_ANSWER = auto()
    # pages
    SHARED_PAGES = auto()
    # -- how exact it is: the encoding, the weights' format, the numerics
    LOSSY_CACHE = auto()
    LOSSY_WEIGHTS = auto()
    NUMERICS = auto()
    # -- tokens that the device holds
    ON_DEVICE = auto()
    # -- a fetch, done or not: tokens, source, transfer, bytes a second, their basis, seconds,
    # seconds of recomputing instead; of how many tokens that is less than all
    FETCH = auto()
    NO_FETCH = auto()
    # one that meets what is computed: tokens, computed tokens, tier, bytes a second, their basis,
    # seconds, seconds of recomputing all instead
    MEETING = auto()
    # -- what happened: tokens, transfers, seconds
    FETCHED = auto()
    # tokens found, tokens expected
    FOUND_ON_DEVICE = auto()
    FOUND_CACHED = auto()
    MET = auto()
    # method, split
    USED = auto()
    # seconds, predicted ones, busy ones of device and link
    RESTORED = auto()
    # bytes
    FIRST_USE = auto()
    # method, drafted tokens, steps, accepted tokens
    DRAFTED = auto()
    # method
    NO_DRAFTER = auto()
    DRAFTS_ARE_FOR_STREAMS = auto()
    NO_DRAFTS = auto()
    # selection, share that was read, steps, their name, fetched rows, all rows
    SELECTED = auto()
    # why other steps read everything
    READ_ALL = auto()
    # selection, why
    NOT_SELECTED = auto()
    DRAFTS_OFF = auto()


class Reason(NamedTuple):
    """One reason of a plan; `ReasonKind` says what its values are."""

    kind: ReasonKind
    values: tuple[int | float | str, ...] = ()


# Methods that a client may ask for by name; it asks for a split by its tokens.
FORCED_METHODS = (RestoreMethod.LOAD, RestoreMethod.TOKENS)


@dataclass(frozen=True, slots=True)
class ForcedRestore:
    """How a client wants its cached prefix to come back, in place of the planner's choice.

    Attributes:
        split_tokens: cached tokens to rebuild from activations, as far as there are as many; the
            others are loaded. None: they are recomputed from their ids.
    """

    split_tokens: int | None

    @classmethod
    def of(cls, split_tokens: int | None, method: RestoreMethod | None) -> ForcedRestore | None:
        """Return what a client asks for, by one of the two; None if by neither.

        Raises InvalidArgument.
        """
        if split_tokens is not None and split_tokens < 0:
            raise InvalidArgument("split_tokens must be at least 0", field="split_tokens")
        if method is None:
            return None if split_tokens is None else cls(split_tokens)
        if method not in FORCED_METHODS:
            names = " or ".join(kind.value for kind in FORCED_METHODS)
            raise InvalidArgument(
                f"restore_method can be {names}, not {method.value} (split_tokens says how much "
                "is rebuilt from activations)",
                field="restore_method",
            )
        if split_tokens is not None:
            raise InvalidArgument(
                "give restore_method or split_tokens, not both", field="restore_method"
            )
        return LOADED if method is RestoreMethod.LOAD else RECOMPUTED

    def check(self, residency: Residency | None, *, has_activations: bool = True) -> None:
        """Raise InvalidArgument for a residency or a store with which it is not possible."""
        if self.split_tokens and not has_activations:
            raise InvalidArgument(
                "the store holds no activations, so nothing can be rebuilt from them: "
                "only split 0 is possible (start with --activations always)",
                field="split_tokens",
                reason="NO_ACTIVATIONS",
            )
        if self == RECOMPUTED and residency is Residency.STREAMED:
            raise InvalidArgument(
                "a streamed prefix is loaded or rebuilt in every step, so recomputing it from "
                "token ids can only be asked for with resident residency",
                field="restore_method",
            )


LOADED, RECOMPUTED = ForcedRestore(0), ForcedRestore(None)


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One request, as the planner sees it. Token counts; footprint in bytes."""

    cached_tokens: int
    new_tokens: int
    has_activations: bool
    schedule: Schedule = Schedule.SERIAL
    residency: Residency = Residency.RESIDENT
    footprint_bytes: int = 0
    # None: the planner chooses.
    forced: ForcedRestore | None = None
    objective: Objective = Objective.LATENCY
    # Tokens that are stored at once: a split is a multiple of it, or everything.
    chunk_tokens: int = 1
    # Tokens of X that fit the staging memory, of which a tile takes at most half; 0: no bound.
    staging_tokens: int = 0
    # Most tokens of a prefill in one piece; 0: no bound.
    prefill_tokens: int = 0
    # How the store keeps K, V and X, and so the bytes that cross the link.
    encoding: Encoding = Encoding.NATIVE
    # Streamed: device memory for a part of the prefix that stays there.
    spare_bytes: int = 0
    # True if X may stay there (schedule ROW), not only K and V.
    keeps_activations: bool = False
    # Seconds of a decode step without its cache traffic. None: the profile's.
    step_compute_seconds: float | None = None

    @property
    def is_streamed(self) -> bool:
        return self.residency is Residency.STREAMED

    def __post_init__(self) -> None:
        least = {"cached_tokens": 0, "new_tokens": 1, "chunk_tokens": 1, "spare_bytes": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InvalidArgument(f"{name} must be at least {value}", field=name)
        if self.forced is not None:
            self.forced.check(self.residency, has_activations=self.has_activations)


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's answer: types.proto's Plan without its words, which `words.py` adds."""

    residency: Residency
    method: RestoreMethod
    split_tokens: int
    cached_tokens: int
    new_tokens: int
    footprint_bytes: int
    predicted_restore_seconds: float
    predicted_load_seconds: float
    predicted_ttft_seconds: float
    # l(s) = clamp(slope * s + intercept, 0, cap), for a growing sequence.
    split_slope: float = 0.0
    split_intercept: float = 0.0
    split_cap: int = 0
    # Cached tokens that are fetched from another host's store or a tier first, and the
    # predicted seconds of that (part of predicted_ttft_seconds).
    fetched_tokens: int = 0
    predicted_fetch_seconds: float = 0.0
    schedule: Schedule = Schedule.SERIAL
    # With method TOKENS: [0, recomputed_tokens) is expected to be prefilled.
    recomputed_tokens: int = 0
    # Streamed: K,V of [0, resident_tokens) stay on the device, [resident_tokens,
    # split_tokens) is rebuilt in each step. Schedule ROW: X stays there.
    resident_tokens: int = 0
    # Tokens of X in one tile on the link; 0: the worker chooses.
    tile_tokens: int = 0
    # Streamed: predicted seconds of a decode step at this length.
    predicted_step_seconds: float = 0.0
    objective: Objective = Objective.LATENCY
    # Leading cached tokens that are on the device already, so that they are not restored.
    device_tokens: int = 0
    # Where fetched tokens come from: another store's address, or the name of a tier.
    fetch_source: str = ""
    # How they come from another store: "direct" or "stream"; after the request, how they came,
    # which may be "direct, stream". Empty: they come from a tier, or there are none.
    fetch_transfer: str = ""
    # Predicted seconds of computing what is restored from token ids. 0: nothing, or unknown.
    predicted_recompute_seconds: float = 0.0
    # What led to it, in the order of the decisions.
    reasons: tuple[Reason, ...] = ()

    def because(self, *reasons: Reason, **changes: Any) -> Plan:
        """Return the plan with further reasons, and with new values of its fields."""
        return replace(self, reasons=(*self.reasons, *reasons), **changes)

    @property
    def kappa_ratio(self) -> float:
        """K / T: cached over new tokens."""
        return self.cached_tokens / self.new_tokens
