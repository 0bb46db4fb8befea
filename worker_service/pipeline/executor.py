"""Runs tasks on the lanes: two drivers of one list of tasks, for restores and for streamed steps.

`splitpoint.planning.schedule` lays tasks out, `task_work` makes their work, and here the lanes are
given it. They share no more, because the moment differs at which a task is given:

`RestoreRun`: the link draws copies one by one, beside those of steps, when it has time for them.
The owner calls `compute` between steps, and never has to wait. While other work wants the device, a
restore does not let the link wait for products: it loads what it would have rebuilt last. The loads
of a back, whose front the owner computes, are claimed while it runs (`TwoEnds`). `restore` carries
one out alone.

`Prefetcher`: a step gives all its tasks in list order, the copies of later tiles ahead of the
attention to the present one. While layer i computes its MLP, the first tiles of layer i + 1 arrive.
The host never waits. On a GPU the lanes wait for each other.

Over `SerialLanes` either is the serial twin. This module knows no requests, no calls of the store,
and not what attention does with a tile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    Task,
    TaskKind,
    restore_tasks,
    step_tasks,
)
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import Event, Lanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.pipeline.staging import InputSlots, Staging
from worker_service.pipeline.task_work import Prefix, RestoreWorks, StepWorks, Target, TileTransfer
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.pipeline.two_ends import TwoEnds

Result = TypeVar("Result")
Attend = Callable[[torch.Tensor, torch.Tensor], None]

# A restore that wants nothing of its owner still calls it after this many seconds: for the link's
# counters and claims.
_QUIET_SECONDS = 0.01
# Bytes of K and V that one piece brings at most: a step's copies wait for no more of them.
PIECE_BYTES = 4 << 20


class RestoreRun:
    """A restore, whose copies the link draws. All but `_draw` belongs to the owner's thread.

    It rebuilds up to a split point, or loads the back of a prefix whose front its owner computes.
    The pieces of a back are claimed while it runs.

    Attributes:
        group: its pieces on the lanes, with their spans and error.
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
        ends: TwoEnds | None = None,
        copies: Iterable[Work] = (),
        piece_bytes: int = PIECE_BYTES,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to bring `prefix` to `target`, and then do the further `copies`.

        Nothing begins before `begin`. Tiles have `tile_tokens`, as far as memory allows. With
        `ends` only the back is brought, and neither split nor tiles matter. `on_change` is called
        from any thread after pieces that the owner has to know of.
        """
        self.group = Group(self._draw, None if on_change is None else self._changed)
        self.is_contended = False
        self.slots = transfer.staging.restore_slots(tile_tokens)
        self._lanes = lanes
        self._on_change = on_change
        self._called_at = time.perf_counter()
        self._schedule = schedule
        self._ends = ends
        tasks = [] if ends is not None else _tasks_of(prefix, transfer, self.slots, schedule)
        self._tasks = tasks
        self._works = RestoreWorks(transfer, prefix, target, self.slots)
        self._copies = list(copies)
        self._copies_left = len(self._copies)
        slot_bytes = 2 * transfer.tensors.layout.kv_slot_bytes
        self._chunk_tokens = transfer.chunk_tokens
        self._piece_tokens = max(1, piece_bytes // slot_bytes) * transfer.chunk_tokens
        if ends is not None:
            self._piece_tokens = prefix.cached_tokens  # claims are small already
        # The claimed chunks of a back, by the last task that loads them.
        self._claims: dict[int, range] = {}
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

    def begin(self) -> None:
        """Let the link draw the copies."""
        self._lanes.attach(self.group)

    def close(self) -> None:
        """Begin no more pieces; those under way end before the group is quiet."""
        self.group.close()
        self._lanes.detach(self.group)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do; the owner's front does not count."""
        with self.group.changed:
            is_claimed = self._ends is None or self._ends.back_ended
            return is_claimed and len(self._done) == len(self._tasks) and not self._copies_left

    @property
    def wants_owner(self) -> bool:
        """True if the owner has something to do, or the restore is over."""
        with self.group.changed:
            return (
                self._ends is not None  # they meet where either of them got to
                or not self.group.is_open
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
        """Tokens times layers that are left to copy and to rebuild; of a back: unclaimed ones."""
        if self._ends is not None:
            return self._ends.left_tokens * self._works.layer_count, 0
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
        """Do everything now, waiting where needed; return the spans. Raises the first error.

        Raises ValueError with `ends`: the front is the owner's, and would never be computed.
        """
        if self._ends is not None:
            raise ValueError("a restore from both ends needs an owner that computes the front")
        self.begin()
        try:
            while not self.is_done and self.group.error is None:
                if self.compute() is None:
                    self._wait()
        finally:
            # The pages may be given to another request: no lane may touch them any more.
            self.close()
            self.group.wait_quiet()
        if self.group.error is not None:
            raise self.group.error
        return self._lanes.count_spans(self.group.take_spans())

    # -- below ------------------------------------------------------------------------------

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
            work = self._works.work_of(task)
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
        """Return the next copy; see `Group`."""
        if self._rest is not None:
            return self._load_piece(*self._rest)
        if self._ends is not None and not self._waiting[Lane.LINK_IN]:
            self._claim_back(self._ends)
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

    def _claim_back(self, ends: TwoEnds) -> None:
        """Claim chunks of the back: one load for each layer."""
        chunks = None if ends.back_ended else ends.claim_back()
        if chunks is None:
            return
        first = chunks.start * self._chunk_tokens
        last = min(chunks.stop * self._chunk_tokens, self._works.prefix.cached_tokens)
        for layer in range(self._works.layer_count):
            self._tasks.append(Task(TaskKind.LOAD, layer, first, last))
            self._queue(len(self._tasks) - 1)
        self._claims[len(self._tasks) - 1] = chunks

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
        return Piece(self._works.work_of(task), lambda: self._end(index), self._computed_at)

    def _load_piece(self, index: int, first: int) -> Piece:
        """Return the load of what fits one piece, from `first` on."""
        task = self._tasks[index]
        last = min(first + self._piece_tokens, task.last)
        self._rest = (index, last) if last < task.last else None
        work = self._works.work_of(replace(task, first=first, last=last))
        return Piece(work, lambda: self._end(index))

    def _end(self, index: int) -> None:
        """Note that a piece of a task is done; the group is locked."""
        left = self._pieces_left.get(index, 1) - 1
        self._pieces_left[index] = left
        if not left:
            self._settle(index)
        if self._ends is not None and index in self._claims:
            chunks = self._claims.pop(index)
            self._ends.loaded(chunks, chunks.start)
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
            if self._works.is_on_host(self._tasks[index].layer)
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
    run = RestoreRun(
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


class Prefetcher:
    """The tiles of one step: `start`, then `consume` each in order.

    The caller of the step collects the lanes at its end, or calls their `finish_after_error`:
    no transfer of a step may be under way between steps.
    """

    def __init__(
        self,
        lanes: Lanes,
        staging: Staging,
        tile_pages: int,
        layers: Sequence[Sequence[TileTransfer]],
    ) -> None:
        self._lanes = lanes
        self._works = StepWorks(staging, tile_pages, layers)
        shapes = {id(each): each.shape for tiles in layers for each in tiles}
        self._tasks = step_tasks(
            [[shapes[id(each)] for each in tiles] for tiles in layers],
            staging.page_count // tile_pages,
            lanes.schedule,
        )
        self._task = next(self._tasks, None)
        # The ends of the tasks that their lanes were given.
        self._ends: list[Event] = []

    def start(self) -> None:
        """Fill the slots with the first tiles."""
        self._copy_ahead()

    def consume(self, layer: int, tile_transfer: TileTransfer, attend: Attend) -> None:
        """Rebuild the rebuilt rows of the tile once it is there, and attend it.

        `attend` receives K and V `[tile pages, n_kv, chunk_tokens, d]`, the tile's pages
        first, and runs as work of the compute lane.
        """
        while (task := self._task) is not None and task.kind is not TaskKind.ATTEND:
            self._give(task, self._works.work_of(task))
        if task is None or task.layer != layer or self._works.tile_of(task) is not tile_transfer:
            raise RuntimeError("tiles are taken in another order than they come")
        keys, values = self._works.kv_tensors(task)
        work = Work("attend", lambda: attend(keys, values), layer=layer, tokens=task.tokens)
        self._give(task, work)
        self._copy_ahead()

    def compute(
        self, name: str, layer: int, call: Callable[[], Result], after: Sequence[Event] = ()
    ) -> Result:
        """Run another part of the forward pass on the compute lane, so that it leaves a span.

        It begins once all of `after` are reached.
        """
        results: list[Result] = []
        work = Work(name, lambda: results.append(call()), layer=layer)
        self._lanes.run(Lane.COMPUTE, work, after)
        return results[0]

    # -- below --------------------------------------------------------------------------

    def _copy_ahead(self) -> None:
        """Give the link the copies that wait for no product of the next tile."""
        while self._task is not None and self._task.lane is Lane.LINK_IN:
            self._give(self._task, self._works.work_of(self._task))

    def _give(self, task: Task, work: Work) -> None:
        """Give a task to its lane, behind the tasks that it waits for."""
        after = [self._ends[index] for index in task.after]
        self._ends.append(self._lanes.run(task.lane, work, after))
        self._task = next(self._tasks, None)


def compute(
    prefetcher: Prefetcher | None, name: str, layer: int, call: Callable[[], Result]
) -> Result:
    """Run a part of a forward pass, on a lane if the step has a prefetcher."""
    return call() if prefetcher is None else prefetcher.compute(name, layer, call)
