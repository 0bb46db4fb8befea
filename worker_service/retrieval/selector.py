"""Decides which requests of a worker read by selection, and makes what they read with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import SplitpointError
from splitpoint.residency.selecting import (
    SelectionPages,
    StepSplit,
    pages_at_last,
    why_not_selected,
)
from splitpoint.selection import Selection
from splitpoint.shapes import ModelShape, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import collected_bytes
from worker_service.lanes.lanes import Lanes
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.screens import Screens

# The screens of a selection on the worker's model; raises SplitpointError if it cannot make them.
ScreensOf = Callable[[Selection], Screens]
NO_PAGES = SelectionPages(0, 0)


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    """Whether a request reads by selection.

    Attributes:
        pages: that it needs for it; none if it reads everything.
        off_reason: why it reads everything although it asked for a selection, in words.
    """

    pages: SelectionPages = NO_PAGES
    off_reason: str = ""

    @property
    def is_on(self) -> bool:
        return self.pages.count > 0


EXACT = SelectionPlan()


class Selector:
    """The selections of one worker. Used by the engine's thread only."""

    def __init__(
        self,
        config: DecoderConfig,
        shape: ModelShape,
        cache: DeviceCache,
        lanes: Lanes,
        screens_of: ScreensOf,
        profile: Callable[[], Profile | None],
        *,
        can_draft: bool,
    ) -> None:
        """
        Args:
            shape: of the model as it is served, in the cache's data type.
            profile: gives the present costs; None: they are unknown.
            can_draft: whether the model can draft for itself: no weights come from the host.
        """
        self._config = config
        self._shape = shape
        self._cache = cache
        self._lanes = lanes
        self._screens_of = screens_of
        self._profile = profile
        self._can_draft = can_draft

    def plan(
        self, selection: Selection, final_tokens: int, split: StepSplit, *, is_streamed: bool
    ) -> SelectionPlan:
        """Return what a request of so many tokens at last gets, by the present costs.

        `split`: by which its steps would read everything.
        """
        if selection.is_full:
            return EXACT
        if not is_streamed:
            return SelectionPlan(
                off_reason="the cache is on the device; only steps of a streamed one select"
            )
        if selection.verify and not self._can_draft:
            return SelectionPlan(
                off_reason="weights come from the host: the model cannot draft for itself"
            )
        try:
            self._screens_of(selection)
        except SplitpointError as error:
            return SelectionPlan(off_reason=error.message)
        layout = self._cache.layout
        chunk = layout.chunk_tokens
        stored = (chunks_of(final_tokens, chunk) - 1) * chunk
        off_reason = why_not_selected(
            self._shape,
            selection,
            stored,
            chunk,
            profile=self._profile(),
            encoding=layout.encoding,
            split=split,
        )
        windows = self._config.windows[selection.exact_layers :]
        if not off_reason and all(each is not None and each < final_tokens for each in windows):
            off_reason = "every layer that would select reads no more than its window"
        what, planes = ("K and V", 2) if selection.estimate else ("K", 1)
        needed = planes * collected_bytes(self._shape, stored)
        if not off_reason and needed > (room := self._cache.plan.collected_bytes):
            off_reason = (
                f"{what} of its {stored:,} stored tokens takes {format_size(needed)} in a layer "
                f"whose screen is built, and the workspace has {format_size(room)} for it"
            )
        if off_reason:
            return SelectionPlan(off_reason=off_reason)
        return SelectionPlan(pages_at_last(self._shape, selection, final_tokens, chunk))

    def reads(
        self, selection: Selection, plan: SelectionPlan, pages: Sequence[int], final_tokens: int
    ) -> SequenceReads:
        """Return what one sequence reads with, in the pages that its plan counts."""
        screens = plan.pages.rows
        centroids = screens + plan.pages.screens
        return SequenceReads(
            self._screens_of(selection),
            self._config,
            self._cache,
            self._lanes,
            row_pages=pages[:screens],
            screen_pages=pages[screens:centroids],
            centroid_pages=pages[centroids:],
            final_tokens=final_tokens,
        )
