"""The inputs of a trained model, such as CLS features, from images in any form, cached features and image files.

Image files are named on the command line by files, folders, patterns, and `-` for a list on stdin.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from duplex.data.images import LINE_END, BadImageFile, ImageTree, as_rgb, describe_skipped, read_image
from duplex.encoders.base import Encoder
from duplex.errors import UsageError
from duplex.features.encode import (
    BATCH_MULTIPLE,
    UNREAD,
    ImageRows,
    OutputSpec,
    decode_batches,
    decoding_workers,
    encode_batches,
    pad_batches,
    report_memory_shortage,
    report_worker_deaths,
    split_rows,
)
from duplex.features.file import CODES, CONTENTS, ENCODED, FIRST_BAD, SCALES, Features, status_reason
from duplex.features.imported import as_numpy, checked_features
from duplex.features.tokens import dequantize
from duplex.methods.base import Inputs

ImageLike = Image.Image | Path | str | NDArray[Any] | Tensor


def encode(encoder: Encoder, pixels: Tensor, *, outputs: OutputSpec, batch_multiple: int = BATCH_MULTIPLE) -> Inputs:
    """Images as a model's inputs, as a feature cache would hold them; `UsageError` for one without finite features.

    pixels: preprocessed images [B, 3, R, R] uint8.
    batch_multiple: batches are padded with blank images to a multiple of this number.
    """
    decoded = torch.full((len(pixels),), ENCODED, dtype=torch.uint8)
    batches = pad_batches([(0, pixels, decoded, UNREAD.expand(len(pixels), -1))], batch_multiple)
    ((_, statuses, values),) = encode_batches(encoder, batches, outputs)
    bad = np.flatnonzero(statuses[: len(pixels)] >= FIRST_BAD)
    if bad.size:
        raise UsageError(f"image {bad[0]} cannot be used: {status_reason(statuses[bad[0]])}")
    return as_inputs({name: value[: len(pixels)] for name, value in values.items()}, encoder.device)


def encode_files(
    encoder: Encoder,
    paths: Sequence[Path],
    *,
    batch_size: int,
    num_workers: int | Literal["auto"],
    outputs: OutputSpec,
    batch_multiple: int = BATCH_MULTIPLE,
) -> Iterator[tuple[NDArray[np.uint8], Inputs]]:
    """Status codes [B] (encoded, or why unreadable) and a model's inputs per batch of files."""
    blocks = split_rows(range(len(paths)), batch_size)
    images = ImageRows([str(path) for path in paths], Path(), encoder.image_transform)
    workers = min(decoding_workers(num_workers), max(0, len(blocks) - 1))  # a process takes longer than one block
    batches = pad_batches(decode_batches(images, blocks, workers, pinned=encoder.device.type == "cuda"), batch_multiple)
    advice = "run the same command again with a smaller --batch-size"
    with report_worker_deaths(""), report_memory_shortage(batch_size, advice):
        encoded = encode_batches(encoder, batches, outputs)
        for block, (_, statuses, values) in zip(blocks, encoded, strict=True):
            rows = len(block)
            yield statuses[:rows], as_inputs({name: value[:rows] for name, value in values.items()}, encoder.device)


def as_inputs(values: dict[str, NDArray[Any]], device: Any) -> Inputs:
    """Encoder outputs as tensors in the types of training: CLS features in float32, tokens in float16."""
    values = {name: value for name, value in values.items() if name != CONTENTS}
    if CODES in values:
        others = {name: value for name, value in values.items() if name not in (CODES, SCALES)}
        values = {**others, "block_inputs": dequantize(values[CODES], values[SCALES])}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    return {name: (value.float() if name == "cls" else value).to(device) for name, value in tensors.items()}


