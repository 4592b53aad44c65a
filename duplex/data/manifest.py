"""The manifest: the table of a data set with one row per image. Caches and results have its rows in the same order.

The cells of manifests and of users' tables are checked here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from duplex.data.text_files import read_text
from duplex.errors import DuplexError
from duplex.labels import SPLITS, prompt_name
from duplex.system.files import replace_file

COLUMNS = ["image", "state", "object", "split"]
NEEDED = ("image", "state", "object")
ROOT = "the folder of the images (--images, or datasets.NAME.source.root of params.yaml)"


def write_manifest(frame: pd.DataFrame, path: Path) -> None:
    """Write a manifest as CSV in the order of its rows; equal rows give equal bytes on every machine."""
    with replace_file(path) as scratch:
        scratch.write_bytes(manifest_bytes(frame))


def manifest_bytes(frame: pd.DataFrame) -> bytes:
    text: str = frame[COLUMNS].to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
    return text.encode("utf-8")


def read_manifest(path: Path) -> pd.DataFrame:
    """Read and check a manifest. Every cell is text, so a state named `NA` or `1` stays as it is."""
    command = f"`duplex prepare --dataset {path.parent.name}` writes it"
    if not path.is_file():
        raise DuplexError(f"{path} does not exist; {command}")
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(path), newline=""), strict=True) if row]
    except csv.Error as error:
        raise DuplexError(f"{path} is not a manifest ({error}); {command} again") from error
    if rows[:1] != [COLUMNS]:
        raise DuplexError(f"{path} has the columns {rows[:1]}; a manifest has {COLUMNS}; {command} again")
    for number, row in enumerate(rows):
        if len(row) != len(COLUMNS):
            raise DuplexError(f"{path}, row {number} has {len(row)} cells, expected {len(COLUMNS)}; {command} again")
    frame = pd.DataFrame(rows[1:], columns=COLUMNS, dtype=str)
    checked = checked_cells(frame, path, lambda row: f"{path}, row {row + 1}")
    if not checked.equals(frame):
        raise DuplexError(f"{path}: an image path has `.` or empty parts, or there are no splits; {command} again")
    return checked


def checked_cells(
    frame: pd.DataFrame, table: object, place: Callable[[int], str], *, paths: bool = True
) -> pd.DataFrame:
    """Check the cells of a table of labelled images; it is returned with image paths without `.` and empty parts.

    Images, states and objects are text that can be used in file names, prompts and tables. A column `split` gives a
    split to each row; it is left out if it is empty. Further columns are text or empty.

    Args:
        table: name of the table in messages.
        place: from the number of a row to its name in messages.
        paths: whether images are paths below the data root; otherwise they may be any text.
    """
    checked: dict[str, list[str]] = {}
    for name in map(str, frame.columns):
        cells = checked.setdefault(name, [])
        for row, given in enumerate(frame[name]):
            cell = "" if given is None and name not in NEEDED else given
            if not isinstance(cell, str):
                raise DuplexError(f"{place(row)}: {name} is {cell!r:.80}; it must be text")
            if name in NEEDED and not cell:
                raise DuplexError(f"{place(row)}: {name} is empty")
            if name == "split" and cell not in (*SPLITS, ""):
                raise DuplexError(f"{place(row)}: the split {cell!r} is not one of {', '.join(SPLITS)}")
            cells.append(relative_path(cell, place(row)) if name == "image" and paths else cell)
    for kind in ("state", "object"):
        check_labels(checked[kind], kind, table)
    without = checked.get("split", []).count("")
    if 0 < without < len(frame):
        raise DuplexError(f"{table}: {without} of {len(frame)} rows have no split; give one to each row or to none")
    if without:
        del checked["split"]
    return pd.DataFrame(checked, dtype=str)


UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")  # control characters, line ends, half characters
PATH_LIMIT = 4096
LABEL_LIMIT = 100  # characters; a state, an object and a context share the 77 tokens of CLIP's prompts


def check_labels(labels: Iterable[str], kind: str, place: object) -> None:
    """Raise DuplexError for names that are too long, have control characters, or leave no word for a prompt.

    Args:
        kind: "state" or "object".
    """
    for label in set(labels):
        if len(label) > LABEL_LIMIT:
            raise DuplexError(
                f"{place}: the {kind} {label[:40]!r}... has {len(label)} characters, which no prompt can hold; "
                f"expected at most {LABEL_LIMIT}"
            )
        if UNFIT.search(label):
            raise DuplexError(f"{place}: the {kind} {label!r} has a control or invalid Unicode character; correct it")
        if not prompt_name(label):
            raise DuplexError(f"{place}: the {kind} {label!r} contains no word for a prompt; rename it")


def relative_path(image: str, place: object) -> str:
    """An image path without `.` and empty parts; raises DuplexError if it leads out of the data set's folder."""
    if UNFIT.search(image) or len(image) > PATH_LIMIT:
        raise DuplexError(f"{place}: the image path {image[:80]!r} is too long or not printable; rename the file")
    if image.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", image):
        raise DuplexError(f"{place}: the image path {image!r} is absolute; write it relative to {ROOT}")
    parts = [part for part in image.split("/") if part not in ("", ".")]
    if not parts:
        raise DuplexError(f"{place}: an image path is empty")
    if ".." in parts or "..\\" in image:
        raise DuplexError(
            f"{place}: the image path {image!r} leaves the data root; write it without `..`, relative to {ROOT}"
        )
    return "/".join(parts)
