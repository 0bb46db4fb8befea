"""/v1/files and /v1/batches: the official client, real processes, and a gateway that is killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from gateway_stack import MODEL, GatewayStack, gateway_stack, logs
from openai.types import Batch

from gateway_service.batch.folder import output_id
from splitpoint.transport.access import Caller, Role, TokenEntry, digest_of, entry_text

SECONDS = 60
SECRET = "xylophone_quartz_5678"


@pytest.fixture(scope="module")
def stack() -> Iterator[GatewayStack]:
    with gateway_stack() as running:
        yield running


class Gateway:
    """A gateway with a folder, which can be killed and started again."""

    def __init__(
        self, stack: GatewayStack, folder: Path, *options: str, failpoint: str = ""
    ) -> None:
        self.stack, self.folder = stack, folder
        self.options = ("--batch-folder", str(folder), *options)
        self.start(failpoint)

    def start(self, failpoint: str = "") -> None:
        self.child = self.stack.begin_gateway(*self.options, failpoint=failpoint)
        self.url = f"http://{self.child.wait_ready()}/v1"

    def restart(self) -> None:
        self.child.kill()
        self.start()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)


@pytest.fixture
def start(stack: GatewayStack, tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    started: list[Gateway] = []

    def begin(*options: str, failpoint: str = "") -> Gateway:
        started.append(Gateway(stack, tmp_path / "batches", *options, failpoint=failpoint))
        return started[-1]

    yield begin
    for each in started:
        each.child.signal(signal.SIGTERM)
        each.child.wait_ended()


def completed(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"model": MODEL, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def lines(*requests: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


def uploaded(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def begun(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> str:
    file_id = uploaded(client, content)
    batch = client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    return batch.id


def until(client: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


# -- what OpenAI's client does ----------------------------------------------------------------


def test_a_batch_from_upload_to_answers(stack: GatewayStack, start: Callable[..., Gateway]) -> None:
    gateway = start()
    with gateway.client() as client:
        asked = [request(str(n), prompt=f"import {SECRET}{n}") for n in range(6)]
        wrong = request("wrong", prompt="a", stop=[""])
        other = request("other", "/v1/chat/completions", messages=[])
        content = lines(*asked, wrong, other, "none")
        batch_id = begun(client, content)
        batch = until(client, batch_id, "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (9, 6, 3)
        assert batch.completed_at >= batch.in_progress_at >= batch.created_at
        assert batch.expires_at == batch.created_at + 24 * 3600
        # The same text as without a batch.
        answers = {row["custom_id"]: row for row in rows(client, batch.output_file_id)}
        assert {*answers} == {str(n) for n in range(6)}
        for each in asked:
            response = answers[each["custom_id"]]["response"]
            direct = client.completions.create(**each["body"])
            assert response["status_code"] == 200
            assert response["body"]["choices"][0]["text"] == direct.choices[0].text
        errors = {row["custom_id"]: row for row in rows(client, batch.error_file_id)}
        assert {*errors} == {"wrong", "other", None}
        assert errors["wrong"]["response"]["body"]["error"]["param"] == "stop[0]"
        assert "url must be one of /v1/completions" in errors["other"]["error"]["message"]
        # Files and batches are listed, page by page; only files can be removed.
        assert [each.id for each in client.batches.list(limit=1)] == [batch_id]
        files = {each.id: each for each in client.files.list()}
        assert {*files} == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
        assert client.files.content(batch.input_file_id).content == content
        assert files[batch.input_file_id].bytes == len(content)
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            client.batches.cancel(batch_id)
    assert gateway.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in gateway.folder.iterdir()} == {0o600}
    assert SECRET not in logs(stack)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
def test_other_endpoints(start: Callable[..., Gateway], endpoint: str) -> None:
    chat = endpoint == "/v1/chat/completions"
    body: dict[str, Any] = {"model": MODEL, "temperature": 0}
    body |= {"max_tokens": 4} if chat else {"max_output_tokens": 4, "input": "class A:"}
    body |= {"messages": [{"role": "user", "content": "class A:"}]} if chat else {}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    with start().client() as client:
        batch = until(client, begun(client, lines(line), endpoint), "completed")
        found = [*rows(client, batch.output_file_id), *rows(client, batch.error_file_id)]
        assert [row["custom_id"] for row in found] == ["a"]
        if batch.error_file_id:  # the bundled model has no template: the same answer as without
            with pytest.raises(openai.APIStatusError) as refused:
                client.chat.completions.create(**body)
            assert found[0]["response"]["status_code"] == refused.value.status_code


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "no requests"), (lines(request("a"), request("a")), "lines 1 and 2 have the same")],
)
def test_files_that_are_no_batch(start: Callable[..., Gateway], content: bytes, why: str) -> None:
    gateway = start()
    with gateway.client() as client:
        batch = until(client, begun(client, content), "failed")
        assert batch.errors is not None
        [error] = batch.errors.data
        assert why in error.message
        assert str(gateway.folder) not in error.message


# -- bounds -----------------------------------------------------------------------------------


def test_without_a_folder_there_are_no_files(stack: GatewayStack) -> None:
    with stack.client() as client, pytest.raises(openai.NotFoundError, match="--batch-folder"):
        uploaded(client, b"x")


def test_uploads_are_bounded(start: Callable[..., Gateway]) -> None:
    gateway = start("--batch-disk", "1MiB")
    with gateway.client() as client:
        with pytest.raises(openai.APIStatusError, match="--batch-disk") as refused:
            uploaded(client, b"x" * (2 << 20))
        assert refused.value.status_code == 413
        first = uploaded(client, b"x" * (600 << 10))

        def parts() -> Iterator[bytes]:  # without a length, and more than there is room
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="../../x"\r\n\r\n'
            for _ in range(64):
                yield b"y" * 65536

        for content in (parts(), parts()):
            answer = httpx.post(
                f"{gateway.url}/files",
                content=content,
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
        names = {path.name for path in gateway.folder.iterdir()}
        assert names == {"lock", f"{first}.json", f"{first}.data"}
        client.files.delete(first)
        second = uploaded(client, b"x" * (600 << 10))
        assert {path.name for path in gateway.folder.iterdir()} - {"lock"} == {
            f"{second}.json",
            f"{second}.data",
        }


def test_answers_that_do_not_fit_end_the_batch(start: Callable[..., Gateway]) -> None:
    with start("--batch-disk", "43KiB").client() as client:
        asked = [request(str(n), prompt="a" * 100, echo=True) for n in range(100)]
        batch = until(client, begun(client, lines(*asked)), "failed")
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data] == ["disk_full"]
        found = rows(client, batch.output_file_id)
        assert 0 < len(found) == batch.request_counts.completed < 100


def test_forms_that_are_wrong(start: Callable[..., Gateway]) -> None:
    url = f"{start().url}/files"
    kind = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n'
    wrong: list[tuple[bytes, dict[str, str], int]] = [
        (part + file + b"--b--", {"content-type": "application/json"}, 415),
        (part + file, kind, 400),
        (part + b"--b--", kind, 400),
        (file + b"--b--", kind, 400),
        (part + part + file + b"--b--", kind, 400),
        (b"x" * 100_000, kind, 400),
        (part.replace(b"batch", b"x" * 5000) + file + b"--b--", kind, 400),
        (part.replace(b"batch", b"vision") + file + b"--b--", kind, 400),
        (part + file + b"--b--", {"content-type": "multipart/form-data"}, 400),
        (part + file + b"--b--", {**kind, "origin": "https://other.example"}, 403),
    ]
    for body, headers, status in wrong:
        answer = httpx.post(url, content=body, headers=headers)
        assert answer.status_code == status, (body, answer.text)
    for tail in (b"--b--", b"--b--\r\n", b"--b--\r\nepilogue"):
        whole = httpx.post(url, content=file + part + tail, headers=kind)
        assert (whole.status_code, whole.json()["bytes"]) == (200, 2)
    assert len(httpx.get(url).json()["data"]) == 3


# -- tenants ----------------------------------------------------------------------------------


def test_tenants_do_not_see_each_other(
    stack: GatewayStack, start: Callable[..., Gateway], tmp_path: Path
) -> None:
    callers = {"k1": ("ada", "x"), "k2": ("bob", "y"), "k3": ("eve", "x")}
    entries = [
        entry_text(TokenEntry(Caller(name, Role.CLIENT, tenant), digest_of(key)))
        for key, (name, tenant) in callers.items()
    ]
    tokens = tmp_path / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text("".join(entries))
    gateway = start("--tokens", str(tokens), "--batch-requests", "1")
    asked = [request(str(n), prompt="a", max_tokens=64) for n in range(16)]
    with gateway.client("k1") as ada, gateway.client("k2") as bob:
        batch_id = begun(ada, lines(*asked))
        file_id = ada.batches.retrieve(batch_id).input_file_id
        calls: list[Callable[[], Any]] = [
            lambda: bob.files.retrieve(file_id),
            lambda: bob.files.content(file_id),
            lambda: bob.files.delete(file_id),
            lambda: bob.batches.retrieve(batch_id),
            lambda: bob.batches.cancel(batch_id),
            lambda: bob.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            ),
            lambda: bob.files.retrieve("..%2Flock"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert [*bob.files.list(), *bob.batches.list()] == []
        with pytest.raises(openai.BadRequestError, match="is the input of"):
            ada.files.delete(file_id)
    with gateway.client("unknown") as stranger, pytest.raises(openai.AuthenticationError):
        uploaded(stranger, b"x" * (8 << 20))
    # The key is in memory only: the batch goes on with the next one of its tenant.
    kept = b"".join(path.read_bytes() for path in gateway.folder.iterdir())
    assert not any(secret in kept for secret in (b'"k1', b"Bearer", digest_of("k1").hex().encode()))
    gateway.restart()
    with gateway.client("k3") as eve:
        batch = until(eve, batch_id, "completed")
        assert sorted(int(row["custom_id"]) for row in rows(eve, batch.output_file_id)) == [
            *range(16)
        ]


# -- kills, and early ends --------------------------------------------------------------------


def test_a_killed_gateway_answers_each_line_once(start: Callable[..., Gateway]) -> None:
    """Each of four ends as it writes an answer, of which half is in the file then."""
    count = 30
    gateway = start("--batch-requests", "2", failpoint="answer:3")
    asked = [request(str(n), prompt=f"x{n} = ", max_tokens=4) for n in range(count)]
    with gateway.client() as client:
        batch_id = begun(client, lines(*asked))
    output = gateway.folder / f"{output_id(batch_id, 'output')}.data"
    whole = 0
    for answered, number in ((2, 7), (6, 1), (0, 4), (3, 0)):
        gateway.child.wait_ended()
        whole += answered
        assert output.read_bytes().count(b"\n") == whole
        assert not output.read_bytes().endswith(b"\n")
        gateway.start(f"answer:{number}" if number else "")
        with gateway.client() as client:  # with the key it goes on
            client.batches.retrieve(batch_id)
    with gateway.client() as client:
        batch = until(client, batch_id, "completed")
        found = rows(client, batch.output_file_id)
        assert sorted(int(row["custom_id"]) for row in found) == [*range(count)]
        assert completed(batch) == count
        assert batch.error_file_id is None
        gateway.restart()
    with gateway.client() as client:  # nothing of an ended batch is lost
        assert rows(client, batch.output_file_id) == found


def endless(count: int) -> bytes:
    body: dict[str, Any] = {"prompt": "class A:", "max_tokens": 3000, "ignore_eos": True}
    return lines(*(request(str(n), **body) for n in range(count)))


def test_a_batch_can_be_cancelled_while_others_wait(start: Callable[..., Gateway]) -> None:
    with start("--batch-requests", "1").client() as client:
        ids = [begun(client, endless(3)) for _ in range(5)]
        for batch_id in ids[:4]:
            until(client, batch_id, "in_progress")
        assert client.batches.retrieve(ids[4]).status == "validating"
        # Others are answered meanwhile.
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices
        assert client.batches.cancel(ids[0]).status in ("cancelling", "cancelled")
        batch = until(client, ids[0], "cancelled")
        assert batch.cancelled_at >= batch.cancelling_at
        assert batch.request_counts.total == 3
        until(client, ids[4], "in_progress")
        for batch_id in ids[1:]:
            client.batches.cancel(batch_id)
        for batch_id in ids[1:]:
            until(client, batch_id, "cancelled")


def test_what_is_not_answered_in_time_says_so(start: Callable[..., Gateway]) -> None:
    """A restart finds a batch whose time is over: its record is changed in between."""
    gateway = start("--batch-requests", "1")
    with gateway.client() as client:
        quick = request("quick", prompt="class A:", max_tokens=1)
        batch_id = begun(client, lines(quick) + endless(20))
        deadline = time.monotonic() + SECONDS
        while not completed(client.batches.retrieve(batch_id)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    gateway.child.kill()
    path = gateway.folder / f"{batch_id}.json"
    record = json.loads(path.read_text())
    record["object"]["expires_at"] = int(time.time()) - 1
    path.write_text(json.dumps(record))
    gateway.start()
    with gateway.client() as client:
        batch = until(client, batch_id, "expired")
        answered = {row["custom_id"] for row in rows(client, batch.output_file_id)}
        given_up = {row["custom_id"]: row for row in rows(client, batch.error_file_id)}
        assert answered | {*given_up} == {"quick", *map(str, range(20))}
        assert not answered & {*given_up}
        assert {row["error"]["code"] for row in given_up.values()} == {"batch_expired"}


def test_a_folder_has_one_gateway_and_is_private(
    start: Callable[..., Gateway], stack: GatewayStack, tmp_path: Path
) -> None:
    gateway = start()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "notes.txt").write_text("not ours")
    for folder, why in ((gateway.folder, "another gateway"), (tmp_path / "open", "mode 700")):
        with pytest.raises(AssertionError, match=why):
            Gateway(stack, folder)
    # What a killed upload left goes, what is not ours stays.
    gateway.child.kill()
    for name in (f"file-{'0' * 32}.data", f".batch_{'0' * 32}.json.x", "notes.txt"):
        (gateway.folder / name).write_text("x")
    gateway.start()
    assert {path.name for path in gateway.folder.iterdir()} == {"lock", "notes.txt"}
