"""One Generate request in the scheduler: what was asked, what has come, and its reader.

Clients choose request ids, so an id is unique only within its tenant: a tenant can
neither attach to the request of another nor find out that it exists.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_service.api.output import Output
from scheduler_service.api.tallies import DraftTally, SelectionTally
from scheduler_service.placement.demand import Demand
from splitpoint.config import counted
from splitpoint.errors import FailedPrecondition, OutOfRange, SplitpointError
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.speculation import AS_CONFIGURED, AskedSpeculation, DraftMethod
from splitpoint.v1 import scheduler_pb2, types_pb2

# Characters of a client's id that stay readable in the name of a tenant's request; with
# `~` and 24 random digits that makes 64, the longest id.
_READABLE_CHARACTERS = 39
# Names no drafter: every worker can follow these.
_ANY_DRAFTER = (None, DraftMethod.OFF, DraftMethod.AUTO)


class RequestListener(Protocol):
    """Is told what a request's readers do. Implemented by the request manager."""

    def on_pause(self, request: Request, paused: bool) -> None: ...

    def on_abandoned(self, request: Request) -> None: ...


@dataclass(slots=True, eq=False)
class Times:
    """Seconds on the scheduler's monotonic clock. None: not yet."""

    arrived: float = 0.0
    # When a worker was first told to run it.
    dispatched: float | None = None
    first_token: float | None = None
    # Cleared by a pause: the pause of a slow reader is no gap between tokens.
    last_token: float | None = None
    # When its cached prefix was last looked up.
    looked_up: float | None = None
    # Since when it waits without any ready worker that could run it.
    unplaceable: float | None = None

    def tokens_came(self, now: float) -> None:
        self.first_token = now if self.first_token is None else self.first_token
        self.last_token = now


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a client goes on reading, and the tokens that it has: none, or all before that."""

    next_index: int = 0
    token_ids: tuple[int, ...] = ()


FROM_THE_START = Resume()


@dataclass(slots=True, eq=False)
class Request(Demand):
    """A checked request. It is queued, placed and read in this form until it ends."""

    # -- what was asked; checked by validation and then unchanged

    # Chosen by the client, or drawn. Unique within the tenant.
    client_request_id: str
    # Equal for requests with equal fields, request_id and resume aside.
    body_digest: bytes
    prompt: tuple[int, ...]
    # As sent, with max_tokens and seed filled in.
    sampling: types_pb2.SamplingParams
    # The tokens of sampling.bad_words, each at least one.
    bad_words: tuple[tuple[int, ...], ...] = ()
    cache_salt: bytes = b""
    speculation: AskedSpeculation = AS_CONFIGURED
    # Where the client that sent it begins to read.
    resume: Resume = FROM_THE_START

    # -- set when it is accepted

    # Salt of its chunk keys.
    tenant_salt: bytes = b""
    output: Output = field(init=False)
    times: Times = field(default_factory=Times)
    # From its arrival to its end.
    span: Span = NO_SPAN
    listener: RequestListener = field(init=False)
    # A reader this many tokens behind pauses the request.
    lag_tokens: int = 0

    # -- what becomes of it

    # Its name for workers and logs. Clients cannot choose a name that is another request's.
    request_id: str = field(init=False)
    # Fewest tokens that a restore found cached. Later ones may find what the request stored itself,
    # or less, since damaged chunks are dropped. None: no worker has told.
    least_cached_tokens: int | None = None
    # Attempts that were lost; those whose worker was lost, or drained, and not through another
    # request; those that ended alone while their worker went on; and engines that failed with an
    # unknown cause while they ran it.
    losses: int = 0
    moves: int = 0
    refusals: int = 0
    engine_failures: int = 0
    drafts: DraftTally = field(default_factory=DraftTally)
    selected: SelectionTally = field(init=False)
    # Number of generated tokens at which it is no suspect any more. None: it never was one.
    cleared_at_tokens: int | None = None
    ended_at: float | None = None
    _complete: scheduler_pb2.GenerateComplete | None = field(default=None, init=False)
    _error: SplitpointError | None = field(default=None, init=False)
    _readers: set[Reader] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.selected = SelectionTally(self.selection, is_resumed=bool(self.resume.token_ids))
        self.request_id = self.client_request_id
        if self.tenant:
            readable = self.client_request_id[:_READABLE_CHARACTERS]
            self.request_id = f"{readable}~{secrets.token_hex(12)}"

    @property
    def is_structured(self) -> bool:
        return self.sampling.HasField("structured_output")

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.client_request_id

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)

    @property
    def generated_count(self) -> int:
        return len(self.output)

    @property
    def most_generated(self) -> int:
        return self.sampling.max_tokens

    @property
    def least_generated(self) -> int:
        return self.sampling.min_tokens

    @property
    def drafter(self) -> DraftMethod | None:
        method = self.speculation.method
        return None if method in _ANY_DRAFTER else method

    @property
    def runs_to_its_limit(self) -> bool:
        sampling = self.sampling
        return sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids)

    @property
    def is_suspect(self) -> bool:
        return self.cleared_at_tokens is not None and len(self.output) < self.cleared_at_tokens

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def has_completed(self) -> bool:
        """True if it ended well, so that a client that attaches gets the same answer."""
        return self._complete is not None

    # -- the producing side ---------------------------------------------------------

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.PositionLogprobs]
    ) -> None:
        """Add generated tokens; `wake_readers` tells the readers."""
        self.output.append(token_ids, logprobs)
        self.update_pause()

    def complete(self, message: scheduler_pb2.GenerateComplete, now: float) -> None:
        self._complete = message
        self.ended_at = now
        self.wake_readers()

    def fail(self, error: SplitpointError, now: float) -> None:
        self._error = error
        self.ended_at = now
        self.wake_readers()

    # -- the reading side -----------------------------------------------------------

    @contextmanager
    def attach(self, resume: Resume = FROM_THE_START) -> Iterator[Reader]:
        """Give a reader from `resume.next_index` on, for the length of the context.

        Raises what `check_resume` raises.
        """
        self.check_resume(resume)
        reader = Reader(self, resume)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self.has_ended:
                if self._readers:
                    self.update_pause()
                else:
                    self.listener.on_abandoned(self)

    def check_resume(self, resume: Resume) -> None:
        """Check that a client with these tokens can go on reading here.

        Raises FailedPrecondition (its tokens are others, or log-probabilities before next_index
        are missing) and OutOfRange (it asks for tokens beyond those that there are or will be).
        """
        produced, brought = self.output.token_ids, resume.token_ids
        common = min(len(produced), len(brought))
        if tuple(produced[:common]) != brought[:common]:
            raise FailedPrecondition(
                "this request has other tokens here than the client: start a new one",
                reason="RESUME_MISMATCH",
            )
        sampling = self.sampling
        wants_logprobs = sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")
        if resume.next_index < self.output.resumed_count and wants_logprobs:
            raise FailedPrecondition(
                "the log-probabilities of the tokens with which the request was resumed here "
                f"({self.output.resumed_count:,}) are not known",
                reason="RESUME_LOGPROBS",
            )
        # Tokens that are still to come can only be waited for by a client that has them.
        can_wait = bool(brought) and not self.has_completed
        if resume.next_index > len(produced) and not can_wait:
            raise OutOfRange(
                f"next_index is {resume.next_index}, and the request has "
                f"{counted(len(produced), 'token')}",
                reason="RESUME_BEYOND",
            )

    def next_response(
        self, cursor: int, prompt_cursor: int
    ) -> scheduler_pb2.GenerateResponse | None:
        """Return the next message of a reader at `cursor`; None: there is none yet.

        `prompt_cursor`: prompt tokens whose log-probabilities it has, if it has no token yet.
        Raises the error that ended the request, after all of its tokens.
        """
        if not cursor and (prompt := self.output.prompt_chunk(prompt_cursor)) is not None:
            return scheduler_pb2.GenerateResponse(chunk=prompt)
        if cursor < len(self.output):
            return scheduler_pb2.GenerateResponse(chunk=self.output.chunk(cursor))
        if self._error is not None:
            raise self._error
        if self._complete is not None:
            return scheduler_pb2.GenerateResponse(complete=self._complete)
        return None

    def wake_readers(self) -> None:
        """Let readers that wait go on."""
        for reader in self._readers:
            reader.wake()

    def update_pause(self) -> None:
        """Pause beyond the lag bound, resume at half of it."""
        slowest = count = len(self.output.token_ids)
        for reader in self._readers:
            slowest = min(slowest, reader.cursor)
        lag = count - slowest
        limit = self.lag_tokens // 2 if self.is_paused else self.lag_tokens
        paused = lag > limit and not self.has_ended
        if paused != self.is_paused:
            self.is_paused = paused
            self.times.last_token = None
            self.listener.on_pause(self, paused)


class Reader:
    """One client's place in a request. Iterate it for messages, the last one `complete`."""

    def __init__(self, request: Request, resume: Resume) -> None:
        # Tokens that the client has taken, and those in the message handed out last.
        self.cursor = resume.next_index
        # Prompt tokens whose log-probabilities were handed out: they come before the first token.
        self._prompt_cursor = 0
        # The client has tokens that were not produced here yet: they are compared when they come.
        self._ahead = resume if self.cursor > len(request.output) else None
        self._handed_out = 0
        self._is_done = False
        self._request = request
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> scheduler_pb2.GenerateResponse:
        """Return the next message; asking for it confirms the one before.

        Raises the request's error.
        """
        if self._is_done:
            raise StopAsyncIteration
        if self._handed_out:
            self.cursor += self._handed_out
            self._handed_out = 0
            self._request.update_pause()
        while True:
            self._news.clear()
            self._compare()
            response = self._request.next_response(self.cursor, self._prompt_cursor)
            if response is not None:
                self._prompt_cursor += len(response.chunk.prompt_logprobs)
                self._handed_out = len(response.chunk.token_ids)
                self._is_done = response.HasField("complete")
                return response
            await self._news.wait()

    def _compare(self) -> None:
        """Compare what the client had before it came here. Raises as `check_resume`."""
        if self._ahead is None:
            return
        self._request.check_resume(self._ahead)
        if len(self._request.output) >= self.cursor:
            self._ahead = None
