"""Read tables that list a data set: CSV or Parquet with the columns image, state, object and optionally split."""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from duplex.data.manifest import relative_path
from duplex.data.text_files import read_bytes, read_text
from duplex.errors import DuplexError, UsageError, install_command
from duplex.labels import SPLITS

NEEDED = ("image", "state", "object")
SPLIT_NAMES = {"set", "subset", "fold", "phase", "partition"}  # of the column `split` in tables made for other programs
SPLIT_WORDS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
Row = tuple[str, list[Any]]  # its place for messages, its cells


def is_table(path: Path) -> bool:
    return path.suffix.lower() in CSV + PARQUET


def read_table(path: Path, optional: Collection[str] = ()) -> pd.DataFrame:
    """Read and check a table; the result has a column `split` if every row has a split.

    optional: further columns to read if they are there; their cells may be empty.
    """
    if not is_table(path):
        raise UsageError(f"{path} is not a table; expected a name that ends in one of {', '.join(CSV + PARQUET)}")
    columns, rows = (_csv if path.suffix.lower() in CSV else _parquet)(path, optional)
    frame = pd.DataFrame([_checked(columns, *row) for row in rows], columns=columns, dtype=str)
    if frame.empty:
        raise DuplexError(f"{path} has no rows")
    if "split" in frame:
        without = int((frame["split"] == "").sum())
        if 0 < without < len(frame):
            raise DuplexError(f"{path}: {without} of {len(frame)} rows have no split; give one to each row or to none")
        if without:
            frame = frame.drop(columns="split")
    return frame


def _columns(header: list[str], path: Path, optional: Collection[str]) -> list[str]:
    """Return the names of a table's columns to read, in a fixed order; other columns are ignored.

    Raise `DuplexError` for a column that is missing, repeated or misspelt.
    """
    columns = [*NEEDED, *(name for name in ("split", *optional) if name in header)]
    for name in columns:
        if header.count(name) != 1:
            count = "no column" if name not in header else "two columns"
            raise DuplexError(
                f"{path} has {count} {name!r}; it needs {', '.join(NEEDED)} and may have split; its columns are "
                f"{', '.join(header)!r:.100}"
            )
    refuse_misspelt(header, str(path), optional)
    return columns


def refuse_unnamed_split(table: pd.DataFrame, place: str) -> None:
    """Raise `DuplexError` for a table without `split` in which another column, otherwise ignored, lists splits.

    place: name of the table in the message.
    """
    for name in table if "split" not in table else ():
        if name not in NEEDED:
            _refuse_splits(name, table[name], place)


def _refuse_splits(name: object, cells: Iterable[object], place: str) -> None:
    """Raise `DuplexError` if all cells of a column that are not empty are split names, with at least two of them.

    name: name of the column.
    place: name of the table in the message.
    """
    values: dict[str, None] = {}
    for cell in cells:
        if cell is None or cell is pd.NA or (isinstance(cell, float) and math.isnan(cell)):
            continue
        text = str(cell).strip()
        if text and text.lower() not in SPLIT_WORDS:
            return
        if text:
            values[text] = None
    if len({text.lower() for text in values}) > 1:
        raise DuplexError(
            f"{place}: column {name!r} holds {', '.join(values)}; rename it to `split` to use it, or remove it"
        )


def refuse_misspelt(header: Iterable[object], place: str, optional: Collection[str] = ()) -> None:
    """Raise `DuplexError` for a column, otherwise ignored, whose name looks like a misspelling of a missing column.

    Examples are `Split`, `splits` and `set` in a table without `split`.

    place: name of the table in the message.
    optional: further columns that the table may have.
    """
    names = [str(name) for name in header]
    lacking = [name for name in (*NEEDED, "split", *optional) if name not in names]
    for name in names:
        word = "_".join(name.lower().split())
        similar = difflib.get_close_matches(word, lacking, n=1, cutoff=0.8)
        if "split" in lacking and word.rstrip("s") in SPLIT_NAMES:
            similar = ["split"]
        if similar:
            raise DuplexError(f"{place} has a column {name!r}; write {similar[0]!r}, or rename or drop the column")


def _checked(columns: list[str], place: str, cells: list[Any]) -> list[str]:
    """Return a table row's cells without surrounding spaces; raise DuplexError unless all are valid text.

    A row needs an image path inside the data root, a state and an object; a split may be empty.
    """
    values = []
    for name, cell in zip(columns, cells, strict=True):
        value = "" if cell is None and name not in NEEDED else cell
        if not isinstance(value, str):
            raise DuplexError(f"{place}: {name} is {cell!r:.80}; it must be text")
        values.append(value.strip())
        if name in NEEDED and not values[-1]:
            raise DuplexError(f"{place}: {name} is empty")
        if name == "split" and values[-1] not in (*SPLITS, ""):
            raise DuplexError(f"{place}: the split {values[-1]!r} is not one of {', '.join(SPLITS)}")
    return [relative_path(values[0], place), *values[1:]]


def _csv(path: Path, optional: Collection[str]) -> tuple[list[str], Iterable[Row]]:
    """Return the names of the wanted columns of a CSV file, and for each row its file and line as text, and its cells.

    Cells are separated by commas, semicolons or tabs, whichever is most frequent in the header.
    """
    text = read_text(path)
    first = text.lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows, number = [], 1  # line where the next row begins: an open quote may make it the last
    try:
        for cells in lines:
            if any(cell.strip() for cell in cells):
                rows.append((f"{path}, line {number}", cells))
            number = lines.line_num + 1
    except csv.Error as error:
        raise DuplexError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise DuplexError(f"{path} is empty; it needs a header with {', '.join(NEEDED)} and may have split")
    names = [cell.strip() for cell in rows[0][1]]
    columns = _columns(names, path, optional)
    for place, cells in rows[1:]:
        if len(cells) != len(names):
            raise DuplexError(f"{place} has {len(cells)} cells; the header has {len(names)}")
    if "split" not in columns:
        for i, name in enumerate(names):
            if name not in columns:
                _refuse_splits(name, (cells[i] for _, cells in rows[1:]), str(path))
    chosen = [names.index(name) for name in columns]
    return columns, ((place, [cells[i] for i in chosen]) for place, cells in rows[1:])


def _parquet(path: Path, optional: Collection[str]) -> tuple[list[str], Iterable[Row]]:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
        from pyarrow.types import is_dictionary, is_large_string, is_string
    except ImportError as error:
        raise UsageError(f"to read {path}, run {install_command('parquet')}, or save it as .csv") from error

    source = BufferReader(read_bytes(path))  # of a Python file, Arrow's threads abort the program at its exit
    try:
        file = parquet.ParquetFile(source)
        names = file.schema_arrow.names
        columns = _columns(names, path, optional)
        further = [] if "split" in columns else [name for name in names if names.count(name) == 1]
        for name in set(further) - set(columns):
            kind = file.schema_arrow.field(name).type
            if is_string(kind) or is_large_string(kind) or is_dictionary(kind):
                distinct = file.read(columns=[name], use_threads=False).column(name).unique()
                _refuse_splits(name, distinct.to_pylist(), str(path))
        table = file.read(columns=columns, use_threads=False)
        cells = [table.column(name).to_pylist() for name in columns]
    except (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0][:120]
        raise DuplexError(f"{path} is not a Parquet table ({reason})") from error
    return columns, ((f"{path}, row {number}", list(row)) for number, row in enumerate(zip(*cells, strict=True), 1))
