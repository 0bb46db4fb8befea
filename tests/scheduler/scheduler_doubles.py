"""Doubles of worker and store that speak the real protocol without a model, and a stack of them.

The worker's tokens are a hash of (prompt, index), so any answer can be checked
without having been there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import xxhash

from scheduler_service.api.output import Output
from scheduler_service.api.request import Request
from scheduler_service.limits import Limits
from scheduler_service.options import SchedulerOptions, ServedModel
from scheduler_service.placement.account import Charge, Need, WorkerAccount
from scheduler_service.placement.footprint import Fits
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.prefixes.lookup import CachedPrefix
from scheduler_service.requests.admission import AdmissionQueue
from scheduler_service.requests.attempt import Attempt
from scheduler_service.service import Scheduler
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.resolve import eos_token_ids
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition, SplitpointError
from splitpoint.keys import pack_tokens
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.planning.plan import Objective, ReasonKind, Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import FULL, Selection
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from splitpoint.transport import channels, servers, statuses
from splitpoint.transport.convert import (
    layout_to_proto,
    plan_from_proto,
    profile_to_proto,
    schedule_to_proto,
    shape_to_proto,
)
from splitpoint.v1 import (
    kvstore_pb2,
    kvstore_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL_FOLDER = ROOT / "models" / "stdlib-llama"
SHAPE = shape_from_config(read_config(MODEL_FOLDER), name="stdlib-llama")
_LOADED = Tokenizer.load(MODEL_FOLDER)
assert _LOADED is not None
TOKENIZER: Tokenizer = _LOADED
MODEL = ServedModel(SHAPE, TOKENIZER, frozenset(eos_token_ids(MODEL_FOLDER)))
CHUNK_TOKENS = 16
PAGE_BYTES = SHAPE.page_bytes(CHUNK_TOKENS)
PROFILE = Profile(1e9, 1e-5, 1e10, 1e-5, 1e10, "a double")
LAYOUT = ArenaLayout.of(SHAPE, chunk_tokens=CHUNK_TOKENS, has_activations=True)


def worker_facts(pages: int, max_batch_size: int, **others: Any) -> WorkerFacts:
    """Return what the scheduler knows of a worker of the bundled model without a store.

    `pages`: of its cache. `others`: fields of WorkerFacts, such as those of a store.
    """
    facts = WorkerFacts(
        worker_id="0",
        address="127.0.0.1:1",
        shape=SHAPE,
        profile=PROFILE,
        chunk_tokens=CHUNK_TOKENS,
        has_activations=True,
        cache_capacity_bytes=pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        streamed_page_count=3,
        max_batch_size=max_batch_size,
    )
    return replace(facts, **others)


def token_at(prompt: Sequence[int], index: int, vocabulary: int = SHAPE.vocabulary_size) -> int:
    """Return a token that is neither of the two special ones."""
    seed = xxhash.xxh3_64_intdigest(pack_tokens([*prompt, index]))
    return 2 + seed % (vocabulary - 2)


def answer(prompt: Sequence[int], count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]


@dataclass(slots=True, eq=False)
class Running:
    command: worker_pb2.AdmitCommand
    prompt: tuple[int, ...]
    produced: int
    pages: int
    paused: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.command.request_id, self.command.attempt


class WorkerDouble(worker_pb2_grpc.WorkerServiceServicer):
    """Runs requests without a model: one token of each per step.

    Attributes to set: `pace` (awaited before each step), `token_of`,
    `cached_tokens` and `met_at` (what restores report), `profile`, `refusal` (an error for the next
    admits), `mangle` (changes each outgoing message).
    Attributes to read: `admits`, `cancels`, `pauses`, `resumes`, `most_pages`, `most_running`,
    `steps`.
    """

    def __init__(
        self,
        worker_id: str = "0",
        *,
        capacity_pages: int = 64,
        streamed_pages: int = 3,
        max_batch: int = 64,
        kvstore_address: str = "",
        shape: ModelShape = SHAPE,
        has_activations: bool = True,
        schedule: Schedule = Schedule.SERIAL,
        profile: Profile = PROFILE,
    ) -> None:
        self.schedule = schedule
        self.profile = profile
        # Where token ids and loaded chunks meet; None: where the plan says.
        self.met_at: int | None = None
        # mean_step_seconds of every finish; None: absent.
        self.mean_step_seconds: float | None = None
        self.worker_id = worker_id
        self.capacity_pages = capacity_pages
        self.streamed_pages = streamed_pages
        self.max_batch = max_batch
        self.kvstore_address = kvstore_address
        self.shape = shape
        self.layout = replace(LAYOUT, has_activations=has_activations)
        self.pace: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.token_of: Callable[[Sequence[int], int], int] = token_at
        self.cached_tokens: int | None = None
        self.refusal: SplitpointError | None = None
        self.mangle: Callable[[worker_pb2.RunResponse], list[worker_pb2.RunResponse]] = (
            lambda response: [response]
        )
        self.reject_info: SplitpointError | None = None
        self.speculation: types_pb2.Speculation | None = None
        self.selections: list[types_pb2.SelectionSupport] = []
        self.has_structured_output = False
        self.numerics = types_pb2.NUMERICS_UNSPECIFIED
        self.numerics_reason = self.numerics_digest = ""
        self.admits: list[worker_pb2.AdmitCommand] = []
        self.cancels: list[tuple[str, int]] = []
        self.pauses: list[str] = []
        self.resumes: list[str] = []
        self.running: dict[tuple[str, int], Running] = {}
        self.most_pages = self.most_running = 0
        self.steps = 0
        self.address = ""
        self._finishes: list[worker_pb2.RequestFinish] = []
        self._restores: list[worker_pb2.RestoreReport] = []
        self._telemetry: types_pb2.Telemetry | None = None
        self._server: grpc.aio.Server | None = None
        self._health: servers.HealthReporter | None = None
        self._work = asyncio.Event()
        self._stream_open = False

    def report(self, telemetry: types_pb2.Telemetry) -> None:
        """Send telemetry with the next message, at once if nothing runs."""
        self._telemetry = telemetry
        self._work.set()

    # -- life ----------------------------------------------------------------------

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = servers.create_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._health = servers.HealthReporter(self._server)
        await self._health.set("splitpoint.v1.WorkerService", True)
        self.address = servers.listen(self._server, address)
        await self._server.start()
        return self.address

    async def kill(self) -> None:
        """Break all streams at once and lose what ran."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)
        self.running.clear()

    async def drain(self) -> None:
        if self._health is not None:
            await self._health.set("splitpoint.v1.WorkerService", False)

    # -- the service -----------------------------------------------------------------

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        if self.reject_info is not None:
            raise self.reject_info
        return worker_pb2.GetInfoResponse(
            worker_id=self.worker_id,
            instance_id=b"i" * 16,
            shape=shape_to_proto(self.shape),
            layout=layout_to_proto(self.layout),
            kvstore_address=self.kvstore_address,
            device="double",
            cache_capacity_bytes=self.capacity_pages * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            streamed_page_count=self.streamed_pages,
            max_batch_size=self.max_batch,
            max_batched_tokens=64,
            profile=profile_to_proto(self.profile),
            schedule=schedule_to_proto(self.schedule),
            staging_tokens=8 * CHUNK_TOKENS,
            shares_pages=True,
            speculation=self.speculation,
            selections=self.selections,
            has_structured_output=self.has_structured_output,
            numerics=self.numerics,
            numerics_reason=self.numerics_reason,
            numerics_digest=self.numerics_digest,
        )

    async def Run(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.RunResponse]:
        if self._stream_open:
            raise FailedPrecondition("another stream is open")
        self._stream_open = True
        await context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                while not (self._finishes or self._restores or self._telemetry or self._active()):
                    self._work.clear()
                    await self._work.wait()
                await self.pace()
                for message in self.mangle(self._step()):
                    yield message
        finally:
            reader.cancel()
            self.running.clear()
            self._stream_open = False

    def _active(self) -> list[Running]:
        return [request for request in self.running.values() if not request.paused]

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            match request.WhichOneof("command"):
                case "admit":
                    self._admit(request.admit)
                case "cancel":
                    key = (request.cancel.request_id, request.cancel.attempt)
                    self.cancels.append(key)
                    if self.running.pop(key, None) is not None:
                        self._finish(key, reason=types_pb2.FINISH_REASON_CANCELLED)
                case "pause":
                    self.pauses.append(request.pause.request_id)
                    self._set_paused(request.pause.request_id, True)
                case "resume":
                    self.resumes.append(request.resume.request_id)
                    self._set_paused(request.resume.request_id, False)
            self._work.set()

    def _set_paused(self, request_id: str, paused: bool) -> None:
        for request in self.running.values():
            if request.command.request_id == request_id:
                request.paused = paused

    def _admit(self, command: worker_pb2.AdmitCommand) -> None:
        self.admits.append(command)
        key = (command.request_id, command.attempt)
        if self.refusal is not None:
            self._finish(key, error=self.refusal)
            return
        prompt = tuple(command.prompt_token_ids)
        pages = chunks_of(len(prompt) + command.sampling.max_tokens, CHUNK_TOKENS)
        if command.plan.residency == types_pb2.RESIDENCY_STREAMED:
            pages = min(pages, self.streamed_pages)
        request = Running(command, prompt, len(command.delivered_token_ids), pages)
        self.running[key] = request
        self.most_pages = max(self.most_pages, sum(r.pages for r in self.running.values()))
        self.most_running = max(self.most_running, len(self.running))
        cached = command.plan.cached_tokens if self.cached_tokens is None else self.cached_tokens
        split = min(command.plan.split_tokens, cached)
        if command.HasField("forced_split_tokens"):
            split = min(command.forced_split_tokens, cached)
        method = types_pb2.RESTORE_METHOD_NONE
        if cached:
            method = (
                types_pb2.RESTORE_METHOD_LOAD
                if split == 0
                else types_pb2.RESTORE_METHOD_RECOMPUTE
                if split == cached
                else types_pb2.RESTORE_METHOD_SPLIT
            )
        recomputed = 0
        if command.plan.method == types_pb2.RESTORE_METHOD_TOKENS:
            method = command.plan.method
            recomputed = command.plan.recomputed_tokens if self.met_at is None else self.met_at
        self._restores.append(
            worker_pb2.RestoreReport(
                request_id=command.request_id,
                attempt=command.attempt,
                cached_tokens=cached,
                split_tokens=split,
                method=method,
                restore_seconds=0.25,
                recomputed_tokens=recomputed,
            )
        )

    def _finish(
        self,
        key: tuple[str, int],
        *,
        reason: Any = 0,
        error: SplitpointError | None = None,
    ) -> None:
        finish = worker_pb2.RequestFinish(request_id=key[0], attempt=key[1], reason=reason)
        if self.mean_step_seconds is not None:
            finish.mean_step_seconds = self.mean_step_seconds
        if error is not None:
            finish.error_code, finish.error_message = error.code, error.message
        self._finishes.append(finish)

    def _step(self) -> worker_pb2.RunResponse:
        self.steps += 1
        response = worker_pb2.RunResponse(step=self.steps)
        for request in self._active():
            command = request.command
            token = self.token_of(request.prompt, request.produced)
            result = response.tokens.add(
                request_id=command.request_id,
                attempt=command.attempt,
                first_index=request.produced,
                token_ids=[token],
            )
            if command.sampling.HasField("logprobs"):
                result.logprobs.add(
                    chosen_logprob=-1.0,
                    top=[
                        types_pb2.TokenLogprob(token_id=n, logprob=-n)
                        for n in range(command.sampling.logprobs)
                    ],
                )
            request.produced += 1
            stopped = token in command.sampling.stop_token_ids
            if stopped or request.produced >= command.sampling.max_tokens:
                del self.running[request.key]
                self._finish(
                    request.key,
                    reason=types_pb2.FINISH_REASON_STOP
                    if stopped
                    else types_pb2.FINISH_REASON_LENGTH,
                )
        response.restores.extend(self._restores)
        response.finishes.extend(self._finishes)
        if self._telemetry is not None:
            response.telemetry.CopyFrom(self._telemetry)
        self._restores, self._finishes, self._telemetry = [], [], None
        response.running_count = len(self.running)
        return response


