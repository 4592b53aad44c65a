"""What a server takes from strangers: how much, for how long, and how many at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from duplex.recognition.counters import Counters

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
DRAINED = 1 << 28  # bytes of a body that is refused that are still read, so that the refusal is read too
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Limits:
    body: int = 32 * 2**20  # bytes of a request
    pixels: int = 40_000_000  # of a picture
    pictures: int = 32  # of a request
    seconds: float = 20.0  # for a request to arrive, and for its answer
    connections: int = 256


class Refused(Exception):
    """A request that is not taken: status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Gate:
    """Around an application: bodies that are too large or too slow are refused while they arrive, every answer is
    counted and carries `headers`."""

    def __init__(self, app: Any, limits: Limits, counters: Counters, headers: Mapping[str, str]) -> None:
        self.app, self.limits, self.counters = app, limits, counters
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        inlet, began, status = Inlet(receive, self.limits), time.monotonic(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *self.headers]}
                if status >= 400 and not inlet.done:
                    await inlet.drain()
            await send(message)

        self.counters.running += 1
        try:
            declared = dict(scope["headers"]).get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > self.limits.body:
                await refuse(sending, inlet.too_large())
            else:
                await self.app(scope, inlet.receive, sending)
        finally:
            self.counters.running -= 1
            self.counters.note(scope["path"], status, time.monotonic() - began)


class Inlet:
    """Counts a body's bytes and its time."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._end = asyncio.get_running_loop().time() + limits.seconds
        self._read, self.done = 0, False

    async def receive(self) -> Message:
        if self.done:
            return await self._receive()
        left = self._end - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.001))
        except asyncio.TimeoutError:
            self.done = True
            raise Refused(408, f"the request took longer than {self._limits.seconds:g} s to arrive") from None
        self._read += len(message.get("body", b""))
        self.done = not message.get("more_body", False)
        if self._read > self._limits.body:
            raise self.too_large()
        return message

    def too_large(self) -> Refused:
        return Refused(413, f"the request is larger than {self._limits.body} bytes")

    async def drain(self) -> None:
        """Read on and forget, within reason."""
        while not self.done and self._read < DRAINED and asyncio.get_running_loop().time() < self._end:
            try:
                message = await asyncio.wait_for(self._receive(), 1.0)
            except asyncio.TimeoutError:
                return
            self._read += len(message.get("body", b""))
            self.done = message["type"] != "http.request" or not message.get("more_body", False)


async def refuse(send: Send, error: Refused) -> None:
    body = json.dumps({"error": error.sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Joined:
    """A transport on which an answer's head and body leave together: each write by itself would wake the client."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._held = transport, loop, list[bytes]()

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def _flush(self) -> None:
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def protocol(seconds: float) -> type[H11Protocol]:
    """HTTP whose heads have to arrive in time, a connection's first and every later one: one that says nothing whole is
    told so and closed. One that says nothing at all after an answer is uvicorn's own to close."""

    class Punctual(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(Joined(transport, self.loop))  # type: ignore[arg-type]
            self._late = self.loop.call_later(seconds, self._too_late)

        def handle_events(self) -> None:
            super().handle_events()
            begun, _ = self.conn.trailing_data
            if not self._between():
                self._late.cancel()
            elif begun and self._late.cancelled():
                self._late = self.loop.call_later(seconds, self._too_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            super().connection_lost(exc)

        def _between(self) -> bool:
            """No request is under way."""
            return self.cycle is None or self.cycle.response_complete

        def _too_late(self) -> None:
            if self._between() and not self.transport.is_closing():
                self.transport.write(LATE)
                self.transport.close()

    return Punctual
