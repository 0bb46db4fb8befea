"""An estimate of the attention that is not read, by clusters of stored tokens (RetroInfer).

Tokens are clustered by key within segments, about `CLUSTER_TOKENS` to a cluster. Of each cluster
the device keeps the sums of K and V and a count, and of each token its cluster. What a query reads
is taken out of copies of the sums, and the rest takes part in attention with its mean key and mean
value, weighted by its count. Everything stays on the device, with shapes that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from splitpoint.residency.selecting import CLUSTER_TOKENS, SEGMENT_TOKENS
from worker_service.model.attention import PartialAttention
from worker_service.selection.records import Records
from worker_service.selection.screen import AttentionShape, to_logits
from worker_service.selection.token_choice import visible_tokens

# Clusters of a segment.
CLUSTERS = SEGMENT_TOKENS // CLUSTER_TOKENS
_ROUNDS = 4
_COUNT_BYTES = 4


class Centroids:
    """Clusters of one layer of one sequence.

    Tokens behind the last whole segment are in no cluster: they are not estimated.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        # `[n_kv, S, d]`.
        self._keys = torch.empty(0)
        self._values = torch.empty(0)
        # The cluster of each token within its segment, int64 `[n_kv, SEGMENT_TOKENS]` each.
        self._segments: list[torch.Tensor] = []

    @property
    def device_bytes(self) -> int:
        """Bytes of the sums of keys and values, in the type of the keys, and of the counts."""
        row = 2 * self._shape.head_dim * self._keys.element_size() + _COUNT_BYTES
        return len(self._segments) * CLUSTERS * self._shape.kv_heads * row

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens `[T, n_kv, d]`; cluster each segment that they fill."""
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        is_first = self._keys.ndim == 1
        self._keys = keys if is_first else torch.cat((self._keys, keys), 1)
        self._values = values if is_first else torch.cat((self._values, values), 1)
        while (first := len(self._segments) * SEGMENT_TOKENS) + SEGMENT_TOKENS <= len(
            self._keys[0]
        ):
            segment = self._keys[:, first : first + SEGMENT_TOKENS].float()
            self._segments.append(clusters_of(segment))

    def estimate(
        self, queries: torch.Tensor, read: torch.Tensor, first_position: int
    ) -> PartialAttention | None:
        """Return the attention to what is not read; None if nothing is clustered yet.

        Only segments before the first query's, and within its layer's window, take part.

        Args:
            queries: `[T, n_q, d]` at consecutive positions from `first_position`.
            read: bool `[T, n_kv, S]`, of `choose`.
        """
        segments = min(len(self._segments), first_position // SEGMENT_TOKENS)
        if not segments:
            return None
        left = self._left(read, first_position, segments * SEGMENT_TOKENS)
        return attend_clusters(queries, *self._left_sums(left, segments), self._shape)

    def _left(self, read: torch.Tensor, first_position: int, tokens: int) -> torch.Tensor:
        """Return which of the first tokens are visible and not read, fp32 `[n_kv, T, tokens]`."""
        visible = visible_tokens(first_position, len(read), tokens, self._shape.window, read.device)
        left = ~read[..., :tokens] & visible.unsqueeze(1)
        return left.transpose(0, 1).float()

    def _left_sums(
        self, left: torch.Tensor, segments: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return of each cluster how many tokens are left, and the sums of their K and V.

        `[n_kv, T, clusters]`, then twice `[n_kv, T, clusters, d]`.
        """
        kv_heads, count, _ = left.shape
        owners = torch.stack(self._segments[:segments], 1)
        member = functional.one_hot(owners, CLUSTERS).float()
        by_segment = left.view(kv_heads, count, segments, SEGMENT_TOKENS).transpose(1, 2)
        counts = by_segment @ member
        left_sums = []
        for rows in (self._keys, self._values):
            of_segment = rows[:, : segments * SEGMENT_TOKENS].float()
            of_segment = of_segment.reshape(kv_heads, segments, SEGMENT_TOKENS, -1)
            spread = member.unsqueeze(-1) * of_segment.unsqueeze(-2)
            sums = by_segment @ spread.flatten(3)
            sums = sums.view(kv_heads, segments, count, CLUSTERS, -1)
            left_sums.append(sums.transpose(1, 2).flatten(2, 3))
        return counts.transpose(1, 2).flatten(2), left_sums[0], left_sums[1]


def attend_clusters(
    queries: torch.Tensor,
    counts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: AttentionShape,
) -> PartialAttention:
    """Attend clusters as this many tokens with their mean key and value; those of none weigh 0.

    Args:
        queries: `[T, n_q, d]`.
        counts: tokens of each cluster, fp32 `[n_kv, T, clusters]`.
        keys, values: sums of their K and V, fp32 `[n_kv, T, clusters, d]`.
    """
    count, query_heads, width = queries.shape
    divisor = counts.clamp_min(1).unsqueeze(-1)
    grouped = queries.float().view(count, shape.kv_heads, -1, width)
    logits = to_logits(torch.einsum("tkgd,ktcd->tkgc", grouped, keys / divisor), shape)
    logits = logits + counts.transpose(0, 1).log().unsqueeze(2)
    peak = logits.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    weights = (logits - peak.unsqueeze(-1)).exp()
    weighted = torch.einsum("tkgc,ktcd->tkgd", weights, values / divisor)
    return PartialAttention(
        weighted.reshape(count, query_heads, width),
        peak.reshape(count, query_heads),
        weights.sum(-1).reshape(count, query_heads),
    )


def clusters_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the cluster of each key of segments, int64 `[..., SEGMENT_TOKENS]`: k-means by angle.

    Clusters are seeded with evenly spread tokens, so the result depends on the keys alone.

    Args:
        keys: fp32 `[..., SEGMENT_TOKENS, d]`.
    """
    centred = functional.normalize(keys - keys.mean(-2, keepdim=True), dim=-1)
    centres = centred[..., ::CLUSTER_TOKENS, :]
    owners = torch.zeros(keys.shape[:-1], dtype=torch.int64, device=keys.device)
    for _ in range(_ROUNDS):
        owners = (centred @ centres.transpose(-1, -2)).argmax(-1)
        member = functional.one_hot(owners, CLUSTERS).float()
        centres = functional.normalize(member.transpose(-1, -2) @ centred, dim=-1)
    return owners


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
