"""The trial of a GPU's attention kernels: what will run, on the device where it will run; 2 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import admission, make_engine, run_all
from graph_double import SpanKernels, span_kernels
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.engine.sampling import Sampling
from worker_service.model.decoder import Decoder
from worker_service.model.span_attention import Variant, kernels_of, try_kernels
from worker_service.startup.kernels import attention_variants
from worker_service.startup.options import WorkerOptions

CPU = torch.device("cpu")


class Devices:
    """torch.cuda, as far as a thread has a current device: at first the first one."""

    def __init__(self) -> None:
        self.current = torch.device("cuda:0")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before


class Kernels:
    """Kernels of torch's operators, which note what selects the compiled one, and where.

    `broken`: the type of queries for which building fails.
    """

    def __init__(self, devices: Devices, broken: torch.dtype | None = None) -> None:
        self.launched: set[tuple[Any, ...]] = set()
        self.on: set[torch.device] = set()
        self._devices = devices
        self._broken = broken

    @property
    def attend_spans(self) -> dict[Any, Any]:
        return _Launches(self, SpanKernels.attend_spans)

    @property
    def merge_spans(self) -> dict[Any, Any]:
        return _Launches(self, SpanKernels.merge_spans)

    def note(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = [each.dtype if torch.is_tensor(each) else type(each) for each in arguments]
        if self._broken in types:
            raise RuntimeError("no such product on this card")
        values = {name: value for name, value in constants.items() if name not in ("scale", "cap")}
        self.launched.add((*types, *sorted(values.items())))
        self.on.add(self._devices.current)


class _Launches(dict[Any, Any]):
    def __init__(self, kernels: Kernels, kernel: Any) -> None:
        self._kernels, self._kernel = kernels, kernel

    def __missing__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._kernels.note(arguments, constants)
            self._kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.parametrize("case", ["llama-3", "gemma2", "opt"])
def test_the_trial_runs_the_very_kernels_of_a_step(case: str, tmp_path: Path) -> None:
    """A kernel of fp32, 16 rows and heads of 16 elements says nothing about a model's own."""
    folder = write_tiny(case, tmp_path)
    model = Decoder.load(folder, CPU, torch.bfloat16)
    stepped = Kernels(Devices())
    with span_kernels(stepped):
        engine = make_engine(model, chunk_tokens=32)
        greedy = Sampling(max_tokens=4, ignore_eos=True)
        run_all(engine, [admission("a", [5] * 70, greedy), admission("b", [6] * 3, greedy)])
    tried = Kernels(Devices())
    config = read_decoder(folder, DataType.BFLOAT16)
    variant = Variant.of(config, page_tokens=32)
    assert try_kernels(CPU, [variant], Devices(), lambda: tried) is tried
    assert stepped.launched
    assert stepped.launched == tried.launched


def test_a_kernel_that_fails_for_the_models_type_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_decoder(write_tiny("llama-3", tmp_path), DataType.BFLOAT16)
    variant = Variant.of(config, page_tokens=16)
    single = replace(variant, dtype=torch.float32)
    kernels = Kernels(Devices(), broken=torch.bfloat16)
    assert try_kernels(CPU, [single], Devices(), lambda: kernels) is kernels
    assert try_kernels(CPU, [single, variant], Devices(), lambda: kernels) is None
    assert "no such product on this card" in caplog.text


def test_the_outcome_of_a_trial_is_what_plans_ask_for(tmp_path: Path) -> None:
    device = torch.device("cuda:7")
    config = read_decoder(write_tiny("llama-3", tmp_path), DataType.FLOAT32)
    # No such device: the trial fails, and nothing is tried again.
    found = try_kernels(device, [Variant.of(config, 16)], Devices(), lambda: SpanKernels)
    assert (found, kernels_of(device)) == (None, None)


def test_a_trial_launches_on_its_own_device(tmp_path: Path) -> None:
    """Triton takes the thread's current device, which is the first one in a new thread."""
    devices = Devices()
    kernels = Kernels(devices)
    config = read_decoder(write_tiny("llama-3", tmp_path), DataType.FLOAT32)
    try_kernels(CPU, [Variant.of(config, 16)], devices, lambda: kernels)
    assert kernels.on == {CPU}
    assert devices.current == torch.device("cuda:0")


def test_a_worker_tries_the_kernels_of_its_model_and_of_its_draft_model(tmp_path: Path) -> None:
    served, draft = (write_tiny(case, tmp_path / case) for case in ("gemma2", "llama-3"))
    options = WorkerOptions(
        worker_id="w", model_folder=served, speculation=SpeculativeConfig(model=str(draft))
    )
    config = read_decoder(served, DataType.BFLOAT16)
    layout = ArenaLayout.of(config.shape, chunk_tokens=64, has_activations=False)
    of_served, of_draft = attention_variants(options, config, layout)
    assert (of_served.has_cap, of_draft.has_cap) == (True, False)
    assert {each.page_tokens for each in (of_served, of_draft)} == {64}
    assert {each.dtype for each in (of_served, of_draft)} == {torch.bfloat16}
