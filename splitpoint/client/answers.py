"""What the clients return: plain dataclasses made from the wire's messages.

Knows no channel and no call; the blocking and the asyncio client share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from grpc_health.v1 import health_pb2

from splitpoint.client.telemetry import Telemetry, telemetry_from_proto
from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal
from splitpoint.planning.planner import Plan
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape
from splitpoint.transport import convert
from splitpoint.v1 import scheduler_pb2, types_pb2


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at one position; `top` is (token id, logprob), likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some generated tokens, and the text that became certain with them.

    `index` is that of the first token, counted from 0. Text may lag behind
    the tokens; the concatenation over all events is the answer. `token_ids`
    is empty when only held-back text follows.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the store, not from a prefill."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Seconds are the scheduler's, from the arrival of the request.

    `step_seconds`: of a streamed request's mean decode step, by its worker; None: it was
    resident, or no token was decoded.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | None
    usage: Usage
    seed: int
    plan: Plan | None
    worker: str
    request_id: str
    logprobs: tuple[Logprobs, ...]
    queue_seconds: float
    restore_seconds: float
    ttft_seconds: float
    seconds: float
    step_seconds: float | None = None


class CompletionBuilder:
    """Puts the messages of one Generate call together and checks that none is missing."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprobs] = []

    def events(self, message: scheduler_pb2.GenerateResponse) -> Iterator[Tokens | Completion]:
        """The events of one message. Raises Internal for a gap in the token indices."""
        if message.HasField("chunk"):
            yield self._tokens(message.chunk)
        elif message.HasField("complete"):
            if message.complete.text:
                self._text.append(message.complete.text)
                yield Tokens(len(self._token_ids), (), message.complete.text)
            yield self._completion(message.complete)

    def _tokens(self, chunk: scheduler_pb2.GenerateChunk) -> Tokens:
        if chunk.index != len(self._token_ids):
            raise Internal(
                f"the server sent token {chunk.index} where {len(self._token_ids)} was due",
                reason="TOKEN_GAP",
            )
        tokens = Tokens(
            chunk.index,
            tuple(chunk.token_ids),
            chunk.text,
            tuple(
                Logprobs(
                    entry.chosen_logprob, tuple((item.token_id, item.logprob) for item in entry.top)
                )
                for entry in chunk.logprobs
            ),
        )
        self._token_ids += tokens.token_ids
        self._text.append(tokens.text)
        self._logprobs += tokens.logprobs
        return tokens

    def _completion(self, message: scheduler_pb2.GenerateComplete) -> Completion:
        reason = _FINISH_REASONS.get(message.finish_reason)
        if reason is None:
            raise Internal(f"unknown finish reason {message.finish_reason}")
        return Completion(
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finish_reason=reason,
            matched_stop=message.matched_stop or None,
            usage=Usage(
                message.usage.prompt_tokens,
                message.usage.completion_tokens,
                message.usage.cached_tokens,
            ),
            seed=message.seed,
            plan=convert.plan_from_proto(message.plan) if message.HasField("plan") else None,
            worker=message.worker_id,
            request_id=message.request_id,
            logprobs=tuple(self._logprobs),
            queue_seconds=message.queue_seconds,
            restore_seconds=message.restore_seconds,
            ttft_seconds=message.ttft_seconds,
            seconds=message.total_seconds,
            step_seconds=message.step_seconds if message.HasField("step_seconds") else None,
        )


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids and, in the same order, the tokens' own spelling."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


