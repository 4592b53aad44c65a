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
MAX_ASPECT = 50  # longer images are cut first, unless they are distorted


def resize_and_crop(image: Any, preprocess: Any) -> Any:
    """The encoder's input [3, R, R] uint8, as `ResizeAndCrop` in duplex/encoders/open_clip.py makes it.

    The whole RGB image is distorted (squash) or gets borders (longest), or its centre is kept (shortest).
    """
    size = preprocess["size"]
    mode = preprocess["resize_mode"]
    filter = RESIZE[preprocess["interpolation"]]
    if mode == "squash":
        return np.asarray(image.resize((size, size), filter)).transpose(2, 0, 1)
    keep = MAX_ASPECT * min(image.size)
    cut = [max(0, side - keep) // 2 for side in image.size]
    image = image.crop((cut[0], cut[1], image.width - cut[0], image.height - cut[1]))
    if mode == "longest":
        ratio = max(image.height / size, image.width / size)
        wide, high = round(image.width / ratio), round(image.height / ratio)
    else:
        short = min(image.size)
        wide, high = int(size * image.width / short), int(size * image.height / short)
    image = image.resize((wide, high), filter)
    square = Image.new("RGB", (size, size), fill_color(preprocess))
    square.paste(image, (border(wide, size), border(high, size)))
    return np.asarray(square).transpose(2, 0, 1)


def border(side: int, size: int) -> int:
    """Pixels before a centred side of an image; negative if it is longer than `size`."""
    return (size - side) // 2 if side <= size else -round((side - size) / 2)


def fill_color(preprocess: Any) -> tuple[int, ...]:
    """Red, green and blue of borders."""
    fill = preprocess["fill_color"]
    return (int(fill),) * 3 if isinstance(fill, (int, float)) else tuple(fill)


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
