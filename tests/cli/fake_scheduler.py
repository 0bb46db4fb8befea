"""A scheduler at the clients' seam: real stubs and a real server, scripted answers.

It "generates" the prompt's own tokens again (of a chat those of its last message), one per
message, and fails in the ways its fields say.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from splitpoint.client import INFERENCE_SERVICE
from splitpoint.errors import InvalidArgument, ResourceExhausted, SplitpointError, Unavailable
from splitpoint.transport import servers
from splitpoint.transport.access import Access
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc, types_pb2

PLAN = types_pb2.Plan(
    residency=types_pb2.RESIDENCY_RESIDENT,
    method=types_pb2.RESTORE_METHOD_LOAD,
    reason="loaded: because this is a test",
    reason_details=["split 0: [nothing] is rebuilt", "resident: it fits"],
    cached_tokens=2,
    new_tokens=1,
    schedule=types_pb2.SCHEDULE_PIPELINED,
    predicted_restore_seconds=0.125,
    predicted_load_seconds=0.125,
)
SHAPE = types_pb2.ModelShape(
    name="tiny",
    family="llama",
    layer_count=1,
    hidden_size=8,
    query_head_count=2,
    kv_head_count=2,
    head_dim=4,
    intermediate_size=16,
    vocabulary_size=256,
    context_length=64,
    data_type=types_pb2.DATA_TYPE_FLOAT32,
)


@dataclass
class Script:
    """What the fake does, and what it saw."""

    failures: list[SplitpointError] = field(default_factory=list)
    # Ends the stream before the token of this index, so often; beyond the last token: after
    # the final message.
    fail_after: int | None = None
    fail_count: int = 1_000_000
    gap: bool = False
    endless: bool = False
    # No token ever comes.
    silent: bool = False
    workers_ready: bool = True
    has_chat_template: bool = True
    # Requests in the queue.
    waiting_count: int = 1
    # For worker 1.
    lost_address: str = ""
    tail: str = ""
    step_seconds: float | None = None
    selection: types_pb2.SelectionUsage | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    explained: list[pb.ExplainPlanRequest] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""


def _logprobs(sampling: types_pb2.SamplingParams, token: int) -> list[types_pb2.PositionLogprobs]:
    if not sampling.HasField("logprobs"):
        return []
    top = [
        types_pb2.TokenLogprob(
            token_id=token + more, logprob=-0.5 - more, token_bytes=bytes([token + more])
        )
        for more in range(sampling.logprobs)
    ]
    return [
        types_pb2.PositionLogprobs(chosen_logprob=-0.5, top=top, chosen_token_bytes=bytes([token]))
    ]


class FakeScheduler(
    scheduler_pb2_grpc.InferenceServiceServicer, scheduler_pb2_grpc.AdminServiceServicer
):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        script = self.script
        script.requests.append(request)
        if script.failures:
            raise script.failures.pop(0)
        text = request.text
        if request.HasField("chat"):
            text = json.loads(request.chat.messages)[-1]["content"]
        if not text and not request.token_ids.ids:
            raise InvalidArgument("the prompt is empty", field="prompt")
        ids = list(request.token_ids.ids) or list(text.encode())
        try:
            if script.silent:
                await asyncio.Event().wait()
            index = request.resume.next_index
            while index < len(ids) or script.endless:
                self._fail_at(index)
                token = ids[index % len(ids)]
                yield pb.GenerateResponse(
                    chunk=pb.GenerateChunk(
                        index=index + (1 if script.gap else 0),
                        token_ids=[token],
                        text=chr(token),
                        logprobs=_logprobs(request.sampling, token),
                    )
                )
                index += 1
                if script.endless:
                    await asyncio.sleep(0.01)
        except (asyncio.CancelledError, GeneratorExit):
            script.cancelled.set()
            raise
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                finish_reason=types_pb2.FINISH_REASON_LENGTH,
                usage=pb.Usage(
                    prompt_tokens=3,
                    completion_tokens=len(ids),
                    cached_tokens=2,
                    selection=script.selection,
                ),
                seed=7,
                plan=PLAN,
                worker_id="0",
                request_id=request.request_id,
                restore_seconds=0.0625,
                ttft_seconds=0.25,
                total_seconds=0.5,
                text=script.tail,
                step_seconds=script.step_seconds,
            )
        )
        self._fail_at(len(ids))

    def _fail_at(self, index: int) -> None:
        if index == self.script.fail_after and self.script.fail_count:
            self.script.fail_count -= 1
            raise Unavailable("the worker is gone")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if self.script.failures:
            raise self.script.failures.pop(0)
        return pb.TokenizeResponse(token_ids=list(request.text.encode()), tokens=list(request.text))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=self._model())

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model()])

    def _model(self) -> pb.Model:
        return pb.Model(
            name="tiny",
            shape=SHAPE,
            ready_worker_count=1,
            context_length=64,
            has_chat_template=self.script.has_chat_template,
        )

    async def ExplainPlan(
        self, request: pb.ExplainPlanRequest, context: Any
    ) -> pb.ExplainPlanResponse:
        self.script.explained.append(request)
        if request.new_tokens > 64:
            raise ResourceExhausted("never fits", needed_bytes=65)
        return pb.ExplainPlanResponse(
            plans=[
                pb.WorkerPlan(worker_id="0", plan=PLAN),
                pb.WorkerPlan(worker_id="1", rejection="never fits"),
            ]
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        ready = self.script.workers_ready
        return pb.ListWorkersResponse(
            workers=[
                pb.WorkerStatus(
                    worker_id="0",
                    ready=True,
                    device="cpu",
                    schedule=types_pb2.SCHEDULE_PIPELINED,
                    emulated_link_bytes_per_second=184e6,
                    weights="[3 of 4] layers on the host",
                    numerics=types_pb2.NUMERICS_INVARIANT,
                    numerics_reason="no operator [of 21] depends on what is beside a row",
                    numerics_digest="00c0ffee",
                    telemetry=types_pb2.Telemetry(
                        uptime_seconds=9.5,
                        link_in_bytes=1 << 20,
                        split_tokens=0,
                        power_watts=70.5,
                        eager_message="a recording failed [see the log]",
                    ),
                    kappa_crit=1.5,
                ),
                pb.WorkerStatus(
                    worker_id="1",
                    address=self.script.lost_address,
                    ready=ready,
                    message="" if ready else "loading",
                    numerics_digest="00c0ffee",
                    loss_count=2,
                    last_lost_seconds_ago=7.5,
                ),
            ]
        )

    async def GetQueue(self, request: pb.GetQueueRequest, context: Any) -> pb.GetQueueResponse:
        waiting = pb.QueuedRequest(request_id="r", footprint_bytes=2048, reason="memory is full")
        waiting.waited_duration.FromMilliseconds(1500)
        return pb.GetQueueResponse(requests=[waiting] * self.script.waiting_count, capacity=8)

    async def GetSchedulerStatus(
        self, request: pb.GetSchedulerStatusRequest, context: Any
    ) -> pb.GetSchedulerStatusResponse:
        return pb.GetSchedulerStatusResponse(
            uptime_seconds=60,
            completed_count=5,
            ttft_count=5,
            ttft_seconds_sum=1.25,
            redis=types_pb2.RedisStatus(address="unix:///r", is_up=True),
        )


@contextmanager
def fake_scheduler(
    address: str, identity: Identity = PLAIN, access: Access | None = None
) -> Iterator[Script]:
    """Serves in a thread of its own while the block runs; `script.address` is where."""
    script = Script()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = servers.create_server(access=access)
        fake = FakeScheduler(script)
        scheduler_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
        scheduler_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)
        health = servers.HealthReporter(server)
        script.address = servers.listen(server, address, identity)
        await health.set(INFERENCE_SERVICE, True)
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(0.0)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    if not started.wait(60):
        raise RuntimeError("the fake scheduler did not start")
    try:
        yield script
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
