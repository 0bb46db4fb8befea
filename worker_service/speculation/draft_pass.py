"""One pass of a draft model over the next rows of several sequences.

As a step of the engine, but small: all weights and pages are on the device, and logits are
wanted of each sequence's last row only.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch

from splitpoint.shapes import chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import UNIT_ROWS
from worker_service.device.upload import Upload
from worker_service.kernels.row_wise import write
from worker_service.kernels.units import UnitView, unit_count
from worker_service.model.attention import decode, prefill
from worker_service.model.attention_plan import DecodePlan, DecodeView, PageView, PrefillPlan
from worker_service.model.model import Layer, Model
from worker_service.model.span_attention import SpanView

# Up to this many rows of a sequence are attended one by one; more are a piece of a prompt.
FEW_ROWS = 8


@dataclass(slots=True, eq=False)
class DraftedTokens:
    """What a draft model's cache holds of one sequence.

    Attributes:
        tokens: those of the sequence, then its newest drafts.
        computed: leading tokens whose K and V are in place.
        pages: chunk i is in `pages[i]`.
    """

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` tokens of a sequence, computed in one pass. It has pages for them."""

    drafted: DraftedTokens
    count: int

    @property
    def positions(self) -> range:
        return range(self.drafted.computed, self.drafted.computed + self.count)


