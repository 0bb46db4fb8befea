"""The clients' return values: plain dataclasses made from messages. Knows no channel.

Counters of workers and the scheduler start at zero with their process. Two readings, divided by
the difference of `uptime_seconds`, give rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from grpc_health.v1 import health_pb2

from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.words import ExplainedPlan
from splitpoint.selection import UNUSED, SelectionMethod, SelectionUsage
from splitpoint.shapes import Encoding, ModelShape, Numerics, WeightFormat
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.transport import convert
from splitpoint.transport.convert import from_message
from splitpoint.v1 import scheduler_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Counters of one worker, with units in their names; None: absent or unknown.

    The message of the same name in types.proto explains each field.
    """

    uptime_seconds: float
    step_count: int
    step_seconds: float
    prefilled_token_count: int
    generated_token_count: int
    link_in_bytes: int
    link_out_bytes: int
    link_in_busy_seconds: float
    link_out_busy_seconds: float
    compute_busy_seconds: float
    loaded_token_count: int
    rebuilt_token_count: int
    recomputed_token_count: int
    predicted_seconds: float
    measured_seconds: float
    cache_used_bytes: int
    split_tokens: int | None = None
    store_is_up: bool | None = None
    redis_is_up: bool | None = None
    link_ceiling_bytes_per_second: float | None = None
    pcie_rx_bytes: int | None = None
    pcie_tx_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_limit_watts: float | None = None
    energy_joules: float | None = None
    utilization_ratio: float | None = None
    device_message: str = ""
    cpu_energy_joules: float | None = None
    preemption_count: int = 0
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    eager_message: str = ""
    selection_step_count: int = 0
    selection_visible_token_count: int = 0
    selection_read_token_count: int = 0
    scheduled_token_count: int = 0


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """A service's connection to Redis. `address` has no user and no password."""

    address: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """One tenant's requests. `service_byte_seconds`: device memory times how long they had it."""

    tenant: str
    metrics_label: str
    weight: float
    running_count: int
    waiting_count: int
    oldest_wait_seconds: float
    service_byte_seconds: float


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counters of a scheduler since its start, and the requests that run and wait now.

    `failed_count` counts requests that ended with an error, `cancelled_count` those that
    their client gave up, `rejected_count` those that were never accepted. `redis` is None
    if the scheduler uses no Redis. A link-bound request's kappa_ratio was above its worker's
    kappa_crit when it was placed. `tenants`: the one with most service first. `decision_counts`:
    requests that started, by the policy's reason.
    """

    uptime_seconds: float
    running_count: int
    waiting_count: int
    completed_count: int
    failed_count: int
    rejected_count: int
    failover_count: int
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    ttft_count: int
    ttft_seconds_sum: float
    itl_count: int
    itl_seconds_sum: float
    cancelled_count: int = 0
    redis: RedisStatus | None = None
    oldest_wait_seconds: float = 0.0
    resumed_count: int = 0
    link_bound_count: int = 0
    link_bound_wait_seconds_sum: float = 0.0
    device_bound_count: int = 0
    device_bound_wait_seconds_sum: float = 0.0
    tenants: tuple[TenantStatus, ...] = ()
    decision_counts: Mapping[str, int] = field(default_factory=dict)


def telemetry_from_proto(message: types_pb2.Telemetry) -> Telemetry:
    return from_message(Telemetry, message)


def redis_status(message: types_pb2.RedisStatus) -> RedisStatus:
    return from_message(RedisStatus, message)


def scheduler_status(message: scheduler_pb2.GetSchedulerStatusResponse) -> SchedulerStatus:
    redis = redis_status(message.redis) if message.HasField("redis") else None
    return from_message(
        SchedulerStatus,
        message,
        redis=redis,
        tenants=tuple(from_message(TenantStatus, tenant) for tenant in message.tenants),
        decision_counts=dict(message.decision_counts),
    )


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
    """Natural log-probabilities at one position; `top`: (token id, logprob), likeliest first.

    `chosen_bytes` and `top_bytes` are the texts of these tokens, which need not be UTF-8 by
    themselves; empty from a model without a tokenizer.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    chosen_bytes: bytes = b""
    top_bytes: tuple[bytes, ...] = ()


