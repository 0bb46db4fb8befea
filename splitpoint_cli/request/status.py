"""`splitpoint status`: does the stack serve, is it complete, and what is it doing?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from splitpoint.client import Client
from splitpoint.client.answers import TenantStatus, Worker
from splitpoint.config import DEFAULT_ADDRESS, check_address, counted, format_size
from splitpoint.costs.fetching import known_rates
from splitpoint.errors import DeadlineExceeded, Unavailable
from splitpoint.transport.tls import Identity, client_identity
from splitpoint_cli.options import Address, CaFile, TokenFile
from splitpoint_cli.output import AsJson, OutputFile, hand_over, out, plain_reason, print_table
from splitpoint_cli.request.findings import Finding, Severity, findings_of, store_findings
from splitpoint_cli.request.observed import Gateway, Status, read_status, read_store
from splitpoint_cli.request.stores import engine_lines, store_json, store_lines

_POLL_SECONDS = 0.2
# Waiting requests that are listed in text.
_QUEUE_LINES = 10
# In addition to the codes of `splitpoint_cli.output`.
GIVEN_UP_EXIT = 6


def status(
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[
        float,
        typer.Option(
            help="Wait until all workers and the gateway are ready, this long at most.",
            metavar="SECONDS",
            min=0.0,
        ),
    ] = 0.0,
    ca: CaFile = None,
    token_file: TokenFile = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show the workers' kernels and threads, too.")
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(
            help="Show this store alone and the engines that use it, such as a `splitpoint store`; "
            "absent: the stack at --address.",
            metavar="ADDRESS",
        ),
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Show what is wrong, then workers, stores, gateway and queue.

    A stack serves while one worker is ready, and is complete when all of them and the gateway are.

    Exit codes: 0 it serves, whatever else is found; 1 it does not serve; 3 no scheduler answers (or
    not the --store); 4 it serves, and --wait ended before it was complete; 6 it serves, and `up`
    gave a worker up.
    """
    identity = client_identity(ca=ca, token_file=token_file)
    if store is not None:
        _show_store(store, identity, wait, as_json=as_json, output=output)
        return
    with Client(address, identity=identity) as client:
        found = _wait_complete(client, wait)
    hand_over(
        status_json(found), lambda: _print_tables(found, wide), as_json=as_json, output=output
    )
    code = status_exit_code(found, has_waited=wait > 0)
    if code:
        raise typer.Exit(code)


def _show_store(
    address: str, identity: Identity, seconds: float, *, as_json: bool, output: Path | None
) -> None:
    """Show a store alone. Raises typer.Exit with 3 if it does not answer."""
    check_address(address, field="store")
    deadline = time.monotonic() + seconds
    while not (found := read_store(address, identity)).is_serving and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    findings = store_findings(found)
    report = {
        "serves": found.is_serving,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        **store_json(found),
    }

    def show() -> None:
        for finding in findings:
            _print_finding(finding)
        for line in (*store_lines(found), *engine_lines(found)):
            _print_text(line)

    hand_over(report, show, as_json=as_json, output=output)
    if not found.is_serving:
        raise typer.Exit(Unavailable.exit_code)


def status_exit_code(found: Status, *, has_waited: bool) -> int:
    """Return the exit code (docs/operations.md). `has_waited`: --wait was given."""
    if not found.serving:
        return 1
    if found.given_up:
        return GIVEN_UP_EXIT
    return DeadlineExceeded.exit_code if has_waited and not found.is_complete else 0


