"""Measure the server: python -m benchmarks.serving [--json] [--model RUN]

A server handles 1,000 requests of 16 clients, which are sockets of one process (benchmarks/clients.py) on the same
cores, in alternation with one client that sends 200 of them one after the other. `predict_seconds` is `duplex predict`
for one image. `steps_ms` is processor time per image of each step of a request, in one thread; `vit_b_32` is an encoder
of that size with random weights. `--steps` measures these alone.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.requests import Request

from benchmarks.clients import BOUNDARY, form
from benchmarks.measure import all_rounds, alternate, emit, median_ratio, options, say, write_pictures
from duplex import Recognizer
from duplex.data.images import decode_image
from duplex.encoders.libraries import open_clip
from duplex.recognition.limits import Limits

REQUESTS, CLIENTS, ROUNDS = 1000, 16, 3
DUPLEX = (sys.executable, "-c", "from duplex.cli import main; main()")
TOGETHER = 16  # pictures encoded at once


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="artifacts/shapes/duplex/0")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pictures = write_pictures(Path(name), 64 if given.steps else REQUESTS, (320, 240), coarse=16)
        record: dict[str, Any] = {"steps_ms": steps(given.model, pictures[:64])}
        if not given.steps:
            record |= {**served(given.model, pictures), "predict_seconds": predicted(given.model, pictures[0])}
    emit(record) if given.json else say(str(record))


def served(model: str, pictures: list[Path]) -> dict[str, Any]:
    """Requests per second of all clients, alternating with one client, and their latencies."""
    rates: dict[str, list[float]] = {"requests": [], "one_client": []}
    times: list[float] = []
    errors = 0
    server, port = start(model)
    try:
        fire(port, pictures[:200])
        for _ in range(ROUNDS):
            seconds, latencies, bad = fire(port, pictures)
            rates["requests"].append(len(pictures) / seconds)
            seconds, _, bad_alone = fire(port, pictures[:200], clients=1)
            rates["one_client"].append(len(pictures[:200]) / seconds)
            times += latencies
            errors += bad + bad_alone
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return {
        "requests": REQUESTS * ROUNDS,
        "clients": CLIENTS,
        "errors": errors,
        **{f"{way}_per_second": round(statistics.median(found), 1) for way, found in rates.items()},
        "times_one_client": round(median_ratio(rates["requests"], rates["one_client"]), 2),
        "p50_ms": round(1000 * float(np.percentile(times, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(times, 95)), 1),
    }


def predicted(model: str, picture: Path) -> float:
    """The median seconds of `duplex predict` for one image, from the start of the process to its end."""
    command = [*DUPLEX, "predict", str(picture), "--model", model]
    run = partial(subprocess.run, command, check=True, capture_output=True)
    return round(alternate({"predict": run}, rounds=ROUNDS, warm=0)["predict"], 2)


def steps(model: str, pictures: list[Path]) -> dict[str, float]:
    """Measure decoding, transform and parsing of the form; encoding and scoring one image and sixteen."""
    torch.set_num_threads(1)
    recognizer = Recognizer.load(model, exact=False, device="cpu")
    candidates, files, large = recognizer.candidates(), [path.read_bytes() for path in pictures], Limits().pixels
    opened = [decode_image(io.BytesIO(data), large) for data in files]
    pixels = [recognizer.encoder.image_transform(picture) for picture in opened]
    inputs = {size: [recognizer.encode(part) for part in parts(pixels, size)] for size in (1, TOGETHER)}
    tower = open_clip.create_model("ViT-B-32").visual.eval()
    blank = {size: torch.zeros(size, 3, 224, 224) for size in (1, TOGETHER)}
    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "decode": (len(files), lambda: [decode_image(io.BytesIO(data), large) for data in files]),
        "transform": (len(files), lambda: [recognizer.encoder.image_transform(picture) for picture in opened]),
        "form": (len(files), lambda: asyncio.run(parse([form(data) for data in files]))),
    }
    for size in (1, TOGETHER):
        work |= {
            f"encode_{size}": (len(files), lambda k=size: [recognizer.encode(part) for part in parts(pixels, k)]),
            f"answer_{size}": (len(files), lambda k=size: [list(candidates.answers(one, 3)) for one in inputs[k]]),
            f"vit_b_32_encode_{size}": (size, lambda k=size: tower(blank[k])),
        }
    with torch.no_grad():
        times = all_rounds({name: run for name, (_, run) in work.items()}, rounds=3, warm=1, clock=time.process_time)
        found = {name: round(1000 * min(times[name]) / count, 3) for name, (count, _) in work.items()}
    return found


def parts(values: list[Any], size: int) -> list[list[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


async def parse(bodies: list[bytes]) -> None:
    """Take forms apart as the server does."""
    headers = [(b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())]
    for body in bodies:

        async def receive(body: bytes = body) -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async with Request({"type": "http", "headers": headers}, receive).form() as taken:
            assert len(await taken["file"].read()) > 0


def start(model: str) -> tuple[subprocess.Popen[str], int]:
    command = [*DUPLEX, "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    while not (line := server.stderr.readline()).startswith("http://"):
        assert line, "the server did not start"
    return server, int(line.strip().strip("/").rsplit(":", 1)[1])


def fire(port: int, pictures: list[Path], clients: int = CLIENTS) -> tuple[float, list[float], int]:
    """Wall-clock seconds, the seconds of each request, and the number of failures."""
    given = "\n".join(map(str, pictures))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.clients", str(port), str(clients)],
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    return said["seconds"], said["latencies"], said["bad"]


if __name__ == "__main__":
    main()
