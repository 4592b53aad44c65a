"""The manifest: the one table of a data set, one row an image, to which everything downstream is row-aligned."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd

from duplex.errors import DuplexError
from duplex.files import replaced, sha256
from duplex.labels import SPLITS

COLUMNS = ["image", "state", "object", "split"]


def write_manifest(frame: pd.DataFrame, path: Path) -> None:
    """Write rows in their order; the same rows give the same bytes everywhere."""
    with replaced(path) as scratch:
        frame[COLUMNS].to_csv(scratch, index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL, encoding="utf-8")


def read_manifest(path: Path) -> pd.DataFrame:
    """Read and check a manifest. Every cell is text: a state named `NA` or `1` stays what it is."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; `duplex prepare --dataset {path.parent.name}` writes it") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DuplexError(f"{path} is not a manifest: {error}") from error
    if list(frame.columns) != COLUMNS:
        raise DuplexError(f"{path} has the columns {list(frame.columns)}; a manifest has {COLUMNS}")
    strange = sorted(set(frame["split"]) - set(SPLITS))
    if strange:
        raise DuplexError(f"{path}: split {strange[0]!r} is not one of {', '.join(SPLITS)}")
    return frame


def manifest_hash(path: Path) -> str:
    """sha256 of the file; part of a feature cache's identity."""
    return sha256(path)
