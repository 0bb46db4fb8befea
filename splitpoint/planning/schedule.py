"""A restore or a streamed step as a list of tasks: copies, products, their lanes and dependencies.

The worker runs the task list, and `simulate` predicts its seconds. The seconds of a task are
arguments.

The schedules of a restore, for one layer with [0, l) rebuilt and [l, s) loaded:

    SERIAL     send X[0:l]; rebuild; load K,V[l:s]; one after the other
    COLUMN     send X[0:l]; then rebuild while loading: KVPR's order (Eq. 10 there),
               each layer after the one before
    ROW        X[0:l] is on the device already: rebuild while loading
    PIPELINED  X in tiles: tile k is rebuilt while tile k+1 and a share of K,V[l:s]
               are on the link; no layer waits for the one before

Layer 0's X is computed from token ids, so its products wait for nothing on the link.
PIPELINED spreads them evenly among those of the other layers. All at once, they would leave
the link idle: X of the next layer fills the staging slots and then waits.

A streamed step brings the tiles of each layer and attends them one by one. COLUMN sends nothing
of a layer before the layer before it has been loaded and rebuilt; the other schedules fill
staging slots as far ahead as there are any, also across layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar


class Lane(Enum):
    """An ordered queue of work, such as a CUDA stream or a thread."""

    LINK_IN = "link in"
    LINK_OUT = "link out"
    WEIGHTS_IN = "weights in"
    COMPUTE = "compute"

    @property
    def resource(self) -> str:
        """The resource that the lane uses: both lanes towards the device share one link."""
        return "link in" if self is Lane.WEIGHTS_IN else self.value


class Schedule(Enum):
    """The overlap of copies and products; see the module's text."""

    SERIAL = "serial"
    COLUMN = "column"
    ROW = "row"
    PIPELINED = "pipelined"


class TaskKind(Enum):
    """The operation of a task, on its tokens in its layer."""

    SEND = "send X"  # X into a staging slot, over the link
    EMBED = "embed"  # layer 0's X from token ids, for the next REBUILD
    REBUILD = "rebuild"  # K and V from X in a staging slot, or from EMBED
    LOAD = "load"  # K and V, over the link
    WEIGHTS = "weights"  # W_K and W_V of a layer on the host into a weight slot
    COPY = "copy X"  # X that is kept on the device into a staging slot
    ATTEND = "attend"  # K and V of a tile

    @property
    def lane(self) -> Lane:
        if self is TaskKind.WEIGHTS:
            return Lane.WEIGHTS_IN
        return Lane.LINK_IN if self in (TaskKind.SEND, TaskKind.LOAD) else Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Task:
    """One copy or one product.

    Attributes:
        first, last: positions [first, last) of the prefix; in a step: rows of the tile.
        slot: staging slot of X, or weight slot of WEIGHTS; None: not needed.
        after: indices of earlier tasks that must have ended.
        tile: in a step: number of the tile in its layer.
        kv_slot: in a step: staging slot of the tile's K and V.
    """

    kind: TaskKind
    layer: int
    first: int
    last: int
    slot: int | None = None
    after: tuple[int, ...] = ()
    tile: int = 0
    kv_slot: int = 0

    @property
    def lane(self) -> Lane:
        return self.kind.lane

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class RestoreWork:
    """A restore, and the sizes of its pieces.

    Attributes:
        first, split, cached: tokens [first, split) are rebuilt, [split, cached) loaded.
        chunk_tokens: loads are whole chunks; the split may lie inside one.
        tile_tokens: tokens of one staging slot, a multiple of chunk_tokens.
        slots: staging slots for X.
        embeds: layer 0's X is computed from token ids instead of sent.
        host_layers: layers whose W_K and W_V must cross the link before K and V are rebuilt.
        weight_slots: layers whose weights can be on the device or on the link at once.
    """

    layer_count: int
    first: int
    split: int
    cached: int
    chunk_tokens: int
    tile_tokens: int
    slots: int = 2
    embeds: bool = True
    host_layers: frozenset[int] = frozenset()
    weight_slots: int = 2

    def __post_init__(self) -> None:
        if self.first % self.chunk_tokens or self.tile_tokens % self.chunk_tokens:
            raise ValueError("a restore begins at a chunk, and its tiles are whole chunks")
        if self.slots < 1 or self.tile_tokens < 1:
            raise ValueError("a restore needs a staging slot")
        if self.host_layers and self.weight_slots < 1:
            raise ValueError("weights on the host need a slot to come to")


