"""Claims, allocates and frees the device pages of sequences.

A resident sequence claims pages for its known tokens, grows with spare pages, and keeps
every page until it ends or leaves the device; those of equal prefixes are shared. A
streamed one claims the front that was granted to it, the page of its tail and, for self
drafts, a window of its newest sealed chunks. Its other pages are in the room, which it
shares with all streamed sequences, and are freed as soon as their chunks are sealed and
behind the window. X pages are held from a chunk's first token until it is sealed.
Bookkeeping over `DeviceCache`'s allocators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Protocol

from splitpoint.planning.plan import Residency, SplitLine
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.selecting import StepSplit
from splitpoint.selection import Selection
from splitpoint.shapes import chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.engine.sequence import Admission, Sequence
from worker_service.engine.shared_pages import SharedPages
from worker_service.retrieval.bounded_pool import BoundedPool
from worker_service.retrieval.selector import EXACT, SelectionPlan
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.quantization import ChunkCodec
from worker_service.store.write_back import (
    ChunksStored,
    Job,
    PoolRelease,
    PoolStart,
    PoolStarted,
    PoolWrite,
    PoolWritten,
    WriteJob,
)


class Selects(Protocol):
    """What a PageManager needs of a `Selector`, whose methods these are."""

    def plan(
        self, selection: Selection, final_tokens: int, split: StepSplit, *, is_streamed: bool
    ) -> SelectionPlan: ...

    def reads(
        self, selection: Selection, plan: SelectionPlan, pages: Rows[int], final_tokens: int
    ) -> SequenceReads: ...


class PageManager:
    """Gives sequences their pages.

    Attributes:
        shared: finds the pages of equal prefixes; None if sequences share none.
    """

    def __init__(
        self, cache: DeviceCache, *, shares_prefixes: bool, selector: Selects | None = None
    ) -> None:
        """`selector`: None: every request reads everything."""
        self._selector = selector
        self.shared = SharedPages(cache) if shares_prefixes else None
        self._cache = cache
        self._claims = cache.claims
        self._chunk_tokens = cache.layout.chunk_tokens
        self._keeps_inputs = bool(cache.inputs)
        layout = cache.layout
        self._codec = ChunkCodec(layout)
        fits = layout.hidden_size == layout.kv_head_count * layout.head_dim
        self._can_keep_rows = self._keeps_inputs and fits

    def claim_of(self, admission: Admission) -> int:
        """Return how many pages a request may hold at once if it runs to max_tokens.

        Pages in the room are not counted; those of a selection are, by the present costs.
        """
        return self._exact_claim(admission) + self._selection_plan(admission).pages.count

    def _exact_claim(self, admission: Admission) -> int:
        """Return `claim_of` a request that reads everything."""
        pages = chunks_of(admission.final_tokens, self._chunk_tokens)
        if admission.residency is Residency.STREAMED:
            front = 0 if self._keeps_rows(admission) else self._kept(admission)
            kept = self._cache.plan.streamed_page_count + front
            return min(pages, kept) + self._row_page_count(admission)
        return pages

    def kept_chunks(self, admission: Admission) -> int:
        """Return how many leading chunks of a streamed request keep K and V on the device.

        These are the sinks of self drafts, and the front that was granted to it.
        """
        if admission.residency is not Residency.STREAMED:
            return 0
        sinks = self._cache.plan.sink_page_count
        return sinks + (0 if self._keeps_rows(admission) else self._kept(admission))

    def kept_inputs(self, admission: Admission) -> int:
        """Return how many leading chunks of a streamed request keep X on the device."""
        return self._kept(admission) if self._keeps_rows(admission) else 0

    def _kept(self, admission: Admission) -> int:
        if admission.residency is not Residency.STREAMED:
            return 0
        return admission.resident_tokens // self._chunk_tokens

    def _keeps_rows(self, admission: Admission) -> bool:
        return admission.schedule is Schedule.ROW and self._can_keep_rows

    def claim(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        """Promise a sequence the pages of its known tokens, or of what is kept of them.

        Return False if fewer than `headroom` pages would then be spare.
        """
        admission = sequence.admission
        sequence.selection_plan = self._selection_plan(admission)
        count = self._known_pages(sequence)
        if count + headroom > self._claims.spare_count:
            return False
        self._claims.promise(sequence.claim, count, uses_room=sequence.is_streamed)
        sequence.kept_chunks = self.kept_chunks(admission)
        # A window is for drafts; what joins a pool is to be written over others at once.
        has_window = sequence.is_streamed and admission.selection.pool is None
        sequence.window_chunks = self._cache.plan.window_page_count if has_window else 0
        sequence.kept_inputs = self.kept_inputs(admission)
        return True

    def _known_pages(self, sequence: Sequence) -> int:
        """Return the pages that a sequence needs before it grows, without those in use."""
        if sequence.is_streamed:
            return self._exact_claim(sequence.admission) + sequence.selection_plan.pages.count
        in_use = 0 if self.shared is None else self.shared.in_use_count(sequence)
        return chunks_of(len(sequence.tokens), self._chunk_tokens) - in_use

    def missing_count(self, sequence: Sequence) -> int:
        """Return how many pages must become spare before a sequence is restored.

        Pages in use, which it was going to share when it was admitted, may be gone by now.
        """
        lacking = self._known_pages(sequence) - sequence.claim.promised
        return 0 if sequence.is_streamed else max(0, lacking)

    @property
    def spare_count(self) -> int:
        """Pages that are not in use, not promised, and not part of the room."""
        return self._claims.spare_count

    def lacks_spare_page(self, sequence: Sequence) -> bool:
        """Return True if the sequence cannot grow before a page becomes spare."""
        claim = sequence.claim
        return not claim.uses_room and claim.held >= claim.promised and not self.spare_count

    def releasable(self, sequence: Sequence) -> int:
        """Return how many pages become spare when the sequence leaves the device."""
        if sequence.is_streamed:
            return sequence.claim.promised
        references = self._cache.pages.references
        own = sum(page is not None and references(page) == 1 for page in sequence.pages)
        return sequence.claim.open_count + own

    def give_up_kept(self, sequence: Sequence) -> bool:
        """Free a page that a streamed sequence keeps on the device; later steps stream the chunk.

        Its screens, which lack the chunk, are built again in its next step.

        The granted front goes first, from its end, then the window, from its oldest chunk, and
        the sinks last. Return False if it keeps nothing that is sealed, or only X.
        """
        pool = None if sequence.reads is None else sequence.reads.pool
        if pool is not None and not pool.is_whole:
            return False  # the store need not have its chunks any more
        last = sequence.kept_chunks - 1
        if last >= self._cache.plan.sink_page_count or not sequence.window_chunks:
            if last < 0 or last >= len(sequence.stored):
                return False
            sequence.kept_chunks = last
            self._give_up(sequence, last)
            return True
        oldest = sequence.stored_range.stop
        if oldest >= len(sequence.stored):
            return False
        sequence.window_chunks -= 1
        self._give_up(sequence, oldest)
        return True

    def _give_up(self, sequence: Sequence, chunk_index: int) -> None:
        page = sequence.page(chunk_index)
        sequence.pages[chunk_index] = None
        self._claims.give_up(sequence.claim, page)
        if sequence.reads is not None:
            sequence.reads.drop()

    def stored_chunks(self, sequence: Sequence, full_count: int) -> range:
        """Return which of the restored full chunks stay in the store.

        Empty for a resident sequence. For a streamed one all but the front and the window.
        """
        if not sequence.is_streamed:
            return range(full_count, full_count)
        start = min(sequence.kept_chunks, full_count)
        return range(start, max(start, full_count - sequence.window_chunks))

    def allocate_prefix(self, sequence: Sequence, stored: range, chunk_count: int) -> None:
        """Allocate pages for the first `chunk_count` chunks, behind those that it has.

        Those of `stored` stay in the store.
        """
        sequence.pages += [
            None if index in stored else self._claimed_page(sequence)
            for index in range(len(sequence.pages), chunk_count)
        ]

    # -- shared prefixes ----------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Return True while another sequence brings what this one would restore or compute."""
        return self.shared is not None and self.shared.must_wait(sequence)

    def holds_more(self, sequence: Sequence) -> bool:
        """Return True if the device holds more of a prefix than the store did at the match."""
        return self.shared is not None and self.shared.holds_more(sequence)

    def take_prefix(self, sequence: Sequence) -> None:
        """Give a sequence what the device holds of its prefix; it brings the rest itself.

        From now on it is promised exactly the pages of its known tokens.
        """
        if self.shared is not None:
            self.shared.take(sequence)
            self.shared.announce(sequence)
        if not sequence.is_streamed:
            self._claims.settle(sequence.claim, chunks_of(len(sequence.tokens), self._chunk_tokens))

    def step_passed(self, sequence: Sequence) -> None:
        """Let others share the chunks that are full after a step that passed its checks."""
        end = sequence.computed // self._chunk_tokens
        if end > sequence.checked_chunks:
            if self.shared is not None:
                self.shared.register(sequence, end)
            sequence.checked_chunks = end

    def forget(self, sequence: Sequence, damaged: Iterable[StoredChunk] = ()) -> set[int]:
        """Let nothing share damaged chunks any more; return the pages that hold them.

        All chunks that the sequence uses count as damaged if none is named.
        """
        if self.shared is None:
            return set()
        return self.shared.forget([chunk.key for chunk in damaged] or sequence.chunk_keys)

    # -- growth and write-back ----------------------------------------------------------

    @property
    def has_input_page(self) -> bool:
        """True if an X page is free, or none is ever needed."""
        return not self._keeps_inputs or self._cache.input_pages.free_count > 0

    def allocate_input_page(self, sequence: Sequence, chunk_index: int) -> int:
        page = self._cache.input_pages.allocate()
        sequence.input_pages[chunk_index] = page
        return page

    def grow(self, sequence: Sequence, count: int) -> int:
        """Allocate pages for the next `count` tokens; return how many tokens have pages.

        A resident sequence always gets the pages that it claimed, and others if they are
        spare. A streamed one, or any whose X is kept, may have to wait for write-back, which
        frees pages of the room: only full chunks are in it, so no sequence that waits for
        the room holds a part of it.
        """
        chunk = self._chunk_tokens
        first = sequence.computed // chunk
        for index in range(first, chunks_of(sequence.computed + count, chunk)):
            if not self._has_pages(sequence, index):
                return max(0, index * chunk - sequence.computed)
        return count

    def grow_for_drafts(self, sequence: Sequence, most: int) -> int:
        """Allocate pages for guesses behind the newest token, which has one.

        Return how many of at most `most` have pages: neither a sequence nor a cached prefix
        leaves the device for a guess. After the step `free_unused` takes the pages back that no
        computed token is in.
        """
        in_last = -(sequence.computed + 1) % self._chunk_tokens
        room = in_last + self._cache.pages.free_count * self._chunk_tokens
        return self.grow(sequence, 1 + min(most, room)) - 1

    def shrink(self, sequence: Sequence) -> None:
        """Free the pages of tokens that were to be computed in a step that failed."""
        end = chunks_of(sequence.computed, self._chunk_tokens)
        pages = [page for page in sequence.pages[end:] if page is not None]
        for plane in (*self._cache.keys, *self._cache.values):
            plane[pages] = 0  # see `clear_unwritten`
        inputs = [page for index, page in sequence.input_pages.items() if index >= end]
        for plane in self._cache.inputs:
            plane[inputs] = 0
        self.free_unused(sequence)

    def free_unused(self, sequence: Sequence) -> None:
        """Free the pages behind the computed tokens; what is in them must be finite."""
        end = chunks_of(sequence.computed, self._chunk_tokens)
        for page in sequence.pages[end:]:
            if page is not None:
                self._claims.free(sequence.claim, page)
        del sequence.pages[end:]
        for index in [index for index in sequence.input_pages if index >= end]:
            self._cache.input_pages.free(sequence.input_pages.pop(index))

    def _has_pages(self, sequence: Sequence, index: int) -> bool:
        """Allocate what the chunk lacks, X first; return False if it must wait."""
        keeps_input = sequence.writes_back and self._keeps_inputs
        if keeps_input and index not in sequence.input_pages:
            if not self._cache.input_pages.free_count:
                return False
            self.allocate_input_page(sequence, index)
        if index == len(sequence.pages):
            page = self._claims.allocate(sequence.claim)
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def _claimed_page(self, sequence: Sequence) -> int:
        """Return a page that the sequence claimed."""
        page = self._claims.allocate(sequence.claim)
        if page is None:
            raise RuntimeError("a sequence needs more pages at once than it claimed")
        return page

    def full_chunks(self, sequence: Sequence, *, tail: bool) -> list[WriteJob]:
        """Return the chunks that became full since the last call; with `tail`, also the
        partial last one, as far as it is exact."""
        chunk, computed = self._chunk_tokens, sequence.computed
        first = sequence.first_approximate
        exact = computed if first is None else min(first, computed)
        end = computed // chunk
        if tail:
            end = max(end, chunks_of(exact, chunk))
        jobs = []
        for index in range(sequence.written_chunks, end):
            last = (index + 1) * chunk
            if last > computed:
                last = exact
            jobs.append(
                WriteJob(
                    chunk_index=index,
                    page=sequence.page(index),
                    input_page=sequence.input_pages.get(index),
                    token_ids=tuple(sequence.tokens[index * chunk : last]),
                    is_exact=sequence.is_exact_until(last),
                )
            )
        sequence.written_chunks = max(sequence.written_chunks, end)
        return jobs

    def chunks_stored(self, sequence: Sequence, command: ChunksStored) -> None:
        """Free the X pages of sealed chunks, and of streamed ones the pages behind the window."""
        for index, chunk in enumerate(command.chunks, command.first_chunk):
            input_page = sequence.input_pages.pop(index, None)
            is_full = chunk.token_count == self._chunk_tokens
            if is_full:
                sequence.stored.append(chunk)
                # Screens learn from what leaves the window, as the store has it.
                self._round_kept(sequence, index)
                self._move_window(sequence)
            if input_page is None:
                continue
            if is_full and index < sequence.kept_inputs:
                self._cache.keep_inputs(input_page, sequence.row_pages[index // 2], index % 2)
            self._cache.input_pages.free(input_page)

    def _move_window(self, sequence: Sequence) -> None:
        """Free the page of the chunk that the window of a streamed sequence leaves behind."""
        index = len(sequence.stored) - 1 - sequence.window_chunks
        if not sequence.is_streamed or index < sequence.kept_chunks:
            return
        page = sequence.pages[index]
        if page is not None:
            if sequence.reads is not None and sequence.reads.is_built:
                sequence.reads.extend(page, sequence.stored[index])
            self._claims.free(sequence.claim, page)
            sequence.pages[index] = None

    def _round_kept(self, sequence: Sequence, index: int) -> None:
        """Give a page that stays on the device the values that the store has of its chunk.

        So the text does not depend on which chunks stay, as it must not where drafts have a window.
        """
        page = sequence.pages[index]
        if sequence.is_streamed and page is not None:
            for plane in (*self._cache.keys, *self._cache.values):
                self._codec.round(plane[page])

    # -- bounded pools ----------------------------------------------------------------------

    def jobs(
        self, sequence: Sequence, others: Callable[[], Collection[StoredChunk]], *, tail: bool
    ) -> list[Job]:
        """Return what write-back is to do; `tail` as in `full_chunks`.

        `others`: returns the chunks that other sequences on the device use.
        """
        pool = None if sequence.reads is None else sequence.reads.pool
        if sequence.reads is None or pool is None or (tail and pool.is_whole):
            return [*self.full_chunks(sequence, tail=tail)]
        if pool.is_whole:
            start = self._pool_start(sequence, sequence.reads, pool, others)
            return [*self.full_chunks(sequence, tail=False)] if start is None else [start]
        if tail or not pool.is_bound:
            return []  # what it ends with is no prefix, or waits for what stays
        return [*self._pool_writes(sequence, sequence.reads, pool)]

    def _pool_start(
        self,
        sequence: Sequence,
        reads: SequenceReads,
        pool: BoundedPool,
        others: Callable[[], Collection[StoredChunk]],
    ) -> PoolStart | None:
        """Return what lets a pool start; None if nothing leaves it, or chunks are on their way."""
        count = len(reads.chunks)
        if not reads.is_built or len(sequence.stored) < sequence.written_chunks:
            return None
        if not pool.is_due(count):
            return None
        used = others()
        shared = next((at for at, each in enumerate(reads.chunks) if each not in used), count)
        moving = pool.start(shared, count, self._first_recent(sequence))
        if moving is None:
            return None
        return PoolStart(reads.row_numbers(moving.places), tuple(reads.chunks), moving.chunk_count)

    def pool_started(self, sequence: Sequence, command: PoolStarted) -> PoolRelease | None:
        """Read what stays where it is now; return what tells the store; None if there is no room.

        The sequence has no chunks any more that the store could find, but those it shares.
        """
        reads = sequence.reads
        if reads is None or reads.pool is None or sequence.match is None:
            raise RuntimeError("a pool without a sequence has started")
        if command.chunks is None:
            reads.pool.refused()
            return None
        used = tuple(reads.chunks[index] for index in reads.pool.used_chunks)
        reads.pool_started(reads.pool, command.chunks)
        shared = reads.pool.shared_chunks
        end = sequence.stored_range.start + shared if shared else 0
        kept, sequence.stored = tuple(sequence.stored[:end]), []
        sequence.match = replace(sequence.match, chunks=kept)
        tokens = tuple(sequence.tokens[: end * self._chunk_tokens])
        return PoolRelease(sequence.salt, kept, tokens, used)

    def _pool_writes(
        self, sequence: Sequence, reads: SequenceReads, pool: BoundedPool
    ) -> Iterator[PoolWrite]:
        """Yield the chunks that became full, each with the rows that it is written over."""
        end = sequence.computed // self._chunk_tokens
        for index in range(sequence.written_chunks, end):
            if not pool.has_room:
                return  # the next step looks again
            places = pool.make_room(self._first_recent(sequence))
            rows = None if places is None else reads.row_numbers(places)
            yield PoolWrite(sequence.page(index), rows)
            sequence.written_chunks = index + 1

    def pool_written(self, sequence: Sequence, command: PoolWritten) -> None:
        """Free the page of the next chunk, which is in the pool now.

        If the store had no slot for it, it is the next to be written, over others.
        """
        reads, index = sequence.reads, sequence.stored_range.stop
        if reads is None or reads.pool is None:
            raise RuntimeError("a chunk was written into no pool")
        if command.is_refused:
            reads.pool.growth_refused()
            sequence.written_chunks = index
            return
        page = sequence.page(index)
        reads.pool_written(reads.pool, page, command.chunk)
        self._claims.free(sequence.claim, page)
        sequence.pages[index] = None
        input_page = sequence.input_pages.pop(index, None)
        if input_page is not None:
            self._cache.input_pages.free(input_page)

    def _first_recent(self, sequence: Sequence) -> int:
        """Return the first position that the next query always reads."""
        return sequence.computed + 1 - sequence.selection.recent

    # -- selections -------------------------------------------------------------------------

    def allocate_selection(self, sequence: Sequence) -> None:
        """Allocate the pages of rows and screens, before chunks that grow take them."""
        admission, plan = sequence.admission, sequence.selection_plan
        if self._selector is None or not plan.is_on:
            return
        pages = [self._claimed_page(sequence) for _ in range(plan.pages.count)]
        sequence.selection_pages = pages
        sequence.reads = self._selector.reads(
            admission.selection, plan, pages, admission.final_tokens
        )

    def _selection_plan(self, admission: Admission) -> SelectionPlan:
        """Return whether a request selects: not if its pages would never fit."""
        if self._selector is None:
            return EXACT
        plan = self._selector.plan(
            admission.selection,
            admission.final_tokens,
            self._step_split(admission),
            is_streamed=admission.residency is Residency.STREAMED,
        )
        most = self._cache.plan.page_count - self._exact_claim(admission)
        if plan.is_on and plan.pages.count > most:
            return SelectionPlan(off_reason="rows and screens would not fit the device")
        return plan

    def _step_split(self, admission: Admission) -> StepSplit:
        """Return how the steps of a streamed request read everything."""
        line, plan, chunk = admission.split_line, self._cache.plan, self._chunk_tokens
        kept = self.kept_chunks(admission) + plan.window_page_count
        return StepSplit(
            SplitLine.fixed(admission.split_tokens) if line is None else line,
            admission.schedule,
            kept * chunk,
            plan.staging_pages * chunk,
        )

    def _free_selection(self, sequence: Sequence) -> None:
        """Free what a selection used, which `drop` zeroes: see `clear_unwritten`."""
        if sequence.reads is not None:
            sequence.reads.drop()
            sequence.reads = None
        pages, sequence.selection_pages = sequence.selection_pages, []
        for page in pages:
            self._claims.free(sequence.claim, page)

    # -- X that stays ------------------------------------------------------------------------

    def allocate_row_pages(self, sequence: Sequence) -> None:
        """Allocate the pages that X will be kept in, before its chunks that grow take them."""
        count = self._row_page_count(sequence.admission)
        sequence.row_pages += [self._claimed_page(sequence) for _ in range(count)]

    def _row_page_count(self, admission: Admission) -> int:
        """Return the pages for X that is kept on the device, of two chunks in each."""
        # The last token is never computed, so at least one chunk never becomes full.
        most = chunks_of(admission.final_tokens, self._chunk_tokens) - 1
        return chunks_of(min(self.kept_inputs(admission), most), 2)

    def clear_unwritten(self, sequence: Sequence) -> None:
        """Zero the pages of a sequence that no step has passed.

        Masked rows count with weight 0, and 0 * NaN is NaN: a page freed with a NaN in it
        would spoil its next owner. Checked chunks are finite; others may read them, and
        write-back may be copying them. Write-back never reads pages with kept X, which may
        have come from the store.
        """
        cache, first = self._cache, sequence.checked_chunks
        pages = [page for page in sequence.pages[first:] if page is not None]
        pages += sequence.row_pages
        for plane in (*cache.keys, *cache.values):
            plane[pages] = 0
        inputs = [page for index, page in sequence.input_pages.items() if index >= first]
        for plane in cache.inputs:
            plane[inputs] = 0

    def clear_spare_rows(self, sequence: Sequence) -> None:
        """Zero the rows behind the computed tokens: rejected drafts may have left a NaN there.

        See `clear_unwritten`.
        """
        cache = self._cache
        first, row = divmod(sequence.computed, self._chunk_tokens)
        for index in range(first, len(sequence.pages)):
            page, start = sequence.pages[index], row if index == first else 0
            if page is not None:
                for plane in (*cache.keys, *cache.values):
                    plane[page, :, start:] = 0
            if index in sequence.input_pages:
                for plane in cache.inputs:
                    plane[sequence.input_pages[index], start:] = 0

    def free_input_pages(self, sequence: Sequence) -> None:
        for page in sequence.input_pages.values():
            self._cache.input_pages.free(page)
        sequence.input_pages = {}

    def _free_pages(self, sequence: Sequence) -> None:
        self._free_selection(sequence)
        freed = [page for page in (*sequence.row_pages, *sequence.pages) if page is not None]
        # The end of a prefix is evicted before its beginning.
        for page in reversed(freed):
            self._claims.free(sequence.claim, page)
        sequence.pages, sequence.row_pages = [], []
        if self.shared is not None:
            self.shared.withdraw(sequence)
            self.shared.freed(freed)
        self.free_input_pages(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free all pages and the claim: the sequence has ended, or leaves the device."""
        self._free_pages(sequence)
        self._claims.end(sequence.claim)
