"""Measure `duplex next`: python -m benchmarks.labelling [--json]

Of the training images of `shapes`, 150 random ones are labelled and fitted by the method `closed_form`. Then 50, 100 or
200 of the others are labelled too, chosen at random or as `duplex next` lists them, and the fit is repeated.
`random` and `next` are accuracies among all 192 pairs, if one image in ten shows a pair without training images in
`shapes`; `gain` is the mean of their difference over seeds with its 95 % t-interval, in percent. Reads the cache that
`make repro` writes.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO

import numpy as np
import pandas as pd
import torch
from scipy import stats

from benchmarks.measure import emit, options, say
from duplex import Dataset, fit
from duplex.artifacts import ArtifactPaths
from duplex.data.tables import read_manifest
from duplex.features.file import read_features
from duplex.project.suspects import in_labelling_order
from duplex.recognition.answers import Answer, Candidates

FIRST, ADDED, SEEDS = 150, (50, 100, 200), 8
NEW_SHARE = 0.1


def main() -> None:
    given = options(__doc__).parse_args()
    paths = ArtifactPaths()
    features = read_features(paths.features("shapes")).cls
    shapes = read_manifest(paths.manifest("shapes")).assign(row=range(len(features)))
    measured = shapes[shapes["split"] == "test"]
    seen = measured[["state", "object"]].apply(tuple, axis=1).isin(
        shapes[shapes["split"] == "train"][["state", "object"]].apply(tuple, axis=1)
    )  # fmt: skip

    def answers(rows: np.ndarray, asked: np.ndarray) -> list[Answer]:
        """Those of a model fitted to training rows, as `Recognizer` gives them in the open world."""
        kept = np.r_[rows, np.flatnonzero(shapes["split"] != "train")]
        with redirect_stderr(StringIO()):
            data = Dataset.from_arrays(features[kept], shapes.iloc[kept].reset_index(drop=True), encoder="tiny")
            run = fit(data, "closed_form")
        open_world = data.labels.candidates("open", "train")
        candidates = Candidates.of(
            data.labels,
            open_world,
            confidence=run.record.confidence,
            world="open",
            scorer=run.method.scorer(open_world.copy()),
            probabilities=run.method.probabilities,
        )
        object.__setattr__(candidates, "novelty", run.record.novelty)
        return list(candidates.answers({"cls": torch.from_numpy(features[asked])}, 2))

    def accuracy(rows: np.ndarray) -> float:
        names = [answer.best.name for answer in answers(rows, measured["row"].to_numpy())]
        right = names == measured["state"] + " " + measured["object"]
        return 100 * float((1 - NEW_SHARE) * right[seen].mean() + NEW_SHARE * right[~seen].mean())

    record = {}
    for added in ADDED:
        found = []
        for seed in range(SEEDS):
            rows = np.random.default_rng(seed).permutation(np.flatnonzero(shapes["split"] == "train"))
            labelled, pool = rows[:FIRST], rows[FIRST:]
            said = answers(labelled, pool)
            margins = [answer.top[0].probability - answer.top[1].probability for answer in said]
            table = pd.DataFrame({"image": pool, "answer": [answer.best.name for answer in said], "margin": margins})
            table["in_distribution"] = [answer.in_distribution for answer in said]
            listed = in_labelling_order(table)["image"].to_numpy()
            found.append([accuracy(np.r_[labelled, chosen[:added]]) for chosen in (pool, listed)])
        random, chosen = np.transpose(found)
        low, high = stats.t.interval(0.95, len(found) - 1, (chosen - random).mean(), stats.sem(chosen - random))
        gain = [round(float(value), 1) for value in ((low + high) / 2, low, high)]
        means = {"random": round(float(random.mean()), 1), "next": round(float(chosen.mean()), 1)}
        record[f"{FIRST} + {added}"] = {**means, "gain": gain}
        say(f"{FIRST} + {added}: {means}, gain {gain}")
    emit(record) if given.json else say(str(record))


if __name__ == "__main__":
    main()
