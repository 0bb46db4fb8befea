"""The Python clients of a running stack: the public import path of `Client` and `AsyncClient`."""

from splitpoint.client.answers import Completion, Tokens
from splitpoint.client.clients import (
    INFERENCE_SERVICE,
    AsyncClient,
    AsyncGeneration,
    Client,
    Generation,
)
from splitpoint.selection import Selection
from splitpoint.speculation import DraftMethod

__all__ = [
    "INFERENCE_SERVICE",
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "Completion",
    "DraftMethod",
    "Generation",
    "Selection",
    "Tokens",
]
