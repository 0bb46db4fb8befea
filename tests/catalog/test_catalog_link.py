"""The link: what URLs are understood, what is never shown, rights, TLS, bounds."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from catalog_helpers import SIZE, publishing, query, serving_store, until_equal
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis_server import RedisServer
from waiting import until

from kvstore_service.catalog import CatalogPublisher
from scheduler_service.cluster.directory import Directory
from scheduler_service.prefixes.lookup import StoreTokens
from scheduler_service.prefixes.redis import RedisCatalog
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.directory import add_announcement, prune, read_entries
from splitpoint.discovery.entries import STORES, WORKERS, ModelName, StoreEntry, WorkerEntry
from splitpoint.discovery.redis_link import RedisLink, State
from splitpoint.discovery.redis_options import (
    RedisOptions,
    parse_redis_url,
    redis_options,
)
from splitpoint.errors import InvalidArgument, PermissionDenied, SplitpointError, Unavailable
from splitpoint.options.option import parser_of
from splitpoint.options.service import REDIS_SECTION

ROOT = Path(__file__).resolve().parents[2]
SECRET = "c0rrect-horse"
STORE = StoreEntry(b"a" * 16, 3, "10.0.0.1:5", b"l" * 16, 10, 4, "life:7", ("disk",))
WORKER = WorkerEntry(
    b"w" * 16, "0", "10.0.0.2:5", ModelName(1, 2, 3, 4), b"l" * 16, store_address="unix:/kv"
)


def test_urls() -> None:
    options = parse_redis_url(f"redis://ann:{SECRET}@example:7000/2")
    assert (options.host, options.port, options.database) == ("example", 7000, 2)
    assert (options.user, options.password, options.tls) == ("ann", SECRET, False)
    assert options.name == "redis://example:7000/2"
    assert SECRET not in repr(options)
    assert parse_redis_url("rediss://h").tls
    assert parse_redis_url("redis://[::1]:1").host == "::1"
    socket = parse_redis_url("unix:///run/redis.sock", password=SECRET)
    assert (socket.socket_path, socket.password) == ("/run/redis.sock", SECRET)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:SECRET@h",
        "redis://",
        "redis://u:SECRET@h:x",
        "redis://u:SECRET@h/x",
        "redis://u:SECRET@h?a=b",
        "unix:",
        "nonsense",
        "",
    ],
)
def test_urls_that_are_none_are_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_redis_url(url.replace("SECRET", SECRET))
    assert SECRET not in str(caught.value)


def parsed(*arguments: str) -> RedisOptions | None:
    return redis_options(parser_of("service", "", [REDIS_SECTION]).parse_args(arguments))


def test_password_files(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    options = parsed("--redis", "redis://ann@h", "--redis-password-file", str(path))
    assert options is not None
    assert (options.user, options.password) == ("ann", SECRET)
    assert parsed() is None
    refused: list[tuple[list[str], type[SplitpointError]]] = [
        (["--redis-password-file", str(path)], InvalidArgument),
        (["--redis", "redis://a:b@h", "--redis-password-file", str(path)], InvalidArgument),
        (["--redis", "redis://h", "--redis-password-file", "/nowhere"], InvalidArgument),
        (["--redis", "redis://h", "--redis-ca", "/ca.pem"], InvalidArgument),
    ]
    for arguments, error in refused:
        with pytest.raises(error):
            parsed(*arguments)
    path.chmod(0o640)
    with pytest.raises(PermissionDenied):
        parsed("--redis", "redis://h", "--redis-password-file", str(path))


# -- entries ------------------------------------------------------------------------------


def test_entries_survive_the_way_and_nothing_else_does() -> None:
    assert StoreEntry.from_json(STORE.to_json().encode()) == STORE
    assert WorkerEntry.from_json(WORKER.to_json().encode()) == WORKER
    good = STORE.to_json()
    for bad in (
        "",
        "3",
        "[]",
        "{}",
        "[" * 100_000,
        good.replace('"format": 1', '"format": 2'),
        good.replace('"epoch": 3', '"epoch": "3"'),
        good.replace('"epoch": 3', '"epoch": -3'),
        good.replace('"epoch": 3', '"epoch": true'),
        good.replace("10.0.0.1:5", "10.0.0.1"),
        good.replace("10.0.0.1:5", "10.0.0.1:5\\n"),
        good.replace("61", "6x"),
        good.replace('"epoch"', '"other"'),
        WORKER.to_json(),
    ):
        assert bad != good
        assert StoreEntry.from_json(bad.encode()) is None
    assert StoreEntry.from_json(b"\xff\xfe") is None
    older = {name: value for name, value in json.loads(good).items() if name != "tiers"}
    assert StoreEntry.from_json(json.dumps(older).encode()) == replace(STORE, tiers=())
    for tiers in ("disk", [1], ["x" * 17], ["disk"] * 9):
        bad = json.dumps({**older, "tiers": tiers})
        assert StoreEntry.from_json(bad.encode()) is None
    worker = WORKER.to_json()
    for bad in (
        worker.replace('"profile": {}', '"profile": {"link_bytes_per_second": 1}'),
        worker.replace('"profile": {}', '"profile": []'),
        worker.replace('"layer_count": 1', '"layer_count": null'),
        worker.replace("unix:/kv", "kv"),
        worker.replace('"worker_id": "0"', '"worker_id": ""'),
        good,
    ):
        assert bad != worker
        assert WorkerEntry.from_json(bad.encode()) is None


async def announce(link: RedisLink, entry: StoreEntry) -> None:
    async def write(redis: object) -> object:
        async with redis.pipeline() as pipe:  # type: ignore[attr-defined]
            add_announcement(pipe, STORES, entry)
            return await pipe.execute()

    await link.run(write)


async def test_an_index_with_strangers_in_it(redis_server: RedisServer) -> None:
    link = RedisLink(parse_redis_url(redis_server.url))
    await announce(link, STORE)
    other = replace(STORE, instance_id=b"b" * 16)
    with redis_server.client() as client:
        client.sadd(STORES, "nonsense", "z" * 32, "00" * 16, other.instance_id.hex())
        # An entry under another's name, and a list where an entry should be.
        client.set(f"sp:store:{other.instance_id.hex()}", STORE.to_json())
        client.sadd(STORES, "11" * 16)
        client.rpush(f"sp:store:{'11' * 16}", "x")
        assert await read_entries(link, STORES, StoreEntry.from_json) == [STORE]
        await prune(link, STORES)
        assert b"00" * 16 not in client.smembers(STORES)
        assert STORE.instance_id.hex().encode() in client.smembers(STORES)
        client.set(WORKERS, "a string")
    assert await read_entries(link, WORKERS, WorkerEntry.from_json) == []
    await link.close()


# -- bounds -------------------------------------------------------------------------------


async def test_an_open_breaker_lets_nobody_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing listens there; the clock stands still."""
    link = RedisLink(parse_redis_url(f"unix://{tmp_path}/none", password=SECRET), clock=lambda: 5.0)
    tried = 0

    async def operation(redis: object) -> object:
        nonlocal tried
        tried += 1
        return await redis.ping()  # type: ignore[attr-defined]

    with caplog.at_level(logging.DEBUG):
        for _ in range(10):
            with pytest.raises(Unavailable) as caught:
                await link.run(operation)
            assert caught.value.reason == "REDIS_AWAY"
    assert tried == 3
    assert link.breaker.state is State.OPEN
    assert sum("is away" in record.getMessage() for record in caplog.records) == 1
    assert SECRET not in caplog.text
    with pytest.raises(Unavailable):
        await link.run(operation, is_heartbeat=True)
    assert tried == 4
    await link.close()


