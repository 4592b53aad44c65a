"""Measure the server: python -m benchmarks.serving [--json] [--model RUN]

A server handles 1,000 requests of 16 clients, which are sockets of one process (benchmarks/clients.py) on the same
cores. Compared with it: a loop over single images without a server, one client that sends them one after the other, and
the server's workers with batches of eight but without HTTP or clients, an upper bound for any server on these cores
(`times_bound`). Then `duplex predict` over 4,000 images is compared with an extraction of the same images. What is
compared alternates. `steps_ms` is processor time per image of each step of a request, in one thread; `vit_b_32` is an
encoder of that size with random weights. `--steps` measures these alone.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.requests import Request

from benchmarks.clients import BOUNDARY, form
from benchmarks.measure import emit, median_ratio, memory, options, say, write_pictures
from duplex import Recognizer
from duplex.data.images import decode_image
from duplex.encoders.open_clip import open_clip
from duplex.recognition import Limits
from duplex.recognition.serve import ImageRequest, image_workers

REQUESTS, CLIENTS, PICTURES, ROUNDS = 1000, 16, 4000, 3
TOGETHER = 16  # pictures encoded at once


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="artifacts/shapes/duplex/0")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pictures = write_pictures(Path(name), 64 if given.steps else PICTURES, (320, 240), coarse=16)
        record: dict[str, Any] = {"steps_ms": steps(given.model, pictures[:64])}
        if not given.steps:
            record |= {**served(given.model, pictures[:REQUESTS]), **predicted(given.model, Path(name), pictures)}
    emit(record) if given.json else say(str(record))


def served(model: str, pictures: list[Path]) -> dict[str, Any]:
    """Requests per second, alternating with a loop over single images and with one client."""
    rates: dict[str, list[float]] = {"requests": [], "one_by_one": [], "workers": [], "one_client": []}
    times: list[float] = []
    errors = growth = 0
    server, port = start(model)
    try:
        fire(port, pictures[:200])
        held = family("VmRSS", server.pid)
        for _ in range(ROUNDS):
            seconds, latencies, bad = fire(port, pictures)
            rates["requests"].append(len(pictures) / seconds)
            rates["one_by_one"].append(loop(model, pictures[:200]))
            rates["workers"].append(without_http(model, pictures))
            seconds, _, bad_alone = fire(port, pictures[:200], clients=1)
            rates["one_client"].append(200 / seconds)
            times += latencies
            errors += bad + bad_alone
            growth = max(growth, family("VmHWM", server.pid) - held)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return {
        "requests": REQUESTS * ROUNDS,
        "clients": CLIENTS,
        "errors": errors,
        **{f"{way}_per_second": round(statistics.median(found), 1) for way, found in rates.items()},
        "times_one_by_one": round(median_ratio(rates["requests"], rates["one_by_one"]), 2),
        "times_bound": round(median_ratio(rates["workers"], rates["one_by_one"]), 2),
        "times_one_client": round(median_ratio(rates["requests"], rates["one_client"]), 2),
        "p50_ms": round(1000 * float(np.percentile(times, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(times, 95)), 1),
        "peak_growth_mb": round(growth / 2**20, 1),
    }


def steps(model: str, pictures: list[Path]) -> dict[str, float]:
    """Measure decoding, transform and parsing of the form; encoding and scoring one image and sixteen."""

    threads = torch.get_num_threads()
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
        found = {name: round(1000 * processor_seconds(run) / count, 3) for name, (count, run) in work.items()}
    torch.set_num_threads(threads)
    return found


def processor_seconds(work: Callable[[], Any]) -> float:
    """The shortest of three times, after one to warm up."""
    work()
    found = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


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
    command = [sys.executable, "-c", "from duplex.cli import main; main()", "serve", model, "--port", "0"]
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


def family(name: str, server: int) -> int:
    """The bytes of the server and its workers as `memory` counts them; shared pages count in each."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    return sum(memory(name, f"/proc/{pid}/status") for pid in (server, *children))


def without_http(model: str, pictures: list[Path]) -> float:
    """Images per second of two workers that always have batches of half the clients' number."""
    size = CLIENTS // 2
    load, threads = partial(Recognizer.load, model, exact=False), max(1, torch.get_num_threads() // 2)
    requests = parts([ImageRequest(path.read_bytes(), 3) for path in pictures], size)
    with (
        image_workers(load, 2, world=None, max_pixels=Limits().pixels, threads=threads) as workers,
        ThreadPoolExecutor(2) as pool,
    ):
        shares = [requests[place::2] for place in range(2)]

        def answer(place: int, batches: list[list[ImageRequest]]) -> int:
            return sum(len(workers[place].submit(batch).result()) for batch in batches)

        for place in range(2):
            answer(place, shares[place][:4])
        began = time.perf_counter()
        count = sum(pool.map(answer, range(2), shares))
        return count / (time.perf_counter() - began)


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
    """Images per second, one after the other."""
    given = "\n".join(map(str, pictures))
    done = subprocess.run(
        [sys.executable, "-c", LOOP, model], input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


STREAM = """
import sys, time
from pathlib import Path
from duplex import Recognizer, load_encoder
from duplex.features.extract import extract
model, folder, out = sys.argv[1:]
paths = sorted(Path(folder).glob("*.jpg"))
recognizer = Recognizer.load(model)
recognizer(paths[0])
def predict():
    assert sum(1 for _ in recognizer.stream(paths)) == len(paths)
def cache(turn):
    names = [path.name for path in paths]
    extract(names, Path(folder), Path(out) / f"{turn}.h5", recognizer.encoder, manifest_sha256="")
for turn in range(3):
    began = time.perf_counter(); predict()
    middle = time.perf_counter(); cache(turn)
    print(middle - began, time.perf_counter() - middle)
"""


def predicted(model: str, folder: Path, pictures: list[Path]) -> dict[str, Any]:
    """The rate of `predict` divided by that of the extraction."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", STREAM, model, str(folder), out]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    return {
        "predicted": len(pictures),
        "predict_per_second": round(len(pictures) / statistics.median(pair[0] for pair in pairs), 1),
        "extract_per_second": round(len(pictures) / statistics.median(pair[1] for pair in pairs), 1),
        "share_of_extraction": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3),
    }


if __name__ == "__main__":
    main()
