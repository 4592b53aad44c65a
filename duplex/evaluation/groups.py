"""Accuracy by training frequency: the paper's frequency groups (appendix tables; see `labels.frequency_groups`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from duplex.errors import DuplexError
from duplex.labels import GROUPS, Bools, FrequencyGroups, Ints


def group_table(groups: FrequencyGroups, train: Ints, test: Ints, right: Mapping[str, Bools]) -> pd.DataFrame:
    """Return one row per group: compositions, training and test images, their shares and accuracies, in percent.

    `train`, `test`: compositions of the images. `right`: column name -> mask [test images] of right predictions; with
    two, the column `gain` is the second minus the first. An accuracy over no images is NaN.
    """
    table = pd.DataFrame({"group": list(GROUPS), "compositions": groups.sizes})
    for split, images in (("train", train), ("test", test)):
        counts = np.bincount(groups.of(images), minlength=len(GROUPS))
        table[f"{split}_images"] = counts
        table[f"{split}_percent"] = 100 * counts / max(images.size, 1)
    for run, hits in right.items():
        if hits.shape != test.shape:
            raise DuplexError(f"{run} has results for {hits.size} images, the test split has {test.size}")
        counted = np.bincount(groups.of(test), weights=hits, minlength=len(GROUPS))
        images = table["test_images"].to_numpy()
        table[run] = np.divide(100 * counted, images, out=np.full(len(GROUPS), np.nan), where=images > 0)
    if len(right) == 2:
        first, second = right
        table["gain"] = table[second] - table[first]
    return table
