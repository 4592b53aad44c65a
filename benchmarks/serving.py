"""What serving costs: python -m benchmarks.serving [--json] [--model RUN]

A server in a process of its own answers 1,000 requests from 16 clients; beside it a loop answers the same pictures one
by one. Then `duplex predict` over 4,000 pictures against an extraction of the same ones; each pair takes turns.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import emit, memory, say

REQUESTS, CLIENTS, PICTURES, ROUNDS = 1000, 16, 4000, 3
BOUNDARY = "between"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="artifacts/shapes/duplex/0")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pictures = write_pictures(Path(name), PICTURES)
        record = {**served(given.model, pictures[:REQUESTS]), **predicted(given.model, Path(name), pictures)}
    emit(record) if given.json else say(str(record))


def write_pictures(folder: Path, count: int) -> list[Path]:
    """JPEG pictures of 320 x 240."""
    random, paths = np.random.default_rng(0), [folder / f"{index:05d}.jpg" for index in range(count)]
    for path in paths:
        coarse = Image.fromarray(random.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        coarse.resize((320, 240), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def served(model: str, pictures: list[Path]) -> dict[str, Any]:
    """Requests a second, in turns with a loop over single pictures."""
    one_by_one, rates, times, errors, growth = [], [], [], 0, 0
    server, port = start(model)
    try:
        bodies = [form(path.read_bytes()) for path in pictures]
        fire(port, bodies[:200])
        held = memory("VmRSS", f"/proc/{server.pid}/status")
        for _ in range(ROUNDS):
            seconds, latencies, bad = fire(port, bodies)
            rates.append(len(bodies) / seconds)
            times += latencies
            errors += bad
            one_by_one.append(loop(model, pictures[:200]))
            growth = max(growth, memory("VmHWM", f"/proc/{server.pid}/status") - held)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return {
        "requests": REQUESTS * ROUNDS,
        "clients": CLIENTS,
        "errors": errors,
        "requests_per_second": round(statistics.median(rates), 1),
        "one_by_one_per_second": round(statistics.median(one_by_one), 1),
        "times_one_by_one": round(statistics.median(a / b for a, b in zip(rates, one_by_one, strict=True)), 2),
        "p50_ms": round(1000 * float(np.percentile(times, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(times, 95)), 1),
        "peak_growth_mb": round(growth / 2**20, 1),
    }


def start(model: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", "from duplex.cli import main; main()", "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    while not (line := server.stderr.readline()).startswith("http://"):
        assert line, "the server did not start"
    return server, int(line.strip().strip("/").rsplit(":", 1)[1])


def form(data: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'.encode()
    return head + data + f"\r\n--{BOUNDARY}--\r\n".encode()


def fire(port: int, bodies: list[bytes]) -> tuple[float, list[float], int]:
    """Wall-clock seconds, each request's seconds, and how many were not answered well."""

    def client(own: list[bytes]) -> list[tuple[float, bool]]:
        line, found = http.client.HTTPConnection("127.0.0.1", port, timeout=120), []
        for body in own:
            began = time.perf_counter()
            line.request("POST", "/predict", body, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
            reply = line.getresponse()
            good = reply.status == 200 and b'"top"' in reply.read()
            found.append((time.perf_counter() - began, good))
        line.close()
        return found

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = [one for many in clients.map(client, [bodies[k::CLIENTS] for k in range(CLIENTS)]) for one in many]
    return time.perf_counter() - began, [seconds for seconds, _ in found], sum(not good for _, good in found)


LOOP = """
import sys, time
from duplex import Recognizer
recognizer = Recognizer.load(sys.argv[1], exact=False)
paths = sys.stdin.read().split("\\n")
recognizer(paths[0])
began = time.perf_counter()
for path in paths:
    recognizer(path)
print(len(paths) / (time.perf_counter() - began))
"""


def loop(model: str, pictures: list[Path]) -> float:
    """Pictures a second, one after the other."""
    given = "\n".join(map(str, pictures))
    done = subprocess.run(
        [sys.executable, "-c", LOOP, model], input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


STREAM = """
import sys, time
from pathlib import Path
from duplex import Recognizer, load_encoder
from duplex.features.extraction import extract
model, folder, out = sys.argv[1:]
paths = sorted(Path(folder).glob("*.jpg"))
recognizer = Recognizer.load(model)
recognizer(paths[0])
def predict():
    assert sum(1 for _ in recognizer.stream(paths)) == len(paths)
def cache(turn):
    names = [path.name for path in paths]
    extract(names, Path(folder), Path(out) / f"{turn}.h5", recognizer.encoder, manifest_sha256="", progress=False)
for turn in range(3):
    began = time.perf_counter(); predict()
    middle = time.perf_counter(); cache(turn)
    print(middle - began, time.perf_counter() - middle)
"""


def predicted(model: str, folder: Path, pictures: list[Path]) -> dict[str, Any]:
    """The rate of `predict` as a share of the extraction's."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", STREAM, model, str(folder), out]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ})
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    return {
        "predicted": len(pictures),
        "predict_per_second": round(len(pictures) / statistics.median(pair[0] for pair in pairs), 1),
        "extract_per_second": round(len(pictures) / statistics.median(pair[1] for pair in pairs), 1),
        "share_of_extraction": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3),
    }


if __name__ == "__main__":
    main()