def tokenization(message: scheduler_pb2.TokenizeResponse) -> Tokenization:
    return Tokenization(tuple(message.token_ids), tuple(message.tokens))


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `context_length` bounds prompt + max_tokens."""

    name: str
    shape: ModelShape
    ready_worker_count: int
    context_length: int
    has_tokenizer: bool
    has_activations: bool
    chunk_tokens: int
    # How the store keeps the cache; unless native, what follows a reused prefix is
    # approximate.
    kv_encoding: Encoding = Encoding.NATIVE


def model(message: scheduler_pb2.GetModelResponse) -> Model:
    return _model(message.model)


def models(message: scheduler_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(_model(entry) for entry in message.models)


def _model(message: scheduler_pb2.Model) -> Model:
    return Model(
        name=message.name,
        shape=convert.shape_from_proto(message.shape),
        ready_worker_count=message.ready_worker_count,
        context_length=message.context_length,
        has_tokenizer=message.has_tokenizer,
        has_activations=message.has_activations,
        chunk_tokens=message.chunk_tokens,
        kv_encoding=convert.encoding_from_proto(message.kv_encoding),
    )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one worker would do; without a plan, `rejection` says why it never could."""

    worker: str
    plan: Plan | None
    rejection: str


def worker_plans(message: scheduler_pb2.ExplainPlanResponse) -> tuple[WorkerPlan, ...]:
    return tuple(
        WorkerPlan(
            entry.worker_id,
            convert.plan_from_proto(entry.plan) if entry.HasField("plan") else None,
            entry.rejection,
        )
        for entry in message.plans
    )


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the scheduler sees it. Bytes of device memory for caches.

    `emulated_link_bytes_per_second`: None: its link is what it is. `weights`: which are
    on the host, and why; empty: none. `telemetry`: the latest; None: none yet, or it is
    lost. `kappa_crit`: cached over new tokens above which its link is the limit; None:
    not known.
    """

    id: str
    address: str
    ready: bool
    draining: bool
    device: str
    cache_capacity_bytes: int
    cache_charged_bytes: int
    running_count: int
    profile: Profile | None
    kvstore_address: str
    message: str
    schedule: Schedule = Schedule.SERIAL
    emulated_link_bytes_per_second: float | None = None
    weights: str = ""
    telemetry: Telemetry | None = None
    # Times its stream broke, no drain announcing it, and how long ago it last did.
    loss_count: int = 0
    last_lost_seconds_ago: float | None = None
    kappa_crit: float | None = None


def workers(message: scheduler_pb2.ListWorkersResponse) -> tuple[Worker, ...]:
    return tuple(
        Worker(
            id=entry.worker_id,
            address=entry.address,
            ready=entry.ready,
            draining=entry.draining,
            device=entry.device,
            cache_capacity_bytes=entry.cache_capacity_bytes,
            cache_charged_bytes=entry.cache_charged_bytes,
            running_count=entry.running_count,
            # A worker that never answered has not measured anything.
            profile=convert.profile_from_proto(entry.profile)
            if entry.profile.link_bytes_per_second
            else None,
            kvstore_address=entry.kvstore_address,
            message=entry.message,
            schedule=convert.schedule_from_proto(entry.schedule),
            emulated_link_bytes_per_second=entry.emulated_link_bytes_per_second or None,
            weights=entry.weights,
            telemetry=telemetry_from_proto(entry.telemetry)
            if entry.HasField("telemetry")
            else None,
            loss_count=entry.loss_count,
            last_lost_seconds_ago=entry.last_lost_seconds_ago
            if entry.HasField("last_lost_seconds_ago")
            else None,
            kappa_crit=entry.kappa_crit or None,
        )
        for entry in message.workers
    )


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits, and why. `position` counts from 0."""

    request_id: str
    position: int
    footprint_bytes: int
    waited_seconds: float
    reason: str
    # Whose it is; request ids are unique within a tenant.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """The waiting requests, first one first, and how many there may be."""

    requests: tuple[QueuedRequest, ...]
    capacity: int


def queue(message: scheduler_pb2.GetQueueResponse) -> Queue:
    return Queue(
        tuple(
            QueuedRequest(
                entry.request_id,
                entry.position,
                entry.footprint_bytes,
                entry.waited_duration.ToNanoseconds() / 1e9,
                entry.reason,
                entry.tenant,
            )
            for entry in message.requests
        ),
        message.capacity,
    )


def is_serving(message: health_pb2.HealthCheckResponse) -> bool:
    return bool(message.status == health_pb2.HealthCheckResponse.SERVING)
