"""The screens of one model and one selection, from artefacts where the method needs them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.errors import InvalidArgument
from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection.artifacts import Artifacts, load
from worker_service.selection.maple import maple_weights
from worker_service.selection.records import Records
from worker_service.selection.screen import AttentionShape, LayerScreen, Maker


class Screens:
    """Makes the screens of sequences.

    Attributes:
        selection: the method and its settings.
    """

    def __init__(
        self,
        config: AttentionConfig,
        selection: Selection,
        artifacts: Artifacts | None = None,
    ) -> None:
        """`artifacts`: of the selection's method; None if it needs none.

        Raises InvalidArgument if they do not fit the model or the selection.
        """
        self.selection = selection
        self._config = config
        self._artifacts = artifacts
        if artifacts is not None:
            self._check(artifacts)

    @classmethod
    def open(
        cls,
        config: AttentionConfig,
        selection: Selection,
        folder: Path,
        *,
        artifacts: Path | None = None,
        device: torch.device,
    ) -> Screens:
        """Return the screens of a selection on a model; see `artifacts.load` for errors.

        Args:
            folder: the model's checkpoint; artefacts lie beside it unless `artifacts` names
                another folder.
        """
        found = None
        if selection.method.is_calibrated:
            found = load(selection.method, folder, artifacts, device)
        return cls(config, selection, found)

    def layer(self, index: int, blocks: Sequence[torch.Tensor] | None = None) -> LayerScreen | None:
        """Return an empty screen of a layer of one sequence; None: the layer reads everything.

        Args:
            blocks: bytes in which a served screen keeps its records, see `Records`; None: in
                memory of its own.
        """
        selection = self.selection
        if selection.is_full or index < selection.exact_layers:
            return None
        make, shape = _MAKERS[selection.method], AttentionShape.of(self._config, index)
        return make(selection, shape, Records(blocks), partial(self._factor, index))

    def _factor(self, index: int, name: str) -> torch.Tensor:
        """Return a layer's tensor of the artefacts. Raises InvalidArgument if there is none."""
        if self._artifacts is None:
            raise InvalidArgument(f"{self.selection.method} needs artefacts", field="artifacts")
        return self._artifacts.of_layer(index, name)

    def _check(self, artifacts: Artifacts) -> None:
        """Raise InvalidArgument if the artefacts' shapes or rank are not those wanted."""
        shape = self._config.shape
        heads, width = shape.kv_head_count, shape.head_dim
        rank = _rank_of(artifacts)
        wanted = self.selection.columns
        is_maple = self.selection.method is SelectionMethod.MAPLE
        if is_maple and wanted is not None and wanted != rank:
            raise InvalidArgument(
                f"selection: columns is {wanted}, but these artefacts of {artifacts.method} were "
                f"trained for {rank}",
                field="selection.columns",
            )
        for index in range(shape.layer_count):
            for name, sizes in {
                "skew": (heads, width, width),
                "query_map": (heads, width, rank),
                "key_map": (heads, width, rank),
            }.items():
                if (tensor := artifacts.tensors.get(f"layers.{index}.{name}")) is not None:
                    _check_sizes(tensor, sizes, f"{name} of layer {index}")
            if is_maple:
                weights = maple_weights(partial(artifacts.of_layer, index))
                columns = weights.projection.shape[-1]
                inner = (columns or shape.hidden_size) + 1
                turned = weights.frequencies.shape[-1] and rank // 2
                _check_sizes(weights.projection, (shape.hidden_size, columns), "the projection")
                _check_sizes(weights.frequencies, (heads, turned), "the frequencies")
                _check_sizes(weights.query, (inner, shape.query_head_count, rank), "the queries")
                _check_sizes(weights.key, (inner, heads, rank), "the keys")


def _makers() -> dict[SelectionMethod, Maker]:
    """Return what `MAKERS` of the modules beside this one make, by method.

    Raises RuntimeError for a method that none or several of them make.
    """
    makers: dict[SelectionMethod, Maker] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name == Path(__file__).stem:
            continue
        found = importlib.import_module(f"worker_service.selection.{module.name}")
        made: Mapping[SelectionMethod, Maker] = getattr(found, "MAKERS", {})
        for method, maker in made.items():
            if makers.setdefault(method, maker) is not maker:
                raise RuntimeError(f"several modules make screens of {method}")
    if forgotten := {*SelectionMethod} - {SelectionMethod.FULL, *makers}:
        raise RuntimeError(f"methods without a screen: {', '.join(sorted(forgotten))}")
    return makers


_MAKERS = _makers()


def _rank_of(artifacts: Artifacts) -> int:
    for name in ("query_map", "key", "skew"):
        if (tensor := artifacts.tensors.get(f"layers.0.{name}")) is not None:
            return tensor.shape[-1]
    raise InvalidArgument(
        f"the artefacts of {artifacts.method} have no factors: calibrate anew", field="artifacts"
    )


def _check_sizes(tensor: torch.Tensor, sizes: Sequence[int], what: str) -> None:
    if tuple(tensor.shape) != tuple(sizes):
        raise InvalidArgument(
            f"the artefacts have {what} as {list(tensor.shape)}, not {list(sizes)}: calibrate anew",
            field="artifacts",
        )
