"""Single questions to a trained network: what is nearest to a pair's prototypes, and to swapped factors."""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.encoders import load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features.image_files import BadPicture, read_picture
from duplex.labels import LabelSpace, prompt_name
from duplex.recognition.images import encode
from duplex.report.prototypes import embed
from duplex.report.retrieved import Hit, prototype_hits
from duplex.report.swaps import swap_hits
from duplex.stages.featured_run import ShownRun, load_shown
from duplex.stages.inventory import shown_run


def shown(params: Params, dataset: str, method: str | None, seed: int | None) -> ShownRun:
    """The run that is asked for; by default the one whose prototypes the report shows."""
    params.dataset(dataset)
    chosen = shown_run(params, dataset, ArtifactPaths())
    picked = (method if method is not None else chosen[0], seed if seed is not None else chosen[1])
    return load_shown(params, dataset, *picked, ArtifactPaths())


def retrieve(source: ShownRun, text: str, top: int) -> dict[str, list[Hit]]:
    """The test images nearest to the semantic and to the visual prototype of a pair, named as in a prompt."""
    viewing = source.viewing()
    return prototype_hits(viewing, embed(viewing.method, viewing.test), find_pair(viewing.labels, text), top)


def find_pair(labels: LabelSpace, text: str) -> int:
    """The composition that a text names: every pair of a state and an object exists, seen or not."""
    wanted, size = prompt_name(text), len(labels.objects)
    for m, state in enumerate(map(prompt_name, labels.states)):
        if wanted.startswith(state + " "):
            rest = wanted.removeprefix(state + " ")
            for n, name in enumerate(map(prompt_name, labels.objects)):
                if rest == name:
                    return m * size + n
    names = [prompt_name(name) for name in (*labels.states, *labels.objects)]
    close = dict.fromkeys(found for word in wanted.split() for found in difflib.get_close_matches(word, names, 2))
    hint = f"; near to it: {', '.join(close)}" if close else ""
    raise UsageError(f"{text!r} is not a state and an object of the data set{hint}; its labels are in labels.json")


def swap(params: Params, dataset: str, source: ShownRun, pictures: tuple[Path, Path], top: int) -> list[Hit]:
    """The test images nearest to the state of the first picture and the object of the second."""
    viewing = source.viewing()
    factors = viewing.method.factors
    if factors is None:
        raise UsageError("this method has no state and object factors to swap; choose another one with --method")
    opened = [_picture(path) for path in pictures]
    entry = params.dataset(dataset).encoder
    encoder = load_encoder(entry.name, entry.weights, towers="image", precision=entry.precision)
    pixels = torch.stack([encoder.image_transform(picture) for picture in opened])
    with torch.inference_mode():
        z_s, z_o = factors(encode(encoder, pixels, kept=source.kept))
    embedded = embed(viewing.method, viewing.test)
    return swap_hits(viewing, embedded, np.asarray(z_s[:1]), np.asarray(z_o[1:]), top)


def _picture(path: Path) -> Image.Image:
    try:
        return read_picture(path)
    except BadPicture as error:
        raise DuplexError(f"{path} cannot be used: {error.reason}") from None
