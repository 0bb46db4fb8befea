"""Plans the attention of some queries of a forward pass to their sequences' row pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from worker_service.device.upload import Upload
from worker_service.model.attention_plan import DecodePlan, Integers
from worker_service.retrieval.sequence_reads import SequenceReads


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which row pages the queries of some sequences attend, the same in some layers.

    Attributes:
        pages: all pages of each sequence, one sequence after the other.
        reads: of these sequences, in that order.
    """

    pages: DecodePlan
    reads: tuple[SequenceReads, ...]

    @classmethod
    def of(
        cls,
        readers: Sequence[tuple[int, SequenceReads]],
        query_positions: Integers,
        *,
        windows: Iterable[int | None],
        chunk_tokens: int,
        device: torch.device,
        upload: Upload,
        query_counts: Sequence[int] | None = None,
    ) -> RowPlan | None:
        """Plan for the numbers of sequences, ascending; None if none has a row page.

        What is chosen is seen, whatever the window. In the order of positions it comes where the
        stored tokens do, of which there are more. For the other arguments see
        `DecodePlan.of_pages`.
        """
        places = [
            (page, number, reads.first_position + place * chunk_tokens)
            for number, reads in readers
            for place, page in enumerate(reads.row_pages)
        ]
        if not places:
            return None
        pages, owners, first_positions = zip(*places, strict=True)
        plan = DecodePlan.of_pages(
            pages,
            owners=owners,
            first_positions=first_positions,
            query_positions=query_positions,
            query_counts=query_counts,
            chunk_tokens=chunk_tokens,
            windows=[None],
            device=device,
            upload=upload,
            is_masked=any(reads.is_dynamic for _, reads in readers),
        )
        views = dict.fromkeys(windows, plan.views[None])
        return cls(replace(plan, views=views), tuple(reads for _, reads in readers))

    def seen(self, layer: int) -> torch.Tensor | None:
        """Return which rows a layer attends, as `decode_partial` takes it; None: all of them."""
        if not any(reads.is_dynamic for reads in self.reads):
            return None
        return torch.cat([reads.seen(layer) for reads in self.reads])
