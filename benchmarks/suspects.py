"""Measure how many wrong labels `duplex data suspects` finds: python -m benchmarks.suspects [--json] [--figure FILE]

Of the labels of `shapes` 5 % and 20 % are flipped at random, in every split, to other pairs of the split; images are
ranked as the command does, and the flipped ones among the first 5 % and 20 % of the list are counted. `prototypes` and
`knn` use the features of the cache, `run` those of a run in closed form that was fitted to the wrong labels. Means over
seeds with 95 % t-intervals, in percent. Reads the cache that `make repro` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.measure import emit, options, say
from duplex.artifacts import ArtifactPaths
from duplex.data.tables import read_manifest
from duplex.features.file import read_features
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.project.suspects import LabelMargins, margins, rank_by_margins

SHARES, LOOKED, SEEDS = (0.05, 0.2), (0.05, 0.2), 5
WAYS = ("prototypes", "knn", "run")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    parser.add_argument("--figure", type=Path, help="SVG file for the curves")
    given = parser.parse_args()
    curves = {share: found(given.artifacts, share) for share in SHARES}
    record = {
        f"flipped_{share:.0%}": {way: table(curves[share][way]) for way in WAYS} | {"at_best": ceilings(share)}
        for share in SHARES
    }
    if given.figure:
        draw(curves, given.figure)
    emit(record) if given.json else say(str(record))


def found(artifacts: Path, share: float) -> dict[str, np.ndarray]:
    """Per way, the share of the flipped images among the first n of the list [seeds, images + 1]."""
    paths = ArtifactPaths(artifacts)
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
            space = fitted(features, own, labels, (told["split"] == "train").to_numpy()) if way == "run" else features
            listed = rank_by_margins(
                told.assign(image=np.arange(len(told))), labels, judged(space, own, labels, way, seed)
            )
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


def judged(space: np.ndarray, own: Any, labels: LabelSpace, way: str, seed: int) -> dict[str, LabelMargins]:
    groups = {"composition": own, "state": labels.state_of(own), "object": labels.object_of(own)}
    vote = "knn" if way == "knn" else "run"
    return {name: margins(space, group, vote, seed=seed) for name, group in groups.items()}  # type: ignore[arg-type]


def fitted(features: np.ndarray, own: Any, labels: LabelSpace, train: np.ndarray) -> np.ndarray:
    """The features of a run without text: whitened by the training images' spread about their labels' means."""
    options = ClosedFormOptions(losses=(), inference=("gaussian",), adapter="none")
    method = ClosedFormMethod(MethodContext(labels, {"cls": (features.shape[1],)}), options)
    z = torch.from_numpy(features)
    method.start(Batch({"cls": z[train]}, torch.as_tensor(own[train])))
    look = method.inspectable().features
    assert look is not None
    return look({"cls": z}).numpy()


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


def draw(curves: dict[float, dict[str, np.ndarray]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "suspects", "font.size": 9, "axes.spines.right": False})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(7.2, 3.1), sharey=True, layout="constrained")
    for panel, (share, found_by) in zip(panels, curves.items(), strict=True):
        for way, colour in zip(WAYS, ("#0072b2", "#d55e00", "#009e73"), strict=True):
            along = np.linspace(0, 100, 41)
            rows = 100 * np.stack([at(found_by[way], part / 100) for part in along])
            panel.plot(along, rows.mean(1), colour, label=way, linewidth=1.6)
            panel.fill_between(along, rows.min(1), rows.max(1), color=colour, alpha=0.2, linewidth=0)
        panel.plot([0, 100 * share, 100], [0, 100, 100], "#888888", linestyle="--", linewidth=1, label="at best")
        panel.plot([0, 100], [0, 100], "#bbbbbb", linestyle=":", linewidth=1, label="by chance")
        for looked in LOOKED:
            panel.axvline(100 * looked, color="#dddddd", linewidth=0.8, zorder=0)
        panel.set(
            title=f"{share:.0%} of the labels flipped", xlabel="first % of the list", xlim=(0, 100), ylim=(0, 102)
        )
    panels[0].set_ylabel("% of the flipped that are found")
    panels[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
