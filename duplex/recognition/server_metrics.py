"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from duplex.recognition.batcher import Batcher
from duplex.system.process_pool import WorkerProcess

PATHS = ("/", "/predict", "/labels", "/health", "/metrics", "/docs", "/openapi.json")  # all others count as "other"


class ServerMetrics(Collector):
    """Prometheus metrics of one server, such as numbers of requests and images, in a registry of its own."""

    def __init__(self, batcher: Batcher, workers: Sequence[WorkerProcess]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("duplex_requests", "Requests", ["path", "status"], registry=self.registry)
        self.seconds = Histogram("duplex_request_seconds", "Seconds per request", registry=self.registry)
        self.running = Gauge("duplex_requests_running", "Requests in progress", registry=self.registry)
        self.bad_images = Counter("duplex_bad_images", "Uploaded files that are not images", registry=self.registry)
        self._batcher = batcher
        self._workers = workers
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        restarts = sum(worker.restarts for worker in self._workers)
        memory = _resident_bytes("self") + sum(_resident_bytes(worker.pid) for worker in self._workers)
        yield CounterMetricFamily("duplex_images", "Images answered", self._batcher.images)
        yield CounterMetricFamily("duplex_batches", "Batches of images", self._batcher.batches)
        yield CounterMetricFamily("duplex_worker_restarts", "Worker processes that were replaced", restarts)
        yield GaugeMetricFamily("duplex_resident_bytes", "Memory of the server and its workers", memory)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def count_requests(self, app: Any) -> Any:
        """Wrap an ASGI application so that each request and its status are counted."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = 500

            async def noting_status(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                with self.seconds.time(), self.running.track_inprogress():
                    await app(scope, receive, noting_status)
            finally:
                self.requests.labels(scope["path"] if scope["path"] in PATHS else "other", status).inc()

        return counted


def _resident_bytes(process: int | str) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:  # not on this system
        return 0