class StoreDouble(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Answers how many tokens are cached, and stores nothing."""

    def __init__(self, cached_tokens: int = 0, slot_count: int = 1000) -> None:
        self.cached_tokens = cached_tokens
        self.slot_count = slot_count
        self.salts: list[bytes] = []
        self.stalled = False
        self._server = servers.create_server()

    async def start(self) -> str:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self, self._server)
        address = servers.listen(self._server, "127.0.0.1:0")
        await self._server.start()
        return address

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Match(self, request: Any, context: Any) -> kvstore_pb2.MatchResponse:
        self.salts.append(request.tenant_salt)
        if self.stalled:
            await asyncio.Event().wait()
        return kvstore_pb2.MatchResponse(
            cached_tokens=min(self.cached_tokens, len(request.token_ids))
        )

    async def GetStats(self, request: Any, context: Any) -> kvstore_pb2.GetStatsResponse:
        return kvstore_pb2.GetStatsResponse(slot_count=self.slot_count)


class Steps:
    """A pace that tests control: the worker waits after `allow(n)` steps."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    async def __call__(self) -> None:
        await self._permits.acquire()


def paced_worker(worker_id: str = "0", **fields: Any) -> tuple[WorkerDouble, Steps]:
    """Return a worker, and what allows its steps."""
    worker = WorkerDouble(worker_id, **fields)
    worker.pace = steps = Steps()
    return worker, steps


class FakeClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Answer:
    """All messages of one Generate call."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chunks: list[scheduler_pb2.GenerateChunk] = field(default_factory=list)
    complete: scheduler_pb2.GenerateComplete | None = None

    @property
    def done(self) -> scheduler_pb2.GenerateComplete:
        if self.complete is None:
            raise RuntimeError("the answer is not complete")
        return self.complete


class Stack:
    """A scheduler over workers, with a client's stubs."""

    def __init__(self, scheduler: Scheduler, address: str, workers: list[WorkerDouble]) -> None:
        self.scheduler = scheduler
        self.address = address
        self.workers = workers
        self.channel = channels.open_channel(address)
        self.inference: Any = scheduler_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin: Any = scheduler_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def manager(self) -> Any:
        return self.scheduler.manager

    async def generate(self, request: scheduler_pb2.GenerateRequest, timeout: float = 60) -> Answer:
        """Return a complete answer. Checks that indices count from 0 without gaps."""
        result = Answer()
        call = self.inference.Generate(request, timeout=timeout)
        try:
            async for response in call:
                if result.complete is not None:
                    raise RuntimeError("something followed `complete`")
                if response.HasField("complete"):
                    result.complete = response.complete
                    result.text += response.complete.text
                    continue
                if response.chunk.index != len(result.token_ids):
                    raise RuntimeError(f"index {response.chunk.index} is out of order")
                result.chunks.append(response.chunk)
                result.token_ids += response.chunk.token_ids
                result.text += response.chunk.text
        finally:
            call.cancel()
        return result

    async def error(self, request: scheduler_pb2.GenerateRequest, **kw: Any) -> SplitpointError:
        """Return the error of a call that must fail."""
        try:
            await self.generate(request, **kw)
        except grpc.RpcError as error:
            return statuses.error_of(error)
        raise RuntimeError("the call did not fail")

    async def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        """Wait for a condition. Raises TimeoutError if it does not come true."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the awaited state did not come")
            await asyncio.sleep(0.005)

    async def all_ready(self) -> None:
        await self.until(lambda: len(self.scheduler.registry.ready()) == len(self.workers))


@asynccontextmanager
async def stack(
    *workers: WorkerDouble,
    limits: Limits | None = None,
    model: ServedModel = MODEL,
    clock: Callable[[], float] = time.monotonic,
    residency: Residency | None = None,
    objective: Objective = Objective.LATENCY,
    server_key: bytes = b"k" * 32,
    answer_charge: AnswerCharge = AnswerCharge.EXPECTED,
    policy: PolicySettings | None = None,
    absent: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """Run a scheduler until its workers are ready. Checks its accounts at the end.

    `absent`: addresses of workers that are not there.
    """
    doubles = list(workers) or [WorkerDouble()]
    for double in doubles:
        if not double.address:
            await double.start()
    scheduler = Scheduler(
        SchedulerOptions(
            model=model,
            worker_addresses=[*(double.address for double in doubles), *absent],
            server_key=server_key,
            limits=limits or Limits(),
            default_residency=residency,
            objective=objective,
            answer_charge=answer_charge,
            policy=policy or PolicySettings(),
            reflection=True,
        ),
        clock=clock,
    )
    address = await scheduler.start("127.0.0.1:0")
    running = Stack(scheduler, address, doubles)
    try:
        await running.all_ready()
        yield running
        problems = scheduler.manager.admission.check_integrity()
        if problems:
            raise RuntimeError(f"the accounts are wrong: {problems}")
    finally:
        await running.channel.close()
        await scheduler.stop(0)
        for double in doubles:
            await double.kill()


async def moved(
    running: Stack, reading: Coroutine[Any, Any, Answer], tokens: int
) -> tuple[Answer, WorkerDouble, WorkerDouble]:
    """Kill the one of two workers that runs a request once it has made this number of tokens.

    Return the answer, the worker that was killed, and the other one.
    """
    paces = {worker: Steps() for worker in running.workers}
    for worker, pace in paces.items():
        worker.pace = pace
    task = asyncio.create_task(reading)
    await running.until(lambda: any(worker.admits for worker in paces))
    victim, heir = sorted(paces, key=lambda worker: not worker.admits)
    [request] = running.manager.requests.running()
    count = len(request.output) + tokens
    paces[victim].allow(tokens)
    await running.until(lambda: len(request.output) == count)
    paces[heir].allow(1000)
    await victim.kill()
    return await task, victim, heir


def ids_request(
    prompt: Sequence[int], max_tokens: int | None = None, **fields: Any
) -> scheduler_pb2.GenerateRequest:
    request = scheduler_pb2.GenerateRequest(token_ids=scheduler_pb2.TokenIds(ids=prompt), **fields)
    if max_tokens is not None:
        request.sampling.max_tokens = max_tokens
    return request


def started(account: WorkerAccount, arrival: int, pages: int, marks: Sequence[bytes] = ()) -> None:
    """Start a request that takes this number of pages, beside those of chunks."""
    fits = Fits(Residency.RESIDENT, (pages + len(marks)) * account.facts.page_bytes)
    need = Need(fits, Charge(marks, pages), pages=pages, cached_tokens=0, new_tokens=1)
    account.start(queued_request(arrival, 2), need)


def queued_request(
    arrival: int,
    token_count: int,
    residency: Residency | None = None,
    worker_id: str = "",
    cached: dict[str, int] | None = None,
    selection: Selection = FULL,
) -> Request:
    """A request as admission sees it. `cached`: tokens in each worker's store."""
    request = Request(
        client_request_id=str(arrival),
        tenant="",
        body_digest=b"",
        prompt=(5,) * (token_count - 1),
        sampling=types_pb2.SamplingParams(max_tokens=1),
        worker_id=worker_id,
        residency=residency,
        selection=selection,
        arrival=arrival,
        cached=CachedPrefix(cached or {}),
    )
    request.output = Output(request.sampling, None, frozenset())
    return request


def admit_all(admission: AdmissionQueue) -> list[Attempt]:
    """Start what may start now."""
    admitted = []
    while (one := admission.admit()) is not None:
        admitted.append(one)
    return admitted


def reasons_of(plan: types_pb2.Plan) -> dict[ReasonKind, tuple[int | float | str, ...]]:
    """Return the values of each reason that a message gives."""
    return dict(plan_from_proto(plan).reasons)
