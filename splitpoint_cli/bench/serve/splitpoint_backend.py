"""The backend of a Splitpoint scheduler: its Python client, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.transport.tls import Identity
from splitpoint_cli.bench.serve.backends import (
    AnswerFacts,
    Counters,
    Sample,
    Sampling,
    ServedModel,
    Waits,
)

# Workers report their counters about once a second.
_TELEMETRY_SECONDS = 1.2


class SplitpointBackend:
    """A scheduler. Requests of a tenant go through the client that has its token."""

    name = "splitpoint"

    def __init__(
        self, clients: Mapping[str, AsyncClient], sampling: Sampling, model: str = ""
    ) -> None:
        """`clients`: by tenant; that of the empty name serves all tenants without their own."""
        self._clients = clients
        self._model = model
        # True if something was sent after the last reading of the counters.
        self._has_sent = False
        self._options: GenerateOptions = {
            "ignore_eos": sampling.ignore_eos,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "logprobs": sampling.logprobs,
            "model": model,
        }

    @property
    def _own(self) -> AsyncClient:
        return self._clients[""]

    async def served(self) -> ServedModel:
        model = await self._own.get_model(self._model)
        return ServedModel(model.name, model.shape.vocabulary_size, model.context_length)

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> AnswerFacts:
        self._has_sent = True
        client = self._clients.get(sample.tenant) or self._own
        options: GenerateOptions = {
            **self._options,
            "max_tokens": sample.output_length,
            "priority": sample.priority,
        }
        async for event in client.generate(sample.prompt, **options):
            if isinstance(event, Completion):
                return _facts(event)
            if event.token_ids:
                on_tokens(len(event.token_ids))
        raise Internal("the generation ended without an answer")

    async def counters(self) -> Counters:
        """Return the totals of scheduler and workers, once the workers have reported again."""
        if self._has_sent:
            await asyncio.sleep(_TELEMETRY_SECONDS)
            self._has_sent = False
        status, workers = await asyncio.gather(
            self._own.scheduler_status(), self._own.list_workers()
        )
        known = [worker.telemetry for worker in workers if worker.telemetry is not None]
        return Counters(
            steps=sum(each.step_count for each in known),
            scheduled_tokens=sum(each.scheduled_token_count for each in known),
            failovers=status.failover_count,
            link_bound=Waits(status.link_bound_count, status.link_bound_wait_seconds_sum),
            device_bound=Waits(status.device_bound_count, status.device_bound_wait_seconds_sum),
            decisions=status.decision_counts,
        )


def _facts(completion: Completion) -> AnswerFacts:
    plan = completion.plan
    return AnswerFacts(
        prompt_tokens=completion.usage.prompt_tokens,
        output_tokens=completion.usage.completion_tokens,
        cached_tokens=completion.usage.cached_tokens,
        plan=None if plan is None else f"{plan.residency.value} {plan.method.value}",
        queue_seconds=completion.queue_seconds,
    )


@asynccontextmanager
async def splitpoint_backend(
    address: str,
    identity: Identity,
    tenants: Mapping[str, Identity],
    sampling: Sampling,
    model: str,
) -> AsyncIterator[SplitpointBackend]:
    """Connect to a scheduler, once for the caller and once for each named tenant."""
    if "" in tenants:
        raise InvalidArgument("a tenant needs a name", field="tenant_token_file")
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(AsyncClient(address, identity=each))
            for name, each in {"": identity, **tenants}.items()
        }
        yield SplitpointBackend(clients, sampling, model)
