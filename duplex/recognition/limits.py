"""Limits of the HTTP server on requests: size, number of images, and the time in which a request must arrive."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

Message = MutableMapping[str, Any]
TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Limits:
    """The HTTP server's limits on each request (bytes, images, seconds, …), and on the number of connections."""

    bytes: int = 32 * 2**20
    pixels: int = 40_000_000  # per image
    images: int = 32
    seconds: float = 20.0  # for a request to arrive, and for its answer
    connections: int = 256


def receive_limited(request: Request, limit: int) -> Callable[[], Awaitable[Message]]:
    """Return an ASGI function `receive` for a request that raises HTTP error 413 if its body exceeds `limit` bytes."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdigit() and int(length) > limit else 0

    async def receive() -> Message:
        nonlocal size
        message: Message = await request.receive() if size <= limit else {}
        size += len(message.get("body", b""))
        if size > limit:  # uvicorn reads and drops the rest
            raise HTTPException(413, f"the request is larger than {limit} bytes")
        return message

    return receive


class RareWarnings(logging.Filter):
    """Log filter that drops repetitions of a warning within some seconds, as a client could cause thousands of them."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}  # text of a warning -> when it passed

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = str(record.msg), time.monotonic()
        if record.levelno > logging.WARNING:
            return True
        if now - self._last.get(text, -math.inf) < self._seconds:
            return False
        self._last[text] = now
        return True


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with a time limit on each request's arrival.

    A request that is incomplete `seconds` after its connection or its first byte gets status 408, and the connection
    is closed. uvicorn itself closes connections that stay idle after a response.
    """

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
            self._timer = self.loop.call_later(seconds, self._time_out)

        def handle_events(self) -> None:
            super().handle_events()
            state = self.conn.their_state
            if state is not h11.SEND_BODY and not (state is h11.IDLE and self.conn.trailing_data[0]):
                self._timer.cancel()
            elif self._timer.cancelled():
                self._timer = self.loop.call_later(seconds, self._time_out)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def _time_out(self) -> None:
            if self.transport.is_closing():
                return
            if self.conn.their_state is h11.IDLE or not self.cycle.response_started:
                self.transport.write(TIMEOUT)
            self.transport.close()

    return TimedProtocol


class _JoinedWrites:
    """An asyncio transport that sends a response's head and body together, so that the client wakes only once."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def _flush(self) -> None:
        if self._pending:
            self._transport.write(b"".join(self._pending))
            self._pending.clear()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
