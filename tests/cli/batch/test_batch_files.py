"""The two files of a batch, and the order of its requests."""

from __future__ import annotations

import json
import os
import random
import resource
from pathlib import Path

import pytest

from gateway_service.batch import files as files_module
from gateway_service.batch.files import (
    AnswerFile,
    Earlier,
    Fault,
    Line,
    Source,
    fault_row,
    response_row,
)
from gateway_service.batch.order import PrefixOrder, prefix_key
from splitpoint.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

URL = "/v1/completions"


def request(custom_id: object = "a", **changes: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"x": 1}, **changes}


def opened(tmp_path: Path, *lines: object) -> Source:
    """The source of lines: bytes as they are, anything else as JSON."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
        )
    )
    source = Source(path, frozenset({URL}))
    try:
        source.index()
    except BaseException:
        source.close()
        raise
    return source


# -- requests -----------------------------------------------------------------------------


def test_requests_are_read_in_any_order(tmp_path: Path) -> None:
    with opened(tmp_path, request("a"), b"\n  \n", request("b"), request("é\ud800")) as source:
        assert len(source) == 3
        assert source.read(2) == Line(5, "é\ud800", URL, {"x": 1})
        assert source.read(0) == Line(1, "a", URL, {"x": 1})
        assert source.read(1) == Line(4, "b", URL, {"x": 1})
        assert source.position_of("é\ud800", 0) == 2
        assert source.position_of("c", 0) is None


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    with opened(tmp_path, request("a"), json.dumps(request("b")).encode()) as source:
        assert source.read(1) == Line(2, "b", URL, {"x": 1})


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        (b"{]\n", None, "the line is not JSON"),
        (b"\xff\n", None, "not UTF-8"),
        (b"[" * 100_000 + b"\n", None, "nested too deeply"),
        (["a"], None, "no JSON object"),
        ({}, None, "custom_id must be a string of 1 to 512 characters"),
        (request(7), None, "custom_id"),
        (request(""), None, "custom_id"),
        (request("x" * 513), None, "custom_id"),
        (request(method="GET"), "a", "method must be POST"),
        (request(url="/v1/embeddings"), "a", "url must be one of /v1/completions"),
        (request(url=["/v1/completions"]), "a", "url must be one of"),
        (request(body="text"), "a", "body must be a JSON object"),
    ],
)
def test_lines_that_are_no_requests_are_faults(
    line: object, custom_id: str | None, message: str, tmp_path: Path
) -> None:
    with opened(tmp_path, request("first"), line, request("last")) as source:
        assert len(source) == 3
        fault = source.read(1)
        assert isinstance(fault, Fault)
        assert (fault.number, fault.custom_id) == (2, custom_id)
        assert message in fault.message
        assert source.position_of(custom_id, 2) == 1
        assert isinstance(source.read(2), Line)


def test_a_line_that_is_too_long_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MOST_LINE_BYTES", 200)
    long = request("long", body={"prompt": "x" * 1000})
    with opened(tmp_path, request("a"), long, request("b"), long) as source:
        kinds = [type(source.read(position)) for position in range(4)]
        assert kinds == [Line, Fault, Line, Fault]
        fault = source.read(3)
        assert isinstance(fault, Fault)
        assert "more than 200 bytes" in fault.message


def test_an_id_that_comes_twice_ends_the_batch_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"lines 1 and 3 have the same custom_id 'a'"):
        opened(tmp_path, request("a"), request("b"), request("a", url="/v1/embeddings"))


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(InvalidArgument, match="read twice"):
        Source(tmp_path / "pipe", frozenset())
    os.close(writer)
    with pytest.raises(InvalidArgument, match="No such file"):
        Source(tmp_path / "nothing", frozenset())


def test_a_digest_is_that_of_what_is_asked(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        path = tmp_path / "one.jsonl"
        path.write_text(text)
        with Source(path, frozenset({URL})) as source:
            source.index()
            assert source.digest_of(0) == source.read(0).digest
            return source.digest_of(0)

    one = digest(f'{{"custom_id": "a", "url": "{URL}", "body": {{"prompt": "é", "n": 1}}}}')
    assert digest(f'{{"url":"{URL}","custom_id":"b","body":{{"n":1,"prompt":"\\u00e9"}}}}') == one
    assert digest(f'{{"custom_id": "a", "url": "{URL}", "body": {{"prompt": "e", "n": 1}}}}') != one
    assert digest('{"custom_id": "a"}') != digest("[]")


# -- answers ------------------------------------------------------------------------------


ROWS = [
    response_row("a", "a" * 16, 200, "cmpl-1", {"text": "é\n"}),
    response_row("b", "b" * 16, 400, "req-2", {"error": {"message": "no"}}),
    fault_row(None, "0" * 16, 7, "the line is not JSON"),
    fault_row("c", "c" * 16, 8, "method must be POST"),
]
EARLIER = [
    Earlier("a", 0, False, "a" * 16),
    Earlier("b", 0, True, "b" * 16),
    Earlier(None, 7, True, "0" * 16),
    Earlier("c", 8, True, "c" * 16),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def written(path: Path) -> bytes:
    with AnswerFile(path) as file:
        assert list(file.earlier()) == []
        for row in ROWS:
            file.write(row)
    return path.read_bytes()


def test_rows_are_openais(path: Path) -> None:
    rows = [json.loads(line) for line in written(path).splitlines()]
    assert rows == ROWS
    assert all(set(row) == {"id", "custom_id", "response", "error"} for row in rows)
    assert rows[0]["response"] == {
        "status_code": 200,
        "request_id": "cmpl-1",
        "body": {"text": "é\n"},
    }
    assert rows[2]["error"]["message"] == "line 7: the line is not JSON"
    assert rows[2]["error"]["line"] == 7
    assert len({row["id"] for row in rows}) == 4


def test_a_file_that_ends_at_any_byte_goes_on_after_its_last_whole_line(path: Path) -> None:
    whole = written(path)
    ends = [0] + [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        count = sum(0 < end <= size for end in ends)
        with AnswerFile(path) as file:
            assert list(file.earlier()) == EARLIER[:count], size
            assert path.stat().st_size == ends[count]
            file.write(ROWS[0])
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[:-1]) == whole[: ends[count]]
        assert json.loads(lines[-1]) == ROWS[0]


def test_zeros_behind_the_last_line_are_dropped(path: Path) -> None:
    """As a file system may leave them when the power fails."""
    whole = written(path)
    path.write_bytes(whole + b"\0" * 4096)
    with AnswerFile(path) as file:
        assert list(file.earlier()) == EARLIER
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        b"an essay without an end",
        b'{"some": "json"}\n',
        b'{"id": "x", "custom_id": "a", "response": null, "error": null}\n',
        b'{"id": "batch_req_1", "custom_id": "a", "response": null, "error": null}\n',
        b'["batch_req_1"]\n',
        b"\xff\xfe\n",
        b"\n",
        b'{"id":"batch_req_1","custom_id":"a","response":null,"error":null}\n',
        b'{"id":"batch_req_1"' + b"[" * 100_000 + b"\n",
        b'{"id":' + b"\0" * 5000 + b"1",
    ],
)
def test_files_of_others_are_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with AnswerFile(path) as file, pytest.raises(InvalidArgument, match="give another file"):
        list(file.earlier())
    assert path.read_bytes() == content


def test_a_file_of_others_is_not_read_whole(path: Path) -> None:
    """A line of 1 TiB, as a hole."""
    path.touch()
    os.truncate(path, 1 << 40)
    with path.open("r+b") as file:
        file.write(b"x")
    with AnswerFile(path) as file, pytest.raises(InvalidArgument, match="give another file"):
        list(file.earlier())


def test_answers_that_are_errors_can_be_dropped(path: Path) -> None:
    whole = written(path)
    path.chmod(0o640)
    with AnswerFile(path) as file:
        file.write(ROWS[0])
        file.drop_failed()
        assert list(file.earlier()) == [EARLIER[0]] * 2
        with pytest.raises(FailedPrecondition):  # the new file is locked, too
            AnswerFile(path)
        file.write(ROWS[1])
        assert list(file.earlier()) == [EARLIER[0]] * 2 + [EARLIER[1]]
    lines = whole.splitlines(keepends=True)
    assert path.read_bytes() == lines[0] * 2 + lines[1]
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="read again"):
        AnswerFile(Path("/dev/null"))


def test_two_batches_cannot_write_one_file(path: Path) -> None:
    with AnswerFile(path), pytest.raises(FailedPrecondition, match="another splitpoint batch"):
        AnswerFile(path)
    with AnswerFile(path):
        pass


def test_a_full_disk_leaves_whole_lines(path: Path) -> None:
    whole = written(path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AnswerFile(path) as file:
        list(file.earlier())
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, most))
        try:
            with pytest.raises(ResourceExhausted, match=r"out\.jsonl: File too large"):
                file.write(ROWS[0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert path.read_bytes() == whole
        file.write(ROWS[1])
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 5


# -- order --------------------------------------------------------------------------------


def random_prompts() -> list[list[int]]:
    """A random trie of prompts: equal ones, and ones that others begin with, included."""
    rng = random.Random(3)
    found: list[list[int]] = []
    for _ in range(400):
        start = rng.choice(found)[: rng.randrange(1, 40)] if found and rng.random() < 0.8 else []
        found.append(start + [rng.randrange(1 << 31) for _ in range(rng.randrange(1, 12))])
    return [*found, found[5], found[9]]


@pytest.mark.parametrize("memory_bytes", [1, 5_000, 1 << 20])
def test_prompts_come_as_in_their_trie(memory_bytes: int) -> None:
    prompts = random_prompts()
    with PrefixOrder(memory_bytes) as order:
        for position, prompt in enumerate(prompts):
            order.add(prefix_key("m", b"", prompt), position)
        positions = list(order.positions())
    assert positions == sorted(range(len(prompts)), key=lambda each: (prompts[each], each))


def test_requests_that_share_no_prefixes_are_apart() -> None:
    keys = [
        prefix_key(model, salt, [token])
        for model in ("a", "ab")
        for salt in (b"", b"x", b"xy")
        for token in (1, 256, 70_000)
    ]
    groups = [keys.index(key) // 3 for key in sorted(keys)]
    assert groups == [group for group in dict.fromkeys(groups) for _ in range(3)]
