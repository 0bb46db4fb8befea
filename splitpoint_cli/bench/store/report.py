"""Results of `bench store`, as JSON and as a table; runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint.config import format_size
from splitpoint_cli.bench.shared.report import commit, hardware
from splitpoint_cli.bench.store.workload import StoreWorkload
from splitpoint_cli.traces.statistics import quantile


@dataclass(frozen=True, slots=True)
class MappingResult:
    """Passes over all sealed payload; rates in bytes per second, one per pass.

    `first_read_rate`: through a mapping whose pages were never touched.
    """

    attach_seconds: float
    payload_bytes: int
    piece_bytes: int
    first_read_rate: float
    read_rates: tuple[float, ...]
    memcpy_rates: tuple[float, ...]

    @property
    def read_rate(self) -> float:
        return statistics.median(self.read_rates)

    @property
    def memcpy_rate(self) -> float:
        return statistics.median(self.memcpy_rates)

    @property
    def ratio(self) -> float:
        return self.read_rate / self.memcpy_rate


@dataclass(frozen=True, slots=True)
class CallsResult:
    """`latencies`: seconds of every call by kind, waiting in the client included."""

    seconds: float
    latencies: dict[str, tuple[float, ...]]

    @property
    def calls_per_second(self) -> float:
        return sum(map(len, self.latencies.values())) / self.seconds

    @property
    def all_latencies(self) -> list[float]:
        return [each for kind in self.latencies.values() for each in kind]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Chunks through Reserve + Seal + Release; seconds of each repeat."""

    chunk_count: int
    batch: int
    chunk_tokens: int
    seconds: tuple[float, ...]

    @property
    def chunks_per_second(self) -> float:
        return self.chunk_count / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class StreamResult:
    """A way to get bytes through a socket; bytes per second, one per pass.

    `peer_rates` are those of the plain form of the same transport.
    """

    name: str
    value_bytes: int
    rates: tuple[float, ...]
    peer: str = ""
    peer_rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def ratio(self) -> float | None:
        return self.rate / statistics.median(self.peer_rates) if self.peer_rates else None


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of each pass, and those that processors computed in all processes together."""

    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One sequence read from another store, in three ways.

    Attributes:
        payload_bytes: of each pass.
        run_slots: contiguous slots in the source's arena.
        stream: ReadChunks, its bytes compared and thrown away.
        fetch: ReadChunks into another store's arena, and sealed there.
        mooncake: the same by Mooncake's Transfer Engine.
        transfer_seconds: of Mooncake's reads alone, without leases, checks and seals.
    """

    payload_bytes: int
    run_slots: int
    stream: Passes
    fetch: Passes
    mooncake: Passes
    transfer_seconds: tuple[float, ...]

    def rate(self, seconds: Sequence[float]) -> float:
        """Return the median rate in bytes per second."""
        return self.payload_bytes / statistics.median(seconds)

    def per_gb(self, passes: Passes) -> float:
        """Return the median processor seconds for 1e9 bytes."""
        return statistics.median(passes.processor_seconds) / (self.payload_bytes / 1e9)


@dataclass(frozen=True, slots=True)
class StoreResults:
    """`transfer`: None if it was not measured. `skipped`: what was not measured, and why."""

    mapping: MappingResult
    calls: CallsResult
    batches: BatchResult
    streams: tuple[StreamResult, ...]
    skipped: tuple[str, ...]
    transfer: TransferResult | None = None


def report_of(workload: StoreWorkload, results: StoreResults) -> dict[str, Any]:
    """Return the JSON object. Rates are medians, in GB/s (1e9 bytes); times in seconds or ms."""
    mapping, calls, batches = results.mapping, results.calls, results.batches
    return {
        "benchmark": "store",
        "workload": asdict(workload),
        "hardware": hardware(),
        "commit": commit(),
        "mapping": {
            "attach_ms": round(1e3 * mapping.attach_seconds, 2),
            "payload_bytes": mapping.payload_bytes,
            "piece_bytes": mapping.piece_bytes,
            "first_read_gb_per_second": _gb(mapping.first_read_rate),
            "read_gb_per_second": _gb(mapping.read_rate),
            "memcpy_gb_per_second": _gb(mapping.memcpy_rate),
            "ratio": round(mapping.ratio, 3),
        },
        "calls": {
            "in_flight": workload.in_flight,
            "per_second": round(calls.calls_per_second),
            **_milliseconds(calls.all_latencies),
            "by_kind": {
                kind: {"count": len(each), **_milliseconds(each)}
                for kind, each in calls.latencies.items()
            },
        },
        "batches": {
            "chunks_per_second": round(batches.chunks_per_second),
            "batch": batches.batch,
            "chunk_tokens": batches.chunk_tokens,
        },
        "streams": {
            stream.name: {
                "gb_per_second": _gb(stream.rate),
                "value_bytes": stream.value_bytes,
                "ratio_to_memcpy": round(stream.rate / mapping.memcpy_rate, 4),
                **(
                    {
                        "peer": stream.peer,
                        "peer_gb_per_second": _gb(statistics.median(stream.peer_rates)),
                        "ratio_to_peer": round(stream.ratio, 3),
                    }
                    if stream.ratio is not None
                    else {}
                ),
            }
            for stream in results.streams
        },
        "transfer": None if results.transfer is None else _transfer(results.transfer),
        "skipped": list(results.skipped),
    }


