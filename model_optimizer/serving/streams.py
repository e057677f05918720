"""Answers over HTTP that end when the client leaves: nobody generates tokens that nobody reads."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientLeft(Exception):
    """The connection was closed before the answer was complete."""


async def unless_client_leaves(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return what `work` returns; cancel it when the client leaves, or when this is cancelled.

    Raises:
        ClientLeft: it left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator, which is closed however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], send_timeout_s: float):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # a stream has none
        self._events = events
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except (ClientLeft, TimeoutError):
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