def _wait_complete(client: Client, seconds: float) -> Status:
    """Return the first complete status, or the last one before the time was over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = read_status(client)
        except (Unavailable, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
        else:
            if found.is_complete or time.monotonic() >= deadline:
                return found
        time.sleep(_POLL_SECONDS)


def status_json(found: Status) -> dict[str, object]:
    """Return the object that `--json` prints; each worker's `profile` fits `plan --profile`."""
    return {
        "serves": found.serving,
        "complete": found.is_complete,
        "address": found.address,
        "away": dict(found.away),
        "findings": [dataclasses.asdict(finding) for finding in findings_of(found)],
        "scheduler": dataclasses.asdict(found.scheduler),
        "models": [
            {
                "name": model.name,
                "context_length": model.context_length,
                "ready_worker_count": model.ready_worker_count,
                "has_tokenizer": model.has_tokenizer,
                "has_activations": model.has_activations,
                "kv_encoding": model.kv_encoding.value,
                "chunk_tokens": model.chunk_tokens,
                "draft_methods": list(model.draft_methods),
                "selection_methods": list(model.selection_methods),
                "numerics": model.numerics.value,
                "numerics_digest": model.numerics_digest,
                "weight_format": model.weight_format.value,
            }
            for model in found.models
        ],
        "workers": [
            {
                **dataclasses.asdict(worker),
                "schedule": worker.schedule.value,
                "weight_format": worker.weight_format.value,
            }
            for worker in found.workers
        ],
        "queue": dataclasses.asdict(found.queue),
        "stores": [store_json(store) for store in found.stores],
        "gateways": [dataclasses.asdict(gateway) for gateway in found.gateways],
    }


def _print_tables(found: Status, wide: bool) -> None:
    """Print everything; within 100 columns, except for reasons and names, unless `wide`."""
    out.print(f"scheduler {found.address}: {_state(found)}")
    for finding in findings_of(found):
        _print_finding(finding)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "state", "device", "schedule", "cache", "running", "note"):
        table.add_column(column)
    for worker in found.workers:
        table.add_row(
            worker.id,
            "draining" if worker.draining else "ready" if worker.ready else "not ready",
            worker.device if wide else _device_name(worker),
            worker.schedule.value if worker.device else "",
            _cache_cell(worker),
            str(worker.running_count),
            plain_reason(worker.message),
        )
    print_table(table)
    same: dict[str, list[str]] = {}
    for worker in found.workers:
        for line in _worker_lines(worker, wide):
            same.setdefault(line, []).append(worker.id)
    for line, ids in same.items():
        _print_text(f"worker{'s' if len(ids) > 1 else ''} {', '.join(ids)}: {line}")
    for store in found.stores:
        for line in store_lines(store):
            _print_text(line)
    for gateway in found.gateways:
        _print_text(gateway_line(gateway))
    for line in tenant_lines(found.scheduler.tenants):
        _print_text(line)
    waiting = counted(len(found.queue.requests), "request waits", "requests wait")
    out.print(f"queue: {waiting}, at most {found.queue.capacity:,} may")
    for request in found.queue.requests[:_QUEUE_LINES]:
        # 0: no ready worker could run it, so what it needs is not known.
        size = request.footprint_bytes
        memory = f" ({format_size(size)} of device memory)" if size else ""
        _print_text(
            f"  {request.position + 1}. request {request.request_id}{memory} has waited "
            f"{request.waited_seconds:.1f} s: {request.reason}"
        )
    if (more := len(found.queue.requests) - _QUEUE_LINES) > 0:
        out.print(f"  and {more:,} more, which --json lists")


def gateway_line(gateway: Gateway) -> str:
    """Return the state of a gateway and what it counts."""
    state = "ready" if gateway.is_serving else "not ready" if gateway.is_up else "no answer"
    text = f"gateway {gateway.url}: {state}"
    if gateway.message:
        text += f", {plain_reason(gateway.message)}"
    counts = gateway.counts
    if counts is None:
        return text
    ways = (
        (counts.failed_count, "failed"),
        (counts.refused_count, "refused"),
        (counts.left_count, "left by their clients"),
    )
    ended = ", ".join(f"{count:,} {way}" for count, way in ways if count)
    return (
        f"{text}\n  {counted(counts.request_count, 'request')} answered"
        f"{f' ({ended})' if ended else ''}, {counts.open_count:,} open with "
        f"{counted(counts.stream_count, 'stream')}, "
        f"{counted(counts.connection_count, 'connection')}"
    )


def tenant_lines(tenants: Sequence[TenantStatus]) -> Iterator[str]:
    """Yield a line for each tenant; nothing if all requests are of the unnamed one."""
    for tenant in tenants:
        if tenant.tenant or len(tenants) > 1:
            waits = ""
            if tenant.waiting_count:
                waits = f" for {tenant.oldest_wait_seconds:.1f} s at most"
            yield (
                f"tenant {tenant.tenant or '(unnamed)'}: {tenant.running_count:,} running, "
                f"{tenant.waiting_count:,} waiting{waits}, weight {tenant.weight:g}, has had "
                f"{format_size(int(tenant.service_byte_seconds))} x s; metrics call it "
                f"{tenant.metrics_label}"
            )


