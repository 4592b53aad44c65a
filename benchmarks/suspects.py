"""Measure `duplex suspects`: python -m benchmarks.suspects [--json] [--copies FOLDER]

Of the labels of `shapes` 5 % and 20 % are flipped at random, in every split, to other pairs of the split; images are
ranked as the command does, and the flipped ones among the first 5 % and 20 % of the list are counted: by the features
of the cache (`plain`), and by whitened ones, as the command does. Means over seeds with 95 % t-intervals, in percent.
Reads the cache that `make repro` writes. With --copies, 200 images of a folder are scaled by 0.5 to 1.5 or not, and
saved as JPEG of quality 50 to 95; `found` is the share whose original is found, `false` that of the folder's images
that are said to be copies without equal pixels.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import stats

from benchmarks.measure import emit, options, say
from duplex.artifacts import ArtifactPaths
from duplex.data.contents import looks_from_texts, near_copies, read_digests
from duplex.data.images import ImageTree
from duplex.data.tables import read_manifest
from duplex.features.file import read_features
from duplex.labels import LabelSpace
from duplex.project.suspects import label_margins, rank_by_margins, whitened

SHARES, LOOKED, SEEDS = (0.05, 0.2), (0.05, 0.2), 5
WAYS = ("plain", "whitened")
COPIES = 200


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--copies", type=Path, help="folder of images to measure near-copies on instead")
    given = parser.parse_args()
    if given.copies:
        record = copies_found(given.copies)
        return emit(record) if given.json else say(str(record))
    curves = {share: found(share) for share in SHARES}
    record = {
        f"flipped_{share:.0%}": {way: table(curves[share][way]) for way in WAYS} | {"at_best": ceilings(share)}
        for share in SHARES
    }
    emit(record) if given.json else say(str(record))


def found(share: float) -> dict[str, np.ndarray]:
    """Per way, the share of the flipped images among the first n of the list [seeds, images + 1]."""
    paths = ArtifactPaths()
    manifest, labels = read_manifest(paths.manifest("shapes")), LabelSpace.load(paths.labels("shapes"))
    features = read_features(paths.features("shapes")).cls
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    curves: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for seed in range(SEEDS):
        own = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
        wrong = flip(own, labels, manifest["split"].to_numpy(), share, np.random.default_rng(seed))
        names = {"state": np.array(labels.states)[labels.state_of(own)]}
        names["object"] = np.array(labels.objects)[labels.object_of(own)]
        told = manifest.assign(**names)
        for way in WAYS:
            space = features if way == "plain" else whitened(torch.from_numpy(features), own, labels).numpy()
            numbered = told.assign(image=np.arange(len(told)))
            listed = rank_by_margins(numbered, labels, label_margins(space, own, labels, seed))
            curves[way].append(np.r_[0, wrong[listed["image"]].cumsum()] / wrong.sum())
            early = ", ".join(f"{at(curves[way][-1], looked):.3f}" for looked in LOOKED)
            say(f"{share:.0%} flipped, seed {seed}, {way}: {early}")
    return {way: np.stack(rows) for way, rows in curves.items()}


def flip(own: Any, labels: LabelSpace, split: Any, share: float, rng: np.random.Generator) -> Any:
    """Give a share of the images another pair of their split, in place; the result is their mask."""
    wrong = np.zeros(len(own), dtype=bool)
    wrong[rng.choice(len(own), round(share * len(own)), replace=False)] = True
    for image in np.flatnonzero(wrong):
        pairs = labels.pairs[split[image]]
        own[image] = rng.choice(pairs[pairs != own[image]])
    return wrong


def copies_found(root: Path) -> dict[str, float]:
    """Percentages of near-copies that are found, and of other images that are taken for one."""
    rng, names = np.random.default_rng(1), np.array(list(ImageTree(root).images()))
    chosen = rng.choice(len(names), COPIES, replace=False)
    with TemporaryDirectory() as folder:
        for number, row in enumerate(chosen):
            image = Image.open(root / names[row]).convert("RGB")
            if number % 2:
                width, height = (round(side * rng.uniform(0.5, 1.5)) for side in image.size)
                image = image.resize((width, height), Image.Resampling.LANCZOS)
            image.save(f"{folder}/{number}.jpg", quality=int(rng.integers(50, 96)))
        files, pixels = read_digests(Path(folder), [f"{number}.jpg" for number in range(COPIES)], {})
        copies = looks_from_texts([pixels[file] for file in files])
    files, pixels = read_digests(root, names.tolist(), {})
    pairs = near_copies(np.concatenate([looks_from_texts([pixels[file] for file in files]), copies])).tolist()
    found = [[row, len(names) + number] in pairs for number, row in enumerate(chosen)]
    other = [pair for pair in pairs if pair[1] < len(names) and pixels[files[pair[0]]] != pixels[files[pair[1]]]]
    false = len({row for pair in other for row in pair}) / len(names)
    return {"images": len(names), "found": round(100 * float(np.mean(found)), 1), "false": round(100 * false, 2)}


def at(curve: np.ndarray, share: float) -> Any:
    return curve[..., round(share * (curve.shape[-1] - 1))]


def table(curves: np.ndarray) -> dict[str, list[float]]:
    """The mean and its interval among the first 5 % and 20 %."""
    record = {}
    for share in LOOKED:
        values = 100 * at(curves, share)
        half = stats.t.ppf(0.975, SEEDS - 1) * values.std(ddof=1) / SEEDS**0.5
        record[f"first_{share:.0%}"] = [
            round(float(v), 1) for v in (values.mean(), values.mean() - half, values.mean() + half)
        ]
    return record


def ceilings(share: float) -> dict[str, float]:
    """The numbers of a list that begins with all flipped images."""
    return {f"first_{looked:.0%}": round(100 * min(1.0, looked / share), 1) for looked in LOOKED}


if __name__ == "__main__":
    main()
