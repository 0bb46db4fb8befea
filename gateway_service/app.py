"""The ASGI application: which path leads to which endpoint."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from gateway_service.endpoints import batches, page, simple
from gateway_service.endpoints.endpoint import GENERATE, OTHER, Ended, Endpoint, Gateway, Handle
from gateway_service.endpoints.generating import Generating
from gateway_service.http.exchange import Exchange
from gateway_service.openai.chat_completions import CHAT_FIELDS, read_chat
from gateway_service.openai.completions import COMPLETION_FIELDS, read_completion
from gateway_service.openai.errors import HttpError, error_answer
from gateway_service.openai.responses import RESPONSE_FIELDS, read_response

_INFERENCE = "/splitpoint.v1.InferenceService"
_ADMIN = "/splitpoint.v1.AdminService"


def routes_of(gateway: Gateway) -> list[Route]:
    """Return every route, each with the gRPC method that says which keys may use it."""

    def route(
        path: str, verb: str, handle: Handle, method: str = "", *, is_counted: bool = True
    ) -> Route:
        endpoint = Endpoint(gateway, path, handle, method=method, is_counted=is_counted)
        return Route(path, endpoint, methods=[verb])

    generate, get_model = GENERATE, f"{_INFERENCE}/GetModel"
    files, status = page.Page(), f"{_ADMIN}/GetSchedulerStatus"
    completions = Generating("cmpl", COMPLETION_FIELDS, read_completion)
    chat = Generating("chatcmpl", CHAT_FIELDS, read_chat)
    responses = Generating("resp", RESPONSE_FIELDS, read_response)
    return [
        route("/v1/completions", "POST", completions, generate),
        route("/v1/chat/completions", "POST", chat, generate),
        route("/v1/responses", "POST", responses, generate),
        route("/v1/embeddings", "POST", simple.embeddings, generate),
        route("/v1/models", "GET", simple.list_models, f"{_INFERENCE}/ListModels"),
        route("/v1/models/{model:path}", "GET", simple.get_model, get_model),
        route("/v1/files", "POST", batches.create_file, generate),
        route("/v1/files", "GET", batches.list_files, generate),
        route("/v1/files/{file_id}", "GET", batches.get_file, generate),
        route("/v1/files/{file_id}", "DELETE", batches.delete_file, generate),
        route("/v1/files/{file_id}/content", "GET", batches.get_content, generate),
        route("/v1/batches", "POST", batches.create_batch, generate),
        route("/v1/batches", "GET", batches.list_batches, generate),
        route("/v1/batches/{batch_id}", "GET", batches.get_batch, generate),
        route("/v1/batches/{batch_id}/cancel", "POST", batches.cancel_batch, generate),
        route("/tokenize", "POST", simple.tokenize, f"{_INFERENCE}/Tokenize"),
        route("/detokenize", "POST", simple.detokenize, f"{_INFERENCE}/Detokenize"),
        route("/", "GET", files, is_counted=False),
        route("/page/{name}", "GET", files, is_counted=False),
        route("/splitpoint/status", "GET", page.status, status),
        route("/health", "GET", simple.health, is_counted=False),
        route("/health/live", "GET", simple.live, is_counted=False),
        route("/metrics", "GET", simple.metrics, status, is_counted=False),
        route("/openapi.json", "GET", simple.openapi, is_counted=False),
        route("/version", "GET", simple.version, is_counted=False),
    ]


class App:
    """Routes by Starlette; what it would answer itself is answered in OpenAI's form."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._routes = routes_of(gateway)
        self._router = Router(self._routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            gateway = self._gateway
            exchange = Exchange(scope, receive, send, gateway.limits, gateway.budget)
            seconds = time.monotonic() - exchange.began
            # By no name of the client's: callers must not be able to add series.
            gateway.on_ended(Ended(OTHER, error.status_code, seconds))
            answer = error_answer(_refusal(error.status_code, scope))
            headers = error.headers
            if error.status_code == 405:
                headers = {"Allow": ", ".join(sorted(self._methods(scope)))}
            await exchange.respond(answer.body, status=answer.status, headers=headers)

    def _methods(self, scope: Scope) -> set[str]:
        """Return the methods at a path; Starlette names those of the first route alone."""
        at_path = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return {method for route in at_path for method in route.methods or ()}


def _refusal(status: int, scope: Scope) -> HttpError:
    if status == 405:
        return HttpError(405, "this path has another method", reason="METHOD_NOT_ALLOWED")
    return HttpError(404, "there is nothing at this path", reason="UNKNOWN_URL")
