"""Finds checkpoint folders in Hugging Face form, their weight files and their fingerprints."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.files import is_there, read_bytes, read_object
from splitpoint.checkpoint.tensors import read_header
from splitpoint.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable
from splitpoint.shapes import WeightFormat

BUNDLED_MODEL = "stdlib-llama"
# Reason of the error for a text that is neither a folder nor a name on the hub.
NO_SUCH_MODEL = "NO_SUCH_MODEL"
INDEX_FILE = "model.safetensors.index.json"

# What a tokenizer is read from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# Configuration, tokenizer, chat templates and safetensors; no pickles, no other formats.
_WANTED = [
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX_FILE,
    "*.safetensors",
]
# Other folders' weights, and the same weights under another project's names.
_UNWANTED = ["*/*.safetensors", "consolidated*"]
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_SAMPLE_COUNT = 64
_SAMPLE_BYTES = 4096


def resolve_model(text: str | None, *, download: bool = True) -> Path:
    """Return the checkpoint folder that `text` names.

    Args:
        text: a folder, or a name on the Hugging Face hub with an optional
            revision (`owner/name`, `owner/name@revision`), or None or its
            name for the bundled model.
        download: fetch a hub name that is not in the local cache (progress
            on stderr); False: search only the cache.

    Raises InvalidArgument (no such folder, no safetensors), NotFound (the hub
    does not know the name), PermissionDenied (gated), Unavailable (not cached
    and the hub cannot be reached).
    """
    if text is None:
        return _bundled_folder()
    folder = Path(text).expanduser()
    if folder.is_dir():
        read_config(folder)
        return folder.resolve()
    if folder.exists():
        raise InvalidArgument(f"{text} is a file, not a checkpoint folder", field="model")
    if text == BUNDLED_MODEL:  # as `status` and the API call it
        return _bundled_folder()
    match = _HUB_NAME.fullmatch(text)
    if match is None or text.startswith(".") or (folder.parent.name and folder.parent.is_dir()):
        raise InvalidArgument(f"{text}: no such folder", field="model")
    cached = _from_hub(match["name"], match["revision"], local_only=True)
    if (
        cached is not None
        and (cached / "config.json").is_file()
        and (not download or _is_complete(cached))
    ):
        return cached
    if "/" not in match["name"]:
        # Few models of the hub have such names; a typing error is far more likely.
        raise InvalidArgument(
            f"{text}: no such folder (models of the Hugging Face hub are named OWNER/NAME)",
            field="model",
            reason=NO_SUCH_MODEL,
        )
    if not download:
        raise NotFound(f"{text} is neither a folder nor a model that was downloaded before")
    fetched = _from_hub(match["name"], match["revision"], local_only=False)
    if fetched is None:
        raise Unavailable(
            f"{text} is neither a folder nor in the local cache, and the Hugging Face hub "
            "cannot be reached (offline?)"
        )
    read_config(fetched)
    weight_files(fetched)
    return fetched


def _bundled_folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bundled" / BUNDLED_MODEL, package.parent / "models" / BUNDLED_MODEL):
        if (folder / "config.json").is_file():
            return folder
    raise NotFound(f"the bundled model {BUNDLED_MODEL} is missing from this installation")


def _from_hub(name: str, revision: str | None, *, local_only: bool) -> Path | None:
    """Return the snapshot's folder; None if it is not cached and cannot be fetched."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                local_files_only=local_only,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except errors.GatedRepoError as error:
        raise PermissionDenied(
            f"{name} is gated: accept its licence on the hub and log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFound(f"the Hugging Face hub has no model {name!r} (or it is private)") from error
    except errors.HFValidationError as error:
        raise InvalidArgument(f"{name!r} is not a model name: {error}", field="model") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        return None
    except Exception as error:
        # The hub client's HTTP exceptions differ between versions; a full disk ends here, too.
        raise Unavailable(f"downloading {name} failed: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint in name order: those of the index, if any.

    Raises InvalidArgument if there are none, or one of them is missing.
    """
    index = folder / INDEX_FILE
    if is_there(index):
        names = indexed_files(index)
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(
            path.name
            for path in folder.glob("*.safetensors")
            if not path.name.startswith("consolidated")
        )
    if not names:
        raise InvalidArgument(
            f"{folder} has no safetensors file (pickled .bin weights are never loaded)",
            field="model",
        )
    missing = [name for name in names if not is_there(folder / name)]
    if missing:
        raise InvalidArgument(f"{folder} lacks {', '.join(missing[:5])}", field="model")
    return [folder / name for name in names]


def indexed_files(index: Path) -> list[str]:
    """Return the file names in an index of safetensors. Raises InvalidArgument."""
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict):
        raise InvalidArgument(f"{index} is no safetensors index", field="model")
    for name in named.values():
        if not _is_file_name(name):
            shown = repr(name)[:64]
            what = f"{index} names {shown}, which is no file of its folder"
            raise InvalidArgument(what, field="model")
    return sorted(set(named.values()))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def _is_complete(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except InvalidArgument:
        return False


def model_fingerprint(folder: Path, weights: WeightFormat = WeightFormat.NATIVE) -> bytes:
    """Return 32 bytes that differ if the weights or their format do, without reading all of them.

    SHA-256 over config.json and, of every safetensors file, its name, size, header and 64
    evenly spread samples of 4 KiB. So two checkpoints of one shape never share chunks. A
    change of unsampled bytes only (an edited weight or two) is not detected.
    """
    read_config(folder)
    digest = hashlib.sha256(b"splitpoint model v1\0")
    _update(digest, read_bytes(folder / "config.json"))
    for path in weight_files(folder):
        found = read_header(path, floats_only=False)
        size = found.file_bytes
        _update(digest, path.name.encode())
        _update(digest, size.to_bytes(8, "little"))
        with path.open("rb") as file:
            _update(digest, found.header)
            first = 8 + len(found.header)
            last = max(first, size - _SAMPLE_BYTES)
            for sample in range(_SAMPLE_COUNT):
                file.seek(first + (last - first) * sample // (_SAMPLE_COUNT - 1))
                _update(digest, file.read(_SAMPLE_BYTES))
    if weights is not WeightFormat.NATIVE:
        _update(digest, f"weights {weights.value} v1".encode())
    return digest.digest()


def _update(digest: Any, part: bytes) -> None:
    # With lengths, moving bytes between parts changes the digest.
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else config.json; may be empty.

    Raises InvalidArgument for anything but an id or a list of ids.
    """
    generation = folder / "generation_config.json"
    found = read_object(generation).get("eos_token_id") if is_there(generation) else None
    if found is None:
        found = read_config(folder).get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise InvalidArgument(f"{folder}: eos_token_id {found!r} is not a token id", field="model")
    return tuple(dict.fromkeys(ids))
