"""Real processes with mutual TLS and tokens on every port: who gets in, and what tenants see."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from local_stack import prompt_of
from secured_stack import CALLERS, TENANT_REQUESTS, SecuredStack, secured_stack

from splitpoint import errors
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.errors import (
    AlreadyExists,
    DeadlineExceeded,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.transport import access, channels, statuses
from splitpoint.transport.tls import PLAIN, Identity, read_identity
from splitpoint.v1 import kvstore_pb2, scheduler_pb2, worker_pb2
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.stack.child import child_environment

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PROMPT = prompt_of(80, seed=7, vocabulary=1000)
CANARY_TEXT = "canaryprompt_7f3a"
CANARY_SALT = "canarysalt_91bc"
WRONG_TOKEN = "wrongcanarytoken_" + "z" * 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    async with secured_stack(tmp_path_factory.mktemp("secured")) as running:
        yield running


def all_methods() -> list[MethodDescriptor]:
    files = (scheduler_pb2, worker_pb2, kvstore_pb2)
    return [
        method
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def call(
    address: str,
    identity: Identity,
    path: str,
    *,
    client_streams: bool = False,
    server_streams: bool = False,
    metadata: Any = None,
    request: bytes = b"",
) -> SplitpointError | None:
    """The error that a call with raw bytes gets; None when it was let in and answered."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        yield request
        over.wait(30)  # a stream that stays open must not delay a refusal

    def blocking() -> SplitpointError | None:
        # Not the asyncio client: when a refusal arrives before its first request
        # has left, it reports "Internal error from Core" instead of the status.
        with channels.open_sync_channel(address, identity) as channel:
            open_call: Any = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, False): channel.stream_unary,
                (True, True): channel.stream_stream,
            }[client_streams, server_streams](path)
            argument = requests() if client_streams else request
            try:
                answer = open_call(argument, metadata=metadata, timeout=60)
                if server_streams:
                    next(answer, None)
                    answer.cancel()
            except grpc.RpcError as error:
                return statuses.error_of(error)
            finally:
                over.set()
        return None

    return await asyncio.to_thread(blocking)


async def call_method(
    stack: SecuredStack, method: MethodDescriptor, identity: Identity, **more: Any
) -> SplitpointError | None:
    return await call(
        stack.addresses[method.containing_service.name],
        identity,
        path_of(method),
        client_streams=method.client_streaming,
        server_streams=method.server_streaming,
        **more,
    )


# -- who gets in ------------------------------------------------------------------------


async def test_every_method_refuses_strangers(stack: SecuredStack) -> None:
    methods = all_methods()
    assert len(methods) >= 20
    for method in methods:
        anonymous = await call_method(stack, method, stack.identity())
        assert isinstance(anonymous, Unauthenticated), path_of(method)
        assert anonymous.reason == "TOKEN_MISSING"
        unknown = await call_method(stack, method, stack.identity(token="x" * 43))
        assert isinstance(unknown, Unauthenticated), path_of(method)
        assert unknown.reason == "TOKEN_UNKNOWN"


async def test_every_method_refuses_the_wrong_role(stack: SecuredStack) -> None:
    for method in all_methods():
        allowed = access.ROLES[path_of(method)]
        for caller in ("alice", "services", "root"):
            error = await call_method(stack, method, stack.identity(caller), request=b"\xff")
            if CALLERS[caller].role not in allowed:
                assert isinstance(error, PermissionDenied), (caller, path_of(method))
                assert error.reason == "ROLE_NOT_ALLOWED"
            else:
                # Let in: what it gets is about its bytes, or about the method.
                assert not isinstance(error, PermissionDenied | Unauthenticated)


