"""Factors of calibrated screens as safetensors, bound to a model by its fingerprint.

One file per method, `METHOD.safetensors`, in `screens/` beside the model or in a folder of its
own. Its metadata names format, method, fingerprint, and facts about the calibration for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound
from splitpoint.selection import SelectionMethod

FORMAT = "splitpoint screen v1"
FOLDER = "screens"


@dataclass(frozen=True, slots=True)
class Artifacts:
    """What one calibration made.

    Attributes:
        tensors: by name, `layers.N.NAME` for those of a layer.
        facts: how they were made: tokens, rank, loss and so on.
    """

    method: SelectionMethod
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, object]

    def of_layer(self, index: int, name: str) -> torch.Tensor:
        """Return a layer's tensor. Raises InvalidArgument if there is none."""
        tensor = self.tensors.get(f"layers.{index}.{name}")
        if tensor is None:
            raise InvalidArgument(
                f"the artefacts of {self.method} have no {name} of layer {index}: calibrate anew",
                field="artifacts",
            )
        return tensor


def artifacts_path(method: SelectionMethod, folder: Path, artifacts: Path | None) -> Path:
    """Return the file of a method's artefacts for the checkpoint in `folder`."""
    return (folder / FOLDER if artifacts is None else artifacts) / f"{method}.safetensors"


def encoded(made: Artifacts, folder: Path) -> bytes:
    """Return the file's content for the checkpoint in `folder`."""
    metadata = {
        "format": FORMAT,
        "method": str(made.method),
        "fingerprint": model_fingerprint(folder).hex(),
        "facts": json.dumps(dict(made.facts)),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in made.tensors.items()}
    return save(tensors, metadata)


def load(
    method: SelectionMethod, folder: Path, artifacts: Path | None, device: torch.device
) -> Artifacts:
    """Return the artefacts of a method for the checkpoint in `folder`, on the device.

    Raises NotFound if they were not made, InvalidArgument for a damaged or foreign file, and
    FailedPrecondition if they belong to another model.
    """
    path = artifacts_path(method, folder, artifacts)
    if not path.is_file():
        raise NotFound(
            f"{method} has no artefacts at {path}: run `splitpoint calibrate {folder} "
            f"--screen {method}" + (f" --artifacts {artifacts}`" if artifacts else "`")
        )
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            _check(metadata, method, path, folder)
            # Copies: the mapped file may be replaced later.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", field="artifacts") from error
    return Artifacts(method, tensors, json.loads(metadata["facts"]))


def _check(metadata: Mapping[str, str], method: SelectionMethod, path: Path, folder: Path) -> None:
    if metadata.get("format") != FORMAT or metadata.get("method") != method:
        raise InvalidArgument(f"{path} holds no artefacts of {method}", field="artifacts")
    theirs, ours = metadata.get("fingerprint", ""), model_fingerprint(folder).hex()
    if theirs != ours:
        raise FailedPrecondition(
            f"{path} was calibrated for another model: its fingerprint is {theirs[:16]}, that of "
            f"{folder} is {ours[:16]}",
            reason="ARTIFACTS_OF_ANOTHER_MODEL",
            artifacts_fingerprint=theirs,
            model_fingerprint=ours,
        )