def as_features(images: Any, dim: int) -> NDArray[np.float32] | None:
    """`images` as an array [B, dim] if they are features, which floats are; None for images, which uint8 arrays are."""
    if isinstance(images, Features):
        if images.bad.any():
            raise UsageError(f"{images.path} has rows of unreadable images; omit them: features.cls[~features.bad]")
        return images.cls
    listed = images if isinstance(images, (list, tuple)) else []
    if listed and all(isinstance(image, (np.ndarray, Tensor)) and image.ndim == 1 for image in listed):
        vectors = [as_numpy(vector) for vector in listed]
        if len({vector.shape for vector in vectors}) > 1:
            raise UsageError(f"features have different widths; expected {dim}, as this model's encoder computes")
        images = np.stack(vectors)
    images = as_numpy(images)
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        return None
    rows = np.atleast_2d(images)
    if rows.ndim != 2 or rows.shape[1] != dim:
        hint = "; arrays of floats are features, an image is uint8 [H, W, 3]" if rows.ndim == 3 else ""
        raise UsageError(
            f"features are {tuple(images.shape)}; expected [B, {dim}], as this model's encoder computes{hint}"
        )
    return checked_features(rows) if len(rows) else np.asarray(rows, dtype=np.float32)


def open_image(image: ImageLike) -> Image.Image:
    try:
        if isinstance(image, (str, Path)):
            return read_image(Path(image))
        if isinstance(image, Image.Image):
            if not all(image.size):
                raise UsageError(f"the image has {image.width} × {image.height} pixels; expected at least one")
            return as_rgb(image)
        array = as_numpy(image)
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
        elif array.dtype == np.uint8 and array.size and (array.ndim == 2 or array.shape[2:] in ((3,), (4,))):
            return as_rgb(Image.fromarray(array))
        else:
            kind = f"an array {array.shape} of {array.dtype}"
    except BadImageFile as error:
        if isinstance(image, (str, Path)) and Path(image).is_dir():
            raise UsageError(f"{image} is a folder; give a list of the image files in it") from error
        name = image if isinstance(image, (str, Path)) else f"the {type(image).__name__}"
        raise UsageError(f"{name} cannot be used: {error.reason}") from error
    except (OSError, ValueError) as error:  # a PIL image that is closed, cut off or of a rare mode
        raise UsageError(f"the {type(image).__name__} cannot be used: {error}") from error
    raise UsageError(f"{kind} is not an image; give a path, a PIL image, uint8 [H, W, 3], or features of the encoder")


def list_images(names: Iterable[str], stdin: TextIO, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files that `names` (files, folders, patterns, `-`) stand for, each once, in order, a folder's sorted.

    `log` is called with the number of files in folders that were skipped, if any.
    """
    paths: dict[Path, None] = {}
    skipped: Counter[str] = Counter()
    for name in names:
        paths.update(dict.fromkeys(_expand(name, stdin, skipped)))
    if not paths:
        raise UsageError("no files were named")
    if skipped:
        total = skipped.total()
        log(f"{total:,} {'file' if total == 1 else 'files'} skipped: {describe_skipped(skipped)}")
    return list(paths)


def _expand(name: str, stdin: TextIO, skipped: Counter[str]) -> list[Path]:
    path = Path(name)
    if name == "-":
        text = stdin.read()
        if "\0" in text:
            raise UsageError("stdin holds zero bytes, as UTF-16 does; expected UTF-8 text, one path per line")
        listed = [Path(line) for line in LINE_END.split(text) if line.strip()]
        if not listed:
            raise UsageError("stdin lists no files; expected one path per line")
        return listed
    if path.is_dir():
        images = _images_in(path, skipped)
        if not images:
            hint = f"; skipped: {describe_skipped(skipped)}" if skipped else ""
            raise UsageError(f"{path} holds no images (files ending in .jpg, .png and the like){hint}")
        return images
    if not path.exists() and glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        if not matches:
            raise UsageError(f"no file matches {name}")
        found: list[Path] = []
        for match in matches:
            found += _images_in(match, skipped) if match.is_dir() else [match]
        return found
    return [path]  # a missing file is reported among the answers, as every unreadable one


def _images_in(folder: Path, skipped: Counter[str]) -> list[Path]:
    tree = ImageTree(folder)
    images = [folder / image for image in tree.images(refuse_links=False)]
    skipped.update({kind: len(paths) for kind, paths in tree.skipped.items()})
    return images
