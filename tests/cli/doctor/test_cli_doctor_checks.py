"""The doctor's checks on machines that are not this one."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.errors import InvalidArgument
from splitpoint.host.memory import MemoryFacts
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.checks import disk, gpu, memory, redis, security
from splitpoint_cli.checks.finding import Check, Finding, Places, Verdict, run_check
from splitpoint_cli.checks.gpu import (
    Driver,
    Gpu,
    Link,
    TorchBuild,
    ask_torch,
    read_driver,
)
from splitpoint_cli.doctor.checklist import check_kernel, check_locks

GIB = 1 << 30


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_error_of_a_check_is_a_finding() -> None:
    def broken() -> Finding:
        raise RuntimeError("no such\nthing")

    def refused() -> Finding:
        raise InvalidArgument("not a size")

    (found,) = run_check(Check("this", broken))
    assert (found.name, found.verdict) == ("this", Verdict.WARNING)
    assert "RuntimeError: no such thing" in found.found
    (found,) = run_check(Check("that", refused))
    assert (found.verdict, found.found) == (Verdict.PROBLEM, "not a size")


def test_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    found = memory.check_shared_memory(tmp_path, 1 << 60, is_chosen=False)
    assert found.verdict == "problem"
    assert f"mount -o remount,size={found.advice.split('size=')[1].split()[0]}" in found.advice
    # What lies there makes room when it is replaced.
    fits = memory.check_shared_memory(tmp_path, 1 << 60, is_chosen=False, there_bytes=1 << 60)
    assert fits.verdict == "ok"
    assert memory.check_shared_memory(tmp_path, 32 << 20, is_chosen=True).verdict == "warning"
    assert memory.check_shared_memory(tmp_path, 32 << 20, is_chosen=False).verdict == "ok"
    # An arena that is there is adopted with its size, however small.
    adopted = memory.check_shared_memory(tmp_path, 1 << 20, is_chosen=True, there_bytes=1 << 20)
    assert adopted.verdict == "ok"
    gone = memory.check_shared_memory(tmp_path / "shm", GIB, is_chosen=True)
    assert "mount -t tmpfs -o size=1024m" in gone.advice


def test_memory_by_the_cgroup_and_by_the_machine() -> None:
    facts = MemoryFacts(64 * GIB, 50 * GIB, 8 * GIB, 6 * GIB)
    assert memory.check_memory(facts, 4 * GIB, GIB).verdict == "ok"
    tight = memory.check_memory(facts, 4 * GIB, 3 * GIB)
    assert tight.verdict == "warning"
    assert "docker run --memory" in tight.advice
    full = memory.check_memory(facts, 7 * GIB, 0)
    assert full.verdict == "problem"
    assert "--host-memory 5529MiB" in full.advice
    bare = MemoryFacts(64 * GIB, 50 * GIB, None, None)
    assert "docker" not in memory.check_memory(bare, 51 * GIB, 0).advice


@pytest.mark.parametrize(
    ("system", "release", "machine", "verdict"),
    [
        ("Linux", "6.1.0-18-amd64", "x86_64", "ok"),
        ("Linux", "3.10.0-1160.el7", "x86_64", "problem"),
        ("Linux", "6.8.0", "aarch64", "warning"),
        ("Darwin", "23.1.0", "arm64", "problem"),
    ],
)
def test_kernels(system: str, release: str, machine: str, verdict: str) -> None:
    named = os.uname_result((system, "host", release, "#1", machine))
    assert check_kernel(named).verdict == verdict


def test_locks_where_nothing_can_be_made(tmp_path: Path) -> None:
    assert check_locks(tmp_path).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    (found,) = run_check(Check("file locks", lambda: check_locks(tmp_path / "none")))
    assert found.verdict == "warning"


MOUNTS = "25 1 0:22 / {path} rw - tmpfs tmpfs rw,size=1g{options}\n"


@pytest.mark.parametrize(
    ("options", "wish", "verdict"),
    [
        (",huge=advise", "auto", "ok"),
        ("", "auto", "note"),
        ("", "always", "problem"),
        ("", "never", "ok"),
    ],
)
def test_huge_pages(tmp_path: Path, options: str, wish: str, verdict: str) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    write(tmp_path, proc__self__mountinfo=MOUNTS.format(path=shm.resolve(), options=options))
    write(tmp_path, sys__kernel__mm__transparent_hugepage__shmem_enabled="always [never] deny")
    places = Places(proc=tmp_path / "proc", sys=tmp_path / "sys", shm=shm)
    assert memory.check_huge_pages(wish, places).verdict == verdict


def test_limits() -> None:
    infinite = resource.RLIM_INFINITY
    assert memory.check_locked_memory(infinite, GIB, has_gpu=True).verdict == "ok"
    assert memory.check_locked_memory(8 << 20, GIB, has_gpu=True).verdict == "warning"
    assert memory.check_locked_memory(8 << 20, 0, has_gpu=True).verdict == "ok"
    assert memory.check_locked_memory(8 << 20, GIB, has_gpu=False).verdict == "ok"
    assert memory.check_open_files(1024, 1024).verdict == "ok"
    assert memory.check_open_files(infinite, infinite).verdict == "ok"
    raised = memory.check_open_files(256, 4096)
    assert (raised.verdict, raised.found) == ("ok", "limit 256, which services raise to 4,096")
    low = memory.check_open_files(256, 256)
    assert low.verdict == "warning"
    assert "as root" in low.advice


# -- GPUs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "on_bus", "visible", "verdict"),
    [
        ("auto", 0, 0, "ok"),
        ("auto", 8, 8, "ok"),
        ("auto", 8, 0, "warning"),
        ("cuda", 8, 0, "problem"),
        ("cuda", 0, 0, "problem"),
        ("cpu", 8, 8, "ok"),
    ],
)
def test_gpus_that_may_be_used(device: str, on_bus: int, visible: int, verdict: str) -> None:
    assert gpu.check_presence(device, on_bus, visible).verdict == verdict


@pytest.mark.parametrize(
    ("link", "verdict"),
    [
        (Link(5, 5, 16, 16), "ok"),
        (Link(1, 5, 16, 16), "note"),
        (Link(5, 5, 8, 16), "warning"),
        (None, "note"),
    ],
)
def test_links(link: Link | None, verdict: str) -> None:
    driver = Driver("580.1", "13.0", (Gpu(0, "H100", 80 * GIB, link),))
    first, second = gpu.check_driver(driver)
    assert (first.verdict, second.verdict) == ("ok", verdict)
    if link is not None:
        assert ("(up to 63 GB/s)" in second.found) == (link.lanes == 16)


class NvmlDouble:
    """What the doctor asks of `pynvml`; `errors` by function, raised instead of an answer."""

    NVMLError = pynvml.NVMLError

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.is_open = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        answers: dict[str, object] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": pynvml.c_nvmlMemory_t(total=141 * GIB),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }
        assert name in answers, name
        assert hasattr(pynvml, name), name

        def call(*arguments: object) -> object:
            if name in self.errors:
                raise pynvml.NVMLError(self.errors[name])
            self.is_open = name != "nvmlShutdown"
            return answers[name]

        return call


def test_what_the_driver_tells() -> None:
    nvml = NvmlDouble()
    driver = read_driver(lambda: nvml)
    assert (driver.version, driver.cuda_version, driver.error) == ("580.95.05", "13.0", "")
    assert driver.gpus[1] == Gpu(1, "NVIDIA H200", 141 * GIB, Link(1, 5, 16, 16))
    assert not nvml.is_open


def test_what_the_driver_does_not_tell() -> None:
    untold = pynvml.NVML_ERROR_NOT_SUPPORTED
    driver = read_driver(
        lambda: NvmlDouble(nvmlDeviceGetCurrPcieLinkWidth=untold, nvmlDeviceGetMemoryInfo=untold)
    )
    assert driver.gpus[0] == Gpu(0, "NVIDIA H200", None, None)
    assert gpu.check_link(driver.gpus[0]).found == "NVIDIA H200; its PCIe link is unknown"
    missing = read_driver(lambda: NvmlDouble(nvmlInit=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert "Not Found" in missing.error

    def uninstalled() -> object:
        raise ImportError("pynvml")

    assert "nvidia-ml-py is not installed" in read_driver(uninstalled).error


def test_a_driver_that_does_not_answer() -> None:
    (found,) = gpu.check_driver(Driver(error="NVML Shared Library Not Found"))
    assert found.verdict == "warning"


@pytest.mark.parametrize(
    ("build", "verdict", "words"),
    [
        (TorchBuild("2.13.0+cpu", None, 0), "problem", "built for the CPU only"),
        (TorchBuild("2.13.0", "13.0", 0), "problem", "takes 12.4 and older"),
        (TorchBuild("2.13.0", "12.4", 8), "ok", "finds 8"),
        (TorchBuild(error="ImportError: libcudart"), "problem", "libcudart"),
    ],
)
def test_builds_of_torch(build: TorchBuild, verdict: str, words: str) -> None:
    found = gpu.check_torch(build, Driver("550.1", "12.4"))
    assert found.verdict == verdict
    assert words in found.found


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert ask_torch().version
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    broken.chmod(0o700)
    assert ask_torch(str(broken)).error == "ImportError: no torch"


# -- the rest -----------------------------------------------------------------------------------


def test_a_redis_that_is_slow_or_old() -> None:
    assert redis.judge("r", redis.Answers("7.2.4", 0.0004)).verdict == "ok"
    assert redis.judge("r", redis.Answers("", 0.0004)).verdict == "ok"
    assert redis.judge("r", redis.Answers("5.0.7", 0.0004)).verdict == "warning"
    assert redis.judge("r", redis.Answers("7.2.4", 0.09)).verdict == "warning"


@pytest.mark.parametrize(
    ("names", "host", "verdict"),
    [
        (["localhost", "127.0.0.1"], "127.0.0.1", "ok"),
        (["::1"], "0:0:0:0:0:0:0:1", "ok"),
        (["*.lan"], "host.lan", "ok"),
        (["*.lan"], "a.host.lan", "warning"),
        (["localhost"], "0.0.0.0", "ok"),
        (["localhost"], "10.0.0.2", "warning"),
        ([], "10.0.0.2", "problem"),
    ],
)
def test_names_of_a_certificate(names: list[str], host: str, verdict: str) -> None:
    assert security.judge_hosts(names, host).verdict == verdict


# -- the disk tier ----------------------------------------------------------------------------


def places_on(tmp_path: Path, folder: Path, kind: str, rotational: str = "0") -> Places:
    """A machine on which `folder` lies on a file system of this kind and disk."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    write(
        tmp_path,
        **{
            "proc/self/mountinfo": f"36 1 1:99 / /other rw - xfs /dev/b rw\n"
            f"37 1 {device} / / rw,relatime shared:1 - {kind} /dev/a rw\n",
            # A partition: its disk, the folder above, has the queue.
            f"sys/dev/block/{device}/partition": "1",
            "sys/dev/block/queue/rotational": rotational,
        },
    )
    return Places(proc=tmp_path / "proc", sys=tmp_path / "sys")


