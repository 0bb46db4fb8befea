"""`splitpoint batch`: answer a file of requests, at a running stack or by a model of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from splitpoint.checkpoint.resolve import BUNDLED_MODEL
from splitpoint.config import DEFAULT_ADDRESS, check_addresses, counted
from splitpoint.errors import Cancelled, InvalidArgument, SplitpointError
from splitpoint.options import scheduler, store, worker
from splitpoint.options.option import Option
from splitpoint.transport.tls import PLAIN, Identity, client_identity
from splitpoint_cli.options import Address, CaFile, TokenFile, of, takes_options
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    err,
    facts_table,
    hand_over,
    print_table,
    seconds_text,
    with_exit_codes,
)
from splitpoint_cli.signals import handled_by
from splitpoint_cli.stack.options import HOST_MEMORY

if TYPE_CHECKING:
    from gateway_service.batch.run import Batch, Totals


LINE_SECONDS = 10.0


@contextmanager
def shown(
    console: Console, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int], None]]:
    """Show how many of `total` requests are done, by what is done with them."""
    if not console.is_terminal:
        yield _lines(console, total, clock)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def on_progress(what: str, done: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield on_progress


def _lines(console: Console, total: int, clock: Callable[[], float]) -> Callable[[str, int], None]:
    told = clock()

    def on_progress(what: str, done: int) -> None:
        nonlocal told
        if clock() - told >= LINE_SECONDS:
            told = clock()
            console.print(f"{what}: {done:,} of {counted(total, 'request')}", markup=False)

    return on_progress


# Their warnings are about the cache of a stack that others use, too.
_SERVICES = ("kvstore_service", "worker_service", "scheduler_service", "splitpoint")
_OFFLINE = "Model in this process (docs/usage.md)"
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
# Seconds of a unary call: tokenizing, and reading facts of models.
_CALL_SECONDS = 60.0

ORDER: Option[str] = Option(
    "order",
    str,
    "prefix",
    "Order in which requests are sent: prefix, those with a common prefix one after the other; "
    "file, as they come.",
    choices=("prefix", "file"),
)
CONCURRENCY: Option[int] = Option(
    "concurrency", int, 64, "Requests that are open at a time.", unit="N", least=1, most=1024
)
RETRY_SECONDS: Option[float] = Option(
    "retry-seconds",
    float,
    60.0,
    "Seconds without any answer for which requests are repeated when no scheduler takes them; "
    "then the command ends, and can be run again.",
    unit="SECONDS",
    least=0,
)
RETRY_FAILED = Option(
    "retry-failed",
    bool,
    False,
    "Ask again for requests that earlier runs answered with an error; their answers are dropped.",
)
MODEL: Option[str | None] = Option(
    "model",
    str,
    None,
    "Answer with this model in this process instead of at --address: a checkpoint folder, a name "
    f"on the Hugging Face hub, or {BUNDLED_MODEL}, the bundled model.",
    unit="DIR|NAME",
)
THREADS: Option[int | None] = replace(
    worker.THREADS, help="CPU threads of the model; absent: all cores of this process."
)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Values of the declared options of `splitpoint batch`."""

    order: str = of(ORDER)
    concurrency: int = of(CONCURRENCY)
    retry_seconds: float = of(RETRY_SECONDS)
    retry_failed: bool = of(RETRY_FAILED)
    model: str | None = of(MODEL, _OFFLINE)
    device: str = of(worker.DEVICE, _OFFLINE)
    dtype: str = of(store.DTYPE, _OFFLINE)
    weights: str = of(store.WEIGHTS, _OFFLINE)
    host_memory: str | None = of(HOST_MEMORY, _OFFLINE)
    device_memory: str | None = of(worker.DEVICE_MEMORY, _OFFLINE)
    threads: int | None = of(THREADS, _OFFLINE)
    max_batch: int | None = of(worker.MAX_BATCH, _OFFLINE)
    max_batched_tokens: int = of(worker.MAX_BATCHED_TOKENS, _OFFLINE)
    residency: str = of(scheduler.RESIDENCY, _OFFLINE)
    speculative_config: str | None = of(worker.SPECULATIVE_CONFIG, _OFFLINE)
    draft_model: str | None = of(worker.DRAFT_MODEL, _OFFLINE)
    chat_template: str | None = of(scheduler.CHAT_TEMPLATE, _OFFLINE)

    def engine_options(self) -> dict[str, Any]:
        """Return the options of the model in this process that are not their defaults.

        Raises InvalidArgument if there are any without --model.
        """
        given = {
            each.name: value
            for each in fields(self)
            if each.metadata["panel"] == _OFFLINE and each.name != "model"
            if (value := getattr(self, each.name)) != each.metadata["option"].default
        }
        if given and self.model is None:
            name = next(iter(given))
            raise InvalidArgument(f"--{name.replace('_', '-')} needs --model", field=name)
        return given


