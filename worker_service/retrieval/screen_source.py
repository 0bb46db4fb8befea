"""The screens that a worker can serve, and the artefacts that it has for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.errors import FailedPrecondition, InvalidArgument, SplitpointError
from splitpoint.selection import SERVED_METHODS, Selection, SelectionMethod
from worker_service.selection.artifacts import Artifacts, artifacts_path, load
from worker_service.selection.screens import Screens

log = logging.getLogger(__name__)


class ScreenSource:
    """Makes the screens of selections on one model.

    Attributes:
        columns: the methods that can be served, each with the dimensions that its artefacts were
            trained for; 0: any.
        size_bytes: of the artefacts, in device memory.
    """

    def __init__(self, config: DecoderConfig, artifacts: Mapping[SelectionMethod, Artifacts]):
        """Raises InvalidArgument for artefacts that do not fit the model."""
        self._config = config
        self._artifacts = artifacts
        self.columns = {
            method: _trained_columns(config, method, artifacts.get(method))
            for method in SERVED_METHODS
            if not method.is_calibrated or method in artifacts
        }
        self.size_bytes = sum(
            tensor.nbytes for each in artifacts.values() for tensor in each.tensors.values()
        )

    @classmethod
    def open(
        cls, config: DecoderConfig, folder: Path, artifacts: Path | None, device: torch.device
    ) -> ScreenSource:
        """Read the artefacts that were made for the checkpoint in `folder`, onto the device.

        What cannot be used raises from a folder that was named, as `artifacts.load` says. Beside
        the model it is left out with a warning: a worker need not select.
        """
        found: dict[SelectionMethod, Artifacts] = {}
        for method in SERVED_METHODS:
            if not method.is_calibrated or not artifacts_path(method, folder, artifacts).is_file():
                continue
            try:
                found[method] = load(method, folder, artifacts, device)
                cls(config, {method: found[method]})
            except SplitpointError as error:
                if artifacts is not None:
                    raise
                found.pop(method, None)
                log.warning("no selection by %s: %s", method, error.message)
        return cls(config, found)

    def screens(self, selection: Selection) -> Screens:
        """Return the screens of a selection.

        Raises FailedPrecondition without its artefacts, InvalidArgument for another number of
        columns than they were trained for.
        """
        if selection.method not in self.columns:
            raise FailedPrecondition(
                f"the worker has no artefacts of {selection.method}", reason="NO_ARTIFACTS"
            )
        trained = self.columns[selection.method]
        kept = selection.kept_columns(self._config.shape.head_dim)
        if trained and kept != trained:
            # Pages are counted by what the selection says.
            raise InvalidArgument(
                f"selection: columns is {kept}, but the worker's artefacts of {selection.method} "
                f"were trained for {trained}",
                field="selection.columns",
            )
        return Screens(self._config, selection, self._artifacts.get(selection.method))


def _trained_columns(
    config: DecoderConfig, method: SelectionMethod, artifacts: Artifacts | None
) -> int:
    """Return the dimensions that artefacts were trained for; 0: any. Raises InvalidArgument."""
    if artifacts is None:
        return 0
    Screens(config, Selection(method=method, ratio=1.0), artifacts)  # for its checks
    is_trained = method is SelectionMethod.RANKED
    return artifacts.of_layer(0, "key_map").shape[-1] if is_trained else 0
