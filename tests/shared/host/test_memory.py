"""The memory and cores of a process, by /proc and cgroups."""

from __future__ import annotations

from pathlib import Path

from splitpoint.host.memory import available_cores, memory_facts


def write_proc(root: Path, cgroup: str) -> Path:
    (root / "self").mkdir(parents=True)
    (root / "self" / "cgroup").write_text(cgroup)
    (root / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")
    return root


def test_memory_without_a_limit(tmp_path: Path) -> None:
    facts = memory_facts(write_proc(tmp_path / "proc", "0::/\n"), tmp_path / "cgroup")
    assert facts.total_bytes == 1000 * 1024
    assert facts.usable_bytes == 800 * 1024
    assert facts.cgroup_limit_bytes is None


def test_memory_under_cgroup_v2_the_tightest_parent_counts(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/a/b\n")
    for group, limit, used in (("a", "500000", "100000"), ("a/b", "max", "1")):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
    facts = memory_facts(proc, tmp_path / "cgroup")
    assert facts.cgroup_limit_bytes == 500_000
    assert facts.usable_bytes == 400_000


def test_memory_under_cgroup_v1(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "3:cpu:/\n4:memory:/job\n")
    folder = tmp_path / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("300000")
    (folder / "memory.usage_in_bytes").write_text("400000")
    # The root's "no limit" of v1.
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    (folder.parent / "memory.usage_in_bytes").write_text("1")
    facts = memory_facts(proc, tmp_path / "cgroup")
    assert facts.cgroup_limit_bytes == 300_000
    assert facts.usable_bytes == 0


def test_memory_of_this_machine() -> None:
    facts = memory_facts()
    assert 0 < facts.usable_bytes <= facts.total_bytes
    assert available_cores() >= 1
