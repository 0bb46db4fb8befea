"""Factors in closed form, from sums over calibration samples.

With `Q = U_q R_q` and `K = U_k R_k` (U with orthonormal columns), the best rank-r approximation
of `Q K^T` is that of `R_q R_k^T = W S Z^T`, so `q R_q^-1 W sqrt(S)` and `k R_k^-1 Z sqrt(S)` are
the best r columns of each. Only `R^T R = Q^T Q` is needed, so samples are summed, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_service.selection.screen import TokenRows

# Directions with less than this share of the largest eigenvalue are left out.
_LEAST_SHARE = 1e-10


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of one layer, fp64.

    Attributes:
        queries: `sum q^T q` over a KV head's group, `[n_kv, d, d]`.
        keys: `sum k^T k`, `[n_kv, d, d]`; key_sums: `sum k`, `[n_kv, d]`.
        tokens: how many.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    key_sums: torch.Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, device: torch.device) -> Sums:
        squares = torch.zeros((2, kv_heads, head_dim, head_dim), dtype=torch.float64, device=device)
        return cls(squares[0], squares[1], torch.zeros_like(squares[0, :, 0]))

    def add(self, rows: TokenRows) -> None:
        """Add the tokens of a passage."""
        keys = rows.keys.double()
        kv_heads, width = keys.shape[1:]
        queries = rows.queries.double().view(len(keys), kv_heads, -1, width)
        self.queries += torch.einsum("tkgd,tkge->kde", queries, queries)
        self.keys += torch.einsum("tkd,tke->kde", keys, keys)
        self.key_sums += keys.sum(0)
        self.tokens += len(keys)

    @property
    def centred_keys(self) -> torch.Tensor:
        """Sums of squares of keys less their mean, which no ranking of a row depends on."""
        mean = self.key_sums / self.tokens
        return self.keys - self.key_sums.unsqueeze(-1) * mean.unsqueeze(-2)


def skew(sums: Sums) -> torch.Tensor:
    """Return A, fp32 `[n_kv, d, d]`: eigenvectors of `sum q^T q`, the largest first (InfiniGen)."""
    _, vectors = torch.linalg.eigh(sums.queries)
    largest_first: torch.Tensor = vectors.flip(-1).float()
    return largest_first


def closed_form(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maps of q and k, fp32 `[n_kv, d, d]`; the best of rank r are the first r columns.

    Args:
        queries, keys: `Q^T Q` and `K^T K`, fp64 `[n_kv, d, d]`.
    """
    query_root, query_inverse = roots(queries)
    key_root, key_inverse = roots(keys)
    left, values, right = torch.linalg.svd(query_root @ key_root.transpose(-1, -2))
    root = values.sqrt().unsqueeze(-2)
    query_map = query_inverse @ (left * root)
    key_map = key_inverse @ (right.transpose(-1, -2) * root)
    return query_map.float(), key_map.float()


def roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return R with `R^T R = gram` and its pseudo-inverse, both `[..., d, d]`."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _LEAST_SHARE * values.amax(-1, keepdim=True)
    scale = torch.where(kept, values, 0).sqrt()
    inverse = torch.where(kept, scale.reciprocal(), 0)
    return scale.unsqueeze(-1) * vectors.transpose(-1, -2), vectors * inverse.unsqueeze(-2)


def projected_form(
    projected: list[torch.Tensor], rows: list[TokenRows], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_Q `[k, n_q, r]` and W_K `[k, n_kv, r]`, fp32: MAPLE's factors in closed form.

    The query heads of a group share the keys of their KV head, so their factors are those of the
    stacked products. Keys are taken less their mean.

    Args:
        projected: `X P` of each passage, `[T, k]`; rows: of the same passages.
    """
    inputs = torch.cat(projected).double()
    keys = torch.cat([each.keys for each in rows]).double()
    queries = torch.cat([each.queries for each in rows]).double()
    kv_heads, width = keys.shape[1:]
    keys = keys - keys.mean(0)
    _, inverse = roots(inputs.T @ inputs)
    basis = inputs @ inverse
    of_queries = torch.einsum("tm,tkgd->kgmd", basis, queries.view(len(keys), kv_heads, -1, width))
    of_keys = torch.einsum("tm,tkd->kmd", basis, keys)
    # [n_kv, g * k, k]: the products of the group's heads, one below the other.
    products = torch.einsum("kgmd,knd->kgmn", of_queries, of_keys).flatten(1, 2)
    left, values, right = torch.linalg.svd(products, full_matrices=False)
    root = values[:, :rank].sqrt().unsqueeze(-2)
    size = inputs.shape[1]
    left = (left[..., :rank] * root).unflatten(1, (-1, size))
    query = torch.einsum("nm,kgmr->nkgr", inverse, left).flatten(1, 2)
    key = torch.einsum("nm,krm->nkr", inverse, right[:, :rank] * root.transpose(-1, -2))
    return query.float(), key.float()
