"""The verdict on a checkpoint: what a worker computes of it, or why this version refuses it.

Every command and service that takes a checkpoint asks here, so that what one approves no other
refuses. The verdict is that of config.json alone; it needs no weights, no device and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitpoint.checkpoint.config import model_name, read_config
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape


@dataclass(frozen=True, slots=True)
class Support:
    """Whether this version serves a checkpoint; one of the two is None.

    Attributes:
        decoder: what a worker computes.
        refusal: why the checkpoint is refused; `field` is the key of config.json that decides,
            and `reason` is UNSUPPORTED_MODEL for a sound checkpoint that needs what this version
            lacks.
    """

    decoder: DecoderConfig | None = None
    refusal: InvalidArgument | None = None

    @property
    def reason(self) -> str:
        """Why the checkpoint is refused, for people; empty if it is served."""
        return "" if self.refusal is None else self.refusal.message

    @property
    def required(self) -> DecoderConfig:
        """What a worker computes. Raises the refusal."""
        if self.decoder is None:
            assert self.refusal is not None
            raise self.refusal
        return self.decoder


def support_of(folder: Path, data_type: DataType | None = None) -> Support:
    """Return the verdict on a checkpoint folder. `data_type` None: as stored."""
    try:
        config = read_config(folder)
        name = model_name(folder)
        return Support(DecoderConfig.parse(config, name=name, data_type=data_type))
    except InvalidArgument as error:
        return Support(refusal=error)


def read_decoder(folder: Path, data_type: DataType | None = None) -> DecoderConfig:
    """Return what a worker computes of a checkpoint. Raises InvalidArgument if it is refused."""
    return support_of(folder, data_type).required


def read_shape(folder: Path, data_type: DataType | None = None) -> ModelShape:
    """Return the shape of a checkpoint. Raises InvalidArgument if it is refused."""
    return read_decoder(folder, data_type).shape
