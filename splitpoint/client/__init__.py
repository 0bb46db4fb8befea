"""The Python clients of a running stack: the public import path of `Client` and `AsyncClient`."""

from splitpoint.client.answers import Completion, Tokens
from splitpoint.client.clients import (
    INFERENCE_SERVICE,
    AsyncClient,
    AsyncGeneration,
    Client,
    Generation,
)

__all__ = [
    "INFERENCE_SERVICE",
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "Completion",
    "Generation",
    "Tokens",
]
