"""Compare extraction with the speed of the bare encoder: python -m benchmarks.extraction [--json] [--device cuda]

Three ways over the same images and weights alternate in one run: the encoder alone over tensors in memory, open_clip's
example (open, transform, encode, one batch after another), and `extract`. Decoding alone, in as many processes as
`extract` has, shows which of the two is the bottleneck. Weights are random: speed does not depend on them. A
convolutional encoder is extracted in its own processes, alternately with and without `duplex.system.threads`
(`speedup_conv`). The peak memory of an extraction, with its workers, is read for few and many images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.measure import FamilyMemory, apart, device_name, emit, median_ratio, options, say, write_pictures
from duplex.encoders.base import Encoder, EncoderSource, load_encoder
from duplex.encoders.open_clip import ClipEncoder, complete_preprocess, open_clip
from duplex.features.encode import ImageRows, decode_batches, decoding_workers, split_rows
from duplex.features.extract import extract
from duplex.system.threads import PRECISIONS, keep_freed_memory

SIZES = {"ViT-L-14": (24, 4, 3), "ViT-B-32": (192, 32, 3)}  # pictures, batch size, rounds
SMALL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 128, "patch_size": 32},
    "text_cfg": {"width": 64, "heads": 2, "layers": 1},
}
CONVOLUTIONAL, CONVOLUTIONAL_ROUNDS = "mobilenetv2_100", 3
PICTURE: dict[str, Any] = {"size": (400, 300), "coarse": 10}
MODULE = "benchmarks.extraction"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", default="auto", help="decoding processes, or auto")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--encoder", choices=(*SIZES, CONVOLUTIONAL), action="append")
    parser.add_argument("--scale", type=int, default=1, help="factor for numbers of images and batch sizes, for a GPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one measurement, in its own process
    given = parser.parse_args()
    if given.part:
        part, *words = given.part.split()
        print(PARTS[part](*words))
        return
    keep_freed_memory()
    given.workers = decoding_workers(given.workers if given.workers == "auto" else int(given.workers))
    wanted = given.encoder or [*SIZES, CONVOLUTIONAL]
    encoders: dict[str, Any] = {}
    for name in (name for name in wanted if name in SIZES):
        with tempfile.TemporaryDirectory() as folder:
            encoders[name] = compare(name, Path(folder), given)
        say(f"{name}: {encoders[name]}")
    record = {
        "share_of_bare_encoder": {name: row["share_of_bare_encoder"] for name, row in encoders.items()},
        "encoders": encoders,
        **(mended(given.workers) if CONVOLUTIONAL in wanted and given.device == "cpu" else {}),
        "peak_megabytes": {f"{count} pictures": apart(MODULE, f"memory {count}") for count in (1000, 8000)},
        "threads": torch.get_num_threads(),
        "workers": given.workers,
        "precision": given.precision,
        "device": device_name(given.device),
    }
    emit(record) if given.json else say(str(record))


def compare(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Images per second of each way: medians over rounds, and the median of each round's ratio."""
    count, batch, rounds = SIZES.get(name, (16, 8, 1))
    count, batch = count * given.scale, batch * given.scale
    encoder = random_encoder(name, folder, given.device, given.precision)
    images = [path.name for path in write_pictures(folder, count, **PICTURE)]
    pixels = torch.stack([encoder.image_transform(Image.open(folder / image)) for image in images])
    encoder.encode_images(pixels[:batch])
    seconds: dict[str, list[float]] = {"bare": [], "decoding": [], "extract": [], "plain": []}
    for turn in range(rounds):
        ways: dict[str, Callable[[], object]] = {
            "bare": partial(bare, encoder, pixels, batch),
            "decoding": partial(decode, encoder, folder, images, batch, given.workers),
            "extract": partial(run, encoder, folder, images, folder / f"{turn}.h5", batch, given.workers),
            "plain": partial(plain, encoder, folder, images, batch),
        }
        for way, work in ways.items():
            seconds[way].append(timed(work, given.device))
    rates = {f"{way}_per_second": round(count / statistics.median(times), 2) for way, times in seconds.items()}
    is_slow_to_decode = rates["decoding_per_second"] <= rates["bare_per_second"]
    return {
        "share_of_bare_encoder": round(median_ratio(seconds["bare"], seconds["extract"]), 3),
        "times_plain_loop": round(median_ratio(seconds["plain"], seconds["extract"]), 3),
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


def run(encoder: Encoder, folder: Path, images: list[str], out: Path, batch: int, workers: int) -> None:
    extract(images, folder, out, encoder, manifest_sha256="", batch_size=batch, num_workers=workers)


def timed(work: Callable[[], object], device: str = "cpu") -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def random_encoder(name: str, folder: Path, device: str, precision: str) -> ClipEncoder:
    """An architecture of open_clip with random weights, loaded like real weights."""
    torch.manual_seed(0)
    architecture, weights = architecture_of(name), folder / "weights.pt"
    torch.save(open_clip.CLIP(**architecture_of(name)).state_dict(), weights)
    source = EncoderSource(name, architecture, complete_preprocess({}, architecture), weights)
    encoder = ClipEncoder(source, towers="image", device=device, precision=precision)
    weights.unlink()
    return encoder


def architecture_of(name: str) -> dict[str, Any]:
    """The configuration of an open_clip architecture, or of `small`; a copy."""
    found: dict[str, Any] = json.loads(json.dumps(SMALL)) if name == "small" else open_clip.get_model_config(name)
    return found


def mended(workers: int) -> dict[str, Any]:
    """Images per second of a convolutional encoder with and without keeping freed memory, alternating."""
    rates: dict[str, list[float]] = {"kept": [], "given_back": []}
    for _ in range(CONVOLUTIONAL_ROUNDS):
        for way, found in rates.items():
            found.append(apart(MODULE, f"convolutional {way} {workers}"))
    return {
        "speedup_conv": round(median_ratio(rates["kept"], rates["given_back"]), 2),
        "conv_per_second": {way: round(statistics.median(found), 1) for way, found in rates.items()},
    }


def convolutional(way: str, workers: str) -> float:
    """Images per second of extracting with MobileNetV2 at 224 pixels, in batches of 64."""
    if way == "kept":
        keep_freed_memory()
    count, batch = 384, 64
    tower = {"timm_model_name": "mobilenetv2_100", "timm_pool": "", "timm_proj": "linear", "image_size": 224}
    architecture = {
        "embed_dim": 256,
        "vision_cfg": {**tower, "timm_model_pretrained": False},
        "text_cfg": {"width": 64, "heads": 2, "layers": 1},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder / "encoder", architecture)
        encoder = load_encoder(f"local-dir:{folder / 'encoder'}", towers="image")
        images = [path.name for path in write_pictures(folder, count, **PICTURE)]
        encoder.encode_images(torch.zeros(batch, 3, 224, 224, dtype=torch.uint8))
        return count / timed(lambda: run(encoder, folder, images, folder / "out.h5", batch, int(workers)))


def write_folder(folder: Path, architecture: dict[str, Any]) -> None:
    """Write a `local-dir:` encoder with random weights."""
    torch.manual_seed(0)
    folder.mkdir()
    config = {"model_cfg": architecture, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = open_clip.CLIP(**json.loads(json.dumps(architecture)))
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")


def peak_memory(pictures: str) -> float:
    """The peak memory in MB of extracting with a small encoder, workers included."""
    keep_freed_memory()
    count = int(pictures)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = random_encoder("small", folder, "cpu", "fp32")
        images = [path.name for path in write_pictures(folder, min(count, 300), **PICTURE)]
        with FamilyMemory() as memory:
            run(encoder, folder, [images[row % len(images)] for row in range(count)], folder / "out.h5", 32, 2)
    return round(memory.peak / 2**20, 1)


PARTS: dict[str, Callable[..., float]] = {"memory": peak_memory, "convolutional": convolutional}

if __name__ == "__main__":
    main()
