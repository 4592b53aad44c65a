"""Measure answers about single images: python -m benchmarks.recognition [--json] [--run RUN]

`times_bare`: seconds of a warm recognizer for one JPEG file, per second of decoding, transforming and encoding the same
file without it; for a ViT-B/32 with random weights and, where $DUPLEX_SHARED/photos/encoder exists, for that encoder.
Both alternate. `first_answer_seconds`: `duplex predict IMAGE --model RUN` as a process of its own, median of five.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

from benchmarks.extraction import random_encoder
from benchmarks.measure import alternate, emit, options, say
from duplex import Recognizer, load_encoder
from duplex.data.images import read_image
from duplex.encoders.base import Encoder
from duplex.labels import LabelSpace
from duplex.recognition.trained import ExportedModel
from duplex.training.checkpoint import ModelHeader

STATES, OBJECTS, PROCESSES = 18, 23, 5


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--run", default="artifacts/shapes/duplex/0", help="trained run of the encoder tiny")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.jpg"
        Image.effect_noise((640, 480), 60).convert("RGB").save(image)
        encoders: dict[str, Encoder] = {"ViT-B-32": random_encoder("ViT-B-32", Path(folder), "cpu", "fp32")}
        small = Path(os.environ.get("DUPLEX_SHARED", "../shared")) / "photos" / "encoder"
        if small.is_dir():
            encoders["photos"] = load_encoder(f"local-dir:{small}")
        ratios = {name: times_bare(encoder, image) for name, encoder in encoders.items()}
        seconds = first_answer(arguments.run, image)
    record = {"times_bare": ratios, "first_answer_seconds": seconds}
    emit(record) if arguments.json else say(str(record))


def times_bare(encoder: Encoder, image: Path) -> float:
    """The time of `recognizer(image)` in units of decoding, transforming and encoding the image."""
    recognizer = recognizer_of(encoder)

    @torch.inference_mode()
    def bare() -> None:
        encoder.encode_images(encoder.image_transform(read_image(image))[None])

    seconds = alternate({"bare": bare, "answer": lambda: recognizer(image)}, rounds=25, warm=3)
    return round(seconds["answer"] / seconds["bare"], 3)


def recognizer_of(encoder: Encoder) -> Recognizer:
    """A recognizer over random prototypes of STATES x OBJECTS compositions."""
    states, objects = ([f"{kind}{i}" for i in range(count)] for kind, count in (("s", STATES), ("o", OBJECTS)))
    pairs = [(state, name) for state in states for name in objects]
    labels = LabelSpace.from_pairs({"train": pairs[::2], "test": pairs[1::2]})
    compositions = torch.arange(labels.size)
    tensors = {
        "semantic": torch.nn.functional.normalize(torch.randn(labels.size, encoder.dim), dim=-1),
        "scale": torch.tensor(100.0),
        "state_of": compositions // OBJECTS,
        "object_of": compositions % OBJECTS,
    }
    fields = {
        "kind": "prompts",
        "world": "closed",
        "labels": labels.to_dict(),
        "calibration": {"bias": 0.0},
        "confidence": {},
        "finetune": None,
        "encoder": {**encoder.identity.to_dict(), "name": encoder.name, "tag": "", "text_precision": "fp32"},
    }
    model = ExportedModel(
        ModelHeader(Path("random/model"), "export", fields, "", "random"), tensors, torch.device("cpu")
    )
    model.backbone.towers["image"] = encoder
    return Recognizer(model)


def first_answer(run: str, image: Path) -> float:
    """The median seconds of `duplex predict`, from the start of the process to its end."""
    command = [str(Path(sys.executable).with_name("duplex")), "predict", str(image), "--model", run]
    seconds = []
    for _ in range(PROCESSES):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds), 2)


if __name__ == "__main__":
    main()
