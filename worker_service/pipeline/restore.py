"""Brings a stored prefix onto the device: loads K,V[l:] and rebuilds K,V[:l] from X.

`splitpoint.planning.schedule` decides the tasks and their order. The link draws the copies of
a `SplitRestore` one by one, beside those of steps; its owner calls `compute` between steps,
and never has to wait. While other work wants the device, a restore does not let the link
wait for products: it loads what it would have rebuilt last. `restore` carries one out alone;
over `SerialLanes` that is the serial twin. This module knows no requests and no calls of the
store.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    Task,
    TaskKind,
    restore_tasks,
)
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import chunks_of
from worker_service.device.copies import sent
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.pipeline.staging import InputSlots
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import StoredChunk

# A restore that wants nothing of its owner still calls it after this many seconds: for the link's
# counters and claims.
_QUIET_SECONDS = 0.01
# Bytes of K and V that one piece brings at most: a step's copies wait for no more of them.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored prefix and where it goes.

    Attributes:
        chunks: all of it, front first; restored from `first_chunk` on.
        pages: `pages[j]` receives chunk j; None before `first_chunk`.
        token_ids: of at least the rebuilt tokens: layer 0's X comes from them.
        cached_tokens: what is wanted of it; the last chunk may hold more.
        split_tokens: [0, split) is rebuilt, the rest loaded.
    """

    chunks: Sequence[StoredChunk]
    first_chunk: int
    pages: Sequence[int | None]
    token_ids: Sequence[int]
    cached_tokens: int
    split_tokens: int

    def part(self, chunks: range, rows: int, positions: torch.Tensor | None = None) -> Part:
        """Return these chunks, of which `rows` token rows are meant, with their pages."""
        span = slice(chunks.start, chunks.stop)
        pages = [page for page in self.pages[span] if page is not None]
        return Part(self.chunks[span], pages, rows, positions)


