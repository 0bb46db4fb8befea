"""Runs the batches of clients: a few at a time, behind other requests, over restarts.

A batch goes on with the key of its owner's latest request, which is in memory only: after a
restart it waits until its owner asks for anything here. Its answers are lines of the output file
and the error file from the beginning, so that a killed gateway goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gateway_service.batch.files import AnswerFile, Source, fault_row
from gateway_service.batch.folder import BATCH, FILE, Folder, Record, output_id
from gateway_service.batch.jobs import Requests
from gateway_service.batch.run import Batch, Order, Totals, unanswered
from gateway_service.openai.batches import Batch as BatchObject
from gateway_service.openai.batches import BatchError, RequestCounts
from gateway_service.openai.errors import HttpError
from gateway_service.settings import Limits
from gateway_service.upstream import Upstream
from splitpoint.client.caller_spans import Metadata
from splitpoint.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unauthenticated,
)
from splitpoint.tasks import FileThread

_log = logging.getLogger(__name__)

# The scheduler's lowest.
_PRIORITY = -10
WINDOW_SECONDS = 24 * 3600
MOST_LINES = 50_000
# Sorted by prefix and answered before the next ones: their keys take 34 MiB at most.
_SORTED_COUNT = 2048
# Between two looks at what has expired.
_CHECK_SECONDS = 1.0
_SWEEP_SECONDS = 3600.0
# A thread that reads lines lets other threads run for as long as this, after as long as this.
_PAUSE_SECONDS = 0.001


class Batches:
    """The batches of a folder. Belongs to one event loop; `start` and close it.

    Args:
        owner_of: returns the owner of what the client of this metadata leaves; raises if its key
            may not generate.
    """

    def __init__(
        self,
        folder: Folder,
        upstream: Upstream,
        limits: Limits,
        owner_of: Callable[[Metadata], str],
    ) -> None:
        self.folder = folder
        self._upstream = upstream
        self._limits = limits
        self._owner_of = owner_of
        # Records are written one after the other.
        self._disk = FileThread()
        self._turns = asyncio.Semaphore(limits.batch_requests)
        # By owner. That of clients without a key is empty.
        self._keys: dict[str, Metadata] = {"": ()}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._totals: dict[str, Totals] = {}
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with the batches that have not ended."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop; what was answered stays, and another gateway can go on."""
        tasks = [*self._running.values(), *self._ending.values()]
        tasks += [self._watching] if self._watching is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._disk:
            pass
        self.folder.close()

    def seen(self, owner: str, key: Metadata) -> None:
        """Let the batches of an owner go on with this key."""
        if self._keys.get(owner) != key and any(
            record.is_open for record in self.folder.all(BATCH, owner)
        ):
            self._keys[owner] = key
            self._changed.set()

    async def add_file(self, owner: str, name: str, filename: str, **more: Any) -> Record:
        """Record an uploaded file. Raises HttpError (507)."""
        add = self.folder.add_file
        return await self._disk.run(lambda: add(name, owner, filename, "batch", **more))

    async def create(self, owner: str, key: Metadata, fields: Mapping[str, Any]) -> Record:
        """Begin a batch for the fields of a body. Raises HttpError (404, 507)."""
        file_id = fields["input_file_id"]
        self.folder.get(FILE, owner, file_id)
        self.folder.check_count(owner)
        now = int(time.time())
        value: BatchObject = {
            "id": f"{BATCH}{secrets.token_hex(16)}",
            "object": "batch",
            "endpoint": fields["endpoint"],
            "errors": None,
            "input_file_id": file_id,
            "completion_window": fields["completion_window"],
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_SECONDS,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": fields.get("metadata"),
        }
        record = Record(owner, {**value})
        await self._disk.run(self.folder.save, record)
        self._keys[owner] = key
        self._changed.set()
        return record

    async def cancel(self, record: Record) -> None:
        """End a batch early. Raises FailedPrecondition if it has ended, HttpError (507)."""
        value = record.value
        if not record.is_open:
            raise FailedPrecondition(
                f"Cannot cancel a batch with status '{value['status']}'.", reason="BATCH_ENDED"
            )
        if value["status"] != "cancelling":
            value |= {"status": "cancelling", "cancelling_at": int(time.time())}
            await self._disk.run(self.folder.save, record)
            self._changed.set()

    def shown(self, record: Record) -> dict[str, Any]:
        """Return OpenAI's object of a batch as it is now."""
        totals = self._totals.get(record.id)
        counts = {} if totals is None else {"request_counts": _counts(totals)}
        return record.value | counts

    async def remove_file(self, record: Record) -> None:
        """Remove a file. Raises HttpError (400) while a batch reads it."""
        for batch in self.folder.all(BATCH, record.owner):
            if batch.is_open and batch.value["input_file_id"] == record.id:
                raise HttpError(
                    400, f"{record.id} is the input of {batch.id}, which runs", reason="FILE_IN_USE"
                )
        await self._disk.run(self.folder.remove, record)

    # -- which run ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        swept = -math.inf
        while True:
            self._changed.clear()
            try:
                if time.monotonic() - swept >= _SWEEP_SECONDS:
                    swept = time.monotonic()
                    await self._disk.run(self.folder.remove_old)
                self._go_on()
            except Exception as error:  # such as of the disk: the next round tries again
                _log.error("batches cannot go on", exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._changed.wait()

    def _go_on(self) -> None:
        """End what is over, and start what waits, by turns among the owners."""
        waiting: dict[str, list[Record]] = {}
        active = dict.fromkeys(self._keys, 0)
        for record in self.folder.all(BATCH):
            if not record.is_open or record.id in self._ending:
                continue
            task = self._running.get(record.id)
            if _end_of(record):
                if task is not None:
                    if not task.cancelling():
                        task.cancel()
                else:
                    self._begin(self._ending, record, self._end)
            elif task is not None:
                active[record.owner] = active.get(record.owner, 0) + 1
            elif record.owner in self._keys:
                waiting.setdefault(record.owner, []).append(record)
        while waiting and len(self._running) < self._limits.batches:
            owner = min(waiting, key=lambda each: active[each])
            record = waiting[owner].pop(0)
            if not waiting[owner]:
                del waiting[owner]
            active[owner] += 1
            self._begin(self._running, record, self._answer)

    def _begin(
        self,
        tasks: dict[str, asyncio.Task[None]],
        record: Record,
        work: Callable[[Record], Awaitable[None]],
    ) -> None:
        async def guarded() -> None:
            try:
                await work(record)
            except Exception as error:
                incident = secrets.token_hex(8)
                _log.error("incident %s in %s", incident, record.id, exc_info=error)
                await self._finish(
                    record, "failed", HttpError(500, f"incident {incident}", reason="INTERNAL")
                )

        def ended(task: asyncio.Task[None]) -> None:
            del tasks[record.id]
            if not task.cancelled() and (error := task.exception()) is not None:
                # The disk refuses even the record: the next round tries again.
                _log.error("batch %s: %s", record.id, error)
            else:
                self._changed.set()

        tasks[record.id] = asyncio.create_task(guarded())
        tasks[record.id].add_done_callback(ended)

    # -- one batch -----------------------------------------------------------------------------

    async def _answer(self, record: Record) -> None:
        """Answer what has no answer; return early if the key is no longer accepted."""
        owner, folder = record.owner, self.folder

        def caller() -> Metadata:
            key = self._keys.get(owner)
            if key is None or self._owner_of(key) != owner:
                raise Unauthenticated("the batch waits for a key", reason="TOKEN_MISSING")
            return key

        asked_with = self._keys[owner]
        requests = Requests(self._upstream, caller=caller, priority=_PRIORITY, turns=self._turns)
        error: SplitpointError | None = None
        try:
            async with self._opened(record) as opened:
                if record.value["status"] == "validating":
                    record.value |= {"status": "in_progress", "in_progress_at": int(time.time())}
                    await self._disk.run(folder.save, record)
                batch = Batch(
                    opened.source,
                    opened.answers,
                    Order.PREFIX,
                    self._limits.batch_requests,
                    math.inf,
                    lambda what, count: None,
                    self._totals[record.id],
                )
                for start in range(0, len(opened.positions), _SORTED_COUNT):
                    await batch.run(requests, opened.positions[start : start + _SORTED_COUNT])
        except (Unauthenticated, PermissionDenied):
            if self._keys.get(owner) == asked_with:
                del self._keys[owner]
            _log.warning("batch %s waits for a key of its owner that is accepted", record.id)
            return
        except SplitpointError as found:
            error = found
        await self._finish(record, "completed" if error is None else "failed", error)

    async def _end(self, record: Record) -> None:
        """End a batch that is cancelled or expired; of an expired one each line says so."""
        status = _end_of(record)
        try:
            async with self._opened(record) as opened:
                if status == "expired":
                    await opened.files.run(_write_expired, opened)
        except SplitpointError as error:  # a wrong input, or a full disk: it ends all the same
            _log.warning("batch %s ends without all its lines: %s", record.id, error.reason)
        await self._finish(record, status)

    @asynccontextmanager
    async def _opened(self, record: Record) -> AsyncIterator[_Opened]:
        """Open a batch's files, and find what has no answer. Raises InvalidArgument."""
        value, folder = record.value, self.folder
        stack = ExitStack()
        try:
            path, urls = folder.content(value["input_file_id"]), frozenset({value["endpoint"]})
            source = stack.enter_context(Source(path, urls, self._limits.body_bytes))
            output, error = (
                stack.enter_context(
                    AnswerFile(
                        folder.content(output_id(record.id, kind)), mode=0o600, take=folder.take
                    )
                )
                for kind in ("output", "error")
            )
            answers = _Answers(output, error)
            async with FileThread() as files:
                self._totals[record.id], positions = await _checked(files, source, answers)
                yield _Opened(source, answers, files, positions)
        finally:
            # The last lines are written to the disk.
            await asyncio.shield(asyncio.to_thread(stack.close))

    async def _finish(
        self, record: Record, status: str, error: SplitpointError | None = None
    ) -> None:
        """Record the end. Killed in between, the gateway comes here again."""
        folder, value, now = self.folder, dict(record.value), int(time.time())
        for kind in ("output", "error"):
            name = output_id(record.id, kind)
            if folder.content(name).exists() and folder.content(name).stat().st_size:
                filename = f"{record.id}_{kind}.jsonl"
                args = (name, record.owner, filename, "batch_output")
                await self._disk.run(folder.add_file, *args)
                value[f"{kind}_file_id"] = name
            else:
                folder.remove_content(name)
        totals = self._totals.get(record.id)
        if totals is not None:
            value["request_counts"] = _counts(totals)
        if error is not None:
            path = folder.content(value["input_file_id"])
            told: BatchError = {
                "code": error.reason.lower() or "invalid_request",
                "message": error.message.replace(str(path), "the file"),
                "param": None,
                "line": None,
            }
            value["errors"] = {"object": "list", "data": [told]}
        value |= {"status": status, "finalizing_at": now, f"{status}_at": now}
        ended = Record(record.owner, value, record.disk_bytes)
        await self._disk.run(folder.save, ended)
        self._totals.pop(record.id, None)
        _log.info("batch %s: %s", record.id, status)


@dataclass(frozen=True, slots=True)
class _Opened:
    source: Source
    answers: _Answers
    files: FileThread
    # Places of the requests without an answer.
    positions: array[int]


class _Answers:
    """The output file and the error file of a batch (`run.Answers`)."""

    def __init__(self, output: AnswerFile, error: AnswerFile) -> None:
        self.files = (output, error)

    def write(self, row: Mapping[str, Any]) -> None:
        is_answer = row["error"] is None and row["response"]["status_code"] == 200
        try:
            self.files[0 if is_answer else 1].write(row)
        except HttpError as error:
            raise ResourceExhausted(error.message, reason=error.reason) from error
        except ResourceExhausted as error:  # by its path
            raise ResourceExhausted("the disk of batches is full", reason="DISK_FULL") from error


async def _checked(
    files: FileThread, source: Source, answers: _Answers
) -> tuple[Totals, array[int]]:
    """Read requests and answers in a thread, which lets the others run now and then."""
    is_left = False
    worked_at = time.monotonic()

    def pause(*_: object) -> None:
        nonlocal worked_at
        if is_left:
            raise Cancelled("the batch is stopped")
        if len(source) > MOST_LINES:
            raise InvalidArgument(f"the file has more than {MOST_LINES:,} requests")
        if time.monotonic() - worked_at > _PAUSE_SECONDS:
            time.sleep(_PAUSE_SECONDS)
            worked_at = time.monotonic()

    def check() -> tuple[Totals, array[int]]:
        source.index(pause)
        if not len(source):
            raise InvalidArgument("the file has no requests", reason="EMPTY_FILE")
        return unanswered(source, *answers.files, on_row=pause)

    try:
        return await files.run(check)
    except asyncio.CancelledError:
        is_left = True
        raise


def _write_expired(opened: _Opened) -> None:
    source, why = opened.source, "the completion window ended before this request was answered"
    for position in opened.positions:
        line, digest = source.read(position), source.digest_of(position)
        opened.answers.write(
            fault_row(line.custom_id, digest, line.number, why, code="batch_expired")
        )


def _end_of(record: Record) -> str:
    """Return the status in which a batch must end now; empty if it goes on."""
    if record.value["status"] == "cancelling":
        return "cancelled"
    return "expired" if time.time() >= record.value["expires_at"] else ""


def _counts(totals: Totals) -> RequestCounts:
    failed = totals.earlier_failed_count + totals.failed_count
    answered = totals.earlier_count + totals.answered_count
    return {"total": totals.line_count, "completed": answered - failed, "failed": failed}
