"""The compiled attention of a CPU against attention in fp64, and its promises of equal bits.

A few seconds, and some for each kernel that is compiled the first time on a host.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from splitpoint.host.processor import compiler
from worker_service.device.upload import Upload
from worker_service.kernels import compiled, units
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.kernels.units import UnitOrder, UnitView
from worker_service.model.attention import PartialAttention, decode_partial
from worker_service.model.attention_parts import DecodeParts
from worker_service.model.attention_plan import DecodePlan

CPU = torch.device("cpu")
CHUNK = 16
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
FUSED = Choice(Decode.FUSED, Prefill.SDPA, Layout.PACKED)

# Query heads, heads of K and V, and their width.
HEADS = [(4, 4, 64), (6, 2, 64), (14, 2, 64), (5, 1, 128), (2, 1, 256), (4, 2, 8), (3, 1, 20)]
# Each type and width is a kernel of its own, compiled for seconds; `make chaos` has them all.
COMPILED = {
    torch.float32: (64, 20, 256),
    torch.bfloat16: (64, 20, 128),
    torch.float16: (64, 8),
}

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def fused() -> None:
    use(FUSED)


class Case:
    """Sequences of these lengths on shuffled pages of a pool; what no sequence holds is NaN."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        seed: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.windows = lengths, windows
        counts = [-(-length // CHUNK) for length in lengths]
        pages = torch.randperm(3 * sum(counts), generator=generator)[: sum(counts)].tolist()
        self.tables = [[pages.pop() for _ in range(count)] for count in counts]
        self.queries = torch.randn(len(lengths), heads, head_dim, generator=generator).to(dtype)
        shape = (3 * sum(counts), kv_heads, CHUNK, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for table, length in zip(self.tables, lengths, strict=True):
            for index, page in enumerate(table):
                rows = min(CHUNK, length - index * CHUNK)
                for pool in (self.keys, self.values):
                    drawn = torch.randn(kv_heads, rows, head_dim, generator=generator)
                    pool[page, :, :rows] = drawn.to(dtype)

    def attend(
        self, some: slice = slice(None), window: int | None = None, cap: float | None = None
    ) -> PartialAttention:
        plan = DecodePlan.of_sequences(
            self.tables[some],
            self.lengths[some],
            chunk_tokens=CHUNK,
            windows=self.windows,
            device=CPU,
        )
        assert isinstance(plan.views[window], UnitView)
        return decode_partial(
            self.queries[some],
            self.keys,
            self.values,
            plan,
            window=window,
            scale=self.scale,
            cap=cap,
        )

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    def expected(self, window: int | None, cap: float | None) -> torch.Tensor:
        """The attention of all sequences in fp64, one after the other."""
        kv_heads, width = self.keys.shape[1], self.keys.shape[3]
        rows = []
        for query, table, length in zip(self.queries, self.tables, self.lengths, strict=True):
            first = 0 if window is None else max(0, length - window)
            key, value = (
                pool[table].transpose(0, 1).reshape(kv_heads, -1, width)[:, first:length].double()
                for pool in (self.keys, self.values)
            )
            by_head = query.double().view(kv_heads, -1, width)
            scores = by_head @ key.transpose(1, 2) * self.scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            rows.append((torch.softmax(scores, dim=-1) @ value).reshape(-1))
        return torch.stack(rows)


def attended(partial: PartialAttention) -> torch.Tensor:
    return partial.attended(torch.float32)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [
        pytest.param(dtype, *heads, marks=[] if heads[2] in widths else pytest.mark.chaos)
        for dtype, widths in COMPILED.items()
        for heads in HEADS
    ],
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (21, None), (None, 3.0)])
def test_it_is_attention_of_any_shape(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    cap: float | None,
) -> None:
    lengths = [1, 15, 16, 17, 300, 529]
    case = Case(
        lengths, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, windows=(None, 21)
    )
    found = attended(case.attend(window=window, cap=cap))
    torch.testing.assert_close(found.double(), case.expected(window, cap), rtol=2e-6, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk", [16, 300])
def test_rows_that_a_head_does_not_see_are_not_read(chunk: int, cap: float | None) -> None:
    """They may be NaN; pages of 300 rows are three units."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(3, 6, 64, generator=generator)
    keys, values = torch.randn(2, 9, 2, chunk, 64, generator=generator)
    pages, owners = torch.tensor([7, 2, 5, 0]), [0, 0, 2, 2]
    seen = (torch.rand((4, 2, chunk), generator=generator) < 0.2).to(torch.uint8)
    seen[1:3, 0] = 0
    hidden = torch.ones((9, 2, chunk), dtype=torch.bool)
    hidden[pages] = seen == 0
    plan = DecodePlan.of_pages(
        pages.tolist(),
        owners=owners,
        first_positions=[0, chunk, 0, chunk],
        query_positions=[9 * chunk] * 3,
        chunk_tokens=chunk,
        windows=[None],
        device=CPU,
        is_masked=True,
    )
    nan = hidden.unsqueeze(-1)
    masked_keys, masked_values = (
        keys.masked_fill(nan, torch.nan),
        values.masked_fill(nan, torch.nan),
    )
    found = decode_partial(
        queries, masked_keys, masked_values, plan, window=None, scale=0.2, cap=cap, seen=seen
    )
    for row, listed in ((0, slice(0, 2)), (2, slice(2, 4))):
        for head in range(6):
            mine = seen[listed, head // 3].flatten().bool()
            key, value = (
                plane[pages[listed], head // 3].flatten(0, 1)[mine].double()
                for plane in (keys, values)
            )
            scores = key @ queries[row, head].double() * 0.2
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            wanted = torch.softmax(scores, 0) @ value
            got = found.weighted[row, head] / found.total[row, head]
            torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6)
    assert not found.total[1].any()


@needs_compiler
def test_large_scores_neither_overflow_nor_lose_their_order() -> None:
    case = Case([200, 40], torch.float32)
    case.queries *= 1000
    torch.testing.assert_close(
        attended(case.attend()).double(), case.expected(None, None), rtol=1e-4, atol=1e-4
    )


@needs_compiler
def test_a_nan_reaches_its_own_sequence_only() -> None:
    case = Case([100, 100], torch.float32)
    case.keys[case.tables[0][2], 0, 3, 5] = torch.nan
    found = attended(case.attend())
    assert found[0].isnan().any()
    assert found[1].isfinite().all()


@needs_compiler
def test_bits_depend_neither_on_the_batch_nor_on_the_threads() -> None:
    case = Case([700, 33, 512, 1], torch.bfloat16)
    together = attended(case.attend())
    for index in range(4):
        assert torch.equal(attended(case.attend(slice(index, index + 1)))[0], together[index])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(attended(case.attend()), together)


@needs_compiler
def test_queries_that_share_pages_give_the_bits_of_queries_alone() -> None:
    """As sequences of one prefix, and as the rows of one sequence with drafts."""
    case = Case([529, 529, 400], torch.float32)
    case.tables[1][:20] = case.tables[0][:20]
    case.tables.append(case.tables[0])
    case.lengths = [528, 529, 400, 529]
    case.queries = torch.cat((case.queries, case.queries[:1] + 1))
    together = attended(case.attend())
    torch.testing.assert_close(together.double(), case.expected(None, None), rtol=2e-6, atol=2e-6)
    for index in range(4):
        assert torch.equal(attended(case.attend(slice(index, index + 1)))[0], together[index])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 21])
def test_parts_in_any_order_give_the_bits_of_the_whole(
    dtype: torch.dtype, window: int | None
) -> None:
    """As the tiles of a streamed step, one of which has no page of the second query."""
    case = Case([64, 30], dtype, windows=(window,))
    pages = np.array(case.tables[0] + case.tables[1])
    owners, first = np.array([0] * 4 + [1] * 2), np.array([0, 16, 32, 48, 0, 16])
    plans = [
        DecodePlan.of_pages(
            pages[some],
            owners=owners[some],
            first_positions=first[some],
            query_positions=[63, 29],
            chunk_tokens=CHUNK,
            windows=[window],
            device=CPU,
        )
        for some in ([3, 5], [1, 4, 0], [], [2])
    ]
    views = [view for plan in plans if isinstance(view := plan.views[window], UnitView)]
    order = UnitOrder.of(views, 2, Upload(CPU))
    parts = DecodeParts(
        case.queries, window=window, scale=case.scale, cap=None, sinks=None, order=order
    )
    for plan in plans[:-1]:
        parts.add(case.keys, case.values, plan=plan)
    with pytest.raises(ValueError, match="were planned"):
        parts.attended()
    parts.add(case.keys, case.values, plan=plans[-1])
    whole = case.attend(window=window).attended(dtype)
    assert torch.equal(parts.attended(), whole)
    near = TOLERANCES[dtype]
    torch.testing.assert_close(whole.double(), case.expected(window, None), rtol=near, atol=near)


@needs_compiler
@pytest.mark.parametrize("most", [1, 7, 20])
@pytest.mark.parametrize("window", [None, 90])
def test_rounds_of_any_size_give_the_bits_of_one(
    most: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([700, 1, 529, 528, 33], torch.float32, windows=(window,))
    case.tables[3][:20] = case.tables[2][:20]
    whole = attended(case.attend(window=window))
    monkeypatch.setattr(units, "ATTENTION_PARTS", most)
    assert torch.equal(attended(case.attend(window=window)), whole)
    plan = DecodePlan.of_sequences(
        case.tables, case.lengths, chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    view = plan.views[window]
    assert isinstance(view, UnitView)
    assert len(view.cuts) > 2
    # At least one for each query.
    assert view.room <= max(most, len(case.lengths))


@needs_compiler
@pytest.mark.parametrize("window", [None, 200])
def test_parts_in_the_order_of_positions_are_merged_as_they_come(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a streamed step with more parts than may wait: device, tiles, device."""
    case = Case([400, 150], torch.bfloat16, windows=(window,))
    whole = case.attend(window=window).attended(torch.bfloat16)
    monkeypatch.setattr(units, "ATTENTION_PARTS", 6)
    parts = DecodeParts(
        case.queries, window=window, scale=case.scale, cap=None, sinks=None, order=None
    )

    def plan(chunks: list[range]) -> DecodePlan:
        listed = [(case.tables[row][index], row, index) for row in (0, 1) for index in chunks[row]]
        pages, owners, indices = zip(*listed, strict=True)
        return DecodePlan.of_pages(
            pages,
            owners=owners,
            first_positions=np.array(indices) * CHUNK,
            query_positions=[399, 149],
            chunk_tokens=CHUNK,
            windows=[window],
            device=CPU,
        )

    # The first and the last pages of both; what lies between comes in tiles.
    own = plan([range(25), range(10)]).views[window]
    device = plan([range(3), range(1)]), plan([range(20, 25), range(4, 10)])
    before, behind = own.halves(np.array([20 * CHUNK, 4 * CHUNK]))  # type: ignore[union-attr]
    assert len(before.owners) + len(behind.owners) == len(own.owners)  # type: ignore[union-attr]
    assert behind.owners.tolist() == device[1].views[window].owners.tolist()  # type: ignore[union-attr]
    tiles = [plan([range(first, first + 5), range(0)]) for first in (3, 8)]
    tiles += [plan([range(13, 20), range(1, 4)])]
    for each in (device[0], *tiles, device[1]):
        parts.add(case.keys, case.values, plan=each)
    assert torch.equal(parts.attended(), whole)


@needs_compiler
@pytest.mark.parametrize("window", [None, 150])
def test_pages_of_several_units(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CHUNK", 300)
    case = Case([1, 128, 129, 700, 900], torch.float32, windows=(window,))
    found = attended(case.attend(window=window))
    torch.testing.assert_close(found.double(), case.expected(window, None), rtol=2e-6, atol=2e-6)


@needs_compiler
def test_a_plane_with_gaps_between_its_pages_is_read_in_place() -> None:
    case = Case([100, 50], torch.float32)
    wanted = attended(case.attend())
    shape = (case.keys.shape[0], 3, *case.keys.shape[1:])
    wide = torch.full(shape, torch.nan)
    wide[:, 1], wide[:, 2] = case.keys, case.values
    case.keys, case.values = wide[:, 1], wide[:, 2]
    assert torch.equal(attended(case.attend()), wanted)


def test_without_a_compiler_there_is_no_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.cache_clear()
    try:
        with pytest.raises(compiled.NoKernels, match="no C\\+\\+ compiler"):
            compiled.load("paged_attention.cpp", {"HEAD_DIM": 64, "ELEMENT": 0})
    finally:
        compiler.cache_clear()


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """A source `sum.cpp` that takes no time to compile; its constants."""
    compiled.source_digest()  # is kept, of the kernels themselves
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "sum.cpp").write_text(
        'extern "C" float sum(const float* x) '
        "{ float s = 0; for (int i = 0; i < HEAD_DIM; i++) s += x[i]; return s; }"
    )
    monkeypatch.setattr(compiled, "_FOLDER", folder)
    return {"HEAD_DIM": 16, "ELEMENT": 0}


@needs_compiler
def test_a_kernel_is_compiled_once_and_an_error_is_the_compiler_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_kernel: dict[str, int]
) -> None:
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(tmp_path / "cache"))
    compiled.load("sum.cpp", small_kernel)
    (library,) = (tmp_path / "cache").glob("*.so")
    made = library.stat().st_mtime_ns
    compiled.load("sum.cpp", small_kernel)
    assert library.stat().st_mtime_ns == made
    with pytest.raises(compiled.NoKernels, match=r"error: .*HEAD_DIM"):
        compiled.load("sum.cpp", {"ELEMENT": 0})
    suffixes = sorted(file.suffix for file in (tmp_path / "cache").iterdir())
    assert suffixes == [".lock", ".sha256", ".so"]


