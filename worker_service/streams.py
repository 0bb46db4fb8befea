"""The open Run streams of a worker: each gets the outputs of its own requests.

A stream has a random number, which is a part of its requests' keys. So schedulers that use the
same request ids do not meet. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from splitpoint.errors import ResourceExhausted
from worker_service.engine.messages import StepOutput

_log = logging.getLogger(__name__)

# Most Run streams of one worker.
STREAM_LIMIT = 8
# Number of queued step outputs at which the worker closes a Run stream.
OUTPUT_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Charges:
    """What the scheduler of a stream charges its requests for, and what its queue wants.

    `waiting_since` is when its first waiting request began to wait, in seconds of the clock of
    `RunStreams`; None: no request waits.
    """

    cache_bytes: int = 0
    request_count: int = 0
    slot_count: int = 0
    wanted_bytes: int = 0
    waiting_since: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.request_count or self.wanted_bytes)


@dataclass(frozen=True, slots=True)
class OtherStreams:
    """The other streams of one: sums of their charges, and the wish that has waited longest."""

    stream_count: int = 0
    busy_count: int = 0
    charges: Charges = field(default_factory=Charges)


@dataclass(slots=True, eq=False)
class Listener:
    """The worker's end of a Run stream. `closed` is set if the scheduler reads no outputs."""

    stream: int
    outputs: asyncio.Queue[StepOutput] = field(default_factory=asyncio.Queue)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    charges: Charges = field(default_factory=Charges)
    # What was sent of the others last.
    told: OtherStreams = field(default_factory=OtherStreams)


class RunStreams:
    """All open streams. `idle_output` gives the worker's present state."""

    def __init__(
        self,
        idle_output: Callable[[], StepOutput],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._idle_output = idle_output
        self._listeners: dict[int, Listener] = {}

    def __len__(self) -> int:
        return len(self._listeners)

    def open(self) -> Listener:
        """Return the end of a new stream. Raises ResourceExhausted beyond STREAM_LIMIT."""
        if len(self._listeners) >= STREAM_LIMIT:
            raise ResourceExhausted(
                f"{len(self._listeners)} schedulers have a Run stream on this worker, its limit",
                reason="STREAM_LIMIT",
                retry_after_seconds=1.0,
            )
        listener = Listener(secrets.randbits(63))
        if self._listeners:  # it hears at once what they hold
            listener.outputs.put_nowait(self._idle_output())
        self._listeners[listener.stream] = listener
        self._others_changed(listener)
        return listener

    def close(self, listener: Listener) -> None:
        """Forget a stream; its further outputs are dropped."""
        if self._listeners.pop(listener.stream, None) is not None:
            self._others_changed(listener)

    def emit(self, output: StepOutput, busy: Collection[int]) -> list[Listener]:
        """Give each stream its part of an output.

        Return the streams that were closed since they take no outputs. A stream that is not in
        `busy`, which has no requests, hears of no steps.
        """
        slow = []
        for listener in list(self._listeners.values()):
            part = _part_of(output, listener.stream)
            # The last step of its requests is theirs, too, although they are over.
            if listener.stream not in busy and not (part.tokens or part.prefills):
                part.step = None
            if not part.has_news:
                continue
            if listener.outputs.qsize() >= OUTPUT_LIMIT:
                _log.error("a scheduler does not read step outputs: closing its Run stream")
                listener.closed.set()
                self.close(listener)
                slow.append(listener)
            else:
                listener.outputs.put_nowait(part)
        return slow

    def charge(self, listener: Listener, charges: Charges) -> None:
        """Note what the scheduler of a stream charges; the other streams are told."""
        listener.charges = charges
        self._others_changed(listener)

    def others_to_tell(self, listener: Listener) -> OtherStreams | None:
        """Return what has changed of the other streams since the last call; None if nothing."""
        others = self._others_of(listener)
        if others == listener.told:
            return None
        listener.told = others
        return others

    def _others_of(self, listener: Listener) -> OtherStreams:
        charges = [each.charges for each in self._listeners.values() if each is not listener]
        waiting = [each for each in charges if each.waiting_since is not None]
        first = min(waiting, key=lambda each: each.waiting_since or 0.0, default=Charges())
        return OtherStreams(
            stream_count=len(charges),
            busy_count=sum(each.is_busy for each in charges),
            charges=Charges(
                cache_bytes=sum(each.cache_bytes for each in charges),
                request_count=sum(each.request_count for each in charges),
                slot_count=sum(each.slot_count for each in charges),
                wanted_bytes=first.wanted_bytes,
                waiting_since=first.waiting_since,
            ),
        )

    def _others_changed(self, listener: Listener) -> None:
        """Let the other streams send a message soon, even if nothing runs."""
        for other in self._listeners.values():
            if other is not listener and other.outputs.empty():
                other.outputs.put_nowait(self._idle_output())


def _part_of(output: StepOutput, stream: int) -> StepOutput:
    """Return an output with the events of one stream's requests only."""
    return replace(
        output,
        tokens=[event for event in output.tokens if event.key[2] == stream],
        prompts=[event for event in output.prompts if event.key[2] == stream],
        prefills=[event for event in output.prefills if event.key[2] == stream],
        drafts=[event for event in output.drafts if event.key[2] == stream],
        selections=[event for event in output.selections if event.key[2] == stream],
        finishes=[event for event in output.finishes if event.key[2] == stream],
        restores=[event for event in output.restores if event.key[2] == stream],
    )
