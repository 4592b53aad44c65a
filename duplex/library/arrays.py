"""Data sets whose features and labels are arrays in memory: check them, and make from them what training reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.config.params import EncoderParams
from duplex.data.dataset import LabelledImages
from duplex.data.manifest import COLUMNS, checked_cells, manifest_bytes
from duplex.data.table import known_columns, refuse_unnamed_split
from duplex.errors import UsageError
from duplex.features.examples import join
from duplex.library.inputs import InputRequest, RunInputs, encoder_record, load_text_tower

NEEDED = ("state", "object")


@dataclass(frozen=True)
class ArrayFeatures:
    """Data set of labelled images whose features are an array in memory; `read` returns them for training."""

    data: LabelledImages
    features: NDArray[np.float32]  # [N, d]
    encoder: EncoderParams
    device: str
    word_vectors: Path | None

    def read(self, request: InputRequest) -> RunInputs:
        """Return what a training run needs: features and labels of each split, text tower, and identity of the encoder.

        Patch tokens and block inputs (activations for fine-tuning) are never included, even if `request` asks for them.
        """
        manifest, labels = self.data.manifest, self.data.labels
        tower, identity = load_text_tower(self.encoder, self.device, request.precision)
        examples = join(manifest, labels, {"cls": self.features}, np.zeros(len(manifest), dtype=bool))
        table = hashlib.sha256(manifest_bytes(manifest)).hexdigest()
        cache = {"weights": f"arrays of width {self.features.shape[1]}", "manifest": table}
        encoder = encoder_record(self.encoder, identity, cache, request, self.word_vectors)
        return RunInputs(manifest, labels, examples, tower, encoder, cache, 0, self.word_vectors)


def checked_table(
    table: pd.DataFrame | Mapping[str, Sequence[str]], rows: int, index: pd.Index | None = None
) -> pd.DataFrame:
    """Check a user's table of labels and return its columns image, state, object and, if present, split.

    Without a column image, images are named by their row numbers. Raises `DuplexError` for a wrong table.

    rows: number of images in the array of features.
    index: the pandas index of the features, if they have one. Rows are matched to features by position, so different
        indexes raise `UsageError`.
    """
    columns = table.values() if isinstance(table, Mapping) else [table]
    _require_equal([index, *map(pandas_index, columns)])
    try:
        frame = pd.DataFrame(table).reset_index(drop=True)
    except ValueError as error:
        raise UsageError(f"the table is not one row per image: {error}") from None
    frame.columns = frame.columns.map(str)
    known = known_columns(frame.columns.tolist(), "the table", NEEDED, ("image",))
    refuse_unnamed_split(frame, "the table")
    if len(frame) != rows:
        raise UsageError(f"features has {rows} rows and the table {len(frame)}; expected one row per image in both")
    frame = frame[known]
    if "image" not in frame:
        frame = frame.assign(image=[str(row) for row in range(rows)])
    frame = checked_cells(frame, "the table", lambda row: f"the table, row {row}", paths=False)
    if frame["image"].duplicated().any():
        image = frame.loc[frame["image"].duplicated(), "image"].iloc[0]
        raise UsageError(f"the table lists the image {image!r} twice; expected one row per image")
    return frame[[column for column in COLUMNS if column in frame]].astype(object)


def _require_equal(indexes: Sequence[pd.Index | None]) -> None:
    """Raise `UsageError` unless the pandas indexes of the features and of the table's columns are equal.

    indexes: one per array or column; None, for one without an index, is skipped.
    """
    present = [index for index in indexes if index is not None]
    if not all(index.equals(present[0]) for index in present):
        raise UsageError(
            "features and the table's columns have different pandas indexes, but rows are matched by position; "
            "bring all into one order and call reset_index(drop=True) on each"
        )


def pandas_index(value: object) -> pd.Index | None:
    """Return a pandas object's index, or a mapping's keys (pandas aligns rows by both); None for other values."""
    index = pd.Index(list(value)) if isinstance(value, Mapping) else getattr(value, "index", None)
    return index if isinstance(index, pd.Index) else None
