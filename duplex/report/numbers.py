"""Tables of numbers in JSON: what is read is what the pipeline writes, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError
from duplex.labels import SPLITS, WORLDS
from duplex.system.files import reason

Tree = dict[str, Any]
JUDGES = ("words", "likelihood")  # of feasibility: what the other one than the row's own would have decided
GROUPINGS = {"groups": "accuracy", "groups_at_ends": "accuracy_at_ends"}  # of summaries, and what of a run they average
TABLES = {*WORLDS, *SPLITS, *JUDGES, *GROUPINGS, "shares"}  # what stands under these names is a table again
TERMS, PREFIXES = "terms_", ("terms_", "top_")  # these begin the names of tables
LISTS = {"bad_images"}
LARGEST = 1e30


def read_numbers(path: Path, command: str, *, names: int = 0) -> Tree | None:
    """A table of numbers and tables, or None where there is no such file. In the outermost `names` tables the keys are
    names of data sets, methods or seeds. A number that JSON does not know (NaN) is undefined."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        _check(record, names, "it")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {reason(error)}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DuplexError(f"{path} is not a table in JSON ({error}); `{command} -f` writes it again") from error
    return dict(record)


def _check(record: object, names: int, place: str) -> None:
    if not isinstance(record, Mapping):
        raise TypeError(f"{place} is no table")
    for key, value in record.items():
        if names or key in TABLES or key.startswith(PREFIXES):
            _check(value, max(0, names - 1), key)
        elif place == "groups" and isinstance(value, Mapping):
            _check(value, 0, key)
        elif not (value is None or key in LISTS or (isinstance(value, int | float) and abs(value) < LARGEST)):
            raise TypeError(f"{key} is {value!r:.40}, not a number")
