"""Measure the estimated share of new pairs: python -m benchmarks.new_share [--run RUN | --model MODEL --images SOURCE]

Sets of 50 and of 400 images with known shares of new pairs are drawn from the test images of a run or, for a fitted
model, from labelled images that it was not fitted to (a folder state/object/*.jpg or a table). Listed in per cent, over
20 draws: mean and deviation of the estimated share, its mean standard error, in how many draws the true share is within
1.96 of them, and the accuracy over all images of a set at a share of 10 %, at the estimated, and at the true one.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.answers import Images, group_answers, test_images
from benchmarks.measure import emit, options, say, write_csv
from duplex import Recognizer
from duplex.data.sources import detect_source
from duplex.evaluation.answered import GroupAnswers
from duplex.evaluation.new_share import estimate_share
from duplex.evaluation.probabilities import NEW_SHARE
from duplex.labels import Ints
from duplex.recognition.labelled_folder import distinct_images

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
SIZES, DRAWS = (50, 400), 20


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--run", type=Path, default=Path("artifacts/shapes/dual/0"))
    parser.add_argument("--model", type=Path, help="fitted model, instead of a run")
    parser.add_argument("--images", type=Path, help="labelled images that the model was not fitted to")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    given = parser.parse_args()
    if (given.model is None) != (given.images is None):
        parser.error("--model needs --images, and --images needs --model")
    recognizer = Recognizer.load(given.model or given.run, device="cpu")
    read = labelled_images(recognizer, given.images) if given.model else test_images(recognizer, given.run)
    table = measured(group_answers(recognizer, *read))
    write_csv(table, given.csv)
    emit(table) if given.json else say(pd.DataFrame(table).to_string(index=False))


def labelled_images(recognizer: Recognizer, source: Path) -> tuple[Images, Ints]:
    """The files of labelled images, and their compositions."""
    description = detect_source(source, None, None)
    rows = distinct_images(description, source).rows
    target = recognizer.labels.index(rows["state"].tolist(), rows["object"].tolist())
    return [description.root / image for image in rows["image"]], target


def measured(answers: GroupAnswers) -> list[dict[str, Any]]:
    """One row per number of images and true share."""
    is_new = ~answers.labels.is_seen(answers.target)
    random = np.random.default_rng(0)
    table: list[dict[str, Any]] = []
    for images in SIZES:
        for share in SHARES:
            draws = [drawn(answers, chosen(is_new, images, share, random)) for _ in range(DRAWS)]
            columns = pd.DataFrame(draws)
            columns.insert(1, "deviation", columns["estimated"].std())
            means = {str(name): round(float(value), 1) for name, value in columns.mean().items()}
            table.append({"images": images, "true_share": round(100 * share, 1), **means})
    return table


def chosen(is_new: np.ndarray, images: int, share: float, random: np.random.Generator) -> Ints:
    """Numbers of drawn images, of which `share` show new pairs; drawn again only if there are too few."""
    unseen = round(share * images)
    parts = []
    for group, count in ((np.flatnonzero(is_new), unseen), (np.flatnonzero(~is_new), images - unseen)):
        parts.append(random.choice(group, count, replace=count > len(group)))
    return np.concatenate(parts)


def drawn(answers: GroupAnswers, rows: Ints) -> dict[str, float]:
    """The estimate for one set of images, and accuracies over it."""
    if answers.mass is None:
        raise SystemExit("the model has no means over validation images; train, fit or export it again")
    estimate = estimate_share(answers.unseen[rows], asdict(answers.mass), answers.stored)
    error = estimate.error or 0.0
    true = float((~answers.labels.is_seen(answers.target[rows])).mean())
    shares = {"assumed": NEW_SHARE, "estimated": estimate.value, "true": true}
    return {
        "estimated": 100 * estimate.value,
        "error": 100 * error,
        "within": 100.0 * (abs(estimate.value - true) <= 1.96 * error),
        **{f"accuracy_{name}": 100 * float(answers.at(at).right[rows].mean()) for name, at in shares.items()},
    }


if __name__ == "__main__":
    main()
