"""A server in its own process, and clients that send raw bytes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from pathlib import Path
from types import TracebackType

from tests.subprocesses import start_duplex

BOUNDARY = "between"


class RunningServer:
    """`with RunningServer(run, folder, "--seconds", "2") as server:`"""

    def __init__(self, run: Path, folder: Path, *words: str) -> None:
        self.process = start_duplex("serve", run, "--port", 0, *words, cwd=folder)
        line = self.process.stderr.readline()
        if line.startswith("share of new pairs"):
            line = self.process.stderr.readline()
        assert line.startswith("http://127.0.0.1:"), line + self.process.stderr.read()
        self.address = line.strip()
        self.port = int(self.address.rsplit(":", 1)[1].strip("/"))

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.process.stderr.close()

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (BrokenPipeError, ConnectionResetError):  # refused while the body was being sent
            return 0, b""
        finally:
            connection.close()

    def predict(self, *files: tuple[str, bytes], query: str = "") -> tuple[int, dict]:
        status, body = self.ask("POST", "/predict" + query, form(*files), form_headers())
        return status, json.loads(body)

    def raw(self, data: bytes, timeout: float = 30.0) -> int:
        """Send bytes and return the status of the response; 0 for none."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as line:
            try:
                line.sendall(data)
                reply = line.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                return 0
            return int(reply.split()[1]) if reply.startswith(b"HTTP/") else 0

    @property
    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    @property
    def resident(self) -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (self.process.pid, *self.workers)]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def metrics(self) -> dict[str, float]:
        status, text = self.ask("GET", "/metrics")
        assert status == 200
        lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


def form(*files: tuple[str, bytes]) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'.encode()
        + b"Content-Type: application/octet-stream\r\n\r\n"
        + data
        + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def form_headers() -> dict[str, str]:
    return {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
