"""The manifest: the table of a data set with one row per image, to which caches and results are row-aligned."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd

from duplex.data.names import check_labels, relative_path
from duplex.data.text_files import read_text
from duplex.errors import DuplexError
from duplex.labels import SPLITS
from duplex.system.files import replace_file

COLUMNS = ["image", "state", "object", "split"]


def write_manifest(frame: pd.DataFrame, path: Path) -> None:
    """Write the rows in their order; equal rows give equal bytes on every machine."""
    with replace_file(path) as scratch:
        frame[COLUMNS].to_csv(scratch, index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL, encoding="utf-8")


def read_manifest(path: Path) -> pd.DataFrame:
    """Read and check a manifest. Every cell is text, so a state named `NA` or `1` stays as it is.

    Raise DuplexError for a missing file, a wrong column, split or label, or an image path outside of the data root.
    """
    command = f"`duplex prepare --dataset {path.parent.name}` writes it"
    if not path.is_file():
        raise DuplexError(f"{path} does not exist; {command}")
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(rows, [])
        if header != COLUMNS:
            raise DuplexError(f"{path} has the columns {header}; a manifest has {COLUMNS}; {command} again")
        cells = [row for row in rows if row]
    except csv.Error as error:
        raise DuplexError(f"{path} is not a manifest ({error}); {command} again") from error
    for number, row in enumerate(cells, 1):
        _check_row(row, f"{path}, row {number}")
    frame = pd.DataFrame(cells, columns=COLUMNS, dtype=str)
    for kind in ("state", "object"):
        check_labels(frame[kind], kind, path)
    return frame


def _check_row(row: list[str], place: str) -> None:
    if len(row) != len(COLUMNS):
        raise DuplexError(f"{place} has {len(row)} cells; a manifest has {len(COLUMNS)}")
    if row[3] not in SPLITS:
        raise DuplexError(f"{place}: split {row[3]!r} is not one of {', '.join(SPLITS)}")
    if relative_path(row[0], place) != row[0]:
        raise DuplexError(f"{place}: the image path {row[0]!r} is not written in full; `duplex prepare` does it")
