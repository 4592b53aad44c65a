"""Check a user's file of image features against its data set and the encoder that is said to have computed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from duplex.data.check import SHOWN, DataIssue, content_issues
from duplex.data.dataset import LabelledImages
from duplex.data.table import read_table
from duplex.encoders import encoder_identity, missing_weights
from duplex.encoders.families import find_family
from duplex.errors import UsageError
from duplex.features.feature_file import FEATURES, FeatureFile, feature_row_keys
from duplex.features.identity import IMPORTED


def check_features(
    path: Path, data: LabelledImages, is_table: bool, encoder: str, weights: str | None, max_bad: float
) -> Iterator[DataIssue]:
    """Check a user's file of image features; yield its issues: rows that are unusable, equal or of no image.

    Raises UsageError unless the file fits both the data set and the encoder.

    Args:
        path: a .npy or .npz file (`features.feature_file`).
        data: the data set.
        is_table: whether the data set is a table, whose lines have an order that a file without names can follow.
        encoder: name of the encoder that made the features; IMPORTED if unknown.
        weights: the encoder's weights.
        max_bad: largest share of rows that are zero or not finite; more are fatal.
    """
    file = FeatureFile.open(path)
    images = data.manifest["image"].tolist()
    rows = file.rows_of(images, ordered=is_table)
    refuse_other_width(file, encoder, weights)
    if file.names is not None and (further := len(file.names) - len(images)):
        yield DataIssue("rows of features belong to no image of the data set", further, (str(path),), False)
    bad = [images[row] for row in np.flatnonzero(file.unusable(rows)).tolist()]
    if bad:
        fatal = len(bad) > max_bad * len(images)
        yield DataIssue("rows of features are zero or not finite", len(bad), tuple(bad), True, fatal)
    keys = dict(zip(images, feature_row_keys(path, is_table, images), strict=True))
    yield from (issue for issue in content_issues(data.manifest, keys, FEATURES) if issue.count)


def refuse_repeated_lines(path: Path, table: Path) -> None:
    """Raise `UsageError` if a file without image names also has a row for each repeated line of a table.

    Repeated lines are left out of a data set, and the other rows of the file would no longer fit its images.
    """
    file = FeatureFile.open(path)
    lines = read_table(table)
    repeated = np.flatnonzero(lines.duplicated()).tolist()
    if file.names is None and repeated and len(file.values) == len(lines):
        shown = ", ".join(f"{row} ({lines['image'][row]})" for row in repeated[:SHOWN])
        more = ", ..." if len(repeated) > SHOWN else ""
        raise UsageError(
            f"{table} repeats {len(repeated)} of its {len(lines)} lines, and uses a repeated line once; delete these "
            f"lines, and from {path} the same rows, counted from 0: {shown}{more}"
        )


def refuse_other_width(file: FeatureFile, encoder: str, weights: str | None, advice: str = "or --encoder none") -> None:
    """Raise `UsageError` if an encoder's features have another width than those in `file`.

    The message ends with `advice`, on how to go on without an encoder.
    """
    if encoder != IMPORTED and (width := _encoder_width(encoder, weights)) not in (None, file.width):
        raise UsageError(
            f"{file.path} has features of width {file.width}, and {encoder} makes features of {width}; name the "
            f"encoder that made them, {advice}"
        )


def _encoder_width(name: str, weights: str | None) -> int | None:
    """None if the width is only known from weights that are not on disk."""
    for entry in find_family(name).catalog():
        if entry.name == name:
            return entry.dim
    return encoder_identity(name, weights).dim if missing_weights(name, weights) is None else None
