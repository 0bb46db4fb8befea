"""Clusters of one layer's stored tokens, which stand for those that are not read (RetroInfer).

Of each cluster of a segment the device keeps the sums of K and V and a count, and of each token its
cluster. What the row pages hold is taken out of copies of the sums; the rest takes part in
attention. Everything stays on the device, with shapes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from splitpoint.residency.selecting import CLUSTER_TOKENS, SEGMENT_TOKENS
from worker_service.model.attention import PartialAttention
from worker_service.selection.centroids import CLUSTERS, attend_clusters, clusters_of
from worker_service.selection.kept_rows import Records
from worker_service.selection.screen import AttentionShape

# Rows of each KV head that are clustered, or taken out of sums, at once: it bounds memory.
_PIECE_ROWS = 2 * SEGMENT_TOKENS
# Fields of the records.
_KEYS, _VALUES, _COUNTS, _OWNERS = range(4)


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of stored tokens in pages of the device, all whole.

    Attributes:
        tokens: `[n_kv, rows]`, the token in each row, below 0: none.
        pages: int64, their numbers.
        keys, values: planes `[P, n_kv, C, d]` that the pages lie in.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class ClusterSums:
    """Sums of the clusters of a layer's whole segments, in fp32."""

    def __init__(self, shape: AttentionShape, blocks: Sequence[torch.Tensor]) -> None:
        """`blocks`: bytes that hold the records, see `Records`."""
        self._shape = shape
        # A record has one cluster of every KV head, and the clusters, within their segment, of
        # as many tokens as a cluster has on average. So a segment is whole records.
        self._records = Records(blocks)

    @property
    def token_count(self) -> int:
        """Tokens that are in a cluster: the first stored ones."""
        return len(self._records) * CLUSTER_TOKENS

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Cluster the next whole segments, `[n_kv, T, d]`."""
        heads, tokens, width = keys.shape
        for first in range(0, tokens, _PIECE_ROWS):
            piece = [
                rows[:, first : first + _PIECE_ROWS]
                .float()
                .reshape(heads, -1, SEGMENT_TOKENS, width)
                for rows in (keys, values)
            ]
            owners = clusters_of(piece[0])
            member = functional.one_hot(owners, CLUSTERS).float()
            key_sums, value_sums = (
                (member.transpose(2, 3) @ rows).flatten(1, 2).transpose(0, 1) for rows in piece
            )
            self._records.append(
                key_sums,
                value_sums,
                member.sum(2).flatten(1).transpose(0, 1),
                owners.to(torch.uint8).view(heads, -1, CLUSTER_TOKENS).transpose(0, 1),
            )

    def estimate(self, queries: torch.Tensor, held: HeldRows) -> PartialAttention:
        """Return the attention of a query `[1, n_q, d]` to what is in clusters and in no row."""
        places, clusters = self._places(held.tokens), len(self._records)
        ones = torch.ones_like(places, dtype=torch.float32)
        counts = self._copied(_COUNTS).index_add_(0, places, ones, alpha=-1)
        sums = [
            _without(self._copied(field), places, plane, held.pages)
            for field, plane in ((_KEYS, held.keys), (_VALUES, held.values))
        ]
        # The last cluster of each head has the rows of tokens that are in none.
        counts, keys, values = (
            each.view(len(held.tokens), 1, clusters + 1, *each.shape[1:])[:, :, :clusters]
            for each in (counts, *sums)
        )
        return attend_clusters(queries, counts, keys, values, self._shape)

    def _places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the place of each row's cluster among those of `_copied`, int64, head by head."""
        heads = len(tokens)
        owners = self._records.field(_OWNERS).transpose(0, 1).reshape(heads, -1)
        inside = tokens.clamp(0, self.token_count - 1).to(torch.int64)
        segment = torch.div(inside, SEGMENT_TOKENS, rounding_mode="floor")
        cluster = segment * CLUSTERS + owners.gather(1, inside)
        is_inside = (tokens >= 0) & (tokens < self.token_count)
        count = len(self._records)
        cluster = torch.where(is_inside, cluster, count)
        first = torch.arange(heads, device=tokens.device).unsqueeze(1) * (count + 1)
        return (cluster + first).flatten()

    def _copied(self, field: int) -> torch.Tensor:
        """Return a copy of a field `[n_kv * (clusters + 1), ...]`, the last of each head zero."""
        kept = self._records.field(field).transpose(0, 1)
        copied = kept.new_zeros((len(kept), kept.shape[1] + 1, *kept.shape[2:]))
        copied[:, :-1] = kept
        return copied.flatten(0, 1)


def _without(
    sums: torch.Tensor, places: torch.Tensor, plane: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """Take rows of pages out of sums `[n, d]`, in place, each where it has its place."""
    _, heads, chunk, width = plane.shape
    by_head = places.view(heads, len(pages), chunk)
    step = max(1, _PIECE_ROWS // chunk)
    for first in range(0, len(pages), step):
        of_piece = by_head[:, first : first + step].reshape(-1)
        rows = plane.index_select(0, pages[first : first + step]).transpose(0, 1)
        sums.index_add_(0, of_piece, rows.reshape(-1, width).float(), alpha=-1)
    return sums
