"""The screens of one model and one selection, from artefacts where the method needs them."""

from __future__ import annotations

from pathlib import Path

import torch

from splitpoint.selection import Selection, SelectionMethod
from worker_service.checkpoint.config import DecoderConfig
from worker_service.selection.columns import ColumnScreen
from worker_service.selection.screen import AttentionShape, LayerScreen
from worker_service.selection.window import WindowScreen


class Screens:
    """Makes the screens of sequences.

    Attributes:
        selection: the method and its settings.
    """

    def __init__(self, config: DecoderConfig, selection: Selection) -> None:
        self.selection = selection
        self._config = config

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
        """Return the screens of a selection on a model.

        Args:
            folder: the model's checkpoint; artefacts lie beside it unless `artifacts` names
                another folder.
        """
        del folder, artifacts, device
        return cls(config, selection)

    def layer(self, index: int) -> LayerScreen | None:
        """Return an empty screen of a layer of one sequence; None: the layer reads everything."""
        selection = self.selection
        if selection.is_full or index < selection.full_layers:
            return None
        shape = AttentionShape.of(self._config, index)
        if selection.method is SelectionMethod.WINDOW:
            return WindowScreen(shape)
        columns = selection.kept_columns(shape.head_dim)
        if selection.method is not SelectionMethod.COLUMNS:
            raise NotImplementedError(selection.method)
        return ColumnScreen(shape, columns, int8=bool(selection.int8))
