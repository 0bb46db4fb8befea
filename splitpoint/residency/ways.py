"""The four ways to decode alike requests on one device, their rates, and the best one.

    RESIDENT   all at once, all K and V on the device
    WAVES      as many as fit; each of the others waits until one has finished
    SLICES     as many as fit; after r tokens they leave, and the next ones come
    STREAMED   as many as the batch holds; each step pulls K and V from the host

With N requests of A tokens, n at once, w = ceil(N / n) waves and k = ceil((A - 1) / r)
slices, seconds until the last one has finished are

    RESIDENT   start(N) + (A - 1) step(N)
    WAVES      the same for each wave, one after the other
    SLICES     the same steps, and for each slice but the first n returns
    STREAMED   streamed start(n) + (A - 1) streamed(n), for each wave

Lengths are those half way through the answers. A link that pulls s tokens of B_kv bytes for
each token yields at most link / (s B_kv) tokens a second, whatever the batch; rebuilding a
part raises that, and what stays on the device is not pulled. A slice's bytes per token are
s B_kv / r. (KVPR, Section 3, is about STREAMED; the comparison is ours.)

The objective LATENCY prefers the least mean finishing time, THROUGHPUT the most tokens a
second. Of equal ways the first in the order above wins. RESIDENT wins wherever it is possible:
nothing moves after its restore. SLICES are shown for their rate and never chosen: they do not
finish earlier than WAVES when all answers are equally long, and the engine has them only as
preemption, when pages run out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.seconds import PieceSeconds
from splitpoint.shapes import ModelShape, chunks_of


class Way(Enum):
    """The place of the caches of several requests while they decode."""

    RESIDENT = "resident"
    WAVES = "waves"
    SLICES = "time slices"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way, predicted.

    Attributes:
        at_once: requests that decode together.
        mean_seconds, last_seconds: until a request has finished, on average and at most.
        step_seconds: of a decode step of all that are there at once.
        link_bytes_per_token: bytes of K and V that cross the link for each decoded token;
            those of the first restore are not counted.
    """

    way: Way
    at_once: int
    tokens_per_second: float
    mean_seconds: float
    last_seconds: float
    step_seconds: float
    link_bytes_per_token: float

    def score(self, objective: Objective) -> float:
        """Return the seconds that the objective compares; smaller is better."""
        return self.last_seconds if objective is Objective.THROUGHPUT else self.mean_seconds


