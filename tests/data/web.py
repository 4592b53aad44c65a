"""A web server on 127.0.0.1 that can hang up in the middle of a file."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

BODY = np.random.default_rng(0).bytes(1 << 20)


class Server(ThreadingHTTPServer):
    """Serves `files`; each request sends at most `cut` bytes and then hangs up."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file.zip": BODY}
        self.cut: int | None = None
        self.ranges = True
        self.asked: list[str | None] = []
        self.sent = 0

    def url(self, path: str = "/file.zip") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body, asked = self.server.files.get(self.path), self.headers.get("Range")
        self.server.asked.append(asked)
        if body is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(body) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:] if self.server.cut is None else body[start : start + self.server.cut]
        self.server.sent += len(part)
        self.wfile.write(part)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()
