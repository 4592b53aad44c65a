"""How much of the bare encoder's speed an extraction keeps: python -m benchmarks.extraction [--json]

Three ways over the same pictures and weights, alternating in one run: the encoder alone over tensors that are ready in
memory, open_clip's plain example (open, transform, encode, one batch after another), and `extract`. Random weights:
speed does not depend on them. An extraction's peak memory, decoding workers and all, is read for few and many pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import FamilyMemory
from duplex.encoders.clip import ClipEncoder, open_clip
from duplex.encoders.source import EncoderSource, complete_preprocess
from duplex.features.extraction import extract

SIZES = {"ViT-L-14": (24, 4, 3), "ViT-B-32": (192, 32, 3)}  # pictures, batch size, rounds
PICTURE = (400, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--encoder", choices=tuple(SIZES), action="append")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    given = parser.parse_args()
    if given.memory is not None:
        print(peak_memory(given.memory))
        return
    results: dict[str, Any] = {}
    for name in given.encoder or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = compare(name, Path(folder), given.workers, given.precision)
        print(f"{name}: {results[name]}", file=sys.stderr)
    few, many = (measure_memory(count) for count in (1000, 8000))
    shares = {name: result["share_of_bare_encoder"] for name, result in results.items()}
    summary = {
        "share_of_bare_encoder": shares,
        "encoders": results,
        "peak_megabytes": {"1000 pictures": few, "8000 pictures": many},
        "threads": torch.get_num_threads(),
        "workers": given.workers,
        "precision": given.precision,
    }
    print(json.dumps(summary, indent=2) if given.json else f"share of the bare encoder: {shares}")


def compare(name: str, folder: Path, workers: int, precision: str) -> dict[str, float]:
    """Pictures a second of the three ways: medians over rounds, and the median of each round's ratio."""
    count, batch, rounds = SIZES[name]
    encoder, images = random_encoder(name, folder, precision), write_pictures(folder, count)
    pixels = torch.stack([encoder.image_transform(Image.open(folder / image)) for image in images])
    encoder.encode_images(pixels[:batch])
    seconds: dict[str, list[float]] = {"bare": [], "extract": [], "plain": []}
    for turn in range(rounds):
        out = folder / f"{turn}.h5"
        seconds["bare"].append(timed(lambda: bare(encoder, pixels, batch)))
        seconds["extract"].append(timed(lambda out=out: run(encoder, folder, images, out, batch, workers)))  # type: ignore[misc]
        seconds["plain"].append(timed(lambda: plain(encoder, folder, images, batch)))
    shares = [b / e for b, e in zip(seconds["bare"], seconds["extract"], strict=True)]
    gains = [p / e for p, e in zip(seconds["plain"], seconds["extract"], strict=True)]
    rates = {f"{way}_per_second": round(count / statistics.median(times), 2) for way, times in seconds.items()}
    shown = {"share_of_bare_encoder": shares, "times_plain_loop": gains}
    return {**{key: round(statistics.median(values), 3) for key, values in shown.items()}, **rates}


def bare(encoder: ClipEncoder, pixels: torch.Tensor, batch: int) -> None:
    for start in range(0, len(pixels), batch):
        encoder.encode_images(pixels[start : start + batch])


def plain(encoder: ClipEncoder, folder: Path, images: list[str], batch: int) -> None:
    """As the example in open_clip's README does it, a batch at a time."""
    for start in range(0, len(images), batch):
        pictures = [Image.open(folder / image).convert("RGB") for image in images[start : start + batch]]
        encoder.encode_images(torch.stack([encoder.image_transform(picture) for picture in pictures]))


def run(encoder: ClipEncoder, folder: Path, images: list[str], out: Path, batch: int, workers: int) -> None:
    extract(images, folder, out, encoder, manifest_sha256="", batch_size=batch, num_workers=workers, progress=False)


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def random_encoder(name: str, folder: Path, precision: str) -> ClipEncoder:
    """An architecture of open_clip with random weights, through the door that real weights take."""
    torch.manual_seed(0)
    architecture = open_clip.get_model_config(name)
    weights = folder / "weights.pt"
    torch.save(open_clip.CLIP(**open_clip.get_model_config(name)).state_dict(), weights)
    source = EncoderSource(name, architecture, complete_preprocess({}, architecture), weights)
    encoder = ClipEncoder(source, towers="image", device="cpu", precision=precision)
    weights.unlink()
    return encoder


def write_pictures(folder: Path, count: int) -> list[str]:
    """JPEG pictures of a photograph's size and smoothness."""
    random = np.random.default_rng(0)
    names = [f"{index:05d}.jpg" for index in range(count)]
    for name in names:
        coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        coarse.resize(PICTURE, Image.Resampling.BICUBIC).save(folder / name, quality=90)
    return names


def measure_memory(count: int) -> float:
    command = [sys.executable, "-m", "benchmarks.extraction", "--memory", str(count)]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }  # else glibc keeps freed blocks, now many, now few
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout)


def peak_memory(count: int) -> float:
    """Megabytes at the peak of extracting `count` pictures with a small encoder, this process and its workers."""
    small = {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 224, "layers": 2, "width": 128, "patch_size": 32},
        "text_cfg": {"width": 64, "heads": 2, "layers": 1},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(open_clip.CLIP(**json.loads(json.dumps(small))).state_dict(), folder / "weights.pt")
        source = EncoderSource("small", small, complete_preprocess({}, small), folder / "weights.pt")
        encoder = ClipEncoder(source, towers="image", device="cpu", precision="fp32")
        images = write_pictures(folder, min(count, 300))
        with FamilyMemory() as memory:
            run(encoder, folder, [images[row % len(images)] for row in range(count)], folder / "out.h5", 32, 2)
    return round(memory.peak / 2**20, 1)


if __name__ == "__main__":
    main()
