"""C++ kernels, compiled by the host's compiler at their first use and kept in a folder of the user.

A kernel is compiled for the processor at hand, in a few seconds. Its OpenMP calls are left
to the runtime that torch has loaded: with one of its own there would be twice the threads.
Without a compiler there is no kernel, and torch's operators do the work.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import torch

from splitpoint.host.processor import compiler, instruction_sets

log = logging.getLogger(__name__)

CACHE_FOLDER = "SPLITPOINT_KERNEL_CACHE"
# Constants of vectors.h: the value of ELEMENT for a type, and the floats of a vector.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANES = 16
# -Wno-psabi: vectors are passed within one library only, and notes about them hide errors.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno"),
    "-Wno-psabi",
)
_FOLDER = Path(__file__).parent
# Seconds for one compilation on a busy host, and for another process that makes a file.
_LIMIT = 120.0
_LOCK_INTERVAL = 0.1


class NoKernels(Exception):
    """Kernels cannot be had on this host; the text says why."""


def cache_folder() -> Path:
    """Return the folder of this user's kernels and choices, made if it is missing.

    $SPLITPOINT_KERNEL_CACHE, or splitpoint below the user's cache folder. Raises NoKernels
    unless it is a folder that others cannot write, since code is loaded from it.
    """
    given = os.environ.get(CACHE_FOLDER)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(given) if given else Path(home, "splitpoint")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise NoKernels(f"{folder} cannot be used: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NoKernels(f"{folder} belongs to another user, or others may write it")
    return folder


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of this name: one process of the host makes a file, the others wait for it.

    Raises NoKernels after _LIMIT seconds: its owner may be stopped.
    """
    end, is_first = time.monotonic() + _LIMIT, True
    with (folder / f"{name}.lock").open("a") as file:
        while not _has_locked(file):
            if is_first:
                log.info("%s kernels: waiting for another process of this host", name)
            if time.monotonic() >= end:
                raise NoKernels(f"another process has held {file.name} for {_LIMIT:g} s")
            is_first = False
            time.sleep(_LOCK_INTERVAL)
        yield


def _has_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@lru_cache
def source_digest() -> str:
    """Return a digest of all kernels' source files, and of the headers that they share."""
    texts = (file.read_bytes() for file in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def load(source: str, constants: Mapping[str, int]) -> ctypes.CDLL:
    """Return the library of a source file in this folder, compiled with these constants.

    A file whose content is not what was compiled, or that cannot be loaded, is damaged, and
    compiled once more. Raises NoKernels: no compiler, an error of the compiler, or of the loader.
    """
    command = compiler()
    if command is None:
        raise NoKernels("there is no C++ compiler")
    defined = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    built_by = [*command, *_FLAGS, *defined, torch.__version__]
    facts = [source_digest(), *built_by, *sorted(instruction_sets())]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]
    folder = cache_folder()
    library = folder / f"{Path(source).stem}-{digest}.so"
    try:
        if library.exists() and (loaded := _loaded(library)) is not None:
            return loaded
        with locked(folder, "compiling"):
            # Another process may have made it meanwhile.
            if library.exists() and (loaded := _loaded(library)) is not None:
                return loaded
            _compile(command, _FOLDER / source, defined, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoKernels(f"{library.name}: {error}") from error


def _loaded(library: Path) -> ctypes.CDLL | None:
    """Return the library of a file, or None if the file is damaged.

    The loader does not verify what it maps: half a library ends the process with a signal.
    """
    try:
        expected = _digest_file(library).read_text()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s has no digest: %s", library.name, error)
        return None
    if _content_digest(library) != expected:
        log.warning("%s is damaged: its content is not what was compiled", library.name)
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        log.warning("%s is damaged: %s", library.name, error)
        return None


def content(library: ctypes.CDLL) -> str:
    """Return a digest of a loaded library's file: of its source, the compiler, and the flags.

    The same compiler makes the same file, wherever source and cache folder are.
    """
    return _content_digest(Path(library._name))


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _content_digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _compile(
    compiler_command: tuple[str, ...], source: Path, defined: list[str], library: Path
) -> None:
    """Compile to a file of another name first: what has the name is whole."""
    log.info("compiling %s for this host's processor, once, in some seconds", source.name)
    working, unlinked = library.with_suffix(".part"), library.with_suffix(".o")
    commands = (
        [*compiler_command, *_FLAGS, *defined, "-c", str(source), "-o", str(unlinked)],
        # Without -fopenmp: see above.
        [*compiler_command, "-shared", str(unlinked), "-o", str(working)],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT)
        with working.open("rb") as file:
            os.fsync(file.fileno())  # or a crash of the host may leave the name and no content
        # A digest of another content means that the library is compiled again.
        _digest_file(library).write_text(_content_digest(working))
        working.rename(library)
    except subprocess.CalledProcessError as error:
        raise NoKernels(f"{compiler_command[0]}: {_reason(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{compiler_command[0]} took more than {_LIMIT:g} s") from error
    finally:
        unlinked.unlink(missing_ok=True)
        working.unlink(missing_ok=True)
    log.info("compiled %s", library.name)


def _reason(output: str) -> str:
    """Return the first line of a compiler's output that names an error, or its last lines."""
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), "\n".join(lines[-3:]))[:500]