@with_exit_codes
@takes_options
def batch(
    options: BatchOptions,
    *,
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests, one JSON object a line.")
    ],
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="Answers; those that are there already are not asked for again.",
        ),
    ],
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    It may be killed at any time: the same command then answers the rest.

    A request that fails has its error as its answer.
    """
    from gateway_service.batch.files import AnswerFile, Source
    from gateway_service.batch.jobs import URLS
    from gateway_service.batch.run import Batch, Order, unanswered

    engine_options = options.engine_options()
    began = time.monotonic()
    with ExitStack() as opened:
        opened.enter_context(_interruptible())
        source = opened.enter_context(Source(requests, URLS))
        if answers.exists() and answers.samefile(requests):
            raise InvalidArgument("OUT is the file of the requests", field="out")
        source.index()
        target = opened.enter_context(AnswerFile(answers))
        if options.retry_failed:
            unanswered(source, target, with_failed=False)  # or it is another batch's file
            target.drop_failed()
        totals, positions = unanswered(source, target)
        on_progress = opened.enter_context(shown(err, len(source)))
        run = Batch(
            source,
            target,
            Order(options.order),
            options.concurrency,
            options.retry_seconds,
            on_progress,
            totals,
        )
        try:
            if not positions:
                pass
            elif options.model is not None:
                _run_offline(run, positions, options.model, engine_options)
            else:
                identity = client_identity(ca=ca, token_file=token_file)
                _run_online(run, positions, address, identity)
        except SplitpointError:
            _tell_rest(totals)
            raise
    seconds = time.monotonic() - began
    report = _report(totals, options.order, seconds)
    hand_over(report, lambda: _show(totals, seconds), as_json=as_json, output=output)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Cancelled in this block on SIGINT and SIGTERM."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Cancelled("interrupted")

    with handled_by(interrupt, *_INTERRUPTS):
        yield


def _run_online(run: Batch, positions: array[int], address: str, identity: Identity) -> None:
    async def work() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in _INTERRUPTS:
            loop.add_signal_handler(number, task.cancel)
        await _answer(run, positions, check_addresses(address), identity)

    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        raise Cancelled("interrupted") from None


def _run_offline(
    run: Batch, positions: array[int], model: str, engine_options: dict[str, Any]
) -> None:
    from splitpoint.extras import need_all

    need_all("splitpoint batch --model")
    from splitpoint_offline.engine import Engine
    from splitpoint_offline.options import settings_of

    for package in _SERVICES:
        logging.getLogger(package).setLevel(logging.ERROR)
    settings = settings_of(None if model == BUNDLED_MODEL else model, engine_options)
    engine = Engine(settings)
    try:
        engine.start()
        engine.call(lambda _: _answer(run, positions, (settings.scheduler_address,), PLAIN))
    finally:
        engine.close()


async def _answer(
    run: Batch, positions: array[int], addresses: tuple[str, ...], identity: Identity
) -> None:
    from gateway_service.batch.jobs import Requests
    from gateway_service.upstream import Upstream

    upstream = Upstream(addresses, identity, call_seconds=_CALL_SECONDS)
    try:
        await run.run(Requests(upstream), positions)
    finally:
        await upstream.close()


def _tell_rest(totals: Totals) -> None:
    done = totals.earlier_count + totals.answered_count
    err.print(
        f"{done:,} of {counted(totals.line_count, 'request')} answered; the same command goes on"
    )


def _report(totals: Totals, order: str, seconds: float) -> dict[str, Any]:
    return {
        "requests": totals.line_count,
        "answered": totals.answered_count,
        "failed": totals.failed_count,
        "failed_by_status": {str(status): count for status, count in sorted(totals.errors.items())},
        "answered_earlier": totals.earlier_count,
        "failed_earlier": totals.earlier_failed_count,
        "order": order,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "prefilled_tokens": totals.prefilled_tokens,
        "completion_tokens": totals.completion_tokens,
        "seconds": seconds,
    }


def _show(totals: Totals, seconds: float) -> None:
    failed = totals.failed_count + totals.earlier_failed_count
    answered = f"{totals.earlier_count + totals.answered_count:,}"
    if totals.earlier_count:
        answered += f", {totals.earlier_count:,} of them by earlier runs"
    rows = [("requests answered", answered), ("with an error", f"{failed:,}")]
    if totals.errors:
        kinds = sorted(totals.errors.items())
        rows.append(
            ("now, by status", ", ".join(f"{status}: {count:,}" for status, count in kinds))
        )
    if failed:
        rows.append(("to ask these again", "--retry-failed"))
    if totals.answered_count:
        rate = totals.completion_tokens / seconds if seconds else 0.0
        rows += [
            ("prompt tokens", f"{totals.prompt_tokens:,}"),
            ("of them cached", f"{totals.cached_tokens:,}"),
            ("of them prefilled", f"{totals.prefilled_tokens:,}"),
            ("generated tokens", f"{totals.completion_tokens:,}, {rate:,.0f} a second"),
        ]
    rows.append(("time", seconds_text(seconds)))
    print_table(facts_table(rows))
