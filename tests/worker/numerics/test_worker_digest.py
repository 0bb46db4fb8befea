"""The digest of what decides the bits of a worker's results. About 2 s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splitpoint.host.processor import compiler
from splitpoint.shapes import WeightFormat
from worker_service.kernels import compiled, row_counts
from worker_service.kernels.choice import Layout, by_flags, use
from worker_service.model.decoder import Decoder
from worker_service.numerics.digest import DIGITS, Facts, facts_of, numerics_digest
from worker_service.profiling.calibration import use_kernels
from worker_service.weights.packing import layout_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CPU = torch.device("cpu")
PAGE = 16
FLAGS = compiled._FLAGS
FUSED = "decode=fused,prefill=fused"


def model_of(
    folder: Path,
    layout: str = "panels",
    dtype: torch.dtype = torch.float32,
    weights: WeightFormat = WeightFormat.NATIVE,
) -> Decoder:
    head_dim = json.loads((folder / "config.json").read_text()).get("head_dim", 16)
    use_kernels(dtype, f"{FUSED},linear={layout}", head_dims=[head_dim], is_invariant=True)
    return Decoder.load(folder, CPU, dtype, weights=weights)


def changed(value: object) -> object:
    """The same kind of fact, with another value."""
    if isinstance(value, dict):
        return {**value, "ANOTHER": "1"}
    if isinstance(value, list):
        return [*value, "another"]
    return f"{value}x" if isinstance(value, str) else -1


def differing(one: Facts, other: Facts) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def test_each_fact_counts_and_their_order_does_not(folder: Path) -> None:
    facts = facts_of(model_of(folder, "plain"), PAGE)
    digest = numerics_digest(facts)
    assert len(digest) == DIGITS
    assert int(digest, 16) >= 0
    assert numerics_digest(dict(reversed(list(facts.items())))) == digest
    others = [numerics_digest({**facts, name: changed(facts[name])}) for name in facts]
    without = [
        numerics_digest({each: facts[each] for each in facts if each != name}) for name in facts
    ]
    assert len({digest, *others, *without}) == 1 + 2 * len(facts)


def test_two_workers_alike_have_one_digest(folder: Path) -> None:
    facts = facts_of(model_of(folder), PAGE)
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert facts_of(model_of(folder), PAGE) == facts, "panels add alike on any threads"


def test_what_makes_a_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(model_of(folder), PAGE)
    assert differing(facts, facts_of(model_of(folder), 2 * PAGE)) == {"page_tokens"}
    half = facts_of(model_of(folder, dtype=torch.bfloat16), PAGE)
    assert differing(facts, half) == {"data_type", "attention", "products"}
    int8 = facts_of(model_of(folder, weights=WeightFormat.INT8), PAGE)
    assert differing(facts, int8) == {"weights", "products"}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert differing(facts, facts_of(model_of(folder), PAGE)) == {"settings"}


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_torchs_products_also_depend_on_threads_and_counts(folder: Path, layout: str) -> None:
    panels = facts_of(model_of(folder), PAGE)
    model = model_of(folder, layout)
    assert layout_of(CPU, torch.float32) is Layout(layout)
    facts = facts_of(model, PAGE)
    assert differing(panels, facts) == {"kernels", "layout", "products", "threads", "rows"}
    row_counts.use_row_counts({(64, 32): (1, 8), (32, 64): (4, 16)})
    counted = facts_of(model, PAGE)
    assert differing(facts, counted) == {"rows"}
    assert counted["rows"] == [(32, 64, [4, 16]), (64, 32, [1, 8])]
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert differing(counted, facts_of(model, PAGE)) == {"threads"}


def test_only_another_compilation_gives_another_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts of a library is the code, not the folder of its source or of its file."""
    contents = []
    for name, flags in (("a", ()), ("b", ()), ("c", ("-O0",))):
        folder, cache = tmp_path / name, tmp_path / f"cache of {name}"
        folder.mkdir()
        (folder / "sum.cpp").write_text(
            'extern "C" float sum(const float* x, int n) '
            "{ float s = 0; for (int i = 0; i < n; i++) s += x[i]; return s; }"
        )
        monkeypatch.setattr(compiled, "_FOLDER", folder)
        monkeypatch.setattr(compiled, "_FLAGS", (*FLAGS, *flags))
        monkeypatch.setenv(compiled.CACHE_FOLDER, str(cache))
        contents.append(compiled.content(compiled.load("sum.cpp", {})))
    assert contents[0] == contents[1] != contents[2]


def test_a_worker_without_kernels_has_no_digest(folder: Path) -> None:
    model = model_of(folder)
    use(None)
    with pytest.raises(RuntimeError, match="not chosen"):
        facts_of(model, PAGE)
    use(by_flags(torch.float32, []))
    assert facts_of(model, PAGE)["kernels"] == "decode=products,prefill=sdpa,linear=packed"