async def test_reflection_is_for_admins_and_health_for_everybody(stack: SecuredStack) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    for address in (stack.scheduler, stack.worker, stack.store):
        both: Any = {"client_streams": True, "server_streams": True, "request": question}
        stranger = await call(address, stack.identity(), REFLECTION, **both)
        assert isinstance(stranger, Unauthenticated)
        client = await call(address, stack.identity("alice"), REFLECTION, **both)
        assert isinstance(client, PermissionDenied)
        assert await call(address, stack.identity("root"), REFLECTION, **both) is None
        async with channels.open_channel(address, stack.identity()) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        # But a stranger must not hold calls open.
        watch = await call(
            address, stack.identity(), "/grpc.health.v1.Health/Watch", server_streams=True
        )
        assert isinstance(watch, Unauthenticated)


async def test_methods_nobody_listed_are_refused_to_admins_too(stack: SecuredStack) -> None:
    path = "/splitpoint.v1.AdminService/Shutdown"
    assert isinstance(await call(stack.scheduler, stack.identity(), path), Unauthenticated)
    assert isinstance(await call(stack.scheduler, stack.identity("root"), path), PermissionDenied)


async def test_malformed_authorizations_are_refused(stack: SecuredStack) -> None:
    token = stack.tokens["root"]
    path = "/splitpoint.v1.AdminService/GetQueue"
    for metadata in (
        [("authorization", token)],
        [("authorization", f"Basic {token}")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")],
    ):
        error = await call(stack.scheduler, stack.identity(), path, metadata=metadata)
        assert isinstance(error, Unauthenticated), metadata[0][1].split()[0]
        assert token not in error.message
    ok = [("authorization", f"bearer {token}")]
    assert await call(stack.scheduler, stack.identity(), path, metadata=ok) is None


# -- mutual TLS -------------------------------------------------------------------------


async def test_each_wrong_certificate_is_named(stack: SecuredStack, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other")
    ours, other = stack.certificates, tmp_path / "other"

    def identity(own: Path | None, ca: Path) -> Identity:
        return read_identity(
            certificate=own / "client.pem" if own else None,
            key=own / "client-key.pem" if own else None,
            authorities=ca / "ca.pem",
        )

    wanted = {
        "not of the authority given here": identity(ours, other),
        "wants a client certificate": identity(None, ours),
        "client certificate of its own authority": identity(other, ours),
        "most likely it speaks TLS": PLAIN,
    }
    for address in (stack.scheduler, stack.worker, stack.store):
        for words, wrong in wanted.items():
            error = await call(address, wrong, "/grpc.health.v1.Health/Check")
            assert isinstance(error, Unavailable)
            assert words in error.message


# -- the limits of the contract ---------------------------------------------------------


@pytest.mark.parametrize("service", ["WorkerService", "KvStoreService", "InferenceService"])
async def test_large_messages_and_metadata_are_refused(stack: SecuredStack, service: str) -> None:
    method = {
        "WorkerService": "/splitpoint.v1.WorkerService/GetInfo",
        "KvStoreService": "/splitpoint.v1.KvStoreService/GetStats",
        "InferenceService": "/splitpoint.v1.InferenceService/Tokenize",
    }[service]
    identity = stack.identity("alice" if service == "InferenceService" else "services")
    credentials = grpc.ssl_channel_credentials(
        identity.authorities, identity.key, identity.certificate
    )
    token = ("authorization", f"Bearer {identity.token}")
    async with grpc.aio.secure_channel(stack.addresses[service], credentials) as unlimited:
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = unlimited.unary_unary(method)
        for request, metadata in (
            (b"\x12" + bytes(4 << 20), (token,)),
            (b"", (token, ("x-long", "y" * 9000))),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await send(request, metadata=metadata, timeout=60)
            assert isinstance(statuses.error_of(caught.value), ResourceExhausted)


@pytest.mark.parametrize(("service", "limit"), [("WorkerService", 64), ("KvStoreService", 1024)])
async def test_concurrent_calls_are_bounded(stack: SecuredStack, service: str, limit: int) -> None:
    opened = [
        channels.open_channel(stack.addresses[service], stack.identity("services"))
        for _ in range(-(-limit // 200) + 1)
    ]
    request = health_pb2.HealthCheckRequest(service="")
    watches: list[Any] = []
    try:
        for index in range(limit):
            stub: Any = health_pb2_grpc.HealthStub(opened[index // 200])
            watches.append(stub.Watch(request, timeout=60))
        # The scheduler's own stream and watch take two places, so two of ours find none.
        answers = await asyncio.gather(
            *(anext(aiter(watch)) for watch in watches), return_exceptions=True
        )
        errors = [statuses.error_of(a) for a in answers if isinstance(a, grpc.RpcError)]
        served = [a for a in answers if isinstance(a, health_pb2.HealthCheckResponse)]
        assert len(served) + len(errors) == limit
        assert 0.9 * limit <= len(served) < limit
        assert {type(error) for error in errors} == {ResourceExhausted}, errors
    finally:
        for watch in watches:
            watch.cancel()
        for channel in opened:
            await channel.close()


# -- tenants ----------------------------------------------------------------------------


async def generate(client: AsyncClient, prompt: list[int], **options: Any) -> Completion:
    options = {"max_tokens": 4, "timeout": 30.0, **options}
    return await client.generate(prompt, **options).complete()


async def test_tenants_share_nothing(stack: SecuredStack) -> None:
    async with (
        stack.client("alice") as alice,
        stack.client("anna") as anna,
        stack.client("bob") as bob,
    ):
        first = await generate(alice, PROMPT)
        assert first.usage.cached_tokens == 0
        foreign = await generate(bob, PROMPT)
        assert foreign.usage.cached_tokens == 0
        assert foreign.plan is not None
        assert foreign.plan.cached_tokens == 0
        again = await generate(alice, PROMPT)
        assert again.usage.cached_tokens >= 64
        colleague = await generate(anna, PROMPT)
        assert colleague.usage.cached_tokens >= 64
        narrowed = await generate(anna, PROMPT, cache_salt=b"mine")
        assert narrowed.usage.cached_tokens == 0
        assert first.token_ids == foreign.token_ids == again.token_ids == colleague.token_ids


async def test_one_client_calls_for_others(stack: SecuredStack) -> None:
    """A gateway has no token: it shows that of each caller, over one connection."""
    prompt = prompt_of(160, 77, 1000)
    async with AsyncClient(stack.scheduler, identity=stack.identity()) as shared:
        alice, anna, bob, root = (
            shared.with_token(stack.tokens[name]) for name in ("alice", "anna", "bob", "root")
        )
        first = await generate(alice, prompt)
        assert (await generate(anna, prompt)).usage.cached_tokens >= 128
        assert (await generate(bob, prompt)).usage.cached_tokens == 0
        assert first.usage.cached_tokens == 0
        assert [worker.ready for worker in await root.list_workers()] == [True]
        with pytest.raises(PermissionDenied):
            await alice.list_workers()
        for stranger in (shared, shared.with_token(WRONG_TOKEN)):
            with pytest.raises(Unauthenticated):
                await generate(stranger, prompt)
            with pytest.raises(Unauthenticated):
                await stranger.tokenize("x")
        await alice.close()  # it is not its connection
        assert (await bob.get_model()).name == "small-llama"
    async with stack.client("alice") as own:
        with pytest.raises(errors.InvalidArgument, match="own"):
            own.with_token("x")


async def test_request_ids_belong_to_tenants(stack: SecuredStack) -> None:
    async with (
        stack.client("alice") as alice,
        stack.client("anna") as anna,
        stack.client("bob") as bob,
    ):
        prompt, other = prompt_of(40, 1, 1000), prompt_of(40, 2, 1000)
        # At the same time, other bodies: neither notices the other.
        one, two = await asyncio.gather(
            generate(alice, prompt, request_id="same", seed=1),
            generate(bob, other, request_id="same", seed=2),
        )
        assert one.token_ids != two.token_ids
        # Within the tenant the id attaches, and another body collides.
        attached = await generate(anna, prompt, request_id="same", seed=1)
        assert (attached.token_ids, attached.seconds) == (one.token_ids, one.seconds)
        with pytest.raises(AlreadyExists):
            await generate(anna, other, request_id="same", seed=2)
        # The id and the body of another tenant's request: a generation of one's own.
        theirs = await generate(alice, prompt, request_id="hers", seed=1)
        own = await generate(bob, prompt, request_id="hers", seed=1)
        assert own.token_ids == theirs.token_ids
        assert own.seconds != theirs.seconds
        assert (theirs.usage.cached_tokens > 0, own.usage.cached_tokens) == (True, 0)


async def test_a_tenants_quota_is_its_own(stack: SecuredStack) -> None:
    async with stack.client("alice") as alice, stack.client("bob") as bob:
        running = [
            alice.generate(prompt_of(20, n, 1000), max_tokens=3000, ignore_eos=True, timeout=60)
            for n in range(TENANT_REQUESTS)
        ]
        for generation in running:
            await anext(generation)
        with pytest.raises(ResourceExhausted) as caught:
            await generate(alice, PROMPT)
        assert caught.value.reason == "TENANT_QUOTA"
        assert caught.value.retry_after_seconds
        assert (await generate(bob, PROMPT)).usage.completion_tokens == 4
        async with stack.client("root") as admin:
            workers = await admin.list_workers()
            assert workers[0].running_count >= 1
        for generation in running:
            await generation.close()
        for _ in range(200):
            try:
                await generate(alice, PROMPT)
                break
            except ResourceExhausted:
                await asyncio.sleep(0.05)
        else:
            pytest.fail("ended requests still count")


async def test_the_plan_of_counts_does_not_depend_on_what_is_cached(stack: SecuredStack) -> None:
    async with stack.client("alice") as alice, stack.client("bob") as bob:
        ours = await alice.explain_plan(64, 16)
        await generate(alice, prompt_of(64, 99, 1000))
        assert await bob.explain_plan(64, 16) == ours


# -- a command --------------------------------------------------------------------------


async def test_a_batch_shows_its_token(stack: SecuredStack, tmp_path: Path) -> None:
    source, target, token_file = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "token"))
    body = {"model": "small-llama", "prompt": CANARY_TEXT, "max_tokens": 2, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line))
    token_file.touch(0o600)

    async def batch(token: str) -> tuple[int | None, str, str]:
        """Run a batch with a token; return exit code, output and errors."""
        token_file.write_text(token)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "splitpoint_cli", "batch", str(source), str(target)),
            *("--address", stack.scheduler, "--ca", str(stack.certificates / "ca.pem")),
            *("--token-file", str(token_file), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(
                {
                    "SPLITPOINT_CERT": str(stack.certificates / "client.pem"),
                    "SPLITPOINT_KEY": str(stack.certificates / "client-key.pem"),
                }
            ),
        )
        out, told = await process.communicate()
        return process.returncode, out.decode(), told.decode()

    code, _, told = await batch(WRONG_TOKEN)
    assert code == 1
    assert "UNAUTHENTICATED" in told
    assert WRONG_TOKEN not in told
    assert not target.read_text()
    code, out, told = await batch(stack.tokens["alice"])
    assert code == 0, told
    assert json.loads(out)["answered"] == 1
    assert json.loads(target.read_text())["response"]["status_code"] == 200


# -- revocation, logs -------------------------------------------------------------------


async def test_nothing_secret_is_logged(stack: SecuredStack) -> None:
    """After every test above: tokens, prompts, salts and tenants appear in no service's log."""
    await provoke(stack)
    for name, path in stack.logs.items():
        log = path.read_text()
        assert f"{name}".replace("store", "kvstore") in log
        assert secrets_in(log, stack) == [], name
    # The logs are the right ones: refusals are told, without what was shown.
    assert "TOKEN_UNKNOWN" in stack.logs["store"].read_text()
    assert "request ended outcome=length prompt_tokens=" in stack.logs["scheduler"].read_text()


async def test_nothing_secret_is_logged_as_json(tmp_path: Path) -> None:
    more = ("--log-format", "json", "--log-level", "debug")
    async with secured_stack(tmp_path, *more) as stack:
        await provoke(stack)
        for name, path in stack.logs.items():
            log = path.read_text()
            records = [json.loads(line) for line in log.splitlines()]
            assert {record["service"].split("-")[0] for record in records} == (
                {name.replace("store", "kvstore")}
            )
            assert secrets_in(log, stack) == [], name
        assert "TOKEN_UNKNOWN" in stack.logs["store"].read_text()
        lines = stack.logs["scheduler"].read_text().splitlines()
        ended = [r for r in map(json.loads, lines) if r["message"] == "request ended"]
        assert {r["facts"]["outcome"] for r in ended} == {"length", "stop", "ABANDONED"}
        assert all(r["request_id"] for r in ended)


async def provoke(stack: SecuredStack) -> None:
    """Requests that end well and badly, and calls of strangers."""
    async with stack.client("alice") as client:
        await client.generate(
            CANARY_TEXT, max_tokens=4, cache_salt=CANARY_SALT.encode(), timeout=30
        ).complete()
        with pytest.raises(SplitpointError):
            await generate(client, [5], stop=[CANARY_TEXT] * 20)
        chat = [{"role": "user", "content": CANARY_TEXT}]
        await client.chat(chat, max_tokens=4, timeout=30).complete()
        for bad in (
            {"role": CANARY_TEXT, "content": 7},
            {"role": "user", "content": [CANARY_TEXT]},
        ):
            with pytest.raises(SplitpointError):
                await client.chat([*chat, bad]).complete()
        # Grammars that answers follow, and such as are refused.
        await client.generate("x", regex=f"{CANARY_TEXT}|y", max_tokens=40, timeout=30).complete()
        with pytest.raises(SplitpointError):
            await client.generate("x", regex=f"{CANARY_TEXT}(").complete()
        with pytest.raises(SplitpointError):
            await client.generate("x", json_schema={"type": CANARY_TEXT}).complete()
        with pytest.raises(SplitpointError):
            await client.tokenize(CANARY_TEXT, model=f"model-{CANARY_SALT}")
        ends = abandoned_count(stack)
        # The end is logged behind the answer, and not at all if the deadline passed before
        # the scheduler began. The test's timeout bounds this.
        while abandoned_count(stack) == ends:
            with pytest.raises(DeadlineExceeded):
                await client.generate(
                    CANARY_TEXT, max_tokens=3000, ignore_eos=True, timeout=0.3
                ).complete()
            await asyncio.sleep(0.05)
    for address in (stack.scheduler, stack.worker, stack.store):
        path = "/splitpoint.v1.KvStoreService/GetStats"
        assert await call(address, stack.identity(token=WRONG_TOKEN), path) is not None


def abandoned_count(stack: SecuredStack) -> int:
    """Return how many requests ended because their client had gone, by the scheduler's log."""
    return stack.logs["scheduler"].read_text().count("ABANDONED")


def secrets_in(log: str, stack: SecuredStack) -> list[str]:
    """Return the secrets that are in a log."""
    secrets = [CANARY_TEXT, CANARY_SALT, WRONG_TOKEN, "canarytenant", *stack.tokens.values()]
    secrets += [access.digest_of(token).hex() for token in stack.tokens.values()]
    secrets += [", ".join(map(str, PROMPT[:4])), CANARY_SALT.encode().hex()]
    return [secret for secret in secrets if secret in log]


async def test_a_revoked_token_is_refused_without_a_restart(stack: SecuredStack) -> None:
    text = stack.tokens_file.read_text()
    blocks = [block for block in text.split("\n\n") if 'name = "bob"' not in block]
    async with stack.client("bob") as bob, stack.client("alice") as alice:
        assert (await bob.list_models())[0].name
        stack.tokens_file.write_text("\n\n".join(blocks))
        refused = None
        while refused is None:  # bounded by the test's timeout
            await asyncio.sleep(0.05)
            refused = await call(
                stack.scheduler,
                stack.identity("bob"),
                "/splitpoint.v1.InferenceService/ListModels",
            )
        assert refused.reason == "TOKEN_UNKNOWN"
        with pytest.raises(Unauthenticated):
            await bob.list_models()
        assert (await alice.list_models())[0].name
