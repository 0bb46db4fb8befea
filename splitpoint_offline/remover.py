"""Removes the files of an engine whose process ends without closing it, kill -9 included."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from splitpoint.config import remove_tree

# Waits for the end of its input, which the kernel brings about however the writer ends.
_SCRIPT = 'read -r line; rm -rf -- "$@"'


class Remover:
    """Folders that must not outlive this process.

    A small process of its own waits for the end of this one: a killed process removes nothing,
    and an arena in /dev/shm is memory.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        shell = shutil.which("sh")
        self._process = shell and subprocess.Popen(
            [shell, "-c", _SCRIPT, "splitpoint-remover", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Ctrl-C and signals to this process's group do not reach it.
            start_new_session=True,
        )

    def leave_to_parent(self) -> None:
        """Close a forked process's end of the pipe, which would outlive the parent's."""
        if self._process and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """Remove the folders now, and wait for the process that would have done so."""
        for folder in self._folders:
            remove_tree(folder)
        if self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
