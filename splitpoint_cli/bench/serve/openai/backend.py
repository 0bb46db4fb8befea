"""The backend of a server that speaks OpenAI's protocol, such as `up --http`: streamed completions.

Prompts are sent as token ids, as the backend of the scheduler does, so that both can be compared.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from splitpoint.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.transport.tls import Identity
from splitpoint_cli.bench.serve.backends import (
    AnswerFacts,
    Counters,
    Sample,
    Sampling,
    ServedModel,
)
from splitpoint_cli.bench.serve.openai.connection import Broken, Connection, Server

_DONE = b"[DONE]"
_ERRORS: dict[int, type[SplitpointError]] = {
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    429: ResourceExhausted,
    503: Unavailable,
}


class OpenAiBackend:
    """A server. Requests of a tenant go with the token that it has."""

    name = "openai"

    def __init__(
        self,
        server: Server,
        tls: ssl.SSLContext | None,
        tokens: Mapping[str, str],
        sampling: Sampling,
        model: str,
    ) -> None:
        """`tokens`: by tenant; that of the empty name is for all without their own."""
        self._server = server
        self._tls = tls
        self._tokens = tokens
        self._model = model
        self._sampling = {
            "ignore_eos": sampling.ignore_eos or None,
            # The scheduler is greedy where OpenAI's protocol samples.
            "temperature": 0.0 if sampling.temperature is None else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "logprobs": sampling.logprobs,
        }
        self._idle: list[Connection] = []

    async def served(self) -> ServedModel:
        found = await self._get("/v1/models")
        models = {each["id"]: each for each in found["data"]}
        model = models.get(self._model) if self._model else next(iter(models.values()), None)
        if model is None:
            raise NotFound(f"the server has no model {self._model!r}", reason="MODEL_NOT_FOUND")
        self._model = model["id"]
        if not isinstance(model.get("vocabulary_size"), int):
            raise FailedPrecondition(
                "the server does not say how many tokens its model knows (vocabulary_size in "
                "/v1/models): no prompts can be drawn for it",
                reason="VOCABULARY_UNKNOWN",
            )
        return ServedModel(model["id"], model["vocabulary_size"], model["max_model_len"])

    async def send(self, sample: Sample, on_tokens: Callable[[int], None]) -> AnswerFacts:
        body = {
            "model": self._model,
            "prompt": sample.prompt,
            "max_tokens": sample.output_length,
            "priority": -sample.priority or None,  # vLLM's: smaller ones start first
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        given = {name: value for name, value in body.items() if value is not None}
        async with self._exchange("POST", "/v1/completions", sample.tenant, given) as connection:
            usage = None
            async for event in connection.events():
                if event == _DONE:
                    continue
                if usage is None and b'"finish_reason":null' in event:
                    on_tokens(1)  # the usage has the exact number
                    continue
                value = json.loads(event)
                if "error" in value:
                    raise _error_of(500, value)
                usage = value.get("usage") or usage
        if usage is None:
            raise Internal("the stream ended without its usage", reason="NO_USAGE")
        details = usage.get("prompt_tokens_details") or {}
        return AnswerFacts(
            prompt_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            cached_tokens=details.get("cached_tokens"),
        )

    async def counters(self) -> Counters | None:
        """Return None: the protocol has none."""
        return None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _get(self, path: str) -> Any:
        async with self._exchange("GET", path, "", None) as connection:
            return json.loads(await connection.body())

    @asynccontextmanager
    async def _exchange(
        self, verb: str, path: str, tenant: str, body: Any
    ) -> AsyncIterator[Connection]:
        """Send a request and yield the connection with its answer. Raises SplitpointError."""
        headers = {"accept": "*/*"}
        if token := self._tokens.get(tenant) or self._tokens.get(""):
            headers["authorization"] = f"Bearer {token}"
        payload = b""
        if body is not None:
            headers["content-type"] = "application/json"
            payload = json.dumps(body).encode()
        connection, status = await self._sent(verb, path, headers, payload)
        try:
            if status != 200:
                raise _error_of(status, _json_of(await connection.body()))
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _sent(
        self, verb: str, path: str, headers: Mapping[str, str], payload: bytes
    ) -> tuple[Connection, int]:
        """Send on a connection that is idle, or on a new one if the server has closed those."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await connection.send(verb, self._server, path, headers, payload)
            except Broken:
                connection.close()
        connection = await Connection.open(self._server, self._tls)
        return connection, await connection.send(verb, self._server, path, headers, payload)


def _json_of(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {}


def _error_of(status: int, value: Any) -> SplitpointError:
    """Return the error of an answer in OpenAI's form."""
    error = value.get("error") if isinstance(value, dict) else None
    found = error if isinstance(error, dict) else {}
    kind = _ERRORS.get(status, Internal)
    reason = str(found.get("code") or f"HTTP_{status}").upper()
    return kind(str(found.get("message") or f"the server answered {status}"), reason=reason)


@asynccontextmanager
async def openai_backend(
    url: str,
    identity: Identity,
    tenants: Mapping[str, Identity],
    sampling: Sampling,
    model: str,
) -> AsyncIterator[OpenAiBackend]:
    """Use the server at a base URL, which has the paths /v1/models and /v1/completions.

    Raises InvalidArgument for a token that would leave this host unencrypted.
    """
    server = Server.of(url)
    tokens = {name: each.token for name, each in {"": identity, **tenants}.items()}
    backend = OpenAiBackend(server, _tls_of(server, identity), tokens, sampling, model)
    try:
        yield backend
    finally:
        backend.close()


def _tls_of(server: Server, identity: Identity) -> ssl.SSLContext | None:
    if not server.is_encrypted:
        return None
    authorities = identity.authorities.decode("ascii", "ignore") or None
    return ssl.create_default_context(cadata=authorities)
