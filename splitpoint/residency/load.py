"""What residency is decided for: alike requests that wait at once for one idle device."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape, chunks_of

# Tokens that a sequence decodes before another one takes its place, if nothing else is said.
SLICE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """`request_count` alike requests. Token counts are of one request.

    Attributes:
        prompt_tokens: all of the prompt; at least 1 of it is not cached.
        cached_tokens: the leading ones whose K and V the store holds.
        answer_tokens: generated tokens.
        shared_tokens: the leading cached ones that all requests have in common. On the
            device they lie once, and cross the link once for all that decode together.
    """

    request_count: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("request_count", self.request_count, 1, None),
            ("prompt_tokens", self.prompt_tokens, 1, None),
            ("answer_tokens", self.answer_tokens, 1, None),
            ("cached_tokens", self.cached_tokens, 0, self.prompt_tokens - 1),
            ("shared_tokens", self.shared_tokens, 0, self.cached_tokens),
        ):
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
                raise InvalidArgument(f"{name} must be {allowed}, not {value}", field=name)

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that are prefilled."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def token_count(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def mean_length(self) -> int:
        """Length of the sequence half way through its answer."""
        return self.prompt_tokens + self.answer_tokens // 2

    @property
    def step_count(self) -> int:
        """Decode steps of one request: the prefill chooses the first token."""
        return self.answer_tokens - 1


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """One worker's device memory for caches, and how it moves them.

    Attributes:
        cache_bytes: memory for K and V.
        streamed_pages: pages of one streamed request, whatever its length.
        max_batch: sequences that decode together.
        has_store: False: nothing can be streamed, or leave the device and come back.
        has_activations: the store keeps X.
        staging_tokens: tokens of X that fit the staging memory; 0: no bound.
        prefill_tokens: most tokens of a prefill in one piece; 0: no bound.
        step_compute_seconds: of a decode step of one sequence without its cache traffic.
            None: the profile's, or that of reading all weights from device memory.
        slice_tokens: tokens that a sequence decodes before it leaves, with time slices.
    """

    cache_bytes: int
    streamed_pages: int
    max_batch: int
    has_activations: bool
    has_store: bool = True
    chunk_tokens: int = 64
    staging_tokens: int = 0
    prefill_tokens: int = 0
    schedule: Schedule = Schedule.PIPELINED
    encoding: Encoding = Encoding.NATIVE
    objective: Objective = Objective.LATENCY
    step_compute_seconds: float | None = None
    slice_tokens: int = SLICE_TOKENS

    def __post_init__(self) -> None:
        for name, least in (
            ("cache_bytes", 0),
            ("streamed_pages", 1),
            ("max_batch", 1),
            ("chunk_tokens", 1),
            ("slice_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidArgument(f"{name} must be at least {least}", field=name)

    def page_count(self, shape: ModelShape) -> int:
        """Return the pages of the cache."""
        return self.cache_bytes // shape.page_bytes(self.chunk_tokens)

    def resident_at_once(self, shape: ModelShape, load: RequestLoad) -> int:
        """Return how many requests fit with the whole cache on the device; 0: not even one.

        Whole shared chunks are held once.
        """
        shared = load.shared_tokens // self.chunk_tokens
        own = chunks_of(load.token_count, self.chunk_tokens) - shared
        room = self.page_count(shape) - shared
        return max(0, min(load.request_count, self.max_batch, room // own))

    def streamed_at_once(self, shape: ModelShape, load: RequestLoad) -> int:
        """Return how many requests can be streamed together; 0: not even one."""
        if not self.has_store:
            return 0
        pages = min(self.streamed_pages, chunks_of(load.token_count, self.chunk_tokens))
        return min(load.request_count, self.max_batch, self.page_count(shape) // pages)

    def spare_bytes(self, shape: ModelShape, load: RequestLoad, streamed_count: int) -> int:
        """Return the memory in which parts of so many streamed caches may stay."""
        whole = chunks_of(load.token_count, self.chunk_tokens)
        pages = min(self.streamed_pages, whole)
        free = self.page_count(shape) - streamed_count * pages
        most = streamed_count * (whole - pages)
        return max(0, min(free, most)) * shape.page_bytes(self.chunk_tokens)
