"""Pictures in whatever form people have them, and cached features, as a method's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from duplex.encoders import Encoder
from duplex.errors import UsageError
from duplex.features.decoding import Pictures, decoded_blocks, decoding_workers, row_blocks, worker_deaths
from duplex.features.eight_bits import restored
from duplex.features.encoding import STEP, Kept, encoded_blocks, filled, memory_shortage
from duplex.features.image_files import BadPicture, as_rgb, read_picture
from duplex.features.layout import CODES, ENCODED, FIRST_BAD, STEPS, reason
from duplex.features.store import Features
from duplex.methods.base import Inputs

Picture = Image.Image | Path | str | NDArray[Any] | Tensor


def encode(encoder: Encoder, pixels: Tensor, *, kept: Kept, step: int = STEP) -> Inputs:
    """[B, 3, R, R] uint8 -> what the cache would hold of it, on the encoder's device."""
    marks = torch.full((len(pixels),), ENCODED, dtype=torch.uint8)
    ((_, found, values),) = encoded_blocks(encoder, filled([(0, pixels, marks)], step), kept)
    bad = np.flatnonzero(found[: len(pixels)] >= FIRST_BAD)
    if bad.size:
        raise UsageError(f"picture {bad[0]}: {reason(found[bad[0]])}")
    return as_inputs({name: value[: len(pixels)] for name, value in values.items()}, encoder.device)


def encode_files(
    encoder: Encoder,
    paths: Sequence[Path],
    *,
    batch_size: int,
    num_workers: int | Literal["auto"],
    kept: Kept,
    step: int = STEP,
) -> Iterator[tuple[NDArray[np.uint8], Inputs]]:
    """Marks [B] and inputs of each block of files, in order; decoding workers run ahead of the encoder."""
    blocks = row_blocks(len(paths), batch_size)
    pictures = Pictures([str(path) for path in paths], Path(), encoder.image_transform)
    workers = min(decoding_workers(num_workers), max(0, len(blocks) - 1))  # a process takes longer than one block
    stream = decoded_blocks(pictures, blocks, workers, pinned=encoder.device.type == "cuda")
    with worker_deaths(""), memory_shortage(batch_size, "run the same command again with a smaller --batch-size"):
        for (start, stop), (_, marks, values) in zip(
            blocks, encoded_blocks(encoder, filled(stream, step), kept), strict=True
        ):
            rows = stop - start
            yield marks[:rows], as_inputs({name: value[:rows] for name, value in values.items()}, encoder.device)


def as_inputs(values: dict[str, NDArray[Any]], device: Any) -> Inputs:
    """As training holds them: CLS features in float32, tokens in float16."""
    if CODES in values:
        others = {name: value for name, value in values.items() if name not in (CODES, STEPS)}
        values = {**others, "deep": restored(values[CODES], values[STEPS])}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    return {name: (value.float() if name == "cls" else value).to(device) for name, value in tensors.items()}


def features_of(images: Any, dim: int) -> NDArray[np.float32] | None:
    """Cached features [B, d] where that is what was given; None where they are pictures."""
    if isinstance(images, Features):
        if images.bad.any():
            raise UsageError(f"{images.path} has rows without a picture; leave them out: features.cls[~features.bad]")
        return images.cls
    if isinstance(images, (list, tuple)) and images and all(_is_feature(one) for one in images):
        rows = [one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in images]
        if len({row.shape for row in rows}) > 1:
            raise UsageError(f"features are of several widths; this model's encoder makes {dim}")
        images = np.stack(rows)
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        return None
    found = np.atleast_2d(images)
    if found.ndim != 2 or found.shape[1] != dim:
        raise UsageError(f"features are {tuple(images.shape)}; this model's encoder makes [B, {dim}]")
    if not np.isfinite(found).all():
        raise UsageError("features hold values that are not finite; leave those rows out")
    return np.asarray(found, dtype=np.float32)


def _is_feature(one: Any) -> bool:
    return isinstance(one, (np.ndarray, Tensor)) and one.ndim == 1


def open_picture(one: Picture) -> Image.Image:
    """A picture as RGB."""
    try:
        return _opened(one)
    except BadPicture as error:
        name = one if isinstance(one, (str, Path)) else f"a {type(one).__name__}"
        raise UsageError(f"{name} cannot be used: {error.reason}") from error


def _opened(one: Picture) -> Image.Image:
    if isinstance(one, (str, Path)):
        return read_picture(Path(one))
    if isinstance(one, Image.Image):
        return as_rgb(one)
    array = one.detach().cpu().numpy() if isinstance(one, Tensor) else one
    if (
        isinstance(array, np.ndarray)
        and array.dtype == np.uint8
        and (array.ndim == 2 or array.shape[2:] in ((3,), (4,)))
    ):
        return as_rgb(Image.fromarray(array))
    what = f"an array {array.shape} of {array.dtype}" if isinstance(array, np.ndarray) else f"{type(one).__name__}"
    raise UsageError(f"{what} is no picture; give a path, a PIL picture, uint8 [H, W, 3], or features of the encoder")
