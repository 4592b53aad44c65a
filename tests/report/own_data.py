"""A small data set with drawn images, random features of pairs, and answers, for tests of its page."""

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from duplex.data.tables import labels_of
from duplex.evaluation.answered import AnsweredImages
from duplex.features.tokens import Examples, join_labels
from duplex.labels import LabelSpace
from duplex.report.own import OwnData

STATES, OBJECTS = ("old", "new", "wet", "dry"), ("car", "tree", "cup")
UNSEEN = {("old", "cup"): "test", ("dry", "tree"): "test", ("new", "car"): "val"}
EACH = {"train": 8, "val": 4, "test": 5}
WIDTH = 6


def manifest() -> pd.DataFrame:
    rows = []
    for state in STATES:
        for thing in OBJECTS:
            held_out = UNSEEN.get((state, thing))
            for split, count in EACH.items():
                if held_out in (None, split):
                    rows += [(f"{state}_{thing}_{split}{i}.png", state, thing, split) for i in range(count)]
    return pd.DataFrame(rows, columns=["image", "state", "object", "split"])


def examples_of(rows: pd.DataFrame, labels: LabelSpace, noise: float = 0.7) -> dict[str, Examples]:
    """Return features that are sums of a state's and an object's vector with noise."""
    random = np.random.default_rng(0)
    states, objects = (random.normal(size=(n, WIDTH)) for n in (len(labels.states), len(labels.objects)))
    codes = labels.index(rows["state"].tolist(), rows["object"].tolist())
    cls = states[labels.state_of(codes)] + objects[labels.object_of(codes)]
    cls = (cls + noise * random.normal(size=cls.shape)).astype(np.float32)
    return join_labels(rows, labels, {"cls": cls}, np.zeros(len(rows), dtype=bool))


def answers_of(labels: LabelSpace, examples: dict[str, Examples]) -> AnsweredImages:
    """Return answers of which about two in three are right, with random probabilities."""
    random, target = np.random.default_rng(1), examples["test"].compositions.numpy()
    answer = np.where(random.random(len(target)) < 0.65, target, random.integers(0, labels.size, len(target)))
    return AnsweredImages(labels, examples["test"].rows, target, answer, random.uniform(0.2, 1.0, len(target)))


def own_data(root: Path) -> OwnData:
    rows = manifest()
    labels = labels_of(rows)
    root.mkdir(parents=True, exist_ok=True)
    for place, image in enumerate(rows["image"]):
        Image.new("RGB", (40, 30), (place % 256, 90, 160)).save(root / image)
    examples = examples_of(rows, labels)
    return OwnData("my shop", labels, rows, root, answers_of(labels, examples), examples, facts=[("encoder", "tiny")])
