"""A peer in a child process: started, asked to load a checkpoint, run and ended.

The child's interpreter may be another environment's. It sees this project's modules of the peer
and nothing else of it, so that its own packages are used.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.host.processor import SPIN_COUNT, WAIT_POLICY
from splitpoint_cli.bench.decode.peers.catalog import missing
from splitpoint_cli.bench.decode.peers.messages import Load, Timing, Work, line_of

# Loading converts a checkpoint, and vLLM compiles it; a run of a large workload takes minutes.
LOAD_SECONDS = 1800.0
RUN_SECONDS = 1800.0
_ENDING_SECONDS = 5.0
_SHOWN_LINES = 5
_FOLDER = Path(__file__).resolve().parent
# This project's choice for its own threads is none of the peer's.
_OWN_SETTINGS = (SPIN_COUNT, WAIT_POLICY, "PYTHONPATH", "PYTHONHOME")


class PeerProcess:
    """One child and its conversation. Close it.

    Attributes:
        variants: settings that the peer has; an empty string is its only one.
        version: of the peer's package, for people.
    """

    def __init__(
        self,
        peer: str,
        interpreter: str,
        load: Load,
        *,
        load_seconds: float = LOAD_SECONDS,
        run_seconds: float = RUN_SECONDS,
    ) -> None:
        """Start the child and load. Raises ModuleNotFoundError, FailedPrecondition, Unavailable."""
        self._peer = peer
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
        module = f"{__package__}.child"
        link = Path(folder, *str(__package__).split("."))
        link.parent.mkdir(parents=True)
        # Python prefers an installed package to a folder without this file, wherever it is.
        for parent in link.relative_to(folder).parents[:-1]:
            Path(folder, parent, "__init__.py").touch()
        link.symlink_to(_FOLDER)
        environment = {key: value for key, value in os.environ.items() if key not in _OWN_SETTINGS}
        self._errors: IO[str] = self._end.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [interpreter, "-m", module],
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
        if is_own and importlib.util.find_spec(load.module) is None:
            continue
        try:
            return PeerProcess(load.peer, interpreter, load)
        except ModuleNotFoundError:
            continue
    raise missing(load.peer, interpreters)
