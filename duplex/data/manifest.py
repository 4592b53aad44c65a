"""The manifest: the table of a data set with one row per image. Caches and results have its rows in the same order.

Labels and image paths are checked, so that they can be used in tables, prompts and file names.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from duplex.data.text_files import read_text
from duplex.errors import DuplexError
from duplex.labels import SPLITS, prompt_name
from duplex.system.files import replace_file

COLUMNS = ["image", "state", "object", "split"]
ROOT = "the folder of the images (--images, or datasets.NAME.source.root of params.yaml)"


def write_manifest(frame: pd.DataFrame, path: Path) -> None:
    """Write a manifest (table of images) as CSV, row order kept; equal rows give equal bytes on every machine."""
    with replace_file(path) as scratch:
        scratch.write_bytes(manifest_bytes(frame))


def manifest_bytes(frame: pd.DataFrame) -> bytes:
    """Return the bytes of the CSV file that stores a manifest (table of images)."""
    text: str = frame[COLUMNS].to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
    return text.encode("utf-8")


def read_manifest(path: Path) -> pd.DataFrame:
    """Read and check a manifest (table of images). Every cell is text, so a state named `NA` or `1` stays as it is."""
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
        place = f"{path}, row {number}"
        if len(row) != len(COLUMNS):
            raise DuplexError(f"{place} has {len(row)} cells, expected {len(COLUMNS)}; {command} again")
        if row[3] not in SPLITS:
            raise DuplexError(f"{place}: split {row[3]!r} is not one of {', '.join(SPLITS)}")
        if relative_path(row[0], place) != row[0]:
            raise DuplexError(f"{place}: the image path {row[0]!r} has `.` or empty parts; {command} without them")
    frame = pd.DataFrame(cells, columns=COLUMNS, dtype=str)
    for kind in ("state", "object"):
        check_labels(frame[kind], kind, path)
    return frame


UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")  # control characters, line ends, half characters
PATH_LIMIT = 4096
LABEL_LIMIT = 100  # characters; a state, an object and a context share the 77 tokens of CLIP's prompts


def check_labels(labels: Iterable[str], kind: str, place: object) -> None:
    """Raise DuplexError for a state or object name that cannot be used in prompts and tables.

    Such a name is too long, has control characters, or leaves no word for a prompt.

    kind: "state" or "object".
    place: name of the source in the message.
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
    """Return an image path without `.` and empty parts; raise DuplexError if it leads out of the data set's folder."""
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
