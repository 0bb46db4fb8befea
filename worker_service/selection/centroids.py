"""An estimate of the attention that is not read, by centroids of keys (RetroInfer).

Tokens are clustered by key within segments, about `CLUSTER_TOKENS` to a cluster. Of each cluster
the device keeps the sums of keys and values. What a query reads is taken out of the sums, and
what is left takes part in attention as so many tokens with the mean key and the mean value.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from worker_service.model.attention import PartialAttention
from worker_service.selection.screen import AttentionShape, to_logits

CLUSTER_TOKENS = 32
SEGMENT_TOKENS = 256
_ROUNDS = 4


class Centroids:
    """Clusters of one layer of one sequence.

    Tokens behind the last whole segment are in no cluster: they are not estimated.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        # `[n_kv, S, d]`; only what is behind the last segment is needed on a device.
        self._keys = torch.empty(0)
        self._values = torch.empty(0)
        # The cluster of each token in a whole segment, int64 `[n_kv, S]`.
        self._owners = torch.empty(0, dtype=torch.int64)

    @property
    def cluster_count(self) -> int:
        """Clusters of each KV head."""
        return self._owners.shape[-1] // CLUSTER_TOKENS if self._owners.ndim == 2 else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the sums of keys and values, in the type of the keys, and of the counts."""
        row = 2 * self._shape.head_dim * self._keys.element_size() + 4
        return self.cluster_count * self._shape.kv_heads * row

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens `[T, n_kv, d]`; cluster each segment that they fill."""
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        is_first = self._keys.ndim == 1
        self._keys = keys if is_first else torch.cat((self._keys, keys), 1)
        self._values = values if is_first else torch.cat((self._values, values), 1)
        if is_first:
            self._owners = torch.empty((len(keys), 0), dtype=torch.int64, device=keys.device)
        while (first := self._owners.shape[1]) + SEGMENT_TOKENS <= self._keys.shape[1]:
            segment = self._keys[:, first : first + SEGMENT_TOKENS].float()
            owners = _clusters(segment, SEGMENT_TOKENS // CLUSTER_TOKENS) + self.cluster_count
            self._owners = torch.cat((self._owners, owners), 1)

    def estimate(
        self, queries: torch.Tensor, read: torch.Tensor, first_position: int
    ) -> PartialAttention | None:
        """Return the attention to what is not read; None if nothing is clustered yet.

        Only segments before the first query's, and within its layer's window, take part.

        Args:
            queries: `[T, n_q, d]` at consecutive positions from `first_position`.
            read: bool `[T, n_kv, S]`, of `choose`.
        """
        whole = min(self._owners.shape[-1], first_position // SEGMENT_TOKENS * SEGMENT_TOKENS)
        if not whole or self._owners.ndim == 1:
            return None
        clusters = whole // CLUSTER_TOKENS
        count, query_heads, width = queries.shape
        kv_heads = self._shape.kv_heads
        left = ~read[..., :whole]
        if self._shape.window is not None:
            last = torch.arange(first_position, first_position + count, device=read.device)
            seen = torch.arange(whole, device=read.device) > last[:, None] - self._shape.window
            left &= seen.unsqueeze(1)
        member = functional.one_hot(self._owners[:, :whole], clusters).float()
        # Sums over the tokens of each cluster that are left, `[n_kv, T, clusters, ...]`.
        by_head = left.transpose(0, 1).float()
        counts = by_head @ member
        keys, values = (
            torch.einsum("kts,ksc,ksd->ktcd", by_head, member, rows[:, :whole].float())
            / counts.clamp_min(1).unsqueeze(-1)
            for rows in (self._keys, self._values)
        )
        group = query_heads // kv_heads
        grouped = queries.float().view(count, kv_heads, group, width)
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
