"""Read tables that list a data set: CSV or Parquet with the columns image, state, object and optionally split."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from duplex.data.manifest import NEEDED, checked_cells
from duplex.data.text_files import read_bytes, read_text
from duplex.errors import DuplexError, UsageError, install_command

SPLIT_NAMES = {"set", "subset", "fold", "phase", "partition"}  # of the column `split` in tables made for other programs
SPLIT_WORDS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
Place = Callable[[int], str]  # number of a row -> its name in messages


def is_table(path: Path) -> bool:
    return path.suffix.lower() in CSV + PARQUET


def read_table(path: Path, optional: Sequence[str] = ()) -> pd.DataFrame:
    """Read and check a table; the result has a column `split` if every row has a split.

    Args:
        optional: further columns to read if they are there; their cells may be empty.
    """
    if not is_table(path):
        raise UsageError(f"{path} is not a table; expected a name that ends in one of {', '.join(CSV + PARQUET)}")
    frame, place = (_read_csv if path.suffix.lower() in CSV else _read_parquet)(path, optional)
    if frame.empty:
        raise DuplexError(f"{path} has no rows")
    return checked_cells(frame, path, place)


def known_columns(
    header: Sequence[str], place: object, needed: Sequence[str] = NEEDED, optional: Sequence[str] = ()
) -> list[str]:
    """The columns of a table that are used, in a fixed order: `needed` ones, split and `optional` ones.

    Raises DuplexError for a column that is missing, repeated or misspelt. `place`: name of the table in messages.
    """
    columns = [*needed, *(name for name in ("split", *optional) if name in header)]
    for name in columns:
        if header.count(name) != 1:
            count = "no column" if name not in header else "two columns"
            raise DuplexError(
                f"{place} has {count} {name!r}; it needs {', '.join(needed)} and may have split; its columns are "
                f"{', '.join(header)!r:.100}"
            )
    _refuse_misspelt(header, place, (*needed, "split", *optional))
    return columns


def refuse_unnamed_split(table: pd.DataFrame, place: object) -> None:
    """Raise `DuplexError` for a table without `split` in which another column, otherwise ignored, lists splits.

    Such a column has the names of at least two splits, and nothing else but empty cells.
    """
    for number, name in enumerate(table.columns if "split" not in table else ()):
        if name in NEEDED:
            continue
        texts = _split_words(table.iloc[:, number])
        if len({text.lower() for text in texts}) > 1:
            raise DuplexError(
                f"{place}: column {name!r} holds {', '.join(texts)}; rename it to `split` to use it, or remove it"
            )


def _split_words(cells: pd.Series) -> list[str]:
    """The distinct texts in a column; none if it has others than names of splits."""
    words: dict[str, None] = {}
    for cell in cells.dropna():
        word = str(cell).strip()
        if word and word.lower() not in SPLIT_WORDS:
            return []
        words[word] = None
    return [word for word in words if word]


def _refuse_misspelt(header: Sequence[str], place: object, known: Sequence[str]) -> None:
    """Raise `DuplexError` for a column, otherwise ignored, whose name looks like a misspelling of a missing column."""
    lacking = [name for name in known if name not in header]
    for name in header:
        word = "_".join(name.lower().split())
        similar = difflib.get_close_matches(word, lacking, n=1, cutoff=0.8)
        if "split" in lacking and word.rstrip("s") in SPLIT_NAMES:
            similar = ["split"]
        if similar:
            raise DuplexError(f"{place} has a column {name!r}; write {similar[0]!r}, or rename or drop the column")


def _read_csv(path: Path, optional: Sequence[str]) -> tuple[pd.DataFrame, Place]:
    text = read_text(path)
    first = text.lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    numbers: list[int] = []
    number = 1  # line where the next row begins: an open quote may make it the last
    try:
        for cells in lines:
            if any(cell.strip() for cell in cells):
                rows.append([cell.strip() for cell in cells])
                numbers.append(number)
            number = lines.line_num + 1
    except csv.Error as error:
        raise DuplexError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise DuplexError(f"{path} is empty; it needs a header with {', '.join(NEEDED)} and may have split")
    header = rows[0]
    columns = known_columns(header, path, optional=optional)
    for number, cells in zip(numbers, rows, strict=True):
        if len(cells) != len(header):
            raise DuplexError(f"{path}, line {number} has {len(cells)} cells; the header has {len(header)}")
    frame = pd.DataFrame(rows[1:], columns=header, dtype=str)
    refuse_unnamed_split(frame, path)
    return frame[columns], lambda row: f"{path}, line {numbers[row + 1]}"


def _read_parquet(path: Path, optional: Sequence[str]) -> tuple[pd.DataFrame, Place]:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
        from pyarrow.types import is_dictionary, is_large_string, is_string
    except ImportError as error:
        raise UsageError(f"to read {path}, run {install_command('parquet')}, or save it as .csv") from error

    source = BufferReader(read_bytes(path))  # of a Python file, Arrow's threads abort the program at its exit
    try:
        file = parquet.ParquetFile(source)
        names = file.schema_arrow.names
        columns = known_columns(names, path, optional=optional)
        further = [] if "split" in columns else [name for name in names if names.count(name) == 1]
        for name in set(further) - set(columns):
            kind = file.schema_arrow.field(name).type
            if is_string(kind) or is_large_string(kind) or is_dictionary(kind):
                distinct = file.read(columns=[name], use_threads=False).column(name).unique()
                refuse_unnamed_split(pd.DataFrame({name: distinct.to_pylist()}, dtype=object), path)
        table = file.read(columns=columns, use_threads=False)
        cells: dict[str, list[object]] = {}
        for name in columns:
            given = table.column(name).to_pylist()
            cells[name] = [cell.strip() if isinstance(cell, str) else cell for cell in given]
    except (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0][:120]
        raise DuplexError(f"{path} is not a Parquet table ({reason})") from error
    return pd.DataFrame(cells, dtype=object), lambda row: f"{path}, row {row + 1}"
