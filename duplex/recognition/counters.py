"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PATHS = ("/", "/predict", "/labels", "/health", "/metrics", "/docs", "/openapi.json")
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class Counters:
    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.buckets, self.seconds, self.requests = [0] * len(BOUNDS), 0.0, 0
        self.bad_pictures = self.running = 0

    def note(self, path: str, status: int, seconds: float) -> None:
        self.answers[path if path in PATHS else "other", status] += 1
        self.seconds, self.requests = self.seconds + seconds, self.requests + 1
        for place, bound in enumerate(BOUNDS):
            self.buckets[place] += seconds <= bound

    def text(self, pictures: int, batches: int, restarts: int, held: int) -> str:
        lines = ["# TYPE duplex_requests_total counter"]
        for (path, status), count in sorted(self.answers.items()):
            lines.append(f'duplex_requests_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE duplex_request_seconds histogram")
        for bound, count in zip(BOUNDS, self.buckets, strict=True):
            lines.append(f'duplex_request_seconds_bucket{{le="{bound}"}} {count}')
        lines.append(f'duplex_request_seconds_bucket{{le="+Inf"}} {self.requests}')
        lines += [f"duplex_request_seconds_sum {self.seconds:.6f}", f"duplex_request_seconds_count {self.requests}"]
        plain = {
            "duplex_pictures_total counter": pictures,
            "duplex_batches_total counter": batches,
            "duplex_bad_pictures_total counter": self.bad_pictures,
            "duplex_requests_running gauge": self.running,
            "duplex_worker_restarts_total counter": restarts,
            "duplex_resident_bytes gauge": held,
        }
        for name, value in plain.items():
            lines += [f"# TYPE {name}", f"{name.split()[0]} {value}"]
        return "\n".join(lines) + "\n"


def resident(process: int | str) -> int:
    """Bytes of memory that a process holds; 0 where the system does not say, or it has just ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:
        return 0
