"""Find test images nearest to a pair's prototypes, or to the state part of one image joined with another's object."""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.image_files import BadImageFile, read_image
from duplex.encoders import load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features.encoding import OutputSpec
from duplex.labels import LabelSpace, prompt_name
from duplex.recognition.image_inputs import encode
from duplex.report.images import Hit, prototype_hits, swap_hits
from duplex.stages.featured_run import FeaturedRun, load_featured_run
from duplex.stages.inventory import featured_run
from duplex.training.checkpoint import is_checkpoint, read_record


def load_queried_run(params: Params, dataset: str, method: str | None, seed: int | None) -> FeaturedRun:
    """Load the trained run of a method and seed, with test images; by default the run whose images the report shows.

    Raises `DuplexError` if the run was trained with other settings than those of params.yaml.
    """
    params.dataset(dataset)
    paths = ArtifactPaths()
    best = featured_run(params, dataset, paths)
    name, number = method or best[0], best[1] if seed is None else seed
    return load_featured_run(params, dataset, name, number, paths, current=True)


def retrieve(source: FeaturedRun, text: str, top: int) -> dict[str, list[Hit]]:
    """Return the `top` test images nearest to a pair's prototypes: kind (`semantic` or `visual`) -> images."""
    context = source.retrieval_context()
    return prototype_hits(context, find_pair(context.labels, text), top)


def find_pair(labels: LabelSpace, text: str) -> int:
    """Return the composition that a text such as "striped heart" names; it may be unseen."""
    wanted = prompt_name(text)
    states, objects = (list(map(prompt_name, names)) for names in (labels.states, labels.objects))
    for m, state in enumerate(states):
        for n, thing in enumerate(objects):
            if wanted == f"{state} {thing}":
                return m * len(objects) + n
    names = [*states, *objects]
    similar = dict.fromkeys(name for word in wanted.split() for name in difflib.get_close_matches(word, names, 2))
    hint = f"; similar names: {', '.join(similar)}" if similar else ""
    raise UsageError(
        f"{text!r} is not a state and an object of the data set, such as {labels.name(0)!r}{hint}; see its labels.json"
    )


def swap(params: Params, dataset: str, source: FeaturedRun, images: tuple[Path, Path], top: int) -> list[Hit]:
    """Return the `top` test images nearest to one image's state part joined with another image's object part."""
    opened = [_read(path) for path in images]
    context = source.retrieval_context()
    factors = context.method.factors
    if factors is None:
        raise UsageError(f"this method has no state and object factors to swap; {_with_factors(params, dataset)}")
    test, identity, entry = context.test.inputs, source.inputs.encoder, params.dataset(dataset).encoder
    block_inputs = int(identity["block_inputs"]) if "block_inputs" in test else 0
    outputs = OutputSpec("patch" in test, block_inputs, int(identity.get("bits", 16)))
    encoder = load_encoder(entry.name, entry.weights, towers="image", precision=entry.precision)
    pixels = torch.stack([encoder.image_transform(image) for image in opened])
    with torch.inference_mode():
        z_s, z_o = factors(encode(encoder, pixels, outputs=outputs))
    return swap_hits(context, np.asarray(z_s[:1]), np.asarray(z_o[1:]), top)


def _with_factors(params: Params, dataset: str) -> str:
    """Return advice for an error message: the trained methods whose features have a state and an object part."""
    paths, seed = ArtifactPaths(), params.run.seeds[0]
    checkpoints = {name: paths.run(dataset, name, seed).checkpoint for name in params.run.methods}
    able = [name for name, file in checkpoints.items() if is_checkpoint(file) and _has_factors(file)]
    return f"use --method {' or '.join(able)}" if able else "train one that has them, such as `cso` or `duplex`"


def _has_factors(checkpoint: Path) -> bool:
    try:
        return "factors" in read_record(checkpoint).inspectable
    except DuplexError:  # of another version, for example
        return False


def _read(path: Path) -> Image.Image:
    try:
        return read_image(path)
    except BadImageFile as error:
        raise DuplexError(f"{path} cannot be used: {error.reason}") from None