def test_a_warning_before_an_error_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "failing"
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(failing))
    warnings = "k.cpp:1: note: an ABI has changed\n" * 50
    for last in ("k.cpp:2:5: error: no such name", "terminated by signal 9"):
        failing.write_text(f"#!/bin/sh\ncat >&2 <<'.'\n{warnings}{last}\n.\nexit 1\n")
        failing.chmod(0o700)
        compiler.cache_clear()
        try:
            with pytest.raises(compiled.NoKernels, match=last):
                compiled.load("paged_attention.cpp", {"HEAD_DIM": 16, "ELEMENT": 0})
        finally:
            compiler.cache_clear()


def load_in_a_child(constants: dict[str, int]) -> None:
    """In a process of its own: a loader opens no file whose name it has mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this one has threads
        child = os.fork()
    if child == 0:
        try:
            compiled.load("sum.cpp", constants).sum  # noqa: B018
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_compiler
def test_a_damaged_library_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_kernel: dict[str, int]
) -> None:
    """The loader would end the process with a signal for some of these."""
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(tmp_path / "cache"))
    load_in_a_child(small_kernel)
    (library,) = (tmp_path / "cache").glob("*.so")
    digest, whole = library.with_suffix(".sha256"), library.read_bytes()
    middle = len(whole) // 2
    zeroed = whole[: middle // 2] + bytes(middle) + whole[middle // 2 + middle :]
    for damage in (b"", b"no library", whole[:middle], zeroed):
        library.write_bytes(damage)
        assert compiled._loaded(library) is None
    load_in_a_child(small_kernel)
    assert library.read_bytes() == whole
    for text in ("", "no digest"):
        digest.write_text(text)
        assert compiled._loaded(library) is None
    digest.unlink()
    assert compiled._loaded(library) is None


@needs_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_kernel: dict[str, int]
) -> None:
    """A crash of the host must not leave a name without content."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(folder))
    synced: list[tuple[int, list[Path]]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, list(folder.glob("*.so"))))
    )
    compiled.load("sum.cpp", small_kernel)
    (library,) = folder.glob("*.so")
    assert synced == [(library.stat().st_ino, [])]


