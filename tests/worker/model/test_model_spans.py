"""Decode attention by spans equals plain products: Triton's kernels under its interpreter.

The interpreter carries the kernels' own source out with numpy; it cannot multiply bfloat16. That
they compile for GPUs is tested in tests/worker/device/test_worker_kernels_compile.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import Interpreter, interpreter

from worker_service.device.upload import Upload
from worker_service.model.attention import PartialAttention, decode_partial
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.library_attention import Library, WholeSequences

CPU = torch.device("cpu")
CHUNK = 16
SCALE = 0.2


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreter]:
    with interpreter() as process:
        yield process


class Case:
    """Random pages of B queries: spread, shared by several, some hidden by a window."""

    def __init__(
        self, seed: int, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
    ) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        query_heads, kv_heads = heads
        self.lengths = [1, 16, 17, 530, 90]
        shape = (150, kv_heads, CHUNK, head_dim)
        self.keys = torch.randn(shape, generator=generator).to(dtype)
        self.values = torch.randn(shape, generator=generator).to(dtype)
        self.queries = torch.randn(5, query_heads, head_dim, generator=generator).to(dtype)
        self.tables = [
            [rng.randrange(150) for _ in range(-(-length // CHUNK))] for length in self.lengths
        ]
        # Two queries share their first pages.
        self.tables[4][:4] = self.tables[3][:4]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.queries, self.keys, self.values

    def seen(self, window: int | None) -> tuple[Any, Any, Any, Any]:
        """Page numbers, owners, positions and seen rows of pages of which a row is seen."""
        numbers, owners, positions, rows = [], [], [], []
        for owner, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            for chunk, page in enumerate(table):
                behind = length - 1 - (chunk * CHUNK + np.arange(CHUNK))
                visible = (behind >= 0) & (behind < (window or length))
                if visible.any():
                    numbers.append(page)
                    owners.append(owner)
                    positions.append(chunk * CHUNK)
                    rows.append(visible)
        # In any order of pages, as the tiles of a streamed step have them.
        order = np.random.default_rng(0).permutation(len(numbers))
        return tuple(np.array(each)[order] for each in (numbers, owners, positions, rows))  # type: ignore[return-value]

    def wanted(self, window: int | None, cap: float | None) -> PartialAttention:
        """By plain products on a CPU."""
        plan = DecodePlan.of_sequences(
            self.tables, self.lengths, chunk_tokens=CHUNK, windows=[window], device=CPU
        )
        queries, keys, values = (each.float() for each in (self.queries, self.keys, self.values))
        return decode_partial(queries, keys, values, plan, window=window, scale=SCALE, cap=cap)


MODELS: list[tuple[torch.dtype, tuple[int, int], int]] = [
    (torch.float32, (4, 4), 16),
    (torch.float32, (6, 2), 20),
    (torch.float16, (4, 1), 32),
    (torch.float16, (8, 2), 64),
]
WINDOWS = [None, 5, 40]


# Each pair of a model, a window and a cap.
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "window", "cap"),
    [
        (*model, window, (None, 0.7)[(number + place) % 2])
        for number, model in enumerate(MODELS)
        for place, window in enumerate(WINDOWS)
    ],
)
def test_spans_equal_plain_products(
    kernels: Interpreter,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    cap: float | None,
) -> None:
    case = Case(3, dtype, heads, head_dim)
    wanted = case.wanted(window, cap)
    places = case.seen(window)
    numbers, _, _, seen = places
    # Rows that no query sees may hold anything.
    for page in range(len(case.keys)):
        unused = ~np.any(seen[numbers == page], axis=0)
        case.keys[page, :, torch.from_numpy(unused)] = math.nan
        case.values[page, :, torch.from_numpy(unused)] = math.nan
    _, parts = kernels.attend(places, case.tensors, scale=SCALE, cap=cap)
    got = PartialAttention(*parts)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        got.attended(torch.float32), wanted.attended(torch.float32), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(got.peak, wanted.peak, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.total, wanted.total, atol=1e-3, rtol=1e-3)


def test_rows_that_a_head_does_not_see_are_not_read(kernels: Interpreter) -> None:
    """They may be NaN, and a head may see no row of a page, or of any."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(3, 6, 16, generator=generator)
    keys, values = torch.randn(2, 9, 2, CHUNK, 16, generator=generator)
    numbers, owners = np.array([7, 2, 5, 0]), np.array([0, 0, 2, 2])
    seen = (torch.rand((4, 2, CHUNK), generator=generator) < 0.3).to(torch.uint8)
    seen[1:, 0] = 0
    hidden = torch.ones((9, 2, CHUNK), dtype=torch.bool)
    hidden[numbers] = seen == 0
    planes = [plane.masked_fill(hidden.unsqueeze(-1), math.nan) for plane in (keys, values)]
    places = (numbers, owners, np.array([0, CHUNK] * 2), np.ones((4, CHUNK), dtype=np.bool_))
    _, parts = kernels.attend(places, (queries, *planes), scale=SCALE, cap=None, seen=seen)
    weighted, _, total = parts
    for row, listed in ((0, slice(0, 2)), (2, slice(2, 4))):
        for head in range(6):
            mine = seen[listed, head // 3].flatten().bool()
            if not mine.any():
                assert not total[row, head]
                continue
            key, value = (
                plane[numbers[listed], head // 3].flatten(0, 1)[mine] for plane in (keys, values)
            )
            wanted = torch.softmax(key @ queries[row, head] * SCALE, 0) @ value
            got = weighted[row, head] / total[row, head]
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not total[1].any()


def test_a_query_without_pages_counts_nothing(kernels: Interpreter) -> None:
    """As in a tile that holds other sequences; and its result does not depend on theirs."""
    case = Case(1, torch.float32, (4, 2), 16)
    places = case.seen(None)
    alone = places[1] == 3
    numbers, owners, positions, seen = (each[alone] for each in places)
    firsts, parts = kernels.attend(
        (numbers, owners, positions, seen), case.tensors, scale=SCALE, cap=None
    )
    assert firsts == [0, 0, 0, 0, 3, 3]
    weighted, peak, total = parts
    others = [0, 1, 2, 4]
    assert not weighted[others].any()
    assert not total[others].any()
    assert (peak[others] == torch.finfo(torch.float32).min).all()
    _, together = kernels.attend(places, case.tensors, scale=SCALE, cap=None)
    for one, all_of_them in zip(parts, together, strict=True):
        assert torch.equal(one[3], all_of_them[3])


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.chaos), 40])
def test_padding_spans_change_no_bit(kernels: Interpreter, window: int | None) -> None:
    """As in the tables of a graph: they are empty, and behind those of all queries."""
    case = Case(2, torch.float32, (4, 2), 16)
    places = case.seen(window)
    firsts, parts = kernels.attend(places, case.tensors, scale=SCALE, cap=None)
    padded_firsts, padded = kernels.attend(places, case.tensors, padded=64, scale=SCALE, cap=None)
    assert firsts == padded_firsts
    assert firsts[-1] < 64
    for plain, wide in zip(parts, padded, strict=True):
        assert torch.equal(plain, wide)


