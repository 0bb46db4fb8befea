"""The screens of one model and one selection, from artefacts where the method needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.errors import InvalidArgument
from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection.artifacts import Artifacts, load
from worker_service.selection.clusters import Centroids
from worker_service.selection.columns import ColumnScreen, LowRankScreen
from worker_service.selection.h2o import HeavyHitterScreen
from worker_service.selection.kept_rows import Records
from worker_service.selection.maple import MapleScreen, MapleWeights
from worker_service.selection.quest import QuestScreen
from worker_service.selection.screen import AttentionShape, LayerScreen
from worker_service.selection.window import WindowScreen


class Screens:
    """Makes the screens of sequences.

    Attributes:
        selection: the method and its settings.
    """

    def __init__(
        self,
        config: DecoderConfig,
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
        config: DecoderConfig,
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
        shape = AttentionShape.of(self._config, index)
        return _MAKERS[selection.method](self, index, shape, Records(blocks))

    def centroids(self, index: int) -> Centroids | None:
        """Return an empty estimate of what a layer does not read; None: there is none."""
        selection = self.selection
        if not selection.estimate or selection.is_full or index < selection.exact_layers:
            return None
        return Centroids(AttentionShape.of(self._config, index))

    def _columns(
        self, index: int, shape: AttentionShape, records: Records, skew: torch.Tensor | None = None
    ) -> LayerScreen:
        columns = self.selection.kept_columns(shape.head_dim)
        int8 = self.selection.keeps_int8
        return ColumnScreen(shape, columns, int8=int8, skew=skew, records=records)

    def _oracle(self, index: int, shape: AttentionShape, records: Records) -> LayerScreen:
        # Only measured: it keeps whole keys, for which no page has room.
        return ColumnScreen(shape, shape.head_dim, int8=self.selection.keeps_int8)

    def _infinigen(self, index: int, shape: AttentionShape, records: Records) -> LayerScreen:
        return self._columns(index, shape, records, self._of(index, "skew"))

    def _maple(self, index: int, shape: AttentionShape, records: Records) -> LayerScreen:
        return MapleScreen(shape, self._maple_weights(index), int8=self.selection.keeps_int8)

    def _ranked(self, index: int, shape: AttentionShape, records: Records) -> LayerScreen:
        maps = (self._of(index, "query_map"), self._of(index, "key_map"))
        return LowRankScreen(shape, *maps, int8=self.selection.keeps_int8, records=records)

    def _low_rank(self, index: int, shape: AttentionShape, records: Records) -> LayerScreen:
        # Columns are in the order of what they explain: the best of a rank are the first.
        kept = self.selection.kept_columns(shape.head_dim)
        maps = (self._of(index, name)[..., :kept] for name in ("query_map", "key_map"))
        return LowRankScreen(shape, *maps, int8=self.selection.keeps_int8, records=records)

    def _of(self, index: int, name: str) -> torch.Tensor:
        if self._artifacts is None:
            raise InvalidArgument(f"{self.selection.method} needs artefacts", field="artifacts")
        return self._artifacts.of_layer(index, name)

    def _maple_weights(self, index: int) -> MapleWeights:
        if self._artifacts is None:
            raise InvalidArgument("maple needs artefacts", field="artifacts")
        return maple_weights(self._artifacts, index)

    def _check(self, artifacts: Artifacts) -> None:
        """Raise InvalidArgument if the artefacts' shapes or rank are not those wanted."""
        shape = self._config.shape
        heads, width = shape.kv_head_count, shape.head_dim
        rank = _rank_of(artifacts)
        wanted = self.selection.columns
        is_trained = self.selection.method in (SelectionMethod.MAPLE, SelectionMethod.RANKED)
        if is_trained and wanted is not None and wanted != rank:
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
            if self.selection.method is SelectionMethod.MAPLE:
                weights = maple_weights(artifacts, index)
                inner = weights.projection.shape[-1]
                _check_sizes(weights.projection, (shape.hidden_size, inner), "the projection")
                _check_sizes(weights.query, (inner, shape.query_head_count, rank), "the queries")
                _check_sizes(weights.key, (inner, heads, rank), "the keys")


_Maker = Callable[[Screens, int, AttentionShape, Records], LayerScreen]
_MAKERS: dict[SelectionMethod, _Maker] = {
    SelectionMethod.INFINIGEN: Screens._infinigen,
    SelectionMethod.MAPLE: Screens._maple,
    SelectionMethod.COLUMNS: Screens._columns,
    SelectionMethod.LOWRANK: Screens._low_rank,
    SelectionMethod.RANKED: Screens._ranked,
    SelectionMethod.QUEST: lambda screens, index, shape, records: QuestScreen(shape, records),
    SelectionMethod.WINDOW: lambda screens, index, shape, records: WindowScreen(shape),
    SelectionMethod.H2O: lambda screens, index, shape, records: HeavyHitterScreen(
        shape, screens.selection
    ),
    SelectionMethod.ORACLE: Screens._oracle,
}
if forgotten := {*SelectionMethod} - {SelectionMethod.FULL, *_MAKERS}:
    raise RuntimeError(f"methods without a screen: {', '.join(sorted(forgotten))}")


def maple_weights(artifacts: Artifacts, index: int) -> MapleWeights:
    """Return a layer's factors, W_Q and W_K out of int8. Raises InvalidArgument."""
    return MapleWeights(
        artifacts.of_layer(index, "projection"),
        *(
            artifacts.of_layer(index, name).float() * artifacts.of_layer(index, f"{name}_scale")
            for name in ("query", "key")
        ),
    )


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