async def test_a_wrong_password_is_named_but_not_shown(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server.client() as client:
        client.config_set("requirepass", SECRET)
    link = RedisLink(parse_redis_url(redis_server.url, password="wrong-" + SECRET))
    with caplog.at_level(logging.DEBUG), pytest.raises(Unavailable, match="Authentication"):
        await link.run(lambda redis: redis.ping())
    await link.close()
    right = RedisLink(parse_redis_url(redis_server.url, password=SECRET))
    assert await right.run(lambda redis: redis.ping())
    await right.close()
    assert SECRET not in caplog.text


# -- rights -------------------------------------------------------------------------------


def documented_acl(name: str) -> list[str]:
    """The line of docs/tiers.md that makes this user."""
    text = (ROOT / "docs" / "tiers.md").read_text()
    found = re.search(rf"^ACL SETUSER ({name} .*)$", text, re.MULTILINE)
    assert found is not None
    return found[1].replace(">PASSWORD", f">{SECRET}").split()


async def test_the_documented_users_can_do_their_work_and_nothing_else(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server.client() as client:
        for user in ("splitpoint", "splitpoint-reader"):
            client.execute_command("ACL", "SETUSER", *documented_acl(user))

    def link_of(user: str) -> RedisLink:
        url = redis_server.url.replace("unix://", f"unix://{user}@")
        return RedisLink(parse_redis_url(url, password=SECRET))

    writer, reader = link_of("splitpoint"), link_of("splitpoint-reader")
    async with serving_store(tmp_path, slots=4) as store:
        prompt = list(range(3 * SIZE))
        publisher = CatalogPublisher(writer, store.bench.store.pool, store.address)
        directory = Directory(reader)
        direct = StoreCatalog(1)
        catalog = RedisCatalog(reader, lambda: directory.stores, direct)
        tasks = [
            asyncio.create_task(publisher.run()),
            asyncio.create_task(directory.run(lambda workers: None)),
        ]
        await until(lambda: publisher.rebuild_count > 0)
        store.seal(prompt)
        await until(lambda: len(directory.stores) == 1)
        await until_equal(
            lambda: catalog.cached_tokens(query(prompt)), {store.address: StoreTokens(3 * SIZE)}
        )
        store.seal([token + 50 for token in prompt])  # evicts
        await until_equal(
            lambda: catalog.cached_tokens(query(prompt)), {store.address: StoreTokens(SIZE)}
        )
        with redis_server.client() as client:
            client.sadd(STORES, "00" * 16)
        await prune(writer, STORES)
        redis_server.flush()
        await until(lambda: publisher.rebuild_count > 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await publisher.withdraw()
        await direct.close()
    for link, forbidden in (
        (writer, lambda redis: redis.set("other", 1)),
        (writer, lambda redis: redis.keys("*")),
        (writer, lambda redis: redis.flushall()),
        (writer, lambda redis: redis.config_get("*")),
        (reader, lambda redis: redis.set("sp:x", 1)),
    ):
        with pytest.raises(Unavailable, match=r"NOPERM|NoPerm"):
            await link.run(forbidden, is_heartbeat=True)
    with redis_server.client() as client:
        denied = {entry["object"] for entry in client.acl_log()}
        # What we tried just now, and nothing that the services did.
        assert denied <= {b"keys", b"flushall", b"config|get", b"other", b"set"} | {
            "keys",
            "flushall",
            "config|get",
            "other",
            "set",
        }
    await writer.close()
    await reader.close()


# -- TLS ----------------------------------------------------------------------------------


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


@asynccontextmanager
async def tls_in_front(socket: Path, certificate: Path, key: Path) -> AsyncIterator[int]:
    """The bundled server speaks no TLS: this ends it in front of the real one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    serving: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        behind_reader, behind_writer = await asyncio.open_unix_connection(socket)
        pumps = [
            asyncio.create_task(pump(reader, behind_writer)),
            asyncio.create_task(pump(behind_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for sink in (writer, behind_writer):
                sink.close()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await until(lambda: not serving)


async def test_tls_is_verified(tmp_path: Path, redis_server: RedisServer) -> None:
    certificate, key = make_certificate(tmp_path, "right")
    stranger, _ = make_certificate(tmp_path, "stranger")
    async with tls_in_front(redis_server.socket, certificate, key) as port:
        trusted = RedisLink(parse_redis_url(f"rediss://127.0.0.1:{port}", ca_file=str(certificate)))
        async with asyncio.timeout(60):
            while True:  # the first handshake may take longer than one operation may
                try:
                    assert await trusted.run(lambda redis: redis.ping(), is_heartbeat=True)
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        for url, ca in (
            (f"rediss://127.0.0.1:{port}", stranger),
            (f"rediss://localhost:{port}", certificate),  # right signer, wrong name
            (f"rediss://127.0.0.1:{port}", None),
        ):
            link = RedisLink(parse_redis_url(url, ca_file=None if ca is None else str(ca)))
            with pytest.raises(Unavailable):
                await link.run(lambda redis: redis.ping())
            await link.close()
        await trusted.close()


async def test_a_publisher_lives_on_while_redis_refuses(tmp_path: Path) -> None:
    """Out of memory there is like being away."""
    (tmp_path / "r").mkdir()
    server = RedisServer(tmp_path / "r", maxmemory="1")
    server.start()
    try:
        async with serving_store(tmp_path) as store, publishing(store, server) as publisher:
            await until(lambda: publisher.beat_count >= 2)
            assert publisher.rebuild_count == 0
            with server.client() as client:
                client.config_set("maxmemory", "0")
            await until(lambda: publisher.rebuild_count > 0)
    finally:
        server.stop()
