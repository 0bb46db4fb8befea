"""Huge pages and NUMA: what is probed, what is really got, and what is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.host import numa
from splitpoint.host.huge_pages import Backing, NoHugePages, Probe, probe

ROOT = Path(__file__).resolve().parents[3]


def in_own_tmpfs(options: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a fresh tmpfs as $FOLDER, in a mount namespace of its own."""
    command = (
        f'd=$(mktemp -d) && mount -t tmpfs -o {options} none "$d" && '
        'FOLDER="$d" "$PYTHON" -c "$SCRIPT"; code=$?; umount "$d"; rmdir "$d"; exit $code'
    )
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("the kernel forbids user and mount namespaces here")
    return subprocess.run(
        ["unshare", "-Urm", "bash", "-c", command],
        env={**os.environ, "PYTHON": sys.executable, "SCRIPT": script, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


MAKE = """
import os
from pathlib import Path
from splitpoint.host.huge_pages import Backing
folder = Path(os.environ["FOLDER"])
fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
backing = Backing({wish!r}, folder)
backing.populate(fd, 8 << 20)
os.posix_fallocate(fd, 0, 8 << 20)
assert os.fstat(fd).st_blocks * 512 == 8 << 20
assert not any(os.pread(fd, 8 << 20, 0))
print(backing.description)
"""


@pytest.mark.parametrize("huge", ["advise", "within_size", "always"])
def test_a_tmpfs_with_huge_pages_gives_them(huge: str) -> None:
    done = in_own_tmpfs(f"size=16m,huge={huge}", MAKE.format(wish="always"))
    if "Invalid argument" in done.stderr or "wrong fs type" in done.stderr:
        pytest.skip("this kernel was built without transparent huge pages")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"huge pages (tmpfs with huge={huge})\n"


def test_without_them_it_says_why_and_always_refuses() -> None:
    done = in_own_tmpfs("size=16m", MAKE.format(wish="auto"))
    assert done.returncode == 0, done.stderr
    assert "pages (no huge pages: the tmpfs of" in done.stdout
    refused = in_own_tmpfs("size=16m", MAKE.format(wish="always"))
    assert refused.returncode == 1
    assert "--huge-pages always: 0 B of 8 MiB could be had" in refused.stderr


def test_a_full_tmpfs_is_an_error_and_no_signal() -> None:
    done = in_own_tmpfs("size=4m,huge=advise", MAKE.format(wish="auto"))
    assert done.returncode == 1  # not -SIGBUS
    assert "No space left on device" in done.stderr


MOUNTS = """\
22 1 0:20 / / rw - ext4 /dev/sda rw
25 22 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1k{shm}
26 22 0:24 / /mnt/with\\040space rw - hugetlbfs none rw,pagesize=2M
"""


@pytest.mark.parametrize(
    ("shm", "enabled", "possible", "reason"),
    [
        ("", "always [never] deny force", False, "huge=never"),
        (",huge=advise", "always [never] deny force", True, "huge=advise"),
        (",huge=always", "always never [deny] force", False, "deny"),
        ("", "always never deny [force]", True, "force"),
    ],
)
def test_the_mount_decides_unless_denied_or_forced(
    tmp_path: Path, shm: str, enabled: str, possible: bool, reason: str
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS.format(shm=shm))
    (tmp_path / "enabled").write_text(enabled)
    found = probe(Path("/dev/shm"), mounts=tmp_path / "mounts", shmem_enabled=tmp_path / "enabled")
    assert found.is_possible is possible
    assert reason in found.reason


def test_other_file_systems(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS.format(shm=""))
    assert not probe(Path("/var"), mounts=tmp_path / "mounts").is_possible
    with pytest.raises(InvalidArgument, match="hugetlbfs"):
        probe(Path("/mnt/with space/x"), mounts=tmp_path / "mounts")


def test_a_promise_that_is_not_kept_is_told() -> None:
    """The probe says yes, the pages that come are small: what smaps says counts."""
    lie = "Backing({wish!r}, folder, probe=lambda _: huge_pages.Probe(True, 'so it says'))"
    make = MAKE.replace("Backing({wish!r}, folder)", lie)
    script = f"from splitpoint.host import huge_pages{make}"
    told = in_own_tmpfs("size=16m,huge=never", script.format(wish="auto"))
    assert "pages (no huge pages: so it says)" in told.stdout, told.stderr
    assert in_own_tmpfs("size=16m,huge=never", script.format(wish="always")).returncode == 1


def test_a_demand_that_cannot_be_met_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        demanding = Backing("always", tmp_path, probe=lambda _: Probe(False, "none here"))
        with pytest.raises(NoHugePages, match="none here"):
            demanding.populate(file.fileno(), 4 << 20)


# -- NUMA --------------------------------------------------------------------------------


def machine(folder: Path, nodes: str, gpus: list[int]) -> Path:
    (folder / "devices/system/node").mkdir(parents=True)
    (folder / "devices/system/node/has_memory").write_text(nodes + "\n")
    devices = [("0x10de", "0x030200", node) for node in gpus]
    devices += [("0x8086", "0x030000", 1), ("0x10de", "0x040300", 1)]  # no NVIDIA, no display
    for index, (vendor, kind, node) in enumerate(devices):
        device = folder / f"bus/pci/devices/0000:0{index}:00.0"
        device.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (device / name).write_text(value + "\n")
    return folder


@pytest.mark.parametrize(
    ("nodes", "gpus", "node"),
    [
        ("0-1", [1, 1], 1),
        ("0-1", [0, 1], None),
        ("0-1", [], None),
        ("0-1", [-1], None),
        ("0", [0], None),
    ],
)
def test_auto_is_the_node_of_the_gpus(
    tmp_path: Path, nodes: str, gpus: list[int], node: int | None
) -> None:
    assert numa.choose_node("auto", sys_folder=machine(tmp_path, nodes, gpus)) == node


def test_nodes_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    folder = machine(tmp_path, "0-1,4", [])
    assert numa.choose_node("4", sys_folder=folder) == 4
    assert numa.choose_node("none", sys_folder=folder) is None
    for wish in ("3", "-1", "first", ""):
        with pytest.raises(InvalidArgument):
            numa.choose_node(wish, sys_folder=folder)


def test_the_policy_is_set_for_the_while_only() -> None:
    calls: list[int | None] = []
    with pytest.raises(KeyError), numa.bound_to(3, set_policy=calls.append):
        raise KeyError
    assert calls == [3, None]
    with numa.bound_to(None, set_policy=calls.append):
        pass
    assert calls == [3, None]


def test_the_kernel_takes_the_policy(tmp_path: Path) -> None:
    """Node 0 always exists; a thread's own policy is visible in numa_maps."""
    script = (
        "import mmap; from splitpoint.host.numa import bound_to\n"
        "with bound_to(0):\n"
        "    m = mmap.mmap(-1, 1 << 20); m[0] = 1\n"
        "    print('bind:0' in open('/proc/self/numa_maps').read())\n"
        "print('bind:0' in open('/proc/self/numa_maps').read())\n"
    )
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
