"""The graphs of a worker's decoding steps: which sizes have one, and when one is recorded.

A graph has fixed grids: a number of query rows, and one of attention's spans (span_attention.py).
Both are rounded up to a few sizes, so that few graphs serve all steps. A padding span has no pages,
and a padding row attends a row of its own.

A step is laid out in the padded tables of its size, which stay at their place, so a graph that was
recorded for one step computes any later one of that size. The second step of a size records its
graph. Without a graph the same padded tables are computed eagerly, by the same calls.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from splitpoint.config import format_size
from worker_service.device.cache import DeviceCache
from worker_service.device.upload import ALIGNMENT, Upload
from worker_service.graphs.recorder import Recorder, Recording
from worker_service.kernels.units import unit_count, units_per_page
from worker_service.model.span_attention import units_per_span

# Rows are powers of two up to this many, and multiples of it above.
_ROW_STEP = 8
# Above, a step is a quarter of the power of two below: at most a quarter of the rows is padding.
_STEPS_PER_DOUBLING = 4
# Sequences of up to this many spans (1,024 tokens) share the graphs of their number of rows.
_LEAST_SPANS_PER_ROW = 4
_ROW_TABLES = 8
_TABLES_PER_WINDOW = 6


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The size of a graph: query rows, and spans of a layer without a window."""

    rows: int
    spans: int


