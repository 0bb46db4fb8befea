"""The store process with its memory options, and on a full file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvstore_helpers import LAYOUT
from test_kvstore_process import StoreProcess, stats_of

ROOT = Path(__file__).resolve().parents[2]


def test_options_reach_the_stats(shm_folder: Path, socket_address: str) -> None:
    options = ("--eviction", "fifo", "--admission", "second-use", "--huge-pages", "never")
    reason = ("--page-reason", "auto: it was measured")
    store = StoreProcess(shm_folder / "store" / "arena", socket_address, *options, *reason)
    with store.stub() as stub:
        stats = stats_of(stub)
    assert stats.eviction_policy == "fifo"
    assert stats.memory_description == "4 KiB pages (--huge-pages never)"
    assert stats.page_reason == "auto: it was measured"
    assert store.end()[0] == 0


@pytest.mark.parametrize("mount", ["size=2m", "size=2m,huge=advise"])
def test_a_full_file_system_names_every_limit_and_leaves_nothing(
    mount: str, socket_address: str
) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("the kernel forbids user and mount namespaces here")
    script = (
        f'd=$(mktemp -d) && mount -t tmpfs -o {mount} none "$d" && '
        '"$PYTHON" -m kvstore_service --listen "$ADDRESS" --layout "$LAYOUT" '
        '--host-memory 16MiB --arena "$d/store/arena"; code=$?; '
        'echo "LEFT $(ls -A "$d" | wc -l)"; umount "$d"; rmdir "$d"; exit $code'
    )
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "ADDRESS": socket_address,
            "LAYOUT": LAYOUT.to_json(),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout == "LEFT 0\n"
    for limit in ("free on the file system of", "MemAvailable", "cgroup"):
        assert limit in done.stderr
    assert "Traceback" not in done.stderr
