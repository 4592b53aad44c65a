"""What a picture shows, with onnxruntime, numpy and Pillow alone: python see.py PICTURE..."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image
from safetensors.numpy import load_file

RESIZE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def pixels(picture: Any, preprocess: Any) -> Any:
    """Shorter side to the encoder's size, then the middle: [3, R, R] uint8."""
    size, picture = preprocess["size"], rgb(picture)
    short = min(picture.size)
    width, height = (int(size * side / short) for side in picture.size)
    picture = picture.resize((width, height), RESIZE[preprocess["interpolation"]])
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(picture.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def rgb(picture: Any) -> Any:
    """Sixteen-bit grey is scaled: Pillow's own conversion makes it white."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).astype(np.float32) / 257 + 0.5).astype(np.uint8))
    return picture.convert("RGB")


def main() -> None:
    folder = Path(__file__).parent
    t, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
    )
    tower, trained = (onnxruntime.InferenceSession(folder / name) for name in ("encoder.onnx", "trained.onnx"))
    preprocess = json.loads(config["encoder"]["preprocessing"])
    batch = np.stack([pixels(Image.open(name), preprocess) for name in sys.argv[1:]])
    (features,) = tower.run(None, {"pixels": batch})
    (scores,) = trained.run(None, {"features": features})
    ranked = np.where(t["live"], scores + config["calibration"]["bias"] * ~t["seen"], -np.inf)
    for name, best in zip(sys.argv[1:], ranked.argmax(axis=1), strict=True):
        m, n = t["state_of"][best], t["object_of"][best]
        print(name, config["labels"]["states"][m], config["labels"]["objects"][n])


if __name__ == "__main__":
    main()
