"""Simulate clients of a server, each with one open request: python -m benchmarks.clients PORT N

Reads paths of images from stdin, one per line. Prints JSON: total seconds, seconds per request, number of failures. All
clients are sockets of one thread in one process, because they share the cores with the server that is measured.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BOUNDARY = "between"


def form(data: bytes) -> bytes:
    """An image as the multipart form that a browser posts."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'.encode()
    return head + data + f"\r\n--{BOUNDARY}--\r\n".encode()


def request(body: bytes) -> bytes:
    return (
        "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Client:
    """A connection to the server."""

    def __init__(self, port: int, requests: Iterator[bytes]) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests, self._said, self._began = requests, b"", 0.0

    def ask(self) -> bool:
        """Send the next request; False if there is none."""
        data = next(self._requests, None)
        if data is None:
            self.line.close()
            return False
        self._said, self._began = b"", time.perf_counter()
        self.line.sendall(data)
        return True

    def hear(self) -> tuple[float, bool] | None:
        """Receive data; the result is seconds and success once the response is complete."""
        part = self.line.recv(1 << 16)
        self._said += part
        head, end, body = self._said.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if part and (not end or len(body) < size):
            return None
        good = self._said.startswith(b"HTTP/1.1 200 ") and b'"top"' in body and len(body) == size
        return time.perf_counter() - self._began, good


def fire(port: int, clients: int, requests: list[bytes]) -> dict[str, object]:
    todo, found, live = iter(requests), list[tuple[float, bool]](), 0
    with selectors.DefaultSelector() as selector:
        began = time.perf_counter()
        for _ in range(min(clients, len(requests))):
            client = Client(port, todo)
            selector.register(client.line, selectors.EVENT_READ, client)
            live += client.ask()
        while live:
            for key, _ in selector.select(120):
                if (heard := key.data.hear()) is not None:
                    found.append(heard)
                    if not heard[1] or not key.data.ask():
                        selector.unregister(key.fileobj)
                        live -= 1
        seconds = time.perf_counter() - began
    bad = len(requests) - sum(good for _, good in found)
    return {"seconds": seconds, "latencies": [seconds for seconds, _ in found], "bad": bad}


if __name__ == "__main__":
    pictures = [Path(line).read_bytes() for line in sys.stdin.read().split("\n")]
    print(json.dumps(fire(int(sys.argv[1]), int(sys.argv[2]), [request(form(data)) for data in pictures])))