# -- the library -----------------------------------------------------------------------------


class Wrapper:
    """FlashInfer's wrapper, from its documentation: its layout HND, and logarithms in base 2."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert (layout, workspace.dtype) == ("HND", torch.uint8)
        self.plans: list[dict[str, Any]] = []

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **more: Any) -> None:
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
        assert all(each.dtype == torch.int32 for each in (indptr, indices, last_page_len))
        self.plans.append(dict(zip(names, sizes, strict=True), **more))
        self.tables = [
            (indices[first:last].tolist(), int(rows))
            for first, last, rows in zip(indptr, indptr[1:], last_page_len, strict=False)
        ]

    def run(self, queries: torch.Tensor, cache: Any, *, return_lse: bool) -> Any:
        keys, values = (each.float() for each in cache)
        plan, size = self.plans[-1], keys.shape[2]
        assert return_lse
        results, logs = [], []
        for query, (pages, last) in zip(queries.float(), self.tables, strict=True):
            length = (len(pages) - 1) * size + last
            key, value = (
                plane[pages].transpose(0, 1).flatten(1, 2)[:, :length] for plane in (keys, values)
            )
            group = plan["num_qo_heads"] // plan["num_kv_heads"]
            key, value = (each.repeat_interleave(group, 0) for each in (key, value))
            scores = torch.einsum("hd,hsd->hs", query, key) * plan["sm_scale"]
            if plan["logits_soft_cap"]:
                scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
            if plan["window_left"] >= 0:
                scores[:, : max(0, length - 1 - plan["window_left"])] = -math.inf
            results.append(torch.einsum("hs,hsd->hd", scores.softmax(-1), value))
            logs.append(scores.logsumexp(-1) / math.log(2))
        return torch.stack(results).to(queries.dtype), torch.stack(logs)


class Module:
    """flashinfer; `made` holds its wrappers."""

    def __init__(self, wrapper: type[Wrapper] = Wrapper) -> None:
        self.made: list[Wrapper] = []
        self._wrapper = wrapper

    def BatchDecodeWithPagedKVCacheWrapper(self, *values: Any, **more: Any) -> Wrapper:
        self.made.append(self._wrapper(*values, **more))
        return self.made[-1]


def whole_of(case: Case, window: int | None) -> WholeSequences:
    pages = np.concatenate([np.array(table) for table in case.tables])
    return WholeSequences.of(pages, np.array(case.lengths), CHUNK, window, Upload(CPU))


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_the_library_gets_what_it_documents(
    heads: tuple[int, int], window: int | None, cap: float | None
) -> None:
    case = Case(2, torch.float16, heads, 64)
    wanted = case.wanted(window, cap)
    module = Module()
    library = Library(CPU, module)
    assert library.takes(case.queries, case.keys)
    whole = whole_of(case, window)
    for _ in range(3):  # layers of one step
        done = library.attend(whole, case.queries, case.keys, case.values, scale=SCALE, cap=cap)
        assert done is not None
        got = PartialAttention(*done)
        torch.testing.assert_close(
            got.attended(torch.float32), wanted.attended(torch.float32), atol=2e-3, rtol=2e-3
        )
        # Merges with the parts of a tile as ours does.
        ours = wanted.merge(wanted).attended(torch.float32)
        merged = got.merge(wanted).attended(torch.float32)
        torch.testing.assert_close(merged, ours, atol=2e-3, rtol=2e-3)
        share = (got.peak.exp() * got.total) / (wanted.peak.exp() * wanted.total)
        torch.testing.assert_close(share, torch.ones_like(share), atol=1e-3, rtol=1e-3)
    [wrapper] = module.made
    assert len(wrapper.plans) == 1, "planned once a step"
    library.attend(
        whole_of(case, window), *(case.queries, case.keys, case.values), scale=1, cap=cap
    )
    assert len(wrapper.plans) == 2
    assert len(module.made) == 1


def test_a_window_has_a_wrapper_of_its_own_and_odd_sizes_none() -> None:
    case = Case(2, torch.float16, (4, 4), 64)
    module = Module()
    library = Library(CPU, module)
    local, all_of_it = whole_of(case, 5), whole_of(case, None)
    for _ in range(2):
        for whole in (local, all_of_it):
            library.attend(whole, case.queries, case.keys, case.values, scale=1.0, cap=None)
    assert [len(each.plans) for each in module.made] == [1, 1]
    assert not library.takes(case.queries.float(), case.keys)
    assert not library.takes(case.queries[..., :20], case.keys[..., :20])


def test_a_library_that_fails_is_told_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Wrapper):
        def plan(self, *values: Any, **more: Any) -> None:
            raise RuntimeError("no kernel was built for this GPU")

    case = Case(2, torch.float16, (4, 4), 64)
    library = Library(CPU, Module(Broken))
    given = (case.queries, case.keys, case.values)
    assert library.attend(whole_of(case, None), *given, scale=1.0, cap=None) is None
    assert not library.takes(case.queries, case.keys)
    assert "FlashInfer is not used: RuntimeError: no kernel was built" in caplog.text
