"""Print the composition that an exported model recognises in each image, using onnxruntime.

Usage: python see.py IMAGE... [--new-share SHARE], as for recognize.py
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

from duplex.recognition.numpy_example import best_candidates, load_model, require_intact_file, split_arguments

RESIZE = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def resize_and_crop(image: Any, preprocess: Any) -> Any:
    """The encoder's input [3, R, R] uint8: an RGB image's shorter side becomes R, its centre is kept."""
    size = preprocess["size"]
    short = min(image.size)
    width = int(size * image.width / short)
    height = int(size * image.height / short)
    image = image.resize((width, height), RESIZE[preprocess["interpolation"]])
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def to_rgb(image: Any) -> Any:
    """As `as_rgb` in duplex/data/images.py, for this script, which runs without duplex."""
    if image.mode == "F":
        raise ValueError("its pixels are floats; expected integers from 0 to 65535")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            found = f"{values.min()} to {values.max()}"
            raise ValueError(f"its pixel values range from {found}; expected 0 to 65535")
        image = Image.fromarray((values.astype(np.float32) / 257 + 0.5).astype(np.uint8))
    return image.convert("RGB")


def open_image(name: str) -> Any:
    """Open an image file as upright RGB; exits if it cannot be read or is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return to_rgb(ImageOps.exif_transpose(Image.open(name)))
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        sys.exit(f"see.py: {name} cannot be read as an image: {error}")


def main() -> None:
    names, share = split_arguments(sys.argv[1:])
    if not names or names[0] in ("-h", "--help"):
        sys.exit("usage: see.py IMAGE [IMAGE ...] [--new-share SHARE|auto]")
    folder = Path(__file__).parent
    t, header = load_model(folder)
    files = [require_intact_file(folder / name, header) for name in ("encoder.onnx", "trained.onnx")]
    tower, trained = map(onnxruntime.InferenceSession, files)
    preprocess = json.loads(header["encoder"]["preprocessing"])
    batch = np.stack([resize_and_crop(open_image(name), preprocess) for name in names])
    (features,) = tower.run(None, {"pixels": batch})
    (scores,) = trained.run(None, {"features": features})
    for name, best in zip(names, best_candidates(t, header, scores.astype(np.float64), share), strict=True):
        m, n = t["state_of"][best], t["object_of"][best]
        print(name, header["labels"]["states"][m], header["labels"]["objects"][n])


if __name__ == "__main__":
    main()