def restore_tasks(work: RestoreWork, schedule: Schedule) -> list[Task]:
    """Return the tasks of a restore in the order in which the lanes receive them."""
    builder = _Builder(work, schedule)
    for layer in range(work.layer_count):
        builder.add_layer(layer)
    embeds = any(task.kind is TaskKind.EMBED for task in builder.tasks)
    # A layer 0 with weights on the host would keep a weight slot until the end.
    if schedule is Schedule.PIPELINED and embeds and 0 not in work.host_layers:
        return _with_first_layer_spread(builder.tasks)
    return builder.tasks


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a streamed step brings of one tile.

    Attributes:
        rows: token rows that are attended.
        rebuilt_rows: leading rows whose K and V are rebuilt from X.
        is_loaded: K and V of the tile cross the link.
        is_kept: X of the rebuilt rows is on the device.
    """

    rows: int
    rebuilt_rows: int
    is_loaded: bool
    is_kept: bool = False


def step_tasks(
    layers: Sequence[Sequence[TileShape]], slots: int, schedule: Schedule
) -> Iterator[Task]:
    """Yield the tasks of a streamed step in the order in which the lanes receive them.

    Each tile ends with its ATTEND. Staging slots are filled in the order of the tiles, and again
    once their content was read. COLUMN is KVPR's order (Eq. 10 there): X of a layer crosses the
    link beside the attention and the MLP of the layer before, and nothing beside a rebuild but
    K and V.

    Args:
        layers: the tiles of each layer, in the order in which it attends them.
        slots: staging slots for X, and as many for K and V; rebuilt K and V that nothing is
            loaded for take the last one.
    """
    return _StepBuilder(layers, slots, schedule).tasks()


@dataclass(frozen=True, slots=True)
class Simulation:
    """Start and end of each task, in seconds, in the order of the simulated list."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    busy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """End of the last task; 0 for no tasks."""
        return max(self.ends, default=0.0)


class LaneTask(Protocol):
    """A task of any kind; see `Task`."""

    @property
    def lane(self) -> Lane: ...

    @property
    def after(self) -> tuple[int, ...]: ...


AnyTask = TypeVar("AnyTask", bound=LaneTask)


def simulate(tasks: Sequence[AnyTask], seconds: Callable[[AnyTask], float]) -> Simulation:
    """Simulate the lanes: each resource runs its tasks in order, one at a time.

    A task begins when its resource is free and all tasks in `after` have ended.
    """
    free: dict[str, float] = {}
    busy: dict[str, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    for task in tasks:
        resource, duration = task.lane.resource, seconds(task)
        start = max([free.get(resource, 0.0), *(ends[index] for index in task.after)])
        free[resource] = start + duration
        busy[resource] = busy.get(resource, 0.0) + duration
        starts.append(start)
        ends.append(start + duration)
    return Simulation(tuple(starts), tuple(ends), busy)


class _Builder:
    """Adds tasks layer by layer, in blocks of one tile and its share of the loads."""

    def __init__(self, work: RestoreWork, schedule: Schedule) -> None:
        self.tasks: list[Task] = []
        self._work = work
        self._schedule = schedule
        # The last REBUILD of each slot: after it, the slot may be filled again.
        self._readers: dict[int, int] = {}
        self._filled = 0
        # The last REBUILD of each layer whose weights crossed the link.
        self._weight_readers: list[int] = []
        self._tiles = _ranges(work.first, work.split, work.tile_tokens)
        self._shares = self._load_shares()
        # The first load brings the chunk in which the split lies as a whole; rebuilt rows are
        # written over it.
        inside = work.first < work.split < work.cached and work.split % work.chunk_tokens
        self._boundary = work.split - inside if inside else None

    def add_layer(self, layer: int) -> None:
        first_load: int | None = None
        weights = self._add_weights(layer)
        rebuild: int | None = None
        for index in range(len(self._shares)):
            barrier = self._barrier()
            source: int | None = None
            if index < len(self._tiles):
                source = self._add_source(layer, self._tiles[index], barrier)
            piece = self._shares[index]
            if piece is not None:
                load = self._add(TaskKind.LOAD, layer, piece, after=barrier)
                first_load = load if first_load is None else first_load
            if index < len(self._tiles):
                rebuild = self._add_rebuild(
                    layer, self._tiles[index], source, barrier, first_load, weights
                )
        if weights is not None and rebuild is not None:
            self._weight_readers.append(rebuild)

    def _add_weights(self, layer: int) -> int | None:
        """Add W_K and W_V, on the link ahead of the layer's X; None if they are on the device."""
        if layer not in self._work.host_layers or not self._tiles:
            return None
        after, readers, slots = self._barrier(), self._weight_readers, self._work.weight_slots
        if len(readers) >= slots:
            after = (*after, readers[-slots])
        return self._add(TaskKind.WEIGHTS, layer, (0, 0), slot=len(readers) % slots, after=after)

    def _barrier(self) -> tuple[int, ...]:
        """Return all tasks of the block before, as in KVPR's order; PIPELINED: none.

        Earlier tasks ended before that block began.
        """
        if self._schedule is Schedule.PIPELINED or not self.tasks:
            return ()
        last = self.tasks[-1]
        count = 1
        while count < min(3, len(self.tasks)) and self.tasks[-count - 1].layer == last.layer:
            count += 1
        return tuple(range(len(self.tasks) - count, len(self.tasks)))

    def _add_source(
        self, layer: int, tile: tuple[int, int], barrier: tuple[int, ...]
    ) -> int | None:
        """Add the copy of X into the next staging slot; None: X is on the device."""
        if self._schedule is Schedule.ROW:
            return None
        if layer == 0 and self._work.embeds:
            return self._add(TaskKind.EMBED, layer, tile, after=barrier)
        slot = self._filled % self._work.slots
        self._filled += 1
        after = (*barrier, self._readers[slot]) if slot in self._readers else barrier
        return self._add(TaskKind.SEND, layer, tile, slot=slot, after=after)

    def _add_rebuild(
        self,
        layer: int,
        tile: tuple[int, int],
        source: int | None,
        barrier: tuple[int, ...],
        first_load: int | None,
        weights: int | None,
    ) -> int:
        after = barrier if source is None else (source,)
        if weights is not None:
            after = (*after, weights)
        if self._boundary is not None and first_load is not None and tile[1] > self._boundary:
            after = (*after, first_load)
        slot = None if source is None else self.tasks[source].slot
        rebuild = self._add(TaskKind.REBUILD, layer, tile, slot=slot, after=after)
        if slot is not None:
            self._readers[slot] = rebuild
        return rebuild

    def _load_shares(self) -> list[tuple[int, int] | None]:
        """Return each block's part of K,V[l:s], front first; None: the block loads nothing.

        Fewer chunks than tiles are spread over the blocks, so that the link has about as
        much to do during each rebuild.
        """
        work = self._work
        if work.split >= work.cached:
            return [None] * len(self._tiles)
        start = max(work.first, work.split - work.split % work.chunk_tokens)
        count = -(-(work.cached - start) // work.chunk_tokens)
        pieces = min(max(1, len(self._tiles)), count)
        edges = [start + count * piece // pieces * work.chunk_tokens for piece in range(pieces)]
        spans = zip(edges, [*edges[1:], work.cached], strict=True)
        shares: list[tuple[int, int] | None] = [None] * max(1, len(self._tiles))
        for piece, span in enumerate(spans):
            shares[piece * len(shares) // pieces] = span
        return shares

    def _add(
        self,
        kind: TaskKind,
        layer: int,
        span: tuple[int, int],
        *,
        slot: int | None = None,
        after: tuple[int, ...] = (),
    ) -> int:
        if self._schedule is Schedule.SERIAL and self.tasks:
            after = (len(self.tasks) - 1,)
        self.tasks.append(Task(kind, layer, span[0], span[1], slot, after))
        return len(self.tasks) - 1


@dataclass(slots=True)
class _Ring:
    """Staging slots that are filled in turn, and the tasks that read each filling."""

    count: int
    fillings: int = 0
    readers: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.fillings - len(self.readers) >= self.count

    def fill(self) -> tuple[int, tuple[int, ...]]:
        """Return the next slot, and the task to wait for before it is filled."""
        slot, turn = self.fillings % self.count, self.fillings - self.count
        self.fillings += 1
        return slot, () if turn < 0 else (self.readers[turn],)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A tile that is on its way: its slots, and the tasks before they may be read."""

    layer: int
    number: int
    tile: TileShape
    slot: int | None
    kv_slot: int
    sent: tuple[int, ...]
    loaded: tuple[int, ...]


class _StepBuilder:
    """Lays out a streamed step tile by tile, with the copies of later ones as early as may be."""

    def __init__(
        self, layers: Sequence[Sequence[TileShape]], slots: int, schedule: Schedule
    ) -> None:
        self._tiles = [
            (layer, number, tile)
            for layer, tiles in enumerate(layers)
            for number, tile in enumerate(tiles)
        ]
        # Rebuilt K and V need a slot, too, though the link does not fill it.
        rebuilds = any(not tile.is_loaded for *_, tile in self._tiles)
        self._rebuilt_slot = slots - 1
        self._inputs = _Ring(slots)
        self._loads = _Ring(slots - rebuilds)
        self._is_column = schedule is Schedule.COLUMN
        self._count = 0
        self._next = 0
        self._coming: deque[_Coming] = deque()
        # COLUMN: the only layer whose tiles may be sent, the tasks before them, and those after
        # which the next layer's may be.
        self._open_layer = self._tiles[0][0] if self._tiles else 0
        self._barrier: tuple[int, ...] = ()
        self._arrivals: list[int] = []

    def tasks(self) -> Iterator[Task]:
        yield from self._fill()
        while self._coming:
            yield from self._take(self._coming.popleft())

    def _take(self, coming: _Coming) -> Iterator[Task]:
        """Yield the rebuild and the ATTEND of a tile, and the copies that they make room for."""
        tile, after = coming.tile, coming.loaded
        if tile.rebuilt_rows:
            yield from self._rebuild(coming)
            after = (self._count - 1,)
            self._inputs.readers.append(self._count - 1)
            # The next X can be on its way while this tile is attended.
            yield from self._fill()
        if self._is_column:
            self._arrivals += after
            yield from self._open_next_layer()
        yield self._task(TaskKind.ATTEND, coming, tile.rows, after)
        if tile.is_loaded:
            self._loads.readers.append(self._count - 1)
        yield from self._fill()

    def _rebuild(self, coming: _Coming) -> Iterator[Task]:
        """Yield what computes K and V of the rebuilt rows, over loaded rows, if there are any."""
        tile, source = coming.tile, coming.sent
        if not coming.layer or tile.is_kept:
            kind = TaskKind.COPY if coming.layer else TaskKind.EMBED
            yield self._task(kind, coming, tile.rebuilt_rows, source)
            source = (self._count - 1,)
        after = (*source, *coming.loaded)
        yield self._task(TaskKind.REBUILD, coming, tile.rebuilt_rows, after)

    def _fill(self) -> Iterator[Task]:
        """Yield the copies of the next tiles, in order, until a slot is missing."""
        while self._next < len(self._tiles):
            layer, number, tile = self._tiles[self._next]
            if self._is_column and layer != self._open_layer:
                return
            if tile.is_loaded and self._loads.is_full:
                return
            if tile.rebuilt_rows and self._inputs.is_full:
                return
            self._next += 1
            yield from self._send(layer, number, tile)

    def _send(self, layer: int, number: int, tile: TileShape) -> Iterator[Task]:
        slot, kv_slot = None, self._rebuilt_slot
        sent: tuple[int, ...] = ()
        loaded: tuple[int, ...] = ()
        if tile.rebuilt_rows:
            slot, free = self._inputs.fill()
            sent = (*free, *self._barrier)
        if tile.is_loaded:
            kv_slot, free = self._loads.fill()
            loaded = (*free, *self._barrier)
        coming = _Coming(layer, number, tile, slot, kv_slot, sent, loaded)
        # Layer 0's X is computed from token ids once it is the tile's turn.
        if tile.rebuilt_rows and layer and not tile.is_kept:
            yield self._task(TaskKind.SEND, coming, tile.rebuilt_rows, sent)
            coming = replace(coming, sent=(self._count - 1,))
        if tile.is_loaded:
            yield self._task(TaskKind.LOAD, coming, tile.rows, loaded)
            coming = replace(coming, loaded=(self._count - 1,))
        self._coming.append(coming)

    def _open_next_layer(self) -> Iterator[Task]:
        """Yield the next layer's first copies once all of the present layer's have arrived."""
        if self._coming or self._next == len(self._tiles):
            return
        layer = self._tiles[self._next][0]
        if layer != self._open_layer:
            self._open_layer = layer
            self._barrier, self._arrivals = tuple(self._arrivals), []
            yield from self._fill()

    def _task(self, kind: TaskKind, coming: _Coming, rows: int, after: tuple[int, ...]) -> Task:
        self._count += 1
        return Task(kind, coming.layer, 0, rows, coming.slot, after, coming.number, coming.kv_slot)


def _with_first_layer_spread(tasks: Sequence[Task]) -> list[Task]:
    """Return the same tasks with layer 0's blocks spread evenly among the others.

    Neither waits for the other, since layer 0 needs no staging slots.
    """
    first = _blocks([index for index, task in enumerate(tasks) if task.layer == 0], tasks)
    others = _blocks([index for index, task in enumerate(tasks) if task.layer], tasks)
    share = len(others) // len(first)
    order: list[int] = []
    for number, block in enumerate(first):
        for each in (block, *others[number * share : (number + 1) * share]):
            order += each
    place = {index: position for position, index in enumerate(order)}
    return [
        replace(tasks[index], after=tuple(place[earlier] for earlier in tasks[index].after))
        for index in order
    ]


def _blocks(indices: Sequence[int], tasks: Sequence[Task]) -> list[list[int]]:
    """Cut the tasks after each REBUILD."""
    blocks: list[list[int]] = [[]]
    for index in indices:
        blocks[-1].append(index)
        if tasks[index].kind is TaskKind.REBUILD:
            blocks.append([])
    return blocks[:-1]


def _ranges(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Cut [first, last) into pieces of `size`; the last one may be smaller."""
    return [(start, min(start + size, last)) for start in range(first, last, size)]
