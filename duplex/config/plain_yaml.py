"""Read YAML as plain data of bounded size; excessive anchors, nesting and numbers raise an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from duplex.errors import UsageError

MAX_BYTES = 1 << 20  # of a file
MAX_CHARACTERS = 4096  # of a text
MAX_VALUES = 100_000  # of a file; an alias counts as all values that it stands for
MAX_BITS = 128  # of a whole number


class _Refused(Exception):
    """Error: a value in a YAML file is too long or too large, contains itself, or has a key that is not a word."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML 1.2 file with one document. Raises UsageError for a file that cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(f"{path} has {size:,} bytes; expected at most {MAX_BYTES:,}")
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        _count(content, {}, set())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist here; run from the project's folder") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(
            f"{path} is nested too deeply to be read; write tables and lists inside each other with fewer levels"
        ) from error
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except _Refused as error:
        raise UsageError(f"{path}: {error}") from error
    return content


def _count(value: Any, counts: dict[int, int], outer: set[int]) -> int:
    """Return the number of values in `value`, itself included; raise an error for values beyond the limits.

    counts: number of values by id, for the tables and lists counted before.
    outer: ids of the tables and lists that contain `value`.
    """
    if isinstance(value, str) and (len(value) > MAX_CHARACTERS or value.encode(errors="ignore").decode() != value):
        raise _Refused(
            f"text {value[:20]!r}... is too long or not Unicode; expected at most {MAX_CHARACTERS} characters"
        )
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Refused(f"a whole number has {value.bit_length()} bits; expected at most {MAX_BITS}")
    if not isinstance(value, Mapping | list | tuple | set):
        return 1
    if id(value) in outer:
        raise _Refused("an anchor contains itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise _Refused(f"the key {str(key)[:40]} is not a word; write it in quotes")
    if id(value) not in counts:
        inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [*value]
        counts[id(value)] = 1 + sum(_count(part, counts, outer | {id(value)}) for part in inner)
    if counts[id(value)] > MAX_VALUES:
        raise _Refused(f"it has more than {MAX_VALUES:,} values, counted with aliases expanded")
    return counts[id(value)]
