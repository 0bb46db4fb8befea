"""Factors in closed form, from sums over calibration samples.

With `Q = U_q R_q` and `K = U_k R_k` (U with orthonormal columns), the best rank-r approximation
of `Q K^T` is that of `R_q R_k^T = W S Z^T`, so `q R_q^-1 W sqrt(S)` and `k R_k^-1 Z sqrt(S)` are
the best r columns of each. Only `R^T R = Q^T Q` is needed, so samples are summed, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from worker_service.selection.screen import TokenRows

# Directions with less than this share of the largest eigenvalue are left out.
_LEAST_SHARE = 1e-10


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of one layer, fp64.

    Attributes:
        queries: `sum q^T q` over a KV head's group, `[n_kv, d, d]`.
        keys: `sum k^T k`, `[n_kv, d, d]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, device: torch.device) -> Sums:
        squares = torch.zeros((2, kv_heads, head_dim, head_dim), dtype=torch.float64, device=device)
        return cls(squares[0], squares[1])

    def add(self, rows: TokenRows) -> None:
        """Add the tokens of a passage."""
        keys = rows.keys.double()
        kv_heads, width = keys.shape[1:]
        queries = rows.queries.double().view(len(keys), kv_heads, -1, width)
        self.queries += torch.einsum("tkgd,tkge->kde", queries, queries)
        self.keys += torch.einsum("tkd,tke->kde", keys, keys)


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
    query_map, key_map, _ = _closed(queries, keys)
    return query_map.float(), key_map.float()


def _closed(
    queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the maps of `closed_form`, and their singular values `[n_kv, d]`; may be complex."""
    query_root, query_inverse = roots(queries)
    key_root, key_inverse = roots(keys)
    left, values, right = torch.linalg.svd(query_root @ key_root.mH)
    root = values.sqrt().unsqueeze(-2)
    return query_inverse @ (left * root), key_inverse @ (right.mH * root), values


def roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return R with `R^H R = gram` and its pseudo-inverse, both `[..., d, d]`."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _LEAST_SHARE * values.amax(-1, keepdim=True)
    scale = torch.where(kept, values, 0).sqrt()
    inverse = torch.where(kept, scale.reciprocal(), 0)
    return scale.unsqueeze(-1) * vectors.mH, vectors * inverse.unsqueeze(-2)


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


def rotated_form(
    projected: list[torch.Tensor], rows: list[TokenRows], rank: int, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return W_Q and W_K as `projected_form`, and `[n_kv, r / 2]` frequencies of their pairs.

    Every pair of q and k before RoPE, as a complex number, is fitted to `X P` by least squares.
    Pairs whose angles differ little over a passage count as one frequency, and are replaced by the
    combinations of them that the closed form of this module gives. Of all of a head, those with
    the r / 2 largest singular values are kept.

    Args:
        rope: radians a token of each pair, falling, `[d / 2]`.
    """
    inputs = torch.cat(projected).double()
    heads = torch.cat([unrotated(each.queries, rope) for each in rows])
    kv_heads = rows[0].keys.shape[1]
    _, inverse = roots(inputs.T @ inputs)
    inverse = (inverse @ inverse.transpose(-1, -2)).to(torch.complex128)

    def fitted(targets: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = torch.einsum(
            "nm,tm,tkp->nkp", inverse, inputs.to(torch.complex128), targets
        )
        return maps

    query = fitted(heads)
    query = query.view(len(query), kv_heads, -1, query.shape[-1])
    key = fitted(torch.cat([unrotated(each.keys, rope) for each in rows]))
    positions = torch.cat([torch.arange(len(each.keys)) for each in rows]).to(inputs.device)
    wide = inputs.to(torch.complex128)
    query_maps, key_maps, sizes, frequencies = [], [], [], []
    for first, last in _alike(rope, max(len(each.keys) for each in rows)):
        frequency = rope[first:last].double().log().mean().exp()
        asked = torch.einsum("tn,nkgp->tkgp", wide, query[..., first:last])
        kept = torch.einsum("tn,nkp->tkp", wide, key[..., first:last])
        kept = kept * _turned(positions * frequency).view(-1, 1, 1)
        # What is the same for all keys ranks none of them.
        kept = kept - kept.mean(0)
        query_map, key_map, values = _closed(
            torch.einsum("tkgp,tkgq->kpq", asked.conj(), asked),
            torch.einsum("tkp,tkq->kpq", kept.conj(), kept),
        )
        query_maps.append(torch.einsum("nkgp,kpr->nkgr", query[..., first:last], query_map))
        key_maps.append(torch.einsum("nkp,kpr->nkr", key[..., first:last], key_map))
        sizes.append(values)
        frequencies.append(frequency.expand_as(values))
    best = torch.cat(sizes, -1).topk(rank // 2, dim=-1).indices
    queries, keys = torch.cat(query_maps, -1), torch.cat(key_maps, -1)
    index = best.expand(len(keys), -1, -1)
    keys = keys.gather(-1, index)
    queries = queries.gather(-1, index.unsqueeze(2).expand(-1, -1, queries.shape[2], -1))
    return (
        _in_halves(queries.flatten(1, 2)),
        _in_halves(keys),
        torch.cat(frequencies, -1).gather(-1, best).float(),
    )


def unrotated(heads: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return heads `[T, n, d]` before RoPE, as complex128 `[T, n, d / 2]`; the first is at 0."""
    first, second = heads.double().chunk(2, -1)
    positions = torch.arange(len(heads), device=heads.device)
    angles = positions.unsqueeze(-1) * rope.double()
    return torch.complex(first, second) * _turned(-angles).unsqueeze(1)


# Pairs are alike if their angles over a whole passage differ by less than this many radians.
_ALIKE_RADIANS = 3.0


def _alike(rope: torch.Tensor, tokens: int) -> list[tuple[int, int]]:
    """Return ranges of pairs whose frequencies are alike over this many tokens."""
    speeds = rope.tolist()
    starts = [0]
    for index, speed in enumerate(speeds):
        if (speeds[starts[-1]] - speed) * tokens >= _ALIKE_RADIANS:
            starts.append(index)
    return list(pairwise([*starts, len(speeds)]))


def _turned(angles: torch.Tensor) -> torch.Tensor:
    return torch.polar(torch.ones_like(angles), angles)


def _in_halves(maps: torch.Tensor) -> torch.Tensor:
    """Return complex `[..., r / 2]` as fp32 `[..., r]`, real parts first."""
    return torch.cat((maps.real, maps.imag), -1).float()
