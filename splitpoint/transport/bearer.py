"""Channels that present a token with every call.

Thin wrappers instead of gRPC's interceptors: those replace a call by an object
that cancels, reads and times out differently. Knows only where metadata goes.
"""

from __future__ import annotations

from typing import Any

import grpc


class _Method:
    """A multicallable with one more entry in its metadata."""

    def __init__(self, inner: Any, entry: tuple[str, str]) -> None:
        self._inner = inner
        self._entry = entry

    def __call__(self, request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return self._inner(request, metadata=self._with_token(metadata), **options)

    def with_call(self, request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return self._inner.with_call(request, metadata=self._with_token(metadata), **options)

    def future(self, request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return self._inner.future(request, metadata=self._with_token(metadata), **options)

    def _with_token(self, metadata: Any) -> tuple[Any, ...]:
        return (*(metadata or ()), self._entry)


class _AsyncMethod(_Method):
    """The asyncio one may be called without a request: then it is written later."""

    def __call__(self, request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
        merged = self._with_token(metadata)
        if request is None:
            return self._inner(metadata=merged, **options)
        return self._inner(request, metadata=merged, **options)


class AsyncTokenChannel(grpc.aio.Channel):
    """An asyncio channel whose every call carries the metadata entry."""

    def __init__(self, channel: grpc.aio.Channel, entry: tuple[str, str]) -> None:
        self._channel = channel
        self._entry = entry

    async def __aenter__(self) -> AsyncTokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._channel.__aexit__(*exception)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *place: Any, **options: Any) -> Any:
        return _AsyncMethod(self._channel.unary_unary(*place, **options), self._entry)

    def unary_stream(self, *place: Any, **options: Any) -> Any:
        return _AsyncMethod(self._channel.unary_stream(*place, **options), self._entry)

    def stream_unary(self, *place: Any, **options: Any) -> Any:
        return _AsyncMethod(self._channel.stream_unary(*place, **options), self._entry)

    def stream_stream(self, *place: Any, **options: Any) -> Any:
        return _AsyncMethod(self._channel.stream_stream(*place, **options), self._entry)


class TokenChannel(grpc.Channel):
    """The blocking one."""

    def __init__(self, channel: grpc.Channel, entry: tuple[str, str]) -> None:
        self._channel = channel
        self._entry = entry

    def __enter__(self) -> TokenChannel:
        self._channel.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._channel.__exit__(*exception)

    def close(self) -> None:
        self._channel.close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def unary_unary(self, *place: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_unary(*place, **options), self._entry)

    def unary_stream(self, *place: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_stream(*place, **options), self._entry)

    def stream_unary(self, *place: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_unary(*place, **options), self._entry)

    def stream_stream(self, *place: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_stream(*place, **options), self._entry)