def _logprobs(message: types_pb2.PositionLogprobs) -> Logprobs:
    top = tuple((item.token_id, item.logprob) for item in message.top)
    spelled = tuple(item.token_bytes for item in message.top)
    return Logprobs(message.chosen_logprob, top, message.chosen_token_bytes, spelled)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The natural log-probability of one token of the prompt, its rank from 1, and the likeliest
    tokens of its position as in `Logprobs`.

    The first token follows nothing: its `logprob` is None, its rank 0.
    """

    token_id: int
    logprob: float | None
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    token_bytes: bytes = b""
    top_bytes: tuple[bytes, ...] = ()


def _prompt_logprobs(message: types_pb2.PositionLogprobs) -> PromptLogprobs:
    found = _logprobs(message)
    logprob = found.chosen if message.chosen_rank else None
    return PromptLogprobs(
        message.chosen_token_id,
        logprob,
        message.chosen_rank,
        found.top,
        found.chosen_bytes,
        found.top_bytes,
    )


def drop_known(chunk: scheduler_pb2.GenerateChunk, known: int) -> int:
    """Take from a message the log-probabilities of prompt tokens that came before.

    Another scheduler sends them from the start. `known`: how many have come. Returns how many
    have come with the message. Raises Internal for a gap.
    """
    if not chunk.prompt_logprobs:
        return known
    if chunk.prompt_index > known:
        raise Internal(
            f"the server sent prompt token {chunk.prompt_index} where {known} was due",
            reason="TOKEN_GAP",
        )
    del chunk.prompt_logprobs[: known - chunk.prompt_index]
    chunk.prompt_index = known
    return known + len(chunk.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated tokens, and the text that became final with them.

    `index` is that of the first token, counted from 0. Text may lag behind the tokens;
    the concatenation over all events is the answer. `token_ids` is empty if only text
    follows that was held back.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """What the drafts of a request came to.

    `method` is the one that drafted most tokens; OFF if none drafted any. `draft_count` steps
    verified `draft_token_count` tokens and accepted `accepted_token_count` of them.
    """

    method: DraftMethod = DraftMethod.OFF
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the store instead of a prefill.

    `selection.is_approximate` says whether the text may differ from the exact one.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: SpeculationUsage = SpeculationUsage()
    selection: SelectionUsage = UNUSED


def _usage(message: scheduler_pb2.Usage) -> Usage:
    speculation = convert.from_message(SpeculationUsage, message.speculation)
    selection = convert.selection_usage_from_proto(message.selection)
    return convert.from_message(Usage, message, speculation=speculation, selection=selection)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. The scheduler measures the seconds, from the request's arrival.

    `step_seconds` is the mean decode step of a streamed request, measured by its worker;
    None if it was resident or no token was decoded.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | None
    usage: Usage
    seed: int
    plan: ExplainedPlan | None
    worker: str
    request_id: str
    logprobs: tuple[Logprobs, ...]
    queue_seconds: float
    restore_seconds: float
    ttft_seconds: float
    seconds: float
    step_seconds: float | None = None
    # One for each token of the prompt; empty if they were not asked for.
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class CompletionBuilder:
    """Join the messages of a generation's calls and check that none is missing."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._completion: Completion | None = None

    @property
    def is_complete(self) -> bool:
        """True if the final message has come."""
        return self._completion is not None

    def tokens_of(self, message: scheduler_pb2.GenerateResponse) -> Tokens | None:
        """Return the tokens or the text of one message; None if it has none.

        Raises Internal for a gap in the token indices.
        """
        if message.HasField("chunk"):
            return self._tokens(message.chunk)
        last = None
        if message.HasField("complete"):
            if message.complete.text:
                self._text.append(message.complete.text)
                last = Tokens(len(self.token_ids), (), message.complete.text)
            self._completion = self._complete(message.complete)
        return last

    def completion(self) -> Completion:
        """Return the whole answer. Raises Internal if the final message is missing."""
        if self._completion is None:
            raise Internal("the stream ended without its final message")
        return self._completion

    def _tokens(self, chunk: scheduler_pb2.GenerateChunk) -> Tokens | None:
        if chunk.prompt_logprobs:
            drop_known(chunk, len(self._prompt_logprobs))
            self._prompt_logprobs += map(_prompt_logprobs, chunk.prompt_logprobs)
            return None
        if chunk.index != len(self.token_ids):
            raise Internal(
                f"the server sent token {chunk.index} where {len(self.token_ids)} was due",
                reason="TOKEN_GAP",
            )
        # Most answers have none, and this runs for every token.
        logprobs = tuple(map(_logprobs, chunk.logprobs)) if chunk.logprobs else ()
        tokens = Tokens(chunk.index, tuple(chunk.token_ids), chunk.text, logprobs)
        self.token_ids += tokens.token_ids
        self._text.append(tokens.text)
        self._logprobs += logprobs
        return tokens

    def _complete(self, message: scheduler_pb2.GenerateComplete) -> Completion:
        reason = _FINISH_REASONS.get(message.finish_reason)
        if reason is None:
            raise Internal(f"unknown finish reason {message.finish_reason}")
        return convert.from_message(
            Completion,
            message,
            token_ids=tuple(self.token_ids),
            text="".join(self._text),
            finish_reason=reason,
            matched_stop=message.matched_stop or None,
            usage=_usage(message.usage),
            plan=convert.plan_from_proto(message.plan) if message.HasField("plan") else None,
            worker=message.worker_id,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            seconds=message.total_seconds,
        )


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids and, in the same order, the tokens' text in the vocabulary."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