def row_bucket(count: int) -> int:
    """Return the rows of the smallest graph for `count` (at least 1): 1, 2, 4, 8, 16, 24, 32, 40.

    Counts above 32 are rounded up to a quarter of the power of two below them.
    """
    if count <= _ROW_STEP:
        return 1 << (count - 1).bit_length()
    step = max(_ROW_STEP, (1 << (count.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-count // step) * step


def span_bucket(spans: int, rows: int) -> int:
    """Return the spans of the smallest graph of `rows` for this many spans: a power of two."""
    return 1 << (max(spans, _LEAST_SPANS_PER_ROW * rows, 1) - 1).bit_length()


def span_count(lengths: Iterable[int], chunk_tokens: int) -> int:
    """Return the spans of queries that see this many tokens each, in pages of `chunk_tokens`."""
    per_span = units_per_span(chunk_tokens)
    return sum(-(-unit_count(length, chunk_tokens) // per_span) for length in lengths)


def spans_by_window(
    key: GraphKey, windows: Iterable[int | None], chunk_tokens: int
) -> dict[int | None, int]:
    """Return the padded spans of the layers of each window.

    A query sees at most `ceil((window - 1) / chunk_tokens) + 1` pages of a window.
    """
    spans: dict[int | None, int] = {}
    for window in set(windows):
        spans[window] = key.spans
        if window is not None:
            pages = -(-(window - 1) // chunk_tokens) + 1
            widest = -(-pages * units_per_page(chunk_tokens) // units_per_span(chunk_tokens))
            spans[window] = min(key.spans, key.rows * widest)
    return spans


def table_bytes(key: GraphKey, spans: Mapping[int | None, int], chunk_tokens: int) -> int:
    """Return the bytes of a step's padded tables, each one aligned."""
    size = _ROW_TABLES * (8 * key.rows + ALIGNMENT)
    for count in spans.values():
        entries = 3 * count * units_per_span(chunk_tokens) + 2 * count + key.rows + 2
        size += 4 * entries + _TABLES_PER_WINDOW * ALIGNMENT
    return size


log = logging.getLogger(__name__)

# Graphs that are kept; the one that was used least recently makes room.
MOST_GRAPHS = 32
# Sizes of which tables are kept, with a graph or without.
_MOST_SIZES = 4 * MOST_GRAPHS
# A size's graph is recorded at this step of the size, and after each eviction at twice as many.
_RECORDED_AT = 2
# Steps until a recording that did not fit is tried again, and then twice as many: what another
# process took while it was measured is not the graph's.
_RETRY_STEPS = 4096

# The tables that a graph reads: their addresses and shapes.
_Signature = list[tuple[int, torch.Size]]


@dataclass(slots=True)
class _Size:
    """What is known of one size."""

    tables: torch.Tensor
    steps: int = 0
    evictions: int = 0
    recording: Recording | None = None
    signature: _Signature = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        return self.steps >= _RECORDED_AT << self.evictions


@dataclass(frozen=True, slots=True)
class GraphSlot:
    """Where a step is laid out that a graph may compute.

    Attributes:
        upload: places the step's tables, in the same order and sizes in each step of a size.
        spans: padded spans for the layers of each window.
        page, input_page: the pages of K,V and of X that only padding rows write and read.
    """

    key: GraphKey
    upload: Upload
    spans: dict[int | None, int]
    page: int
    input_page: int

    def padded(self, values: Sequence[int], padding: int) -> list[int]:
        """Return a value for each row of the graph."""
        return [*values, *[padding] * (self.key.rows - len(values))]


@dataclass(slots=True)
class GraphCounts:
    """Steps since the start: played back, and computed eagerly though they had a size."""

    replayed: int = 0
    eager: int = 0
    recorded: int = 0


class DecodeGraphs:
    """The graphs of one engine. For its thread.

    Attributes:
        obstacle: why steps are computed eagerly from now on; None: graphs are used.
        is_full: True while graphs have taken their memory: no further ones are recorded.
        counts: of steps.
    """

    def __init__(
        self,
        cache: DeviceCache,
        windows: Iterable[int | None],
        recorder: Recorder,
        *,
        most_rows: int,
    ) -> None:
        """`most_rows`: larger steps are computed eagerly. The cache has a page for padding."""
        self.obstacle: str | None = None
        self.is_full = False
        # Steps of any size, and the one at which a refused recording is tried again.
        self._steps = 0
        self._retry_at = math.inf
        self._refusals = 0
        self._pool_bytes = 0
        # The driver's memory for each recording that was kept, as measured.
        self._own_bytes: deque[int] = deque(maxlen=MOST_GRAPHS)
        self.counts = GraphCounts()
        self._windows = set(windows)
        self._recorder = recorder
        self._most_rows = most_rows
        self._limit_bytes = cache.plan.graph_bytes
        self._device = cache.device
        self._chunk = cache.layout.chunk_tokens
        if cache.padding_page is None or cache.padding_input_page is None:
            raise ValueError("graphs need a memory plan with graph_bytes")
        self._page, self._input_page = cache.padding_page, cache.padding_input_page
        # Least recently used first.
        self._sizes: dict[GraphKey, _Size] = {}

    @property
    def graph_count(self) -> int:
        return sum(size.recording is not None for size in self._sizes.values())

    @property
    def size_bytes(self) -> int:
        """Device memory of the graphs and their pool, as measured."""
        return self._size_of(self.graph_count)

    def _size_of(self, graph_count: int) -> int:
        """Graphs of one model have the same nodes, and take about the same of the driver's memory.

        The median leaves out measurements in which another process took memory.
        """
        own = statistics.median_low(self._own_bytes) if self._own_bytes else 0
        return self._pool_bytes + graph_count * own

    def slot(self, lengths: Sequence[int]) -> GraphSlot | None:
        """Return the place for a step of resident queries; None: it is laid out as it comes.

        `lengths[i]` counts the tokens that row i sees, itself included.
        """
        if self.obstacle is not None or len(lengths) > self._most_rows:
            return None
        rows = row_bucket(len(lengths))
        # A padding row sees one token.
        spans = span_count(lengths, self._chunk) + rows - len(lengths)
        key = GraphKey(rows, span_bucket(spans, rows))
        padded = spans_by_window(key, self._windows, self._chunk)
        size = self._sizes.pop(key, None)
        if size is None:
            tables = torch.empty(
                table_bytes(key, padded, self._chunk), dtype=torch.uint8, device=self._device
            )
            size = _Size(tables)
        self._sizes[key] = size
        self._forget_sizes()
        upload = Upload(self._device, into=size.tables, pin_memory=self._device.type == "cuda")
        return GraphSlot(key, upload, padded, self._page, self._input_page)

    def run(
        self, slot: GraphSlot, tables: Sequence[torch.Tensor], call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `call` computes from these tables of the slot, by a graph if there is one.

        The result is valid until the next step of the size.
        """
        size = self._sizes[slot.key]
        size.steps += 1
        self._steps += 1
        if self._steps >= self._retry_at:
            self.is_full, self._retry_at = False, math.inf
        signature = [(table.data_ptr(), table.shape) for table in tables]
        if size.recording is None and size.is_due and not self.is_full:
            self._record(slot.key, size, call)
            size.signature = signature
        if size.recording is None:
            self.counts.eager += 1
            return call()
        if size.signature != signature:
            raise RuntimeError(f"the tables of {slot.key} are not where its graph reads them")
        self.counts.replayed += 1
        size.recording.replay()
        return size.recording.result

    def _record(self, key: GraphKey, size: _Size, call: Callable[[], torch.Tensor]) -> None:
        self._make_room()
        try:
            recording = self._recorder.record(call)
        except Exception as error:
            # The end of a recording fails, too, if its content did.
            cause = error.__context__ or error
            self._stop(f"recording {key} failed: {type(cause).__name__}: {cause}")
            return
        before = self.size_bytes
        # The pool stays as large as its largest graph made it.
        self._pool_bytes += recording.pool_bytes
        self._own_bytes.append(recording.own_bytes)
        if self._size_of(self.graph_count + 1) > self._limit_bytes:
            self.is_full = True
            self._retry_at = self._steps + (_RETRY_STEPS << self._refusals)
            self._refusals += 1
            self._own_bytes.pop()
            log.warning(
                "no further graphs of decoding steps now: %d take %s of %s, and %s needs %s more",
                self.graph_count,
                format_size(before),
                format_size(self._limit_bytes),
                key,
                format_size(recording.pool_bytes + recording.own_bytes),
            )
            return
        self.counts.recorded += 1
        size.recording = recording

    def _make_room(self) -> None:
        """Drop the graph that was used least recently, if there are too many."""
        if self.graph_count < MOST_GRAPHS:
            return
        oldest = next(size for size in self._sizes.values() if size.recording is not None)
        oldest.recording = None
        oldest.evictions += 1
        oldest.steps = 0

    def _forget_sizes(self) -> None:
        """Drop tables of sizes without a graph, those first that were used least recently."""
        if len(self._sizes) > _MOST_SIZES:
            del self._sizes[next(key for key, size in self._sizes.items() if not size.recording)]

    def _stop(self, obstacle: str) -> None:
        """Compute all further steps eagerly."""
        log.warning(
            "decoding steps are computed eagerly: %s (--enforce-eager avoids the attempt)", obstacle
        )
        self.obstacle = obstacle
        self.is_full = True
        for size in self._sizes.values():
            size.recording = None
