"""Test the options of lanes: the serial twin, the emulated link, the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trace_files import read_trace

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.residency.batch_size import LEAST, MOST_STEP_SECONDS, SIZES, BatchLimit
from splitpoint.shapes import DataType
from splitpoint.transport.tls import PLAIN
from splitpoint.v1 import types_pb2
from splitpoint.v1 import worker_pb2 as pb
from worker_service.__main__ import options_from, parse_arguments
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import SerialLanes
from worker_service.server import WorkerServicer
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import LoadedWorker, load_worker

SUFFIX, MODEL = types_pb2.DRAFT_METHOD_SUFFIX, types_pb2.DRAFT_METHOD_MODEL


def options(folder: Path, *arguments: str) -> WorkerOptions:
    base = ("--listen", "unix:/none", "--model", str(folder), "--device", "cpu")
    small = ("--dtype", "float32", "--device-memory", "64MiB", "--max-batch", "4")
    return options_from(parse_arguments([*base, *small, *arguments]), PLAIN)


async def info_of(worker: LoadedWorker) -> pb.GetInfoResponse:
    servicer = WorkerServicer(worker=worker)
    return await servicer.GetInfo(pb.GetInfoRequest(), None)  # type: ignore[arg-type]


async def test_a_worker_overlaps_by_default(folder: Path) -> None:
    worker = await load_worker(options(folder))
    info = await info_of(worker)
    await worker.runtime.stop()
    worker.monitor.stop()
    assert type(worker.engine.lanes) is ThreadLanes
    assert worker.engine.trace is None
    assert info.schedule == types_pb2.SCHEDULE_PIPELINED
    assert info.emulated_link_bytes_per_second == 0
    assert "emulated" not in info.device


async def test_a_serial_worker_on_an_emulated_link_says_so(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    worker = await load_worker(
        options(folder, "--serial", "--link-rate", "500MB/s", "--trace", str(file))
    )
    info = await info_of(worker)
    await worker.runtime.stop()
    worker.monitor.stop()
    assert type(worker.engine.lanes) is SerialLanes
    assert info.schedule == types_pb2.SCHEDULE_SERIAL
    assert info.emulated_link_bytes_per_second == 5e8
    assert "link emulated at 500 MB/s" in info.device
    # No faster than the emulated link.
    assert info.profile.link_bytes_per_second < 5.5e8
    # The file is there from the start, and what the profile measured is not in it.
    recorded = read_trace(file)
    assert recorded.spans == ()
    assert recorded.facts == {"device": info.device, "schedule": "serial"}


async def test_a_worker_chooses_its_batch_by_memory_and_measured_steps(folder: Path) -> None:
    """It keeps it when its costs are measured again: the memory is divided by it."""
    for memory, most in ((64 << 20, SIZES[-1]), (24 << 20, LEAST)):
        given = replace(options(folder), max_batch_size=None, device_memory_bytes=memory)
        worker = await load_worker(given)
        before = await info_of(worker)
        servicer = WorkerServicer(worker=worker)
        await servicer.Profile(pb.ProfileRequest(refresh=True), None)  # type: ignore[arg-type]
        info, engine = await info_of(worker), worker.engine
        await worker.runtime.stop()
        worker.monitor.stop()
        assert info.profile != before.profile
        assert info.max_batch_size == engine.max_batch_size == worker.batch.size <= most
        assert info.max_batch_size == before.max_batch_size
        assert info.batch_reason == worker.batch.reason
        assert engine.memory_plan.page_count // (info.shape.context_length // 64) >= (
            worker.batch.held
        )
        if most == LEAST:
            assert worker.batch.limit is BatchLimit.MEMORY
        else:
            # On a host that is busy with other things.
            is_slow = worker.batch.more_seconds > MOST_STEP_SECONDS
            assert worker.batch.size > LEAST or is_slow


async def test_a_given_batch_stays(folder: Path) -> None:
    worker = await load_worker(options(folder))
    info = await info_of(worker)
    await worker.runtime.stop()
    worker.monitor.stop()
    assert info.max_batch_size == worker.engine.max_batch_size == 4
    assert info.batch_reason.startswith("batch 4 (--max-batch): memory for ")


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--link-rate", "0", "link-rate"),
        ("--link-rate", "fast", "link-rate"),
        ("--link-rate", "184MB/h", "link-rate"),
        ("--trace", "/no/such/folder/trace.json", "trace"),
    ],
)
def test_bad_values_are_refused(folder: Path, flag: str, value: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options(folder, flag, value)
    assert caught.value.field == field


async def test_a_trace_that_cannot_be_written_is_refused_at_the_start(
    folder: Path, tmp_path: Path
) -> None:
    wanted = WorkerOptions(
        "0", folder, device="cpu", data_type=DataType.FLOAT32, trace_file=tmp_path
    )
    with pytest.raises(InvalidArgument, match="cannot be written"):
        await load_worker(wanted)


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "nan"])
def test_a_share_of_reads_is_between_none_and_all(folder: Path, rate: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options(folder, "--verify-rate", rate)
    assert caught.value.field == "verify-rate"
    assert options(folder, "--verify-rate", "0").verify_rate == 0.0


async def test_a_worker_drafts_only_as_configured(folder: Path) -> None:
    """Self drafts need a store; the model drafts for itself here."""
    for arguments, methods, draft_model in (
        ((), [], ""),
        (("--speculative-config", '{"method": "auto"}'), [SUFFIX], ""),
        (("--draft-model", str(folder)), [SUFFIX, MODEL], folder.name),
    ):
        worker = await load_worker(options(folder, *arguments))
        info = await info_of(worker)
        await worker.runtime.stop()
        worker.monitor.stop()
        assert sorted(info.speculation.methods) == methods
        assert info.speculation.draft_model == draft_model
        assert bool(worker.engine.memory_plan.draft_tokens) == bool(methods)
    assert info.speculation.defaults.method == MODEL


async def test_a_draft_model_of_another_vocabulary_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="vocabulary"):
        await load_worker(options(folder, "--draft-model", str(resolve_model(None))))