def tokenization(message: scheduler_pb2.TokenizeResponse) -> Tokenization:
    return Tokenization(tuple(message.token_ids), tuple(message.tokens))


def detokenization(message: scheduler_pb2.DetokenizeResponse) -> str:
    return message.text


def tokenizer_files(messages: Iterable[scheduler_pb2.GetTokenizerResponse]) -> dict[str, bytes]:
    """Return the contents of each file of a tokenizer, by its name."""
    pieces: dict[str, list[bytes]] = {}
    for message in messages:
        pieces.setdefault(message.file_name, []).append(message.data)
    return {name: b"".join(parts) for name, parts in pieces.items()}


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
    # Encoding of the stored cache. Unless native, tokens after a reused prefix are
    # approximate.
    kv_encoding: Encoding = Encoding.NATIVE
    # Methods that a ready worker can draft by.
    draft_methods: tuple[DraftMethod, ...] = ()
    # Methods of selection that a ready worker can serve.
    selection_methods: tuple[SelectionMethod, ...] = ()
    # Invariant if all its ready workers are, and compute equal bits: have this digest.
    numerics: Numerics = Numerics.FAST
    numerics_digest: str = ""
    # INT8 if one of its ready workers has such weights.
    weight_format: WeightFormat = WeightFormat.NATIVE
    has_chat_template: bool = False
    # hermes, llama3_json or mistral; empty: the template teaches no calls of tools.
    tool_call_format: str = ""
    # A ready worker can follow json_schema, regex, grammar and choice.
    has_structured_output: bool = False


def model(message: scheduler_pb2.GetModelResponse) -> Model:
    return _model(message.model)


