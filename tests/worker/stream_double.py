"""CUDA streams and events on paper: what `StreamLanes` uses of torch.cuda, in adversarial order.

Work sits in its stream until the host waits; then any stream whose next
piece may run is chosen at random, so whatever streams and events leave open happens
some day. Each stream keeps its own time. It knows no device, and proves nothing
about one: only that the waits which were asked for suffice.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Recording:
    """One `record` of an event; `at`: its stream's time when it was reached."""

    at: float | None = None


@dataclass(eq=False)
class Stream:
    """In order: work (a call and its seconds), records, and waits."""

    cuda: StreamDouble
    now: float = 0.0
    queue: deque[tuple[str, object, float]] = field(default_factory=deque)

    @property
    def cuda_stream(self) -> int:
        return self.cuda.streams.index(self)

    def wait_event(self, event: TimedEvent) -> None:
        if event.recording is not None:  # as CUDA: an event never recorded blocks nothing
            self.queue.append(("wait", event.recording, 0.0))

    def synchronize(self) -> None:
        end = self.cuda.Event()
        end.record(self)
        end.synchronize()

    @property
    def may_run(self) -> bool:
        if not self.queue:
            return False
        kind, what, _ = self.queue[0]
        return kind != "wait" or (isinstance(what, Recording) and what.at is not None)

    def run_one(self) -> None:
        kind, what, seconds = self.queue.popleft()
        if isinstance(what, Recording):
            if kind == "record":
                what.at = self.now
            elif what.at is not None:
                self.now = max(self.now, what.at)
        elif callable(what):
            what()
            self.now += seconds


@dataclass
class TimedEvent:
    cuda: StreamDouble
    recording: Recording | None = None

    def record(self, stream: Stream) -> None:
        self.cuda.check()
        self.recording = Recording()
        stream.queue.append(("record", self.recording, 0.0))

    def query(self) -> bool:
        return self.recording is None or self.recording.at is not None

    def synchronize(self) -> None:
        self.cuda.synchronized += 1
        with self.cuda.running:
            self.cuda.check()
            while not self.query():
                self.cuda.run_something()
                self.cuda.check()

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds; as CUDA an error before both were reached."""
        times = [each.recording.at if each.recording else None for each in (self, end)]
        if times[0] is None or times[1] is None:
            raise RuntimeError("device not ready")
        return 1e3 * (times[1] - times[0])


# The double has a method of this name, as torch.cuda has a class.
_Stream = Stream

# PyTorch's, of each device: c10/cuda/CUDAStream.h.
POOLED_STREAMS = 32


class StreamDouble:
    """In place of the module torch.cuda.

    `synchronized` counts how often the host waited, `made` the events. `error` is what every
    call raises once work has set it, as an illegal access on a device does. `contexts` has the
    numbers of the devices for which the driver made one.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.synchronized = 0
        self.made = 0
        self.error: Exception | None = None
        # Held by the thread of the host whose waiting makes things happen.
        self.running = threading.Lock()
        self.default = Stream(self)
        self.streams = [self.default]
        self.contexts: set[int] = set()
        self._drawn = 0
        self._thread = threading.local()

    @property
    def current(self) -> Stream:
        """As in CUDA, each thread has its own."""
        stream: Stream = getattr(self._thread, "current", self.default)
        return stream

    def Stream(self, device: torch.device) -> _Stream:
        """As PyTorch: streams of a pool, in turn."""
        if self._drawn < POOLED_STREAMS:
            self.streams.append(Stream(self))
        self._drawn += 1
        return self.streams[1 + (self._drawn - 1) % POOLED_STREAMS]

    def set_device(self, device: torch.device) -> None:
        self._thread.device = device.index
        self.contexts.add(device.index)

    def Event(self, *, enable_timing: bool = False) -> TimedEvent:
        self.made += 1
        return TimedEvent(self)

    def current_stream(self, device: torch.device) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._thread.current = self.current, stream
        try:
            yield
        finally:
            self._thread.current = before
            # PyTorch makes the thread's device current again: for CUDA 12 that is a context.
            self.contexts.add(getattr(self._thread, "device", 0))

    def launch(self, call: Callable[[], None], seconds: float = 0.0) -> None:
        """What a kernel or a copy does: into the current stream, to happen later."""
        self.current.queue.append(("work", call, seconds))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def run_something(self) -> None:
        self.rng.choice([stream for stream in self.streams if stream.may_run]).run_one()