def test_a_lock_that_is_never_given_back_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner may be stopped; flock counts open files, so one process shows it."""
    monkeypatch.setattr(compiled, "_LIMIT", 0.2)
    caplog.set_level(logging.INFO)
    with compiled.locked(tmp_path, "calibrating"):
        with (
            pytest.raises(compiled.NoKernels, match="another process has held"),
            compiled.locked(tmp_path, "calibrating"),
        ):
            pytest.fail("two have it")
        with compiled.locked(tmp_path, "compiling"):
            pass
    with compiled.locked(tmp_path, "calibrating"):
        pass
    assert "waiting for another process" in caplog.text


@needs_compiler
def test_a_compiler_may_be_several_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_kernel: dict[str, int]
) -> None:
    """As in CXX="ccache g++"."""
    (found,) = compiler() or ()
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho ran >> "{tmp_path}/runs"\nexec "$@"\n')
    launcher.chmod(0o700)
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", f'"{launcher}" {found}')
    compiler.cache_clear()
    try:
        assert compiler() == (str(launcher), found)
        compiled.load("sum.cpp", small_kernel)
        monkeypatch.setenv("CXX", '"no end')
        compiler.cache_clear()
        assert compiler() is None
    finally:
        compiler.cache_clear()
    assert (tmp_path / "runs").read_text() == "ran\nran\n"


def test_a_folder_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(folder))
    assert compiled.cache_folder() == folder
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(compiled.NoKernels, match="another user"):
        compiled.cache_folder()


def test_a_folder_that_others_may_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(compiled.CACHE_FOLDER, str(folder))
    with pytest.raises(compiled.NoKernels, match="others"):
        compiled.cache_folder()
