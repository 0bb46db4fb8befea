"""What a worker's numerics are by wish, obstacle and check. Takes 4 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.shapes import Encoding, Numerics
from splitpoint.transport.tls import PLAIN
from splitpoint.v1 import types_pb2
from splitpoint.v1 import worker_pb2 as pb
from worker_service.__main__ import options_from, parse_arguments
from worker_service.kernels.choice import Decode, by_flags
from worker_service.numerics.verdict import decide, obstacle
from worker_service.server import WorkerServicer
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import load_worker


def no_check() -> str | None:
    raise AssertionError("nothing should be checked")


def test_fast_is_what_is_asked_for() -> None:
    assert decide("fast", obstacle=None, check=no_check).numerics is Numerics.FAST


@pytest.mark.parametrize("wish", ["auto", "invariant"])
def test_a_check_without_findings_makes_a_worker_invariant(wish: str) -> None:
    assert decide(wish, obstacle=None, check=lambda: None).numerics is Numerics.INVARIANT


def test_auto_becomes_fast_and_says_why() -> None:
    found = decide("auto", obstacle=None, check=lambda: "the product up differs")
    assert (found.numerics, found.reason) == (Numerics.FAST, "the product up differs")
    found = decide("auto", obstacle="no compiler", check=no_check)
    assert (found.numerics, found.reason) == (Numerics.FAST, "no compiler")


def test_invariant_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(InvalidArgument, match=r"--numerics invariant .*: the product up") as caught:
        decide("invariant", obstacle=None, check=lambda: "the product up differs")
    assert (caught.value.field, caught.value.exit_code) == ("numerics", 2)
    with pytest.raises(InvalidArgument, match="no compiler"):
        decide("invariant", obstacle="no compiler", check=no_check)


def test_what_stands_against_it_before_the_model_is_loaded() -> None:
    kernels = by_flags(torch.float32, [])
    found = obstacle("auto", is_gpu=False, encoding=Encoding.INT8, kernels=kernels)
    assert found is not None
    assert "int8" in found
    found = obstacle("auto", is_gpu=False, encoding=Encoding.NATIVE, kernels=kernels)
    assert kernels.decode is Decode.PRODUCTS
    assert found is not None
    assert "--cpu-kernels decode=fused" in found
    found = on_gpu("auto", has_triton=True)
    assert found is not None
    assert "one GPU has confirmed them so far" in found
    assert on_gpu("invariant", has_triton=True) is None
    found = on_gpu("invariant", has_triton=False)
    assert found is not None
    assert "Triton" in found


def on_gpu(wish: str, *, has_triton: bool) -> str | None:
    return obstacle(
        wish, is_gpu=True, encoding=Encoding.NATIVE, kernels=None, has_triton=has_triton
    )


def options(folder: Path, *arguments: str) -> WorkerOptions:
    base = ("--listen", "unix:/none", "--model", str(folder), "--device", "cpu")
    small = ("--dtype", "float32", "--device-memory", "64MiB", "--max-batch", "4")
    return options_from(parse_arguments([*base, *small, *arguments]), PLAIN)


async def test_a_worker_tells_its_numerics(folder: Path) -> None:
    worker = await load_worker(options(folder, "--numerics", "fast"))
    servicer = WorkerServicer(worker=worker)
    info = await servicer.GetInfo(pb.GetInfoRequest(), None)  # type: ignore[arg-type]
    await worker.runtime.stop()
    worker.monitor.stop()
    assert info.numerics == types_pb2.NUMERICS_UNSPECIFIED
    assert info.numerics_reason == "as asked for"


async def test_a_worker_with_other_kernels_refuses_to_be_invariant(folder: Path) -> None:
    wanted = options(folder, "--numerics", "invariant", "--cpu-kernels", "decode=products")
    with pytest.raises(InvalidArgument, match="decode attention by products") as caught:
        await load_worker(wanted)
    assert caught.value.field == "numerics"


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("linear", ["panels", "packed", "plain"])
async def test_an_invariant_worker_uses_kernels_of_one_order(folder: Path, linear: str) -> None:
    """Whatever was measured to be fastest, and in every layout of weights."""
    wanted = options(folder, "--numerics", "invariant", "--cpu-kernels", f"linear={linear}")
    worker = await load_worker(wanted)
    servicer = WorkerServicer(worker=worker)
    info = await servicer.GetInfo(pb.GetInfoRequest(), None)  # type: ignore[arg-type]
    await worker.runtime.stop()
    worker.monitor.stop()
    assert info.numerics == types_pb2.NUMERICS_INVARIANT
    assert "decode attention fused, prefill attention fused" in info.device
    assert f"weights {linear}" in info.device


async def test_a_worker_that_may_compile_nothing_says_which_kernel_it_lacks(folder: Path) -> None:
    wanted = options(folder, "--cpu-kernels", "flags")
    worker = await load_worker(wanted)
    await worker.runtime.stop()
    worker.monitor.stop()
    assert worker.numerics.numerics is Numerics.FAST
    assert "decode attention by products" in worker.numerics.reason