@dataclass(frozen=True, slots=True)
class Impossible:
    """A way that cannot serve the load."""

    way: Way
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All ways, in the order of `Way`, and the best of the possible ones.

    Attributes:
        best: None if no way is possible.
        link_bound: tokens per second that streaming everything without rebuilding cannot
            exceed.
    """

    ways: tuple[Forecast | Impossible, ...]
    best: Forecast | None
    link_bound: float
    reason: str

    def forecast(self, way: Way) -> Forecast | None:
        """Return the prediction of a way; None if it is not possible."""
        found = self.ways[list(Way).index(way)]
        return found if isinstance(found, Forecast) else None


def compare_ways(
    shape: ModelShape, profile: Profile, load: RequestLoad, room: DeviceRoom
) -> Comparison:
    """Predict all ways, and choose."""
    pieces = PieceSeconds(shape, profile, room)
    predicted = tuple(_predict(way, pieces, load) for way in Way)
    possible = [each for each in predicted if isinstance(each, Forecast)]
    if possible and possible[0].way is Way.RESIDENT:
        best: Forecast | None = possible[0]
    else:
        candidates = (each for each in possible if each.way is not Way.SLICES)
        best = min(candidates, key=lambda each: each.score(room.objective), default=None)
    pulled = load.mean_length * shape.stored_kv_bytes_per_token(room.encoding)
    bound = profile.link_bytes_per_second / pulled
    return Comparison(predicted, best, bound, _reason(predicted, best, room.objective))


# -- predictions ----------------------------------------------------------------------


def _predict(way: Way, pieces: PieceSeconds, load: RequestLoad) -> Forecast | Impossible:
    why_not = _why_not(way, pieces, load)
    if why_not:
        return Impossible(way, why_not)
    if way is Way.SLICES:
        return _time_slices(pieces, load)
    if way is Way.STREAMED:
        return _streamed(pieces, load)
    return _resident(pieces, load, way)


def _resident(pieces: PieceSeconds, load: RequestLoad, way: Way) -> Forecast:
    """Predict RESIDENT, and WAVES, of which it is a single one."""
    count = pieces.room.resident_at_once(pieces.shape, load)
    ends = list(_wave_ends(pieces, load, count))
    step = pieces.step(count, load.mean_length)
    returned = 0.0  # nothing moves between the first token and the last
    return _forecast(way, load, count, ends, step, returned)


def _time_slices(pieces: PieceSeconds, load: RequestLoad) -> Forecast:
    """Predict SLICES: groups take turns; each decodes r tokens and leaves for nothing."""
    room, shape = pieces.room, pieces.shape
    count = room.resident_at_once(shape, load)
    groups = list(_waves(load.request_count, count))
    ends = [0.0] * len(groups)
    now, left, turn = 0.0, load.step_count, 0
    while turn == 0 or left > 0:
        steps = min(room.slice_tokens, left)
        length = load.token_count - left
        back = pieces.restore(length) if turn else 0.0
        for index, group in enumerate(groups):
            now += group * back if turn else pieces.start(load, group)
            now += steps * pieces.step(group, length)
            ends[index] = now
        left -= steps
        turn += 1
    finished = [(end, group) for end, group in zip(ends, groups, strict=True)]
    bytes_back = load.mean_length * shape.stored_kv_bytes_per_token(room.encoding)
    return _forecast(
        Way.SLICES,
        load,
        count,
        finished,
        pieces.step(count, load.mean_length),
        bytes_back / room.slice_tokens,
    )


def _streamed(pieces: PieceSeconds, load: RequestLoad) -> Forecast:
    shape, room = pieces.shape, pieces.room
    count = room.streamed_at_once(shape, load)
    length = load.mean_length
    now, finished, step = 0.0, [], 0.0
    for group in _waves(load.request_count, count):
        kept = room.spare_bytes(shape, load, group) // shape.kv_bytes_per_token
        seconds = pieces.streamed_step(group, length, resident_tokens=kept)
        now += pieces.streamed_start(load, group) + load.step_count * seconds
        finished.append((now, group))
        step = max(step, seconds)
    kept = room.spare_bytes(shape, load, count) // shape.kv_bytes_per_token
    pulled = pieces.pulled_bytes(count, length, kept) / count
    return _forecast(Way.STREAMED, load, count, finished, step, pulled)


def _wave_ends(pieces: PieceSeconds, load: RequestLoad, count: int) -> Iterator[tuple[float, int]]:
    """Yield the end of each wave, and its requests."""
    now = 0.0
    for group in _waves(load.request_count, count):
        now += pieces.start(load, group) + load.step_count * pieces.step(group, load.mean_length)
        yield now, group


def _waves(request_count: int, count: int) -> Iterator[int]:
    """Yield the requests of each wave."""
    while request_count > 0:
        yield min(count, request_count)
        request_count -= count


def _forecast(
    way: Way,
    load: RequestLoad,
    count: int,
    ends: list[tuple[float, int]],
    step_seconds: float,
    link_bytes_per_token: float,
) -> Forecast:
    """Return the forecast of groups that finish at `ends`: (seconds, requests) of each."""
    last = max(end for end, _ in ends)
    return Forecast(
        way=way,
        at_once=count,
        tokens_per_second=load.request_count * load.answer_tokens / last,
        mean_seconds=sum(end * group for end, group in ends) / load.request_count,
        last_seconds=last,
        step_seconds=step_seconds,
        link_bytes_per_token=link_bytes_per_token,
    )


# -- words ------------------------------------------------------------------------------

# Of streamed requests for which the device has memory to spare.
_STAYS = " (whose prefixes stay on the device)"


def _why_not(way: Way, pieces: PieceSeconds, load: RequestLoad) -> str:
    """Return why a way is not possible; empty if it is."""
    room, shape = pieces.room, pieces.shape
    needed = chunks_of(load.token_count, room.chunk_tokens) * shape.page_bytes(room.chunk_tokens)
    fitting = room.resident_at_once(shape, load)
    if way is Way.STREAMED:
        if not room.has_store:
            return "there is no KV store to stream from"
        if room.streamed_at_once(shape, load):
            return ""
        tail = min(needed, room.streamed_pages * shape.page_bytes(room.chunk_tokens))
        return f"even a streamed request needs {format_size(tail)} of {_sized(room)}"
    if not fitting:
        return f"one request needs {format_size(needed)} of {_sized(room)}"
    everyone = fitting == load.request_count
    if way is Way.RESIDENT:
        limit = ", the batch limit" if fitting == room.max_batch else ""
        return "" if everyone else f"{fitting:,} of {load.request_count:,} fit at once{limit}"
    if everyone:
        return "all requests fit at once"
    if way is Way.SLICES and not room.has_store:
        return "there is no KV store from which a sequence could come back"
    return ""


def _sized(room: DeviceRoom) -> str:
    return f"device cache, which has {format_size(room.cache_bytes)}"


def _reason(
    predicted: tuple[Forecast | Impossible, ...], best: Forecast | None, objective: Objective
) -> str:
    """Return why the best way was chosen, with the rates of the others."""
    if best is None:
        # Streaming needs the least memory.
        reasons = [each for each in predicted if isinstance(each, Impossible)]
        return f"{reasons[-1].way.value}: {reasons[-1].reason}"
    at_once = counted(best.at_once, "request")
    # What is resident needs no link while it decodes, so it is not given up for a rate.
    stays = "" if best.link_bytes_per_token or best.way is not Way.STREAMED else _STAYS
    all_fit = "all fit, " if best.way is Way.RESIDENT else ""
    parts = [f"{best.way.value}{stays}: {all_fit}{at_once} at once, {_rate(best, objective)}"]
    for other in predicted:
        if isinstance(other, Forecast) and other.way is not best.way:
            stays = "" if other.link_bytes_per_token or other.way is not Way.STREAMED else _STAYS
            parts.append(f"{other.way.value}{stays} {_rate(other, objective)}")
    return ", ".join(parts)


def _rate(forecast: Forecast, objective: Objective) -> str:
    if objective is Objective.THROUGHPUT:
        return f"{forecast.tokens_per_second:,.0f} tokens/s"
    seconds = forecast.mean_seconds
    text = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
    return f"{text} s to finish on average"