def _print_text(text: str) -> None:
    """Print a line; a terminal gets it broken between words, anything else whole."""
    out.print(text, markup=False, soft_wrap=not out.is_terminal)


def _device_name(worker: Worker) -> str:
    """Return the device without its kernels and threads."""
    return worker.device.partition(", ")[0]


def _worker_lines(worker: Worker, wide: bool) -> Iterator[str]:
    """Yield what there is to say about a worker besides its row of the table."""
    if worker.batch_reason:
        yield worker.batch_reason
    if worker.weights:
        yield worker.weights
    eager = worker.telemetry.eager_message if worker.telemetry is not None else ""
    if eager and (wide or not worker.device.startswith("cpu")):
        yield f"decoding steps are no CUDA graphs: {eager}"
    if worker.profile is not None and (rates := known_rates(worker.profile)):
        yield "plans expect chunks from " + ", ".join(f"{name} at {rate}" for name, rate in rates)
    if worker.speculation is not None and worker.speculation.methods:
        yield speculation_text(worker)
    if worker.selection_methods:
        yield selection_text(worker)
    if worker.weight_format.is_lossy:
        yield f"weights are {worker.weight_format.value}: answers are approximate"
    if worker.numerics_reason:
        yield numerics_text(worker)
    if worker.advised_power_watts is not None:
        yield (
            f"a power cap of {worker.advised_power_watts:.0f} W would cost no throughput now: "
            f"{worker.advised_power_reason}"
        )


def _cache_cell(worker: Worker) -> str:
    charged, capacity = worker.cache_charged_bytes, worker.cache_capacity_bytes
    over = ", overcommitted" if charged > capacity else ""
    return f"{format_size(charged)} of {format_size(capacity)}{over}"


def numerics_text(worker: Worker) -> str:
    """Return the numerics of a worker, their digest if there is one, and why it has these."""
    digest = f" {worker.numerics_digest}" if worker.numerics_digest else ""
    return f"numerics {worker.numerics.value}{digest}: {worker.numerics_reason}"


def selection_text(worker: Worker) -> str:
    """Return what a worker can select by, and what it has read so."""
    text, told = f"selects by {', '.join(worker.selection_methods)}", worker.telemetry
    if told is None or not told.selection_step_count:
        return text
    share = told.selection_read_token_count / max(1, told.selection_visible_token_count)
    return f"{text}; {counted(told.selection_step_count, 'step')} read {share:.1%} of the tokens"


def speculation_text(worker: Worker) -> str:
    """Return what a worker that can draft drafts by, and how well that went."""
    speculation = worker.speculation
    if speculation is None:
        raise ValueError("the worker has told nothing of its speculation")
    parts = [
        f"drafts by {', '.join(speculation.methods)}",
        f"unasked {speculation.defaults.method}",
    ]
    if speculation.draft_model:
        parts.append(f"draft model {speculation.draft_model}")
    if speculation.defaults.num_speculative_tokens is not None:
        most = counted(speculation.defaults.num_speculative_tokens, "token")
        parts.append(f"at most {most} a step")
    telemetry = worker.telemetry
    if telemetry is not None and telemetry.draft_token_count:
        drafted = counted(telemetry.draft_token_count, "drafted token")
        parts.append(f"{telemetry.accepted_token_count:,} of {drafted} accepted")
    return "; ".join(parts)


def _state(found: Status) -> str:
    if not found.serving:
        return "not ready, no worker takes requests"
    names = ", ".join(model.name for model in found.models)
    if found.is_complete:
        return f"ready, serves {names}"
    return f"serves {names} with {found.ready_count} of {counted(len(found.workers), 'worker')}"


COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def _print_finding(finding: Finding) -> None:
    colour = COLOURS[finding.severity]
    why = f" ({finding.why})" if finding.why else ""
    out.print(f"[{colour}]{finding.severity.value}[/{colour}]: {escape(finding.what + why)}")
    out.print(f"  do: {escape(finding.do)}")