def models(message: scheduler_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(_model(entry) for entry in message.models)


def _model(message: scheduler_pb2.Model) -> Model:
    return convert.from_message(
        Model,
        message,
        shape=convert.shape_from_proto(message.shape),
        draft_methods=tuple(convert.known_draft_methods(message.draft_methods)),
        selection_methods=convert.selection_methods(
            message.selection_method_names, message.selection_methods
        ),
    )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The plan of one worker; without a plan, `rejection` says why it cannot run."""

    worker: str
    plan: ExplainedPlan | None
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
class WorkerSpeculation:
    """What a worker can draft by, and what requests get that leave it open.

    `draft_model` is the name of its draft model; empty if it has none.
    """

    defaults: Speculation
    methods: tuple[DraftMethod, ...]
    draft_model: str = ""


def _speculation(message: types_pb2.Speculation) -> WorkerSpeculation:
    return WorkerSpeculation(
        convert.speculation_from_proto(message.defaults).over(PLAIN),
        tuple(convert.known_draft_methods(message.methods)),
        message.draft_model,
    )


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the scheduler sees it. Cache sizes are bytes of device memory.

    Attributes:
        emulated_link_bytes_per_second: None if the link is real.
        weights: the weights on the host, and the reason; empty if all are on the device.
        telemetry: the latest; None if none came yet or the worker is lost.
        loss_count: times its stream broke without a drain before.
        kappa_crit: ratio of cached to new tokens above which the link is the limit;
            None if unknown.
        speculation: None if unknown.
        selection_methods: what it can select by.
        numerics_reason: why it has these numerics; empty if unknown.
        numerics_digest: equal for workers that compute equal bits, and so share chunks;
            empty for fast workers, which share chunks with each other.
        recent_kappa_ratio: cached over new tokens of the requests that it got lately; 0: none yet.
        advised_power_watts: a power cap that these leave room for, since the link is their
            limit; `advised_power_reason` says why. None: no advice. Nothing sets it.
        max_batch_size, batch_reason: most requests of a step, why, and what they cost; 0 and empty
            if unknown.
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
    loss_count: int = 0
    last_lost_seconds_ago: float | None = None
    kappa_crit: float | None = None
    speculation: WorkerSpeculation | None = None
    selection_methods: tuple[SelectionMethod, ...] = ()
    numerics: Numerics = Numerics.FAST
    numerics_reason: str = ""
    numerics_digest: str = ""
    weight_format: WeightFormat = WeightFormat.NATIVE
    recent_kappa_ratio: float = 0.0
    advised_power_watts: float | None = None
    advised_power_reason: str = ""
    max_batch_size: int = 0
    batch_reason: str = ""


def workers(message: scheduler_pb2.ListWorkersResponse) -> tuple[Worker, ...]:
    return tuple(
        convert.from_message(
            Worker,
            entry,
            id=entry.worker_id,
            # A worker that never answered has no measurements.
            profile=convert.profile_from_proto(entry.profile)
            if entry.profile.link_bytes_per_second
            else None,
            emulated_link_bytes_per_second=entry.emulated_link_bytes_per_second or None,
            telemetry=telemetry_from_proto(entry.telemetry)
            if entry.HasField("telemetry")
            else None,
            kappa_crit=entry.kappa_crit or None,
            speculation=_speculation(entry.speculation) if entry.HasField("speculation") else None,
            selection_methods=convert.selection_methods(
                entry.selection_method_names, entry.selection_methods
            ),
        )
        for entry in message.workers
    )


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits, and why. `position` counts from 0, in the order of turns.

    Attributes:
        footprint_bytes: its smallest charge on any ready worker; 0 if there is none.
        waited_seconds, queued_seconds: since its arrival; since it entered the queue last.
        reason: why it waits, in words.
        tenant: request ids are unique within it.
        waits_for: one word for it, such as memory, batch, turn or share (docs/scheduling.md).
        worker_id: the worker that lacks least for it, of which the following numbers are.
        cached_tokens, new_tokens, kappa_ratio: K, T, and K / T.
        missing_bytes: of device memory; 0 if something else is missing.
        has_reservation: memory is kept free for it.
        tenant_weight, tenant_share, tenant_entitled_share: the tenant's weight, its part of the
            memory and time charged, and its part of the weights, both 0 to 1.
    """

    request_id: str
    position: int
    footprint_bytes: int
    waited_seconds: float
    reason: str
    tenant: str = ""
    waits_for: str = ""
    queued_seconds: float = 0.0
    priority: int = 0
    worker_id: str = ""
    cached_tokens: int = 0
    new_tokens: int = 0
    kappa_ratio: float = 0.0
    missing_bytes: int = 0
    has_reservation: bool = False
    tenant_weight: float = 1.0
    tenant_share: float = 0.0
    tenant_entitled_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Queue:
    """The waiting requests in order, and the most that may wait."""

    requests: tuple[QueuedRequest, ...]
    capacity: int


def queue(message: scheduler_pb2.GetQueueResponse) -> Queue:
    return Queue(
        tuple(
            convert.from_message(
                QueuedRequest,
                entry,
                waited_seconds=entry.waited_duration.ToNanoseconds() / 1e9,
                queued_seconds=entry.queued_duration.ToNanoseconds() / 1e9,
            )
            for entry in message.requests
        ),
        message.capacity,
    )


def is_serving(message: health_pb2.HealthCheckResponse) -> bool:
    return bool(message.status == health_pb2.HealthCheckResponse.SERVING)
