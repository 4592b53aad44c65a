"""Compare extraction with the speed of the bare encoder: python -m benchmarks.extraction [--json]

Three ways over the same images and weights alternate in one run: the encoder alone over tensors in memory, open_clip's
example (open, transform, encode, one batch after another), and `extract`. Decoding alone, in as many processes as
`extract` has, shows which of the two is the bottleneck. Weights are random: speed does not depend on them. The
peak memory of an extraction, with its workers, is read for few and many images.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.measure import all_rounds, apart, emit, finished, median_ratio, memory, options, say, write_pictures
from duplex.encoders.base import EncoderSource
from duplex.encoders.libraries import open_clip
from duplex.encoders.open_clip import ClipEncoder, complete_preprocess
from duplex.features.encode import ImageRows, decode_batches, decoding_workers, split_rows
from duplex.features.extract import ExtractionSettings, extract
from duplex.system.threads import PRECISIONS, keep_freed_memory

SIZES = {"ViT-L-14": (24, 4, 3), "ViT-B-32": (192, 32, 3)}  # pictures, batch size, rounds
SMALL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 128, "patch_size": 32},
    "text_cfg": {"width": 64, "heads": 2, "layers": 1},
}
PICTURE: dict[str, Any] = {"size": (400, 300), "coarse": 10}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one measurement, in its own process
    given = parser.parse_args()
    if given.part:
        print(peak_memory(int(given.part)))
        return
    keep_freed_memory()
    workers = decoding_workers("auto")
    encoders: dict[str, Any] = {}
    for name in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            encoders[name] = compare(name, Path(folder), workers, precision=given.precision)
        say(f"{name}: {encoders[name]}")
    record = {
        "encoders": encoders,
        "peak_megabytes": {f"{count} pictures": apart("benchmarks.extraction", str(count)) for count in (1000, 8000)},
        "threads": torch.get_num_threads(),
        "workers": workers,
        "precision": given.precision,
    }
    emit(record) if given.json else say(str(record))


def compare(
    name: str, folder: Path, workers: int, *, precision: str, device: str = "cpu", scale: int = 1, repeats: int = 1
) -> dict[str, Any]:
    """Images per second of each way: medians over rounds, and the median of each round's ratio.

    scale: factor for numbers of images and batch sizes, for a GPU.
    repeats: how often `extract`, and decoding alone, read each image, so that starting workers is a small part.
    """
    count, batch, rounds = SIZES.get(name, (16, 8, 1))
    count, batch = count * scale, batch * scale
    encoder = random_encoder(name, folder, device, precision)
    images = [path.name for path in write_pictures(folder, count, **PICTURE)]
    many = images * repeats
    pixels = torch.stack([encoder.image_transform(Image.open(folder / image)) for image in images])
    encoder.encode_images(pixels[:batch])
    ways: dict[str, Callable[[], object]] = {
        "bare": partial(bare, encoder, pixels, batch),
        "decoding": partial(decode, encoder, folder, many, batch, workers),
        "extract": partial(run, encoder, folder, many, batch, workers),
        "plain": partial(plain, encoder, folder, images, batch),
    }
    ways = {way: finished(work, encoder.device) for way, work in ways.items()}
    seconds = all_rounds(ways, rounds, warm=0)
    each = {  # seconds per image
        way: [taken / (len(many) if way in ("decoding", "extract") else count) for taken in times]
        for way, times in seconds.items()
    }
    rates = {f"{way}_per_second": round(1 / statistics.median(times), 2) for way, times in each.items()}
    is_slow_to_decode = rates["decoding_per_second"] <= rates["bare_per_second"]
    return {
        "share_of_bare_encoder": round(median_ratio(each["bare"], each["extract"]), 3),
        "times_plain_loop": round(median_ratio(each["plain"], each["extract"]), 3),
        **rates,
        "held_by": "decoding" if is_slow_to_decode else "the encoder",
    }


def bare(encoder: ClipEncoder, pixels: torch.Tensor, batch: int) -> None:
    for start in range(0, len(pixels), batch):
        encoder.encode_images(pixels[start : start + batch])


def plain(encoder: ClipEncoder, folder: Path, images: list[str], batch: int) -> None:
    """Encode as the example in open_clip's README does, a batch at a time."""
    for start in range(0, len(images), batch):
        pictures = [Image.open(folder / image).convert("RGB") for image in images[start : start + batch]]
        encoder.encode_images(torch.stack([encoder.image_transform(picture) for picture in pictures]))


def decode(encoder: ClipEncoder, folder: Path, images: list[str], batch: int, workers: int) -> None:
    """Decode as the workers do, and nothing else."""
    blocks = split_rows(range(len(images)), batch)
    pinned = encoder.device.type == "cuda"
    for _ in decode_batches(ImageRows(images, folder, encoder.image_transform), blocks, workers, pinned=pinned):
        pass


def run(encoder: ClipEncoder, folder: Path, images: list[str], batch: int, workers: int) -> None:
    out = folder / "features.h5"
    out.unlink(missing_ok=True)
    extract(images, out, encoder, ExtractionSettings(folder, "", batch_size=batch, num_workers=workers))


def random_encoder(name: str, folder: Path, device: str, precision: str) -> ClipEncoder:
    """An architecture of open_clip with random weights, loaded like real weights."""
    torch.manual_seed(0)
    architecture: dict[str, Any] = SMALL if name == "small" else open_clip.get_model_config(name)
    weights = folder / "weights.pt"
    torch.save(open_clip.CLIP(**copy.deepcopy(architecture)).state_dict(), weights)
    source = EncoderSource(name, architecture, complete_preprocess({}, architecture), weights)
    encoder = ClipEncoder(source, towers="image", device=device, precision=precision)
    weights.unlink()
    return encoder


class FamilyMemory:
    """Measures the peak memory of this process and its children every tenth of a second; shared pages count once."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> FamilyMemory:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
            held = 0
            for pid in ("self", *children):
                with contextlib.suppress(OSError):  # a child may just have ended
                    held += memory("Pss", f"/proc/{pid}/smaps_rollup")
            self.peak = max(self.peak, held)


def peak_memory(count: int) -> float:
    """The peak memory in MB of extracting with a small encoder, workers included."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = random_encoder("small", folder, "cpu", "fp32")
        images = [path.name for path in write_pictures(folder, min(count, 300), **PICTURE)]
        with FamilyMemory() as family:
            run(encoder, folder, [images[row % len(images)] for row in range(count)], 32, 2)
    return round(family.peak / 2**20, 1)


if __name__ == "__main__":
    main()
