"""A batch's loop: what it repeats, what ends it, how much it has open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway_service.batch.files import AnswerFile, Line, Source
from gateway_service.batch.jobs import Outcome
from gateway_service.batch.order import prefix_key
from gateway_service.batch.run import Batch, Order, Totals
from splitpoint.errors import (
    Internal,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint_cli.main import app

URL = "/v1/completions"


class Scripted:
    """Takes the place of the schedulers: answers each custom_id with what a script says."""

    def __init__(
        self, script: Callable[[str, int], SplitpointError | None], *, awaited: int = 0
    ) -> None:
        """No answer comes before `awaited` requests are open at once."""
        self._script = script
        self._awaited = awaited
        self._are_open = asyncio.Event()
        self.asked: list[str] = []
        self.open_count = self.most_open = 0

    async def answer(self, line: Line) -> Outcome:
        self.asked.append(line.custom_id)
        self.open_count += 1
        self.most_open = max(self.most_open, self.open_count)
        if self.open_count >= self._awaited:
            self._are_open.set()
        await self._are_open.wait()
        await asyncio.sleep(0)
        self.open_count -= 1
        error = self._script(line.custom_id, self.asked.count(line.custom_id))
        if error is not None:
            raise error
        return Outcome(200, "cmpl", {"text": line.custom_id}, 10, 4, 2)

    async def key(self, line: Line) -> bytes:
        return prefix_key("m", b"", [100 - int(line.custom_id)])


async def run(
    tmp_path: Path, requests: Scripted, count: int, *, order: Order = Order.FILE, **changes: Any
) -> tuple[list[dict[str, Any]], Totals]:
    """Answer requests with the ids 0, 1, ...; return the rows and the totals."""
    source_path = tmp_path / "in.jsonl"
    body = {"model": "m", "prompt": "x"}
    lines = [{"custom_id": str(n), "url": URL, "body": body} for n in range(count)]
    source_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "out.jsonl"
    values = {"concurrency": 4, "retry_seconds": 0.3, **changes}
    with Source(source_path, frozenset({URL})) as source, AnswerFile(path) as answers:
        source.index()
        batch = Batch(
            source,
            answers,
            order,
            on_progress=lambda *_: None,
            totals=Totals(line_count=count),
            **values,
        )
        await batch.run(requests, range(count))  # type: ignore[arg-type]
    return rows_of(tmp_path), batch.totals


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def fine(custom_id: str, times: int) -> None:
    return None


async def test_each_request_is_sent_once_and_so_many_are_open(tmp_path: Path) -> None:
    requests = Scripted(fine, awaited=4)
    rows, totals = await run(tmp_path, requests, 50)
    assert sorted(requests.asked, key=int) == [str(n) for n in range(50)]
    assert requests.most_open == 4
    assert {row["custom_id"]: row["response"]["body"]["text"] for row in rows} == {
        str(n): str(n) for n in range(50)
    }
    assert (totals.answered_count, totals.failed_count, totals.open_count) == (50, 0, 0)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.prefilled_tokens) == (500, 200, 300)
    assert totals.completion_tokens == 100


async def test_requests_are_sent_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    requests = Scripted(fine)
    await run(tmp_path, requests, 30, order=Order.PREFIX, concurrency=1)
    assert requests.asked == [str(n) for n in range(29, -1, -1)]


async def test_errors_of_a_request_are_its_answer(tmp_path: Path) -> None:
    errors = {
        "1": InvalidArgument("too long", field="sampling.max_tokens"),
        "2": Internal("a bug"),
        "3": ResourceExhausted("never fits"),
        "4": Unavailable("moved too often", reason="TOO_MANY_MOVES"),
    }
    requests = Scripted(lambda custom_id, _: errors.get(custom_id))
    rows, totals = await run(tmp_path, requests, 6)
    found = {row["custom_id"]: row["response"]["status_code"] for row in rows}
    assert found == {"0": 200, "1": 400, "2": 500, "3": 400, "4": 503, "5": 200}
    (row,) = (row for row in rows if row["custom_id"] == "1")
    assert row["error"] is None
    assert row["response"]["body"]["error"]["param"] == "max_tokens"
    assert (totals.answered_count, totals.failed_count) == (6, 4)
    assert len(requests.asked) == 6


async def test_what_may_pass_is_repeated(tmp_path: Path) -> None:
    def script(custom_id: str, times: int) -> SplitpointError | None:
        if custom_id == "0" and times < 3:
            return Unavailable("no worker")
        if custom_id == "1" and times < 3:
            return ResourceExhausted("the queue is full", retry_after_seconds=0.01)
        return None

    rows, totals = await run(tmp_path, Scripted(script), 3, retry_seconds=10.0)
    assert [row["response"]["status_code"] for row in rows] == [200] * 3
    assert totals.failed_count == 0


async def test_a_batch_ends_when_nothing_succeeds_any_more(tmp_path: Path) -> None:
    def script(custom_id: str, times: int) -> SplitpointError | None:
        return Unavailable("no scheduler") if int(custom_id) >= 10 else None

    with pytest.raises(Unavailable, match="no scheduler"):
        await run(tmp_path, Scripted(script), 40)
    # What was answered is in the file, and nothing else.
    assert sorted(int(row["custom_id"]) for row in rows_of(tmp_path)) == list(range(10))


async def test_a_request_that_alone_finds_no_worker_does_not_end_the_others(
    tmp_path: Path,
) -> None:
    class Slow(Scripted):
        async def answer(self, line: Line) -> Outcome:
            await asyncio.sleep(0.05)
            return await super().answer(line)

    requests = Slow(lambda custom_id, _: Unavailable("no worker") if custom_id == "0" else None)
    rows, _ = await run(tmp_path, requests, 300, retry_seconds=60.0)
    found = {row["custom_id"]: row["response"]["status_code"] for row in rows}
    assert found == {"0": 503, **{str(n): 200 for n in range(1, 300)}}


async def test_a_token_that_may_not_call_ends_the_batch_at_once(tmp_path: Path) -> None:
    requests = Scripted(lambda *_: PermissionDenied("not this role"))
    for order in Order:
        with pytest.raises(PermissionDenied):
            await run(tmp_path, requests, 40, order=order)
        assert rows_of(tmp_path) == []
    assert len(requests.asked) <= 8


async def test_answers_to_changed_requests_are_refused(tmp_path: Path) -> None:
    def fails_once(custom_id: str, times: int) -> SplitpointError | None:
        return InvalidArgument("no", field="prompt") if custom_id == "2" else None

    await run(tmp_path, Scripted(fails_once), 4)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines, answers = (
        [json.loads(line) for line in source.read_text().splitlines()],
        rows_of(tmp_path),
    )

    def again(*changed: str, **body: object) -> Result:
        written = [
            {**line, "body": {**line["body"], **(body if line["custom_id"] in changed else {})}}
            for line in lines
        ]
        source.write_text("".join(json.dumps(line, indent=None) + "\n" for line in written))
        # Nothing listens there: whatever is asked again ends the command.
        return CliRunner().invoke(
            app,
            ["batch", str(source), str(target), "--address", "127.0.0.1:9", "--retry-seconds=0"],
        )

    assert again().exit_code == 0
    assert again(*"0123", model="m").exit_code == 0
    for changes in ({"prompt": "y"}, {"temperature": 0.5}):
        refused = again("1", **changes)
        assert isinstance(refused.exception, InvalidArgument)
        assert "an answer to another request with the custom_id '1'" in refused.exception.message
    assert isinstance(again("2", prompt="y").exception, InvalidArgument)
    assert rows_of(tmp_path) == answers