class DraftPasses:
    """Runs a draft model over its own cache. Belongs to the engine's thread."""

    def __init__(self, model: Model, cache: DeviceCache) -> None:
        self._model = model
        self._cache = cache
        self._chunk = cache.layout.chunk_tokens
        self._windows = {layer.window for layer in model.layers}
        self._growing: _GrowingPlan | None = None

    def run(self, pieces: Rows[Piece]) -> torch.Tensor:
        """Compute all pieces; return fp32 logits `[B, vocabulary]` of the last row of each."""
        few = [index for index, piece in enumerate(pieces) if piece.count <= FEW_ROWS]
        many = [index for index, piece in enumerate(pieces) if piece.count > FEW_ROWS]
        ordered = [pieces[index] for index in (*few, *many)]
        upload = Upload(self._cache.device)
        positions = [position for piece in ordered for position in piece.positions]
        pages = [
            piece.drafted.pages[position // self._chunk]
            for piece in ordered
            for position in piece.positions
        ]
        ends = np.cumsum([piece.count for piece in ordered])
        attention = _Attention(
            self._cache,
            pages=upload.table(pages),
            rows=upload.table([position % self._chunk for position in positions]),
            decodes=self._decode_plan(ordered[: len(few)], upload) if few else None,
            prefills=[
                (slice(int(end) - piece.count, int(end)), self._prefill_plan(piece, upload))
                for piece, end in zip(ordered[len(few) :], ends[len(few) :], strict=True)
            ],
        )
        token_ids = upload.table(
            [token for piece in ordered for token in _span(piece.drafted.tokens, piece.positions)]
        )
        # In the order in which the pieces were given.
        last_rows = upload.table((ends - 1)[np.argsort([*few, *many])])
        places = upload.table(positions)
        upload.send()
        hidden = self._model.run(token_ids, places, attention.attend)
        for piece in pieces:
            piece.drafted.computed += piece.count
        if len(positions) > len(pieces):
            hidden = hidden.index_select(0, last_rows)
        return self._model.logits(hidden)

    def _decode_plan(self, pieces: Rows[Piece], upload: Upload) -> DecodePlan:
        """Plan for each row by itself; continue the plan of the pass before if that is enough."""
        growing, self._growing = self._growing, None
        if growing is not None and growing.extend(pieces):
            self._growing = growing
            return growing.plan
        plan = DecodePlan.of_sequences(
            [piece.drafted.pages for piece in pieces for _ in piece.positions],
            [position + 1 for piece in pieces for position in piece.positions],
            chunk_tokens=self._chunk,
            windows=self._windows,
            device=self._cache.device,
            upload=upload,
        )
        self._growing = _GrowingPlan.of(plan, pieces, self._chunk)
        return plan

    def _prefill_plan(self, piece: Piece, upload: Upload) -> PrefillPlan:
        return PrefillPlan.of_prefix(
            piece.drafted.pages,
            piece.drafted.computed,
            piece.count,
            chunk_tokens=self._chunk,
            windows=self._windows,
            device=self._cache.device,
            upload=upload,
        )


@dataclass(slots=True)
class _GrowingPlan:
    """A plan with one row of each sequence, which the next rows of their pages can join.

    Planning costs a third of a small model's pass. Only plans of the model's own views have this,
    and only without sliding windows, which would also have to leave rows behind.

    Attributes:
        view: the plan's only view.
        drafted: the sequences, in the order of the plan's queries.
        places: int64 `[B]`, where in the view the newest page of each sequence is.
        ends: how many tokens of each the plan sees.
    """

    plan: DecodePlan
    view: DecodeView
    drafted: list[DraftedTokens]
    places: torch.Tensor
    ends: list[int]
    chunk_tokens: int

    @classmethod
    def of(cls, plan: DecodePlan, pieces: Rows[Piece], chunk_tokens: int) -> _GrowingPlan | None:
        """Return what can grow; None if nothing can."""
        view = plan.views.get(None)
        if view is None or len(plan.views) > 1 or plan.shared or plan.whole:
            return None
        if any(piece.count > 1 for piece in pieces):
            return None
        ends = [piece.positions.stop for piece in pieces]
        counts = [chunks_of(end, chunk_tokens) for end in ends]
        if isinstance(view, PageView) and isinstance(view.pages, slice):
            places = [
                piece.drafted.pages[count - 1] - view.pages.start
                for piece, count in zip(pieces, counts, strict=True)
            ]
        elif isinstance(view, UnitView):
            places = (view.firsts[1:] - 1).tolist()
        else:
            if isinstance(view, SpanView):
                counts = [unit_count(end, chunk_tokens) for end in ends]
            places = [int(last) - 1 for last in np.cumsum(counts)]
        tables = view.limit if isinstance(view, PageView) else view.highs
        listed = torch.tensor(places, device=tables.device)
        drafted = [piece.drafted for piece in pieces]
        return cls(plan, view, drafted, listed, ends, chunk_tokens)

    def extend(self, pieces: Rows[Piece]) -> bool:
        """Let each query see one more row; False if these are not the next rows of its pages."""
        if len(pieces) != len(self.drafted):
            return False
        for piece, drafted, end in zip(pieces, self.drafted, self.ends, strict=True):
            if piece.drafted is not drafted or piece.positions != range(end, end + 1):
                return False
            if end % self.chunk_tokens % UNIT_ROWS == 0:
                return False
        if isinstance(self.view, PageView):
            rows = [end % self.chunk_tokens for end in self.ends]
            self.view.limit[self.places, 0, torch.tensor(rows, device=self.places.device)] = (
                torch.inf
            )
        else:
            self.view.highs[self.places] += 1
        self.ends = [end + 1 for end in self.ends]
        return True


@dataclass(frozen=True, slots=True)
class _Attention:
    """Where a pass's rows go and what they attend; the same in every layer.

    Attributes:
        pages, rows: int64 `[N]`, the place of each row's K and V.
        decodes: for the first rows; None if there are none.
        prefills: for the others, the rows of each piece.
    """

    cache: DeviceCache
    pages: torch.Tensor
    rows: torch.Tensor
    decodes: DecodePlan | None
    prefills: list[tuple[slice, PrefillPlan]]

    def attend(
        self,
        index: int,
        layer: Layer,
        _inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `Attend`."""
        cache = self.cache
        planes = (cache.keys[index], cache.values[index])
        write(*planes, self.pages, self.rows, keys, values)
        parts = []
        if self.decodes is not None:
            first = queries[: self.decodes.query_count]
            parts.append(decode(first, *planes, self.decodes, layer))
        for span, plan in self.prefills:
            parts.append(
                prefill(
                    queries[span],
                    keys[span],
                    values[span],
                    cache.keys[index],
                    cache.values[index],
                    plan,
                    window=layer.window,
                    scale=layer.scale,
                    cap=layer.cap,
                    sinks=layer.sinks,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _span(tokens: list[int], positions: range) -> list[int]:
    return tokens[positions.start : positions.stop]
