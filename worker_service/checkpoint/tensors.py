"""Reads the tensors of a checkpoint from safetensors files.

Tensors are read one by one, straight to their type and device, so there is never a
second copy of the whole model. Pickled weights can run code and are refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from splitpoint.checkpoint.decoder import DecoderConfig, Norm
from splitpoint.checkpoint.files import is_there
from splitpoint.checkpoint.resolve import indexed_files
from splitpoint.progress import Counter, Ticker
from worker_service.checkpoint.names import HEAD_NAME, NAMES, expected_tensors
from worker_service.checkpoint.quantized import PARTS, Codes, bad_checkpoint, read_codes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEAD = f"{HEAD_NAME}.weight"
# Unused buffers of older checkpoints.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
# Parts for images, in a checkpoint whose text decoder is served.
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.")
# Of a cache in a smaller format, which is not used.
_KV_SCALES = (".k_scale", ".v_scale")
_LISTED = 5  # names shown in an error
# By safetensors' names of the types.
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_STORED_BYTES = {**_FLOAT_BYTES, "I64": 8, "I32": 4}


class TensorSource(Protocol):
    """Returns tensors by their checkpoint names, in the decoder's type, on its device."""

    def get(self, name: str) -> torch.Tensor: ...

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor to `target`, which has its shape, on any device."""


class RandomTensors:
    """Random weights, for measurements and tests without a file.

    Matrices and biases are N(0, 0.02^2), norms scale by 1. A tensor depends only on the
    seed and its place in `expected_tensors`.
    """

    def __init__(
        self, config: DecoderConfig, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shapes = expected_tensors(config)
        self._places = {name: place for place, name in enumerate(self._shapes)}
        self._norm = config.norm
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def get(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            if self._norm is Norm.RMS_PLUS_ONE:
                return torch.zeros(shape, dtype=self._dtype, device=self._device)
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed * 1_000_003 + self._places[name])
        drawn = torch.empty(shape, dtype=torch.float32, device=self._device)
        return drawn.normal_(0.0, 0.02, generator=generator).to(self._dtype)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.get(name))


class Checkpoint:
    """A folder of safetensors files, checked against a config when it is opened.

    The files are mapped until the context manager exits; tensors that `get` returned are
    copies and stay valid. `tickers` receive the bytes read. Raises InvalidArgument with
    the names of tensors that are missing, unknown or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        tickers: Sequence[Ticker] = (),
    ) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._config = config
        self._files = ExitStack()
        self._holders: dict[str, tuple[str, Any]] = {}
        self._expected = expected_tensors(config)
        try:
            self._open_files()
            total = self._check()
        except BaseException:
            self._files.close()
            raise
        self._read = Counter("loading", total, tickers)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._holders.clear()

    def get(self, name: str) -> torch.Tensor:
        """Return a copy of the tensor in the decoder's type, on its device."""
        # Never a view of the mapped file, which may be replaced later.
        return self._plain(name).to(device=self._device, dtype=self._dtype, copy=True)

    def matrix(self, name: str) -> torch.Tensor | Codes:
        """Return the same, or the codes that the checkpoint has of it."""
        found = self._found(name)
        if isinstance(found, Codes):
            return found
        return found.to(device=self._device, dtype=self._dtype, copy=True)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor from the file to `target`, without another copy."""
        target.copy_(self._plain(name))

    def _plain(self, name: str) -> torch.Tensor:
        found = self._found(name)
        return found.dequantized() if isinstance(found, Codes) else found

    def _found(self, name: str) -> torch.Tensor | Codes:
        how, module = self._config.quantization, name.removesuffix(".weight")
        if how is not None:
            codes = read_codes(how, module, self._holders.__contains__, self._stored)
            if codes is not None:
                _check_shape(name, codes.shape, self._expected[name])
                return codes
        return self._stored(name)

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._holders:
            raise bad_checkpoint(f"{self._folder} lacks {name}")
        stored_name, file = self._holders[name]
        stored: torch.Tensor = file.get_tensor(stored_name)
        self._read.add(stored.nbytes)
        return stored

    def _open_files(self) -> None:
        root = NAMES[self._config.shape.family].root
        for name, file in stored_tensors(self._folder, self._files):
            if name.removeprefix("model.").startswith(_IMAGE_PREFIXES):
                continue
            full = _full_name(name, root)
            if full in self._holders:
                raise bad_checkpoint(f"{name} is in more than one file of {self._folder}")
            self._holders[full] = (name, file)

    def _check(self) -> int:
        """Check names, shapes and types; return the stored bytes of the expected tensors."""
        total, expected = 0, self._expected
        parts = {} if self._config.quantization is None else self._parts()
        missing = [name for name in expected if name not in self._holders and name not in parts]
        known = {*expected, *(part for each in parts.values() for part in each)}
        unknown = [
            name
            for name in self._holders
            if name not in known
            and not name.endswith(_IGNORED_SUFFIXES)
            and name != _HEAD
            and not self._is_unused(name, parts)
        ]
        if missing:
            raise bad_checkpoint(f"{self._folder} lacks {_listed(missing)}")
        if unknown:
            raise bad_checkpoint(
                f"{self._folder} holds tensors this model has not: {_listed(unknown)}"
            )
        for name, shape in expected.items():
            if name in parts:
                total += sum(self._bytes_of(each) for each in parts[name])
                continue
            stored_name, file = self._holders[name]
            stored = file.get_slice(stored_name)
            _check_shape(stored_name, stored.get_shape(), shape)
            if stored.get_dtype() not in _FLOAT_BYTES:
                raise bad_checkpoint(
                    f"{stored_name} is stored as {stored.get_dtype()}, not as floats"
                )
            total += prod(shape) * _FLOAT_BYTES[stored.get_dtype()]
        if _HEAD in self._holders and _HEAD not in expected:
            self._check_tied_head()
        return total

    def _parts(self) -> dict[str, list[str]]:
        """Return what is stored of each matrix that is quantised."""
        found = {}
        for name in self._expected:
            module = name.removesuffix("weight")
            parts = [module + each for each in PARTS if module + each in self._holders]
            if name.endswith(".weight") and parts:
                found[name] = [*parts, *([name] if name in self._holders else [])]
        return found

    def _is_unused(self, name: str, quantized: Container[str]) -> bool:
        """Return whether quantisers store this of any model: scales of K and V, zeros as biases."""
        if self._config.quantization is None or not name.endswith((".bias", *_KV_SCALES)):
            return False
        if name.endswith(_KV_SCALES):
            return True
        stored_name, file = self._holders[name]
        is_beside = f"{name.removesuffix('bias')}weight" in quantized
        return is_beside and not file.get_tensor(stored_name).any()

    def _bytes_of(self, name: str) -> int:
        stored_name, file = self._holders[name]
        stored = file.get_slice(stored_name)
        size: int = prod(stored.get_shape())
        return size * _STORED_BYTES.get(stored.get_dtype(), 1)

    def _check_tied_head(self) -> None:
        """Check that a tied head that is stored again equals the embeddings."""
        names = NAMES[self._config.shape.family]
        head_name, head_file = self._holders[_HEAD]
        name, file = self._holders[f"{names.root}{names.embedding}.weight"]
        if not torch.equal(head_file.get_tensor(head_name), file.get_tensor(name)):
            raise bad_checkpoint(
                "tie_word_embeddings is true, but lm_head.weight is not the embeddings"
            )


def stored_tensors(folder: Path, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and its file, which is open until `files` closes."""
    for path in weight_files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise bad_checkpoint(f"{path} cannot be read: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder, sharded or not, in order.

    Raises InvalidArgument if there are none, or a shard is missing.
    """
    index = folder / _INDEX
    if is_there(index):
        shards = indexed_files(index)
        for shard in shards:
            if not is_there(folder / shard):
                raise bad_checkpoint(f"{folder} lacks the shard {shard}")
        return [folder / shard for shard in shards]
    single = folder / _SINGLE
    if is_there(single):
        return [single]
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if pickled:
        raise bad_checkpoint(
            f"{folder} holds only pickled weights ({_listed(pickled)}), which can run code and "
            "are never loaded: convert them to safetensors (in transformers: "
            "from_pretrained(...).save_pretrained(folder))"
        )
    raise bad_checkpoint(f"{folder} holds no model.safetensors")


def _full_name(name: str, root: str) -> str:
    """Add the leading `model.`, which checkpoints of a bare model lack.

    A model that sees images has its text decoder below `language_model`.
    """
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    if name == _HEAD or name.startswith(root):
        return name
    bare = root.removeprefix("model.")
    if name.startswith(bare) and (bare or name.startswith(("layers.", "embed_tokens.", "norm."))):
        return f"model.{name}"
    return name


def _check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if list(found) != list(wanted):
        raise bad_checkpoint(f"{name} has shape {list(found)}, the config asks for {list(wanted)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