@dataclass(frozen=True, slots=True)
class Target:
    """Where K and V of restored chunks go: layer i's pages `[pages, n_kv, chunk_tokens, d]`."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


class RestoreRun(ABC):
    """A restore whose pieces the lanes draw from a group, between `begin` and `close`.

    Attributes:
        group: its pieces on the lanes, with their spans and error.
    """

    def __init__(self, lanes: Lanes, on_change: Callable[[], None] | None) -> None:
        """`on_change` is called from any thread after pieces that the owner has to know of."""
        self.group = Group(self._draw, None if on_change is None else self._changed)
        self._lanes = lanes
        self._on_change = on_change
        self._called_at = time.perf_counter()

    @property
    @abstractmethod
    def wants_owner(self) -> bool:
        """True if the owner has something to do, or the restore is over."""

    @abstractmethod
    def _draw(self) -> Piece | None:
        """Return the next copy; see `Group`."""

    def _changed(self) -> None:
        """Call the owner, if it is worth it.

        On a CPU the owner's thread takes the interpreter's lock from the thread that copies:
        called after each piece, a restore of 16 MiB took twice as long.
        """
        now = time.perf_counter()
        is_due = now - self._called_at > _QUIET_SECONDS
        if self._on_change and (is_due or self._lanes.group_count > 1 or self.wants_owner):
            self._called_at = now
            self._on_change()

    def begin(self) -> None:
        """Let the link draw the copies."""
        self._lanes.attach(self.group)

    def close(self) -> None:
        """Begin no more pieces; those under way end before the group is quiet."""
        self.group.close()
        self._lanes.detach(self.group)


class SplitRestore(RestoreRun):
    """A restore by a split point, in pieces. All but `draw` belongs to the owner's thread.

    Attributes:
        is_contended: others want the device. Products of weights on the host are loaded
            instead; and whenever the link has nothing else to do, the last ones that remain.
    """

    def __init__(
        self,
        transfer: CacheTransfer,
        lanes: Lanes,
        prefix: Prefix,
        target: Target,
        *,
        schedule: Schedule = Schedule.PIPELINED,
        tile_tokens: int,
        copies: Iterable[Work] = (),
        piece_bytes: int = PIECE_BYTES,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to bring `prefix` to `target`, and then do the further `copies`.

        Nothing begins before `begin`. Tiles have `tile_tokens`, as far as memory allows.
        """
        super().__init__(lanes, on_change)
        self.is_contended = False
        self.slots = transfer.staging.restore_slots(tile_tokens)
        self._schedule = schedule
        self._tasks = _tasks_of(prefix, transfer, self.slots, schedule)
        self._maker = _WorkMaker(transfer, prefix, target, self.slots)
        self._copies = list(copies)
        self._copies_left = len(self._copies)
        slot_bytes = 2 * transfer.tensors.layout.kv_slot_bytes
        self._piece_tokens = max(1, piece_bytes // slot_bytes) * transfer.chunk_tokens
        # Tasks that no lane was given yet, in order; guarded by the group.
        self._waiting: dict[Lane, dict[int, None]] = {lane: {} for lane in Lane}
        self._waiting_tokens = dict.fromkeys(Lane, 0)
        for index in range(len(self._tasks)):
            self._queue(index)
        # Products that are left of those that read X from a slot.
        self._slot_products = {
            index
            for index, task in enumerate(self._tasks)
            if task.kind is TaskKind.REBUILD and task.slot is not None
        }
        self._begun: set[int] = set()
        self._done: set[int] = set()
        # Pieces that are left of each task that is cut.
        self._pieces_left: dict[int, int] = {}
        # The rest of a load that is being cut.
        self._rest: tuple[int, int] | None = None
        self._has_slots = False
        # When the last product ended: only then may a copy into its slot begin.
        self._computed_at = 0.0

    # -- for the owner --------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do."""
        with self.group.changed:
            return len(self._done) == len(self._tasks) and not self._copies_left

    @property
    def wants_owner(self) -> bool:
        with self.group.changed:
            return (
                not self.group.is_open
                or self.is_done
                or self._weights_to_give() is not None
                or bool(self._next_product())
            )

    @property
    def needs_slots(self) -> bool:
        """True if products are left that read X from a slot."""
        with self.group.changed:
            return bool(self._slot_products)

    @property
    def left_tokens(self) -> tuple[int, int]:
        """Tokens times layers that are left to copy and to rebuild."""
        with self.group.changed:
            return self._waiting_tokens[Lane.LINK_IN], self._waiting_tokens[Lane.COMPUTE]

    def lend_slots(self) -> None:
        """Let it use the X memory of restores, which nothing else uses until `needs_slots` ends."""
        with self.group.changed:
            self._has_slots = True
        self._lanes.poke()

    def contend(self, is_contended: bool) -> None:
        """Say whether others want the device."""
        if is_contended == self.is_contended:
            return
        with self.group.changed:
            self.is_contended = is_contended
            if is_contended:
                self._load_host_layers()
        self._lanes.poke()

    def compute(self) -> int | None:
        """Rebuild the next tile whose X has come; return its tokens, or None if there is none."""
        self._give_weights()
        with self.group.changed:
            if self.group.error is not None:
                return None
            indices = self._next_product()
        if not indices:
            return None
        for index in indices:
            self._give(Lane.COMPUTE, index)
        return self._tasks[indices[-1]].tokens

    def finish(self) -> list[Span]:
        """Do everything now, waiting where needed; return the spans. Raises the first error."""
        self.begin()
        try:
            while not self.is_done and self.group.error is None:
                if self.compute() is None:
                    self._wait()
        finally:
            self.close()
            self.group.wait_quiet()
        if self.group.error is not None:
            raise self.group.error
        return self._lanes.count_spans(self.group.take_spans())

    # -- below ------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until a product can be computed, or everything has ended."""
        with self.group.changed:
            self.group.changed.wait_for(lambda: self.wants_owner)

    def _queue(self, index: int) -> None:
        """Let a task wait for its lane, behind those that do."""
        task = self._tasks[index]
        self._waiting[task.lane][index] = None
        self._waiting_tokens[task.lane] += task.tokens

    def _unqueue(self, index: int) -> None:
        """Take a task from those that wait for its lane."""
        task = self._tasks[index]
        del self._waiting[task.lane][index]
        self._waiting_tokens[task.lane] -= task.tokens

    def _settle(self, index: int) -> None:
        """Count a task as done."""
        self._done.add(index)
        self._slot_products.discard(index)

    def _give(self, lane: Lane, index: int) -> None:
        task = self._tasks[index]
        with self.group.changed:
            self._unqueue(index)
            self._begun.add(index)
            work = self._maker.work_of(task)
        self._lanes.run_piece(lane, self.group, Piece(work, lambda: self._end(index)))

    def _give_weights(self) -> None:
        """Send the weights whose slot is free. The stream of weights is the owner's."""
        while True:
            with self.group.changed:
                index = self._weights_to_give()
            if index is None:
                return
            self._give(Lane.WEIGHTS_IN, index)

    def _weights_to_give(self) -> int | None:
        index = next(iter(self._waiting[Lane.WEIGHTS_IN]), None)
        return index if index is not None and self._may_begin(index) else None

    def _next_product(self) -> list[int]:
        """Return the next REBUILD that may begin, with its EMBED before it; empty: none may."""
        embed: list[int] = []
        for index in self._waiting[Lane.COMPUTE]:
            task = self._tasks[index]
            is_ready = all(each in self._done or each in embed for each in task.after)
            if task.kind is TaskKind.EMBED and is_ready:
                embed = [index]
                continue
            if is_ready:
                return [*embed, index]
            if not self.is_contended:
                # In the other schedules copies may wait for the EMBED.
                return [] if self._schedule is Schedule.PIPELINED else embed
            embed = []
        return []

    def _draw(self) -> Piece | None:
        if self._rest is not None:
            return self._load_piece(*self._rest)
        for index in self._waiting[Lane.LINK_IN]:
            if self._may_begin(index):
                return self._copy(index)
            # While another restore has the slots, later loads need none.
            if not self.is_contended and not self._lacks_slots(index):
                return None
        if self.is_contended:
            load = self._load_last_product()
            if load is not None:
                return self._copy(load)
        if not self._waiting[Lane.LINK_IN] and self._copies:
            return Piece(self._copies.pop(0), self._end_copy)
        return None

    def _lacks_slots(self, index: int) -> bool:
        return self._tasks[index].kind is TaskKind.SEND and not self._has_slots

    def _may_begin(self, index: int) -> bool:
        task = self._tasks[index]
        if self._lacks_slots(index):
            return False
        # A lane keeps its order.
        return all(
            each in self._done or (each in self._begun and self._tasks[each].lane is task.lane)
            for each in task.after
        )

    def _copy(self, index: int) -> Piece:
        """Return the copy of a task, or the first piece of it."""
        task = self._tasks[index]
        self._unqueue(index)
        self._begun.add(index)
        if task.kind is TaskKind.LOAD:
            self._pieces_left[index] = -(-task.tokens // self._piece_tokens)
            return self._load_piece(index, task.first)
        return Piece(self._maker.work_of(task), lambda: self._end(index), self._computed_at)

    def _load_piece(self, index: int, first: int) -> Piece:
        """Return the load of what fits one piece, from `first` on."""
        task = self._tasks[index]
        last = min(first + self._piece_tokens, task.last)
        self._rest = (index, last) if last < task.last else None
        work = self._maker.work_of(replace(task, first=first, last=last))
        return Piece(work, lambda: self._end(index))

    def _end(self, index: int) -> None:
        """Note that a piece of a task is done; the group is locked."""
        left = self._pieces_left.get(index, 1) - 1
        self._pieces_left[index] = left
        if not left:
            self._settle(index)
        if self._tasks[index].lane is Lane.COMPUTE:
            self._computed_at = time.perf_counter()

    def _end_copy(self) -> None:
        self._copies_left -= 1

    # -- loads instead of products -------------------------------------------------------------

    def _load_last_product(self) -> int | None:
        """Turn the last product whose X is not on its way into a load; return its index."""
        waiting, products = self._waiting[Lane.LINK_IN], self._waiting[Lane.COMPUTE]
        for index in reversed(products):
            task = self._tasks[index]
            if task.kind is not TaskKind.REBUILD:
                continue
            sources = [each for each in task.after if self._makes_inputs(each)]
            if all(each in waiting or each in products for each in sources):
                return self._load_instead(index, sources)
        return None

    def _makes_inputs(self, index: int) -> bool:
        return self._tasks[index].kind in (TaskKind.SEND, TaskKind.EMBED)

    def _load_instead(self, index: int, sources: Iterable[int]) -> int:
        """Load the tile of a REBUILD, which no lane was given; return the load's index."""
        task = self._tasks[index]
        self._unqueue(index)
        self._settle(index)
        for each in sources:
            if each in self._waiting[self._tasks[each].lane]:
                self._unqueue(each)
                self._settle(each)
            # Else X is on its way. What comes into the same slot later comes after it.
        self._tasks.append(Task(TaskKind.LOAD, task.layer, task.first, task.last))
        load = len(self._tasks) - 1
        self._queue(load)
        return load

    def _load_host_layers(self) -> None:
        """Load all layers whose weights are on the host: steps use the slots for weights."""
        layers = {
            self._tasks[index].layer
            for index in self._waiting[Lane.COMPUTE]
            if self._maker.is_on_host(self._tasks[index].layer)
        }
        for index in list(self._waiting[Lane.COMPUTE]):
            task = self._tasks[index]
            if task.layer in layers and task.kind is TaskKind.REBUILD:
                self._load_instead(index, [each for each in task.after if self._makes_inputs(each)])
        for index in list(self._waiting[Lane.WEIGHTS_IN]):
            self._unqueue(index)
            self._settle(index)


def restore(
    transfer: CacheTransfer,
    lanes: Lanes,
    prefix: Prefix,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    schedule: Schedule = Schedule.PIPELINED,
    tile_tokens: int,
) -> list[Span]:
    """Bring the prefix into cache pages alone, waiting for it; return the spans of the work.

    `keys[i]`, `values[i]` are layer i's `[pages, n_kv, chunk_tokens, d]`. Raises ChunkLost if
    a slot changed while it was read: the pages then hold nothing usable.
    """
    wanted = prefix.chunks[prefix.first_chunk :]
    if not wanted:
        return []
    run = SplitRestore(
        transfer,
        lanes,
        prefix,
        Target(keys, values),
        schedule=schedule,
        tile_tokens=tile_tokens,
    )
    run.lend_slots()
    spans = run.finish()
    # A slot's generation only grows: one that is current now was current all the time.
    transfer.tensors.check_current(wanted)
    return spans


def _tasks_of(
    prefix: Prefix, transfer: CacheTransfer, slots: InputSlots, schedule: Schedule
) -> list[Task]:
    """Return the tasks of a prefix; none if nothing of it is wanted."""
    if not prefix.chunks[prefix.first_chunk :]:
        return []
    weights = transfer.model.layer_weights
    work = RestoreWork(
        layer_count=len(transfer.model.layers),
        first=prefix.first_chunk * transfer.chunk_tokens,
        split=prefix.split_tokens,
        cached=prefix.cached_tokens,
        chunk_tokens=transfer.chunk_tokens,
        tile_tokens=slots.slot_pages * transfer.chunk_tokens,
        slots=slots.count,
        host_layers=frozenset() if weights is None else frozenset(weights.keys),
        weight_slots=0 if weights is None else weights.slot_count,
    )
    return restore_tasks(work, schedule)


@dataclass(slots=True)
class _WorkMaker:
    """Makes the work of tasks; all layers share what depends on the tokens alone."""

    transfer: CacheTransfer
    prefix: Prefix
    target: Target
    slots: InputSlots
    parts: dict[tuple[bool, int, int], Part] = field(default_factory=dict)
    # The slot of each layer's W_K and W_V that come over the link.
    weight_slots: dict[int, int] = field(default_factory=dict)

    def work_of(self, task: Task) -> Work:
        """Return the work of a task."""
        transfer, layer, slot = self.transfer, task.layer, task.slot
        keys, values = self.target.keys[layer], self.target.values[layer]
        match task.kind:
            case TaskKind.LOAD:
                return transfer.load(layer, self._part(task), keys, values)
            case TaskKind.WEIGHTS:
                return self._load_weights(task)
            case TaskKind.EMBED:
                ids = self.prefix.token_ids[task.first : task.last]
                token_ids = sent(ids, transfer.device)
                return transfer.embed(token_ids, self._positions(task))
            case TaskKind.SEND:
                if slot is None:
                    raise RuntimeError("activations are sent into a staging slot")
                return transfer.send(layer, self._part(task), self.slots[slot])
            case TaskKind.REBUILD:
                inputs = None if slot is None else self.slots[slot]
                work = transfer.rebuild(layer, self._part(task), inputs, keys, values)
                return self._with_weights(work, layer)
            case TaskKind.COPY | TaskKind.ATTEND:
                raise RuntimeError(f"no restore has a task {task.kind.value}")

    def is_on_host(self, layer: int) -> bool:
        weights = self.transfer.model.layer_weights
        return weights is not None and layer in weights

    def _load_weights(self, task: Task) -> Work:
        weights = self.transfer.model.layer_weights
        if weights is None or task.slot is None:
            raise RuntimeError("weights that are on the device are said to be on the host")
        self.weight_slots[task.layer] = task.slot
        return weights.piece_work(task.layer, WeightPiece.KEY_VALUE, task.slot)

    def _with_weights(self, work: Work, layer: int) -> Work:
        weights, slot = self.transfer.model.layer_weights, self.weight_slots.get(layer)
        if weights is None or slot is None:
            return work

        def call() -> None:
            with weights.lent(layer, WeightPiece.KEY_VALUE, slot):
                work.call()

        return replace(work, call=call)

    def _part(self, task: Task) -> Part:
        is_rebuilt = task.kind is not TaskKind.LOAD
        key = (is_rebuilt, task.first, task.last)
        if key not in self.parts:
            chunk = self.transfer.chunk_tokens
            chunks = range(task.first // chunk, chunks_of(task.last, chunk))
            positions = self._positions(task) if is_rebuilt else None
            self.parts[key] = self.prefix.part(chunks, task.tokens, positions)
        return self.parts[key]

    def _positions(self, task: Task) -> torch.Tensor:
        return torch.arange(task.first, task.last, device=self.transfer.device)