@pytest.mark.parametrize(
    ("kind", "rotational", "verdict", "words"),
    [
        ("ext4", "0", "ok", "on ext4"),
        ("ext4", "1", "warning", "the disk rotates"),
        ("tmpfs", "0", "warning", "that is memory"),
        ("nfs4", "0", "warning", "network's file system"),
        ("overlay", "0", "note", "goes with the container"),
    ],
)
def test_file_systems_of_a_disk_tier(
    tmp_path: Path, kind: str, rotational: str, verdict: str, words: str
) -> None:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    found = disk.check_tier_disk(folder, "1MiB", places_on(tmp_path, folder, kind, rotational))
    assert found.verdict == verdict, found
    assert words in found.found
    # One that is still to be made lies where its parent does.
    found = disk.check_tier_disk(folder / "new", "1MiB", places_on(tmp_path, folder, kind))
    assert f"on {kind}" in found.found


def test_a_virtual_disk_is_not_said_to_rotate(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    places = places_on(tmp_path, folder, "ext4")
    number = folder.stat().st_dev
    link = tmp_path / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
    shutil.rmtree(link)
    device = tmp_path / "sys/devices/pci0000:00/virtio1/block/vda"
    write(device, queue__rotational="1")
    link.symlink_to(device)
    assert disk.check_tier_disk(folder, "1MiB", places).verdict == "ok"
    link.unlink()
    device = tmp_path / "sys/devices/pci0000:00/ata1/block/sda"
    write(device, queue__rotational="1")
    link.symlink_to(device)
    assert disk.check_tier_disk(folder, "1MiB", places).verdict == "warning"


def test_a_disk_tier_that_does_not_fit_is_told_before_it_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    places = places_on(tmp_path, folder, "ext4")
    found = disk.check_tier_disk(folder, "1000000GiB", places)
    assert found.verdict == "warning"
    assert "will be full before its bound" in found.found
    # What its own files have already is no loss of room.
    room = os.statvfs(folder)
    (folder / "segment").write_bytes(bytes(1 << 20))
    used = (folder / "segment").stat().st_blocks * 512
    after = os.statvfs(folder)
    assert room.f_bavail >= after.f_bavail
    assert f"have {used >> 20} MiB so far" in disk.check_tier_disk(folder, "1000TiB", places).found


def test_memory_that_does_not_hold_the_bound_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    places = places_on(tmp_path, folder, "tmpfs")
    assert "too little" in disk.check_tier_disk(folder, "1000000GiB", places).found
    assert "too little" not in disk.check_tier_disk(folder, "1MiB", places).found


def test_a_disk_tier_holds_a_few_chunks_at_least(tmp_path: Path, bundled_model: Path) -> None:
    shape = read_shape(bundled_model)
    layout = ArenaLayout.of(shape, chunk_tokens=64, has_activations=False)
    found = disk.check_tier_disk(tmp_path / "tier", "1MiB", Places(), layout)
    assert found.verdict == "problem"
    assert "at least 4 chunks: give it " in found.found
    assert "MiB or more" in found.found
    assert disk.check_tier_disk(tmp_path / "tier", "64MiB", Places(), layout).verdict != "problem"


def test_folders_that_a_disk_tier_cannot_use(tmp_path: Path) -> None:
    def words(folder: Path, size: str = "1GiB") -> str:
        found = disk.check_tier_disk(folder, size, Places())
        assert found.verdict == "problem", found
        return f"{found.found}: {found.advice}"

    folder = tmp_path / "tier"
    assert "needs --tier-disk-size" in words(folder, "0")
    without_folder = disk.check_tier_disk(None, "1GiB", Places())
    assert (without_folder.verdict, without_folder.found) == (
        *("problem", "--tier-disk-size needs --tier-disk"),
    )
    missing = words(tmp_path / "no" / "tier")
    assert f"{tmp_path / 'no'} does not exist: Make it first: mkdir -p {tmp_path / 'no'}" in missing
    (tmp_path / "file").touch()
    assert "is no folder" in words(tmp_path / "file")
    folder.mkdir()
    folder.chmod(0o750)
    assert f"chmod 0700 {folder}" in words(folder)
    with pytest.raises(InvalidArgument, match="--tier-disk-size: 'much' is not a size"):
        disk.check_tier_disk(folder, "much", Places())
