"""How `duplex fit` chooses whether long images are cropped, squashed or padded to a square.

A sample of the training and validation images is encoded in each way, and the closed form, which trains nothing and
reads no text, is fitted. The way with the highest validation AUC is taken; the encoder's own, unless another leads it
by more than the standard error of the difference. The choice depends on images, labels, encoder and device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from PIL import Image

from duplex.config.params import EncoderParams, EvaluationParams
from duplex.data.images import CROP, READABLE, uncropped_path
from duplex.data.tables import labels_of
from duplex.encoders.base import RESIZES, encoder_identity, load_encoder
from duplex.errors import DuplexError
from duplex.features.shared import encode_shared, user_cache
from duplex.labels import Ints
from duplex.recognition.labelled_folder import LabelledFolder
from duplex.training.inputs import Data
from duplex.training.recipes import SearchSpace
from duplex.training.run import train_run
from duplex.training.trials import Trial, TrialResult

LONG = 4 / 3  # ratio of an image's sides above which the way matters
SHARE = 0.25  # of the sample, that such images must have
SAMPLE = {"train": 600, "val": 400}  # largest number of images of each split


def choose_resize(
    data: LabelledFolder, entry: EncoderParams, device: torch.device, say: Callable[[str], None]
) -> EncoderParams:
    """`entry` with the way to make images square, which is tried if a quarter of the images are long."""
    rows = sampled_rows(data)
    images = data.manifest["image"].iloc[rows].tolist()
    if share_of_long(data, images) < SHARE:
        return entry
    results = {}
    try:
        for way in RESIZES:
            results[way] = _result(data, rows, entry.model_copy(update={"resize": way}), device)
    except DuplexError as error:
        say(f"images stay as the encoder resizes them, since no sample could be compared ({error})")
        return entry
    own = own_way(entry)
    best = max(results, key=lambda way: results[way].auc)
    difference = results[best].components.minus(results[own].components)
    if difference.auc is None or difference.auc <= (difference.standard_error or 0.0):
        best = own
    listed = ", ".join(f"{way} {result.auc:.1f}" for way, result in results.items())
    say(f"long images: validation AUC of a sample ({len(rows):,} images) {listed}; chosen: {best}")
    return entry if best == own else entry.model_copy(update={"resize": best})


def own_way(entry: EncoderParams) -> str:
    """How the encoder's own preprocessing makes images square: crop, squash or pad."""
    own = encoder_identity(entry.name, entry.weights)
    same = [way for way in RESIZES if encoder_identity(entry.name, entry.weights, resize=way) == own]
    return same[0]


def sampled_rows(data: LabelledFolder) -> Ints:
    """Rows of the sample, in order: of training, the same number of each pair, and of validation with these words.

    Images are taken in the order of their contents' digests, so that it depends on nothing else.
    """
    table = data.manifest[["state", "object", "split"]].assign(digest=data.digests).sort_values("digest")
    place = table.groupby(["state", "object", "split"]).cumcount()
    train = table[table["split"] == "train"].assign(place=place)
    train = train.sort_values(["place", "digest"]).head(SAMPLE["train"])
    val = table[table["split"] == "val"]
    val = val[val["state"].isin(train["state"]) & val["object"].isin(train["object"])].head(SAMPLE["val"])
    return np.sort(np.concatenate([train.index.to_numpy(), val.index.to_numpy()]))


def share_of_long(data: LabelledFolder, images: list[str]) -> float:
    """The share of images whose longer side exceeds the shorter one by more than a third."""
    long = [_is_long(data, image) for image in images]
    return sum(long) / max(1, len(long))


def _is_long(data: LabelledFolder, image: str) -> bool:
    crop = CROP.search(image)
    if crop is not None:
        width, height = int(crop[3]), int(crop[4])
        return max(width, height) > LONG * min(width, height)
    try:
        with Image.open(data.root / uncropped_path(image), formats=READABLE) as file:  # reads only the header
            return max(file.size) > LONG * min(file.size)
    except Exception:  # Pillow raises almost anything; extraction says what is wrong with the image
        return False


def _result(data: LabelledFolder, rows: Ints, entry: EncoderParams, device: torch.device) -> TrialResult:
    """The closed form's result on the sample's validation images."""
    tower = load_encoder(entry.name, entry.weights, towers="image", device=str(device), resize=entry.resize)
    manifest: pd.DataFrame = data.manifest.iloc[rows].reset_index(drop=True)
    digests = [data.digests[row] for row in rows]
    images = manifest["image"].tolist()
    features, bad = encode_shared(user_cache(), tower, data.root, images, digests, max_bad=1.0)
    kept = ~np.isin(np.arange(len(manifest)), [each.row for each in bad])
    manifest = manifest[kept].reset_index(drop=True)
    features = replace(features, digests=tuple(np.array(digests)[kept].tolist()))
    recipe: Trial = SearchSpace(0).nothing_trained
    inputs = Data(manifest, labels_of(manifest), features, entry, str(device)).read(recipe.spec.request)
    run = train_run(recipe.spec, inputs, 0, device, EvaluationParams())
    assert run.margins is not None
    return TrialResult(recipe.name, run.margins, run.record.epoch)
