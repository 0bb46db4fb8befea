"""An estimate of the attention that is not read, by centroids of keys (RetroInfer).

Tokens are clustered by key within segments, about `CLUSTER_TOKENS` to a cluster. Of each cluster
the device keeps the sums of keys and values. What a query reads is taken out of the sums, and
what is left takes part in attention as so many tokens with the mean key and the mean value.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from worker_service.model.attention import PartialAttention
from worker_service.selection.choose import visible_tokens
from worker_service.selection.screen import AttentionShape, to_logits

CLUSTER_TOKENS = 32
SEGMENT_TOKENS = 256
_CLUSTERS = SEGMENT_TOKENS // CLUSTER_TOKENS
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
        return len(self._segments) * _CLUSTERS * self._shape.kv_heads * row

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
            self._segments.append(_clusters(segment, _CLUSTERS))

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
        count, query_heads, width = queries.shape
        left = self._left(read, first_position, segments * SEGMENT_TOKENS)
        counts, keys, values = self._means(left, segments)
        grouped = queries.float().view(count, self._shape.kv_heads, -1, width)
        logits = to_logits(torch.einsum("tkgd,ktcd->tkgc", grouped, keys), self._shape)
        logits = logits + counts.transpose(0, 1).log().unsqueeze(2)
        peak = logits.amax(-1).clamp_min(torch.finfo(torch.float32).min)
        weights = (logits - peak.unsqueeze(-1)).exp()
        weighted = torch.einsum("tkgc,ktcd->tkgd", weights, values)
        return PartialAttention(
            weighted.reshape(count, query_heads, width),
            peak.reshape(count, query_heads),
            weights.sum(-1).reshape(count, query_heads),
        )

    def _left(self, read: torch.Tensor, first_position: int, tokens: int) -> torch.Tensor:
        """Return which of the first tokens are visible and not read, fp32 `[n_kv, T, tokens]`."""
        visible = visible_tokens(first_position, len(read), tokens, self._shape.window, read.device)
        left = ~read[..., :tokens] & visible.unsqueeze(1)
        return left.transpose(0, 1).float()

    def _means(
        self, left: torch.Tensor, segments: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return of each cluster the tokens that are left, and the means of their K and V.

        `[n_kv, T, clusters]`, then twice `[n_kv, T, clusters, d]`.
        """
        kv_heads, count, _ = left.shape
        owners = torch.stack(self._segments[:segments], 1)
        member = functional.one_hot(owners, _CLUSTERS).float()
        by_segment = left.view(kv_heads, count, segments, SEGMENT_TOKENS).transpose(1, 2)
        counts = by_segment @ member
        means = []
        for rows in (self._keys, self._values):
            of_segment = rows[:, : segments * SEGMENT_TOKENS].float()
            of_segment = of_segment.reshape(kv_heads, segments, SEGMENT_TOKENS, -1)
            spread = member.unsqueeze(-1) * of_segment.unsqueeze(-2)
            sums = by_segment @ spread.flatten(3)
            sums = sums.view(kv_heads, segments, count, _CLUSTERS, -1)
            mean = sums / counts.clamp_min(1).unsqueeze(-1)
            means.append(mean.transpose(1, 2).flatten(2, 3))
        return counts.transpose(1, 2).flatten(2), means[0], means[1]


def _clusters(keys: torch.Tensor, clusters: int) -> torch.Tensor:
    """Return the cluster of each key `[n_kv, S, d]`, int64 `[n_kv, S]`: k-means by angle.

    Clusters are seeded with evenly spread tokens, so the result depends on the keys alone.
    """
    centred = functional.normalize(keys - keys.mean(1, keepdim=True), dim=-1)
    tokens = keys.shape[1]
    centres = centred[:, :: tokens // clusters][:, :clusters]
    owners = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)
    for _ in range(_ROUNDS):
        owners = (centred @ centres.transpose(1, 2)).argmax(-1)
        member = functional.one_hot(owners, clusters).float()
        centres = functional.normalize(member.transpose(1, 2) @ centred, dim=-1)
    return owners
