"""Decides which requests of a worker read by selection, and makes what they read with.

The screens that a worker can serve depend on the artefacts that it has for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition, InvalidArgument, SplitpointError
from splitpoint.residency.selecting import (
    SelectionPages,
    StepSplit,
    pages_at_last,
    why_not_selected,
)
from splitpoint.selection import SERVED_METHODS, Selection, SelectionMethod
from splitpoint.shapes import ModelShape, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.lanes.lanes import Lanes
from worker_service.retrieval.sequence_reads import SequenceReads, building_bytes
from worker_service.selection.artifacts import Artifacts, artifacts_path, load
from worker_service.selection.screen_factory import Screens

log = logging.getLogger(__name__)


class ScreenSource:
    """Makes the screens of selections on one model.

    Attributes:
        columns: the methods that can be served, each with the dimensions that its artefacts were
            trained for; 0: any.
        size_bytes: of the artefacts, in device memory.
    """

    def __init__(self, config: AttentionConfig, artifacts: Mapping[SelectionMethod, Artifacts]):
        """Raises InvalidArgument for artefacts that do not fit the model."""
        self._config = config
        self._artifacts = artifacts
        self.columns = {
            method: _trained_columns(config, method, artifacts.get(method))
            for method in SERVED_METHODS
            if not method.is_calibrated or method in artifacts
        }
        self.size_bytes = sum(
            tensor.nbytes for each in artifacts.values() for tensor in each.tensors.values()
        )

    @classmethod
    def open(
        cls, config: AttentionConfig, folder: Path, artifacts: Path | None, device: torch.device
    ) -> ScreenSource:
        """Read the artefacts that were made for the checkpoint in `folder`, onto the device.

        What cannot be used raises from a folder that was named, as `artifacts.load` says. Beside
        the model it is left out with a warning: a worker need not select.
        """
        found: dict[SelectionMethod, Artifacts] = {}
        for method in SERVED_METHODS:
            if not method.is_calibrated or not artifacts_path(method, folder, artifacts).is_file():
                continue
            try:
                found[method] = load(method, folder, artifacts, device)
                cls(config, {method: found[method]})
            except SplitpointError as error:
                if artifacts is not None:
                    raise
                found.pop(method, None)
                log.warning("no selection by %s: %s", method, error.message)
        return cls(config, found)

    def screens(self, selection: Selection) -> Screens:
        """Return the screens of a selection.

        Raises FailedPrecondition without its artefacts, InvalidArgument for another number of
        columns than they were trained for.
        """
        if selection.method not in self.columns:
            raise FailedPrecondition(
                f"the worker has no artefacts of {selection.method}", reason="NO_ARTIFACTS"
            )
        trained = self.columns[selection.method]
        kept = selection.kept_columns(self._config.shape.head_dim)
        if trained and kept != trained:
            # Pages are counted by what the selection says.
            raise InvalidArgument(
                f"selection: columns is {kept}, but the worker's artefacts of {selection.method} "
                f"were trained for {trained}",
                field="selection.columns",
            )
        return Screens(self._config, selection, self._artifacts.get(selection.method))


def _trained_columns(
    config: AttentionConfig, method: SelectionMethod, artifacts: Artifacts | None
) -> int:
    """Return the dimensions that artefacts were trained for; 0: any. Raises InvalidArgument."""
    if artifacts is None:
        return 0
    Screens(config, Selection(method=method, ratio=1.0), artifacts)  # for its checks
    is_trained = method is SelectionMethod.MAPLE
    return artifacts.of_layer(0, "key").shape[-1] if is_trained else 0


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
        config: AttentionConfig,
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
        """Return what a request of this many tokens at last gets, by the present costs.

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
        if selection.method.keeps_inputs and not layout.has_activations:
            return SelectionPlan(
                off_reason=f"{selection.method} makes keys of layer inputs: the store keeps none"
            )
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
        hides = [each is not None and each < final_tokens for each in windows]
        if not off_reason and all(hides):
            off_reason = "every layer that would select reads no more than its window"
        if not off_reason and selection.pool is not None and any(hides):
            off_reason = "layers with a sliding window give no token up: there is no bounded pool"
        needed = building_bytes(layout, selection, stored)
        if not off_reason and needed > (room := self._cache.plan.collected_bytes):
            off_reason = (
                f"building the screen of a layer takes {format_size(needed)} for its {stored:,} "
                f"stored tokens, and the workspace has {format_size(room)} for it"
            )
        if off_reason:
            return SelectionPlan(off_reason=off_reason)
        return SelectionPlan(pages_at_last(self._shape, selection, final_tokens, chunk))

    def reads(
        self, selection: Selection, plan: SelectionPlan, pages: Sequence[int], final_tokens: int
    ) -> SequenceReads:
        """Return what one sequence reads with, in the pages that its plan counts."""
        rows = plan.pages.rows
        return SequenceReads(
            self._screens_of(selection),
            self._config,
            self._cache,
            self._lanes,
            row_pages=pages[:rows],
            screen_pages=pages[rows:],
            final_tokens=final_tokens,
        )