def _transfer(transfer: TransferResult) -> dict[str, Any]:
    """Return all rates, and Mooncake's over the stream's and the fetch's, which it replaces."""
    mooncake = transfer.mooncake
    return {
        "payload_bytes": transfer.payload_bytes,
        "run_slots": transfer.run_slots,
        **{
            name: {
                "gb_per_second": _gb(transfer.rate(passes.seconds)),
                "processor_seconds_per_gb": round(transfer.per_gb(passes), 3),
            }
            for name, passes in (
                ("stream", transfer.stream),
                ("fetch", transfer.fetch),
                ("mooncake", mooncake),
            )
        },
        "mooncake_reads": {
            "gb_per_second": _gb(transfer.rate(transfer.transfer_seconds)),
            "to_stream": round(
                transfer.rate(transfer.transfer_seconds) / transfer.rate(transfer.stream.seconds), 3
            ),
        },
        **{
            f"mooncake_to_{name}": {
                "rate": round(transfer.rate(mooncake.seconds) / transfer.rate(passes.seconds), 3),
                "processor": round(transfer.per_gb(mooncake) / transfer.per_gb(passes), 3),
            }
            for name, passes in (("stream", transfer.stream), ("fetch", transfer.fetch))
        },
    }


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the report for people."""
    mapping, calls, batches = report["mapping"], report["calls"], report["batches"]
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=f"KV store, {report['hardware']}"
    )
    for column in ("what", "measured", "against"):
        table.add_column(column)
    table.add_row(
        "attach: call and mapping",
        f"{mapping['attach_ms']:.1f} ms",
        f"first read, pages untouched: {mapping['first_read_gb_per_second']:.1f} GB/s",
    )
    table.add_row(
        "read through the mapping",
        f"{mapping['read_gb_per_second']:.1f} GB/s",
        f"{mapping['ratio']:.2f} x memcpy ({mapping['memcpy_gb_per_second']:.1f} GB/s) in "
        f"pieces of {format_size(mapping['piece_bytes'])}",
    )
    table.add_row(
        f"control calls, {calls['in_flight']} in flight",
        f"{calls['per_second']:,} calls/s",
        f"p50 {calls['p50_ms']:.1f} ms, p99 {calls['p99_ms']:.1f} ms",
    )
    for kind, each in calls["by_kind"].items():
        table.add_row(
            f"  {kind}",
            f"{each['count']:,} calls",
            f"p50 {each['p50_ms']:.1f} ms, p99 {each['p99_ms']:.1f} ms",
        )
    table.add_row(
        f"Reserve + Seal + Release in batches of {batches['batch']}",
        f"{batches['chunks_per_second']:,} chunks/s",
        f"{batches['chunk_tokens']} tokens a chunk",
    )
    for name, each in report["streams"].items():
        peer = (
            f"{each['ratio_to_peer']:.2f} x {each['peer']} ({each['peer_gb_per_second']:.2f} GB/s)"
            if "peer" in each
            else f"{each['ratio_to_memcpy']:.3f} x memcpy"
        )
        value = format_size(each["value_bytes"])
        table.add_row(f"{name}, {value}", f"{each['gb_per_second']:.2f} GB/s", peer)
    if report["transfer"] is not None:
        _add_transfer(table, report["transfer"])
    if report["skipped"]:
        table.caption = "skipped: " + "; ".join(report["skipped"])
    return table


def _add_transfer(table: Table, transfer: Mapping[str, Any]) -> None:
    size = format_size(transfer["payload_bytes"])
    for name, what in (
        ("stream", f"{size} of another store: ReadChunks"),
        ("fetch", "  ReadChunks into an arena, sealed"),
        ("mooncake", "  by Mooncake into an arena, sealed"),
    ):
        each = transfer[name]
        against = ""
        if name == "mooncake":
            stream, fetch = transfer["mooncake_to_stream"], transfer["mooncake_to_fetch"]
            reads = transfer["mooncake_reads"]
            against = (
                f"; its reads alone {reads['gb_per_second']:.2f} GB/s, {reads['to_stream']:.2f} x "
                f"the stream; {stream['rate']:.2f} x the stream at {stream['processor']:.2f} x its "
                f"processor time, {fetch['rate']:.2f} x the fetch at {fetch['processor']:.2f} x"
            )
        table.add_row(
            what,
            f"{each['gb_per_second']:.2f} GB/s",
            f"{each['processor_seconds_per_gb']:.2f} s/GB of all processors{against}",
        )


def _gb(rate: float) -> float:
    return round(rate / 1e9, 3)


def _milliseconds(latencies: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {f"p{p}_ms": round(1e3 * quantile(ordered, p / 100), 2) for p in (50, 99)}
