"""Bounds of the gateway: bodies, headers, silent clients, slow readers, leaving, draining, keys."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fake_scheduler import fake_scheduler
from running_gateway import HttpAnswer, RunningGateway, Wire, request_bytes, running_gateway
from scheduler_doubles import Stack, Steps, paced_worker, stack
from waiting import until

from gateway_service.settings import Limits
from splitpoint.errors import (
    DataLoss,
    DeadlineExceeded,
    Internal,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.observe.metrics import Service, metrics_of
from splitpoint.transport.access import Access, Caller, Role
from splitpoint_cli.security.token import add_token

LIMITS = Limits(
    body_bytes=4096,
    all_bodies_bytes=6000,
    header_bytes=2048,
    linger_seconds=0.3,
    requests=4,
)
# Of tests that wait for a limit of time. Others must not come to one, however busy the machine is.
BRIEF = replace(LIMITS, body_seconds=0.5, header_seconds=0.5, idle_seconds=1.0)
BODY = {"model": "stdlib-llama", "prompt": "def main():", "temperature": 0}


@dataclass
class Front:
    stack: Stack
    http: RunningGateway

    async def until_open(self, count: int) -> None:
        await self.stack.until(lambda: self.http.gateway.open_count == count)

    async def begin(self, behind: bytes = b"", **fields: object) -> tuple[Wire, Steps]:
        """Send a request, and bytes behind it, and return once it runs."""
        self.stack.workers[0].pace = steps = Steps()
        wire = await self.http.wire()
        await wire.send(streamed(**fields) + behind)
        steps.allow(2)
        await self.stack.until(lambda: self.stack.workers[0].steps >= 2)
        return wire, steps

    async def until_cancelled(self, steps: Steps) -> None:
        """Return once nothing runs here and at the worker. Steps are allowed only then."""
        await self.until_open(0)
        steps.allow(100)
        await self.stack.until(lambda: not self.stack.workers[0].running)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with stack() as behind, running_gateway(behind.address, limits=LIMITS) as http:
        yield Front(behind, http)


@pytest.fixture
async def brief_front() -> AsyncIterator[Front]:
    async with stack() as behind, running_gateway(behind.address, limits=BRIEF) as http:
        yield Front(behind, http)


def streamed(**fields: object) -> bytes:
    return request_bytes("POST", "/v1/completions", {**BODY, "stream": True, **fields})


def assert_whole(answer: HttpAnswer, tokens: int) -> None:
    """A stream ended by its length. Tokens may share an event: only their number is fixed."""
    *_, last, usage = answer.events
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == tokens


VERSION = request_bytes("GET", "/version")
# What a client may send behind a request, before it has the answer.
BEHIND = {
    "request": VERSION,
    "body": streamed(max_tokens=5),
    "junk": b"BROKEN\r\n\r\n",
    "request-junk": VERSION + b"\x16\x03\x01\r\n\r\n",
    "large-headers": VERSION.replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 3000),
}


# Returns the status and the error's code of each request that has ended.
Ended = Callable[[], list[tuple[int, str | None]]]


@pytest.fixture
def ended(caplog: pytest.LogCaptureFixture) -> Ended:
    caplog.set_level(logging.INFO)
    name = "gateway_service.endpoints.endpoint"

    def read() -> list[tuple[int, str | None]]:
        records = [vars(each) for each in caplog.records if each.name == name]
        facts = [each["facts"] for each in records if each["msg"] == "request ended"]
        return [(each["status"], each.get("error")) for each in facts]

    return read


# -- bodies ---------------------------------------------------------------------------------


async def test_a_large_body_is_refused_before_it_comes(front: Front) -> None:
    wire = await front.http.wire()
    await wire.send(request_bytes("POST", "/v1/completions", b"", {"content-length": "4097"}))
    found = await wire.answer()
    assert (found.status, found.error["code"]) == (413, "body_too_large")
    assert await wire.is_closed()  # what follows is not waited for


async def test_a_large_body_in_chunks_is_refused(front: Front) -> None:
    wire = await front.http.wire()
    head = request_bytes("POST", "/v1/completions", b"", {"transfer-encoding": "chunked"})
    await wire.send(head.replace(b"content-length: 0\r\n", b""))
    for _ in range(5):
        await wire.send(b"400\r\n" + b" " * 1024 + b"\r\n")
    assert (await wire.answer()).status == 413


async def test_a_connection_goes_on_after_a_refused_body(front: Front) -> None:
    wire = await front.http.wire()
    body = {**BODY, "prompt": "x" * 5000}
    await wire.send(request_bytes("POST", "/v1/completions", body))
    assert (await wire.answer()).status == 413
    await wire.send(request_bytes("GET", "/health/live"))
    assert (await wire.answer()).status == 200


async def test_a_slow_body_is_given_up(brief_front: Front) -> None:
    wire = await brief_front.http.wire()
    await wire.send(request_bytes("POST", "/v1/completions", b"{", {"content-length": "100"}))
    found = await wire.answer()
    assert (found.status, found.error["code"]) == (408, "body_timeout")


async def test_all_bodies_together_are_bounded(front: Front) -> None:
    first, second = [await front.http.wire() for _ in range(2)]
    part = request_bytes("POST", "/v1/completions", b" " * 3500, {"content-length": "4000"})
    budget = front.http.gateway.budget
    await first.send(part)
    await front.stack.until(lambda: budget.used >= 3500)
    await second.send(part)
    assert (await second.answer()).status == 429
    first.close()
    await front.stack.until(lambda: budget.used == 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "gzip"},
    ],
)
async def test_other_kinds_of_bodies(front: Front, headers: dict[str, str]) -> None:
    found = await front.http.ask("POST", "/v1/completions", BODY, headers)
    assert found.status == 415


# -- headers and connections -------------------------------------------------------------------


@pytest.mark.parametrize("filler", ["x-many: y\r\n" * 400, "x-long: " + "y" * 4000])
async def test_large_headers(front: Front, filler: str) -> None:
    wire = await front.http.wire()
    await wire.send(f"GET /health HTTP/1.1\r\nhost: localhost\r\n{filler}".encode())
    found = await wire.answer()
    assert (found.status, found.error["code"]) == (431, "headers_too_large")
    assert await wire.is_closed()


async def test_headers_that_never_end(brief_front: Front) -> None:
    wire = await brief_front.http.wire()
    wire.writer.write(b"GET /health HTTP/1.1\r\nx: ")

    async def trickle() -> None:
        while not wire.writer.is_closing():
            wire.writer.write(b"y")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert await wire.is_closed()
    trickling.cancel()


async def test_silent_connections_are_closed(brief_front: Front) -> None:
    front = brief_front
    idle = await front.http.wire()
    await idle.send(request_bytes("GET", "/health/live"))
    assert (await idle.answer()).status == 200
    silent, spaced = [await front.http.wire() for _ in range(2)]
    await spaced.send(b"\r\n")
    assert all(await asyncio.gather(silent.is_closed(), idle.is_closed(), spaced.is_closed()))
    await front.stack.until(lambda: front.http.server.connection_count == 0)


async def test_what_is_no_http(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    wire = await front.http.wire()
    await wire.send(b"\x16\x03\x01 not http\r\n\r\n")
    found = await wire.answer()
    assert (found.status, found.error["code"]) == (400, "malformed_request")
    assert await wire.is_closed()

    assert not [each for each in caplog.records if each.levelno > logging.INFO]


async def test_bytes_that_are_no_body(front: Front, ended: Ended) -> None:
    """The exchange that reads them ends as if its client had left."""
    wire = await front.http.wire()
    head = request_bytes("POST", "/v1/completions", b"", {"transfer-encoding": "chunked"})
    await wire.send(head.replace(b"content-length: 0\r\n", b""))
    await front.until_open(1)
    await wire.send(b"1\r\n{\r\nno size\r\n")
    found = await wire.answer()
    assert (found.status, found.error["code"]) == (400, "malformed_request")
    assert await wire.is_closed()
    await front.until_open(0)
    assert ended() == [(499, None)]


async def test_another_protocol_is_not_offered(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    wire = await front.http.wire()
    for _ in range(2):
        headers = {"connection": "upgrade", "upgrade": "h2c"}
        await wire.send(request_bytes("GET", "/version", None, headers))
        assert (await wire.answer()).status == 200
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize("behind", BEHIND)
async def test_one_request_at_a_time(front: Front, behind: str, ended: Ended) -> None:
    wire = await front.http.wire()
    body = {**BODY, "max_tokens": 2}
    await wire.send(request_bytes("POST", "/v1/completions", body) + BEHIND[behind])
    found = await wire.answer()
    assert (found.status, found.headers["connection"]) == (200, "close")
    assert found.json["usage"]["completion_tokens"] == 2
    assert await wire.reader.read() == b""
    assert ended() == [(200, None)]


async def test_bytes_within_a_stream_leave_it_whole(front: Front) -> None:
    options = {"include_usage": True}
    wire, steps = await front.begin(max_tokens=4, stream_options=options)
    for behind in BEHIND.values():
        await wire.send(behind)
    steps.allow(4)
    found = await wire.answer()
    assert_whole(found, tokens=4)
    assert await wire.reader.read() == b""


async def test_a_client_that_sends_on_and_on_is_cut_off(front: Front, ended: Ended) -> None:
    wire, steps = await front.begin(VERSION, max_tokens=100)
    with suppress(ConnectionError):
        for _ in range(3):
            await wire.send(b"x" * 2000)
        assert await wire.is_closed()
    await front.until_cancelled(steps)
    assert ended() == [(499, None)]


async def test_paths_and_methods(front: Front) -> None:
    found = await front.http.ask("GET", "/v1/completions")
    assert (found.status, found.error["code"]) == (405, "method_not_allowed")
    assert found.headers["allow"] == "POST"
    for path in ("/v1/nothing", "/v1/completions/", "/%ff", "/..//etc/passwd"):
        assert (await front.http.ask("GET", path)).status == 404
    wire = await front.http.wire()
    await wire.send(request_bytes("HEAD", "/health/live"))
    assert (await wire.head())[0] == 200


# -- too many, and leaving ---------------------------------------------------------------------


async def test_too_many_requests_are_told_when_to_come_back(front: Front) -> None:
    front.stack.workers[0].pace = steps = Steps()
    wires = [await front.http.wire() for _ in range(4)]
    for wire in wires:
        await wire.send(streamed(max_tokens=2))
    await front.until_open(4)
    found = await front.http.complete()
    assert (found.status, found.error["type"]) == (429, "rate_limit_error")
    assert found.headers["retry-after"] == "1"
    # Health does not count.
    assert (await front.http.ask("GET", "/health")).status == 200
    steps.allow(20)
    assert [(await wire.answer()).status for wire in wires] == [200] * 4
    assert (await front.http.complete(max_tokens=1)).status == 200


@pytest.mark.parametrize("behind", [b"", BEHIND["request"], BEHIND["junk"]], ids=len)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_cancels(
    front: Front,
    ended: Ended,
    caplog: pytest.LogCaptureFixture,
    is_stream: bool,
    behind: bytes,
) -> None:
    wire, steps = await front.begin(behind, max_tokens=100, stream=is_stream, n=2)
    wire.close()
    await front.until_cancelled(steps)
    assert ended() == [(499, None)]
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


async def test_a_client_that_ends_its_side_has_left(front: Front, ended: Ended) -> None:
    wire, steps = await front.begin(max_tokens=100, stream=False)
    wire.writer.write_eof()
    await front.until_cancelled(steps)
    assert await wire.reader.read() == b""
    assert ended() == [(499, None)]


async def test_a_client_that_leaves_the_queue_cancels() -> None:
    worker, steps = paced_worker(max_batch=1)
    async with stack(worker) as behind, running_gateway(behind.address) as http:
        first, second = [await http.wire() for _ in range(2)]
        await first.send(streamed(max_tokens=100))
        await behind.until(lambda: worker.admits)
        await second.send(streamed(max_tokens=100))
        admission = behind.manager.admission
        await behind.until(lambda: admission.waiting_count == 1)
        second.close()
        await behind.until(lambda: admission.waiting_count == 0)
        first.close()
        await behind.until(lambda: http.gateway.open_count == 0)
        steps.allow(200)


async def test_a_reader_that_stops_is_given_up(ended: Ended) -> None:
    with fake_scheduler("127.0.0.1:0") as script, socket.socket() as client:
        script.endless = True
        limits = replace(LIMITS, stall_seconds=0.5)
        async with running_gateway(script.address, limits=limits) as http:
            host, _, port = http.address.rpartition(":")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            # Soon more bytes than the kernel keeps for a reader.
            client.sendall(streamed(model="tiny", prompt=[65], n=64, logprobs=20))
            await until(lambda: ended() and not http.server.connection_count)
            assert ended() == [(499, None)]
            assert await asyncio.to_thread(script.cancelled.wait, 20)


# -- the end -------------------------------------------------------------------------------------


async def test_a_stop_lets_running_requests_finish(front: Front) -> None:
    front.stack.workers[0].pace = steps = Steps()
    idle, busy = [await front.http.wire() for _ in range(2)]
    await idle.send(request_bytes("GET", "/health/live"))
    await idle.answer()
    await busy.send(streamed(max_tokens=4, stream_options={"include_usage": True}))
    await front.until_open(1)
    front.http.server.stop_listening()
    draining = asyncio.create_task(front.http.gateway.drain())
    assert await idle.is_closed()
    with pytest.raises(OSError, match=r"."):
        await front.http.wire()
    steps.allow(4)
    found = await busy.answer()
    assert_whole(found, tokens=4)
    assert await busy.is_closed()
    await draining


async def test_a_stop_ends_what_takes_too_long(ended: Ended) -> None:
    limits = replace(LIMITS, grace_seconds=0.2)
    async with stack() as behind, running_gateway(behind.address, limits=limits) as http:
        behind.workers[0].pace = steps = Steps()
        begun, waiting = [await http.wire() for _ in range(2)]
        await begun.send(streamed(max_tokens=100))
        steps.allow(1)
        assert (await begun.head())[0] == 200
        await begun.chunk()
        await waiting.send(request_bytes("POST", "/v1/completions", BODY))
        await behind.until(lambda: http.gateway.open_count == 2)
        await http.gateway.drain()
        last = b""
        while chunk := await begun.chunk():
            last = chunk
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        found = await waiting.answer()
        assert (found.status, found.error["code"]) == (503, "draining")
        # The stream's head had 200.
        assert ended() == [(503, "draining")] * 2
        assert (await http.ask("GET", "/health")).status == 503
        refused = await http.complete()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        steps.allow(200)


# -- errors ----------------------------------------------------------------------------------------

ERRORS: list[tuple[SplitpointError, int, str]] = [
    (Unauthenticated("who", reason="TOKEN_UNKNOWN"), 401, "invalid_api_key"),
    (PermissionDenied("no", reason="ROLE_NOT_ALLOWED"), 403, "role_not_allowed"),
    (ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=2.5), 429, "queue_full"),
    (ResourceExhausted("never fits", reason="TOO_LARGE"), 400, "too_large"),
    (Unavailable("away", reason="NO_WORKER", retry_after_seconds=None), 503, "no_worker"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (DataLoss("lost"), 500, "data_loss"),
    (Internal("internal error, incident 12", incident="12"), 500, "internal"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
async def test_errors_of_the_scheduler(error: SplitpointError, status: int, code: str) -> None:
    # gRPC itself repeats a call that failed with UNAVAILABLE.
    with fake_scheduler("127.0.0.1:0") as script:
        script.failures = [error] * 5
        async with running_gateway(script.address) as http:
            found = await http.complete()
            assert (found.status, found.error["code"]) == (status, code)
            assert found.error["message"] == error.message
            expected = {429: "3", 503: "1"}.get(status)
            assert found.headers.get("retry-after") == expected
            assert found.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


async def test_an_error_within_a_stream_is_its_last_event(ended: Ended) -> None:
    with fake_scheduler("127.0.0.1:0") as script:
        script.fail_after = 2
        async with running_gateway(script.address, retry_seconds=0.2) as http:
            found = await http.complete(prompt=[65, 66, 67], stream=True)
            assert found.status == 200
            *chunks, last = [json.loads(each) for each in found.data]
            assert "".join(each["choices"][0]["text"] for each in chunks) == "AB"
            assert last["error"]["type"] == "service_unavailable_error"
            # An answer that is not streamed has its status.
            assert (await http.complete(prompt=[65, 66, 67])).status == 503
            script.fail_after, script.gap = None, True
            found = await http.complete(prompt=[65])
            assert (found.status, found.error["code"]) == (500, "token_gap")
            assert ended() == [(503, "unavailable"), (503, "unavailable"), (500, "token_gap")]
            counts = await http.readings()
            name, endpoint = "splitpoint_gateway_requests_total", "/v1/completions"
            assert counts[name, endpoint, "503"] == 2
            assert (name, endpoint, "200") not in counts


async def test_without_a_scheduler() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with running_gateway(address) as http:
            assert (await http.ask("GET", "/health/live")).status == 200
            found = await http.ask("GET", "/health")
            assert (found.status, found.error["code"]) == (503, "not_serving")
            assert (await http.complete()).status == 503


# -- keys ------------------------------------------------------------------------------------------


async def test_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens.toml"
    key = add_token(tokens, Caller("alice", Role.CLIENT, "research"))
    worker = add_token(tokens, Caller("w", Role.WORKER))
    root = add_token(tokens, Caller("root", Role.ADMIN))
    with fake_scheduler("127.0.0.1:0", access=Access(tokens)) as script:
        async with running_gateway(script.address, limits=LIMITS, access=Access(tokens)) as http:

            async def status(key: str | None, path: str = "/v1/models") -> int:
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                return (await http.ask("GET", path, None, headers)).status

            assert [await status(each) for each in (None, "wrong", worker, key, root)] == (
                [401, 401, 403, 200, 200]
            )
            assert [await status(each, "/metrics") for each in (None, key, root)] == [401, 403, 200]
            assert [await status(None, path) for path in ("/health", "/version")] == [200, 200]
            # Before any byte of a body was read.
            wire = await http.wire()
            await wire.send(request_bytes("POST", "/v1/completions", b"", {"content-length": "9"}))
            found = await wire.answer()
            assert (found.status, found.error["code"]) == (401, "invalid_api_key")
            # The scheduler checks the client's own key.
            headers = {"authorization": f"Bearer {key}"}
            body = {**BODY, "model": "tiny", "prompt": [1, 2]}
            assert (await http.ask("POST", "/v1/completions", body, headers)).status == 200
            for wrong in ("Bearer a\x01b", "Basic abc", "Bearer " + "k" * 5000):
                found = await http.ask("GET", "/v1/models", None, {"authorization": wrong})
                assert found.status in (400, 401, 431)
    assert key not in caplog.text


async def test_without_keys_only_this_host_is_named(front: Front) -> None:
    async with running_gateway(front.stack.address, checks_host=True) as http:
        for host, status in (
            ("localhost", 200),
            ("LOCALHOST:8080", 200),
            ("127.0.0.1:8080", 200),
            ("[::1]:8080", 200),
            ("192.168.1.2", 200),
            ("evil.example", 403),
            ("evil.example:80", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
        ):
            found = await http.ask("GET", "/v1/models", None, {"host": host})
            assert found.status == status, host


# -- what operators see ---------------------------------------------------------------------------


async def test_metrics_and_logs(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canaryprompt"
    body = {**BODY, "prompt": canary, "cache_salt": canary, "stop": canary, "max_tokens": 2}
    headers = {"authorization": f"Bearer {canary}"}
    for stream in (True, False):
        sent = {**body, "stream": stream}
        assert (await front.http.ask("POST", "/v1/completions", sent, headers)).status == 200
    wrong = {**body, "temperature": canary, canary: 1}
    assert (await front.http.ask("POST", "/v1/completions", wrong, headers)).status == 400
    assert (await front.http.ask("GET", f"/{canary}")).status == 404
    text = (await front.http.ask("GET", "/metrics")).body.decode()
    found = await front.http.readings()
    endpoint = "/v1/completions"
    assert found["splitpoint_gateway_requests_total", endpoint, "200"] == 2
    assert found["splitpoint_gateway_requests_total", endpoint, "400"] == 1
    assert found["splitpoint_gateway_requests_total", "other", "404"] == 1
    assert found["splitpoint_gateway_request_seconds_count", endpoint] == 3
    assert found["splitpoint_gateway_first_token_seconds_count", endpoint] == 1
    assert found[("splitpoint_gateway_open_requests",)] == 0
    for metric in metrics_of(Service.GATEWAY):
        assert any(each[0].startswith(metric.name) for each in found), metric.name
    assert canary not in text
    assert canary not in caplog.text
    names = [each.name for each in caplog.records if each.message == "request ended"]
    assert names.count("gateway_service.endpoints.endpoint") == 3


# -- conversations that are kept -------------------------------------------------------------------


async def test_conversations_belong_to_a_tenant_and_are_bounded(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tenants = {"ann": "a", "ada": "a", "ben": "b", "cid": "", "a": ""}
    keys = {
        name: add_token(tokens, Caller(name, Role.CLIENT, tenant))
        for name, tenant in tenants.items()
    }
    limits = replace(Limits(), response_bytes=6000)
    with fake_scheduler("127.0.0.1:0") as script:
        async with running_gateway(script.address, limits=limits, access=Access(tokens)) as http:

            async def respond(name: str, **fields: object) -> tuple[int, str, int]:
                body = {"model": "tiny", "input": "Hi", **fields}
                key = {"authorization": f"Bearer {keys[name]}"}
                found = await http.ask("POST", "/v1/responses", body, key)
                if found.status != 200:
                    return found.status, found.error["code"], 0
                return 200, found.json["id"], len(json.loads(script.requests[-1].chat.messages))

            _, first, _ = await respond("ann")
            for name, count in (("ann", 3), ("ada", 3)):
                assert (await respond(name, previous_response_id=first))[::2] == (200, count)
            missing = (404, "previous_response_not_found", 0)
            _, alone, _ = await respond("cid")
            for name, other in (("ben", first), ("cid", first), ("a", first), ("a", alone)):
                assert await respond(name, previous_response_id=other) == missing
            # The tenant that has the most loses its oldest; the others keep theirs.
            for _ in range(10):
                await respond("ann", input="x" * 500)
            assert http.gateway.responses.used_bytes <= limits.response_bytes
            assert await respond("ann", previous_response_id=first) == missing
            assert (await respond("cid", previous_response_id=alone))[0] == 200
            # One that is larger than all the memory is answered, but not kept.
            _, large, _ = await respond("ben", input="x" * 7000)
            assert await respond("ben", previous_response_id=large) == missing


async def test_a_conversation_is_forgotten_in_time() -> None:
    limits = replace(Limits(), response_seconds=0.2)
    with fake_scheduler("127.0.0.1:0") as script:
        async with running_gateway(script.address, limits=limits) as http:
            body = {"model": "tiny", "input": "Hi"}
            found = (await http.ask("POST", "/v1/responses", body)).json
            assert found["store"] is True
            await until(lambda: not http.gateway.responses.used_bytes)
            body["previous_response_id"] = found["id"]
            assert (await http.ask("POST", "/v1/responses", body)).status == 404


async def test_without_memory_no_conversation_is_kept() -> None:
    limits = replace(Limits(), response_bytes=0)
    with fake_scheduler("127.0.0.1:0") as script:
        async with running_gateway(script.address, limits=limits) as http:
            body = {"model": "tiny", "input": "Hi", "store": True}
            found = (await http.ask("POST", "/v1/responses", body)).json
            assert found["store"] is False
            body["previous_response_id"] = found["id"]
            assert (await http.ask("POST", "/v1/responses", body)).status == 404
