"""Facts of the served models, remembered for some seconds: they change with the workers only."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway_service.upstream.schedulers import Upstream
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.tries import INFERENCE
from splitpoint.v1 import scheduler_pb2 as pb

_SECONDS = 5.0


class Models:
    """Models by name. Only names that a scheduler knows are remembered."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._found: dict[str, tuple[float, pb.Model]] = {}

    async def get(self, name: str, metadata: Metadata) -> pb.Model:
        """Return a model. Raises NotFound, and what a call raises.

        The generation that follows is what checks the client's key: facts of a model are no
        secret of its clients.
        """
        now = self._clock()
        found = self._found.get(name)
        if found is None or now - found[0] > _SECONDS:
            request = pb.GetModelRequest(model=name)
            answer = await self._upstream.call(INFERENCE, "GetModel", request, metadata)
            found = self._found[name] = (now, answer.model)
        return found[1]
