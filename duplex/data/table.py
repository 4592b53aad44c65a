"""Tables as data sets: CSV or Parquet with the columns image, state, object and optionally split."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from duplex.data.manifest import relative_path
from duplex.data.text_files import read_bytes, read_text
from duplex.errors import DuplexError, UsageError, install_command
from duplex.labels import SPLITS

NEEDED = ("image", "state", "object")
CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
Row = tuple[str, list[str]]  # its place for messages, its cells


def is_table(path: Path) -> bool:
    return path.suffix.lower() in CSV + PARQUET


def read_table(path: Path) -> pd.DataFrame:
    """Read and check a table; the result has a column `split` if every row has a split."""
    if not is_table(path):
        raise UsageError(f"{path} is not a table; its name ends in one of {', '.join(CSV + PARQUET)}")
    columns, rows = _csv(path) if path.suffix.lower() in CSV else _parquet(path)
    cells = [_checked(columns, row) for row in rows]
    if not cells:
        raise DuplexError(f"{path} has no rows")
    frame = pd.DataFrame(cells, columns=columns, dtype=str)
    if "split" in frame:
        without = int((frame["split"] == "").sum())
        if 0 < without < len(frame):
            raise DuplexError(f"{path}: {without} of {len(frame)} rows have no split; give one to each row or to none")
        if without:
            frame = frame.drop(columns="split")
    return frame


def _columns(header: list[str], path: Path) -> list[str]:
    """Return the names of the columns to read, in a fixed order; further columns are ignored."""
    for name in (*NEEDED, "split"):
        if header.count(name) != 1 and not (name == "split" and name not in header):
            count = "no column" if name not in header else "two columns"
            raise DuplexError(f"{path} has {count} {name!r}; it needs {', '.join(NEEDED)} and may have split")
    return [*NEEDED, "split"] if "split" in header else list(NEEDED)


def _checked(columns: list[str], row: Row) -> list[str]:
    place, cells = row
    cells = [cell.strip() for cell in cells]
    for name, cell in zip(columns, cells, strict=True):
        if name != "split" and not cell:
            raise DuplexError(f"{place}: {name} is empty")
        if name == "split" and cell and cell not in SPLITS:
            raise DuplexError(f"{place}: the split {cell!r} is not one of {', '.join(SPLITS)}")
    return [relative_path(cells[0], place), *cells[1:]]


def _csv(path: Path) -> tuple[list[str], Iterable[Row]]:
    """Read CSV with commas, semicolons or tabs, whichever is most frequent in the header."""
    text = read_text(path)
    first = text.lstrip("\r\n").split("\n", 1)[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    rows = _csv_rows(lines, path)
    header = next(rows, None)
    if header is None:
        raise DuplexError(f"{path} is empty; it needs a header with {', '.join(NEEDED)} and may have split")
    names = [cell.strip() for cell in header[1]]
    columns = _columns(names, path)
    return columns, _select_cells(rows, names, [names.index(name) for name in columns])


def _select_cells(rows: Iterator[Row], names: list[str], keep: list[int]) -> Iterator[Row]:
    for place, cells in rows:
        if len(cells) != len(names):
            raise DuplexError(f"{place} has {len(cells)} cells; the header has {len(names)}")
        yield place, [cells[i] for i in keep]


def _csv_rows(lines: Iterator[list[str]], path: Path) -> Iterator[Row]:
    """Yield the place (file and line) and the cells of every CSV line that is not blank."""
    while True:
        number = getattr(lines, "line_num", 0) + 1
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise DuplexError(f"{path}, line {number}: {error}") from error
        if any(cell.strip() for cell in cells):
            yield f"{path}, line {number}", cells


def _parquet(path: Path) -> tuple[list[str], Iterable[Row]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(f"{path} needs the extra: {install_command('parquet')}; or save it as .csv") from error

    source = io.BytesIO(read_bytes(path))
    try:
        columns = _columns(parquet.read_schema(source).names, path)
        table = parquet.read_table(source, columns=columns)
        rows = zip(*(table.column(name).to_pylist() for name in columns), strict=True)
    except (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0][:120]
        raise DuplexError(f"{path} is not a Parquet table ({reason})") from error
    return columns, _parquet_rows(rows, columns, path)


def _parquet_rows(rows: Iterable[tuple[object, ...]], columns: list[str], path: Path) -> Iterator[Row]:
    for number, cells in enumerate(rows, 1):
        place = f"{path}, row {number}"
        for name, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str) and not (cell is None and name == "split"):
                raise DuplexError(f"{place}: {name} is {cell!r:.80}; it must be text")
        yield place, [str(cell or "") for cell in cells]
