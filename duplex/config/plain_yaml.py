"""YAML as plain data: what is read is small and shallow, whatever a file makes of anchors, nesting and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from duplex.errors import UsageError
from duplex.system.files import reason

LARGEST = 1 << 20  # bytes of a file
LONGEST = 4096  # characters of a text
VALUES = 100_000  # in all, every alias counted as what it stands for
BITS = 128  # of a whole number


class _Unfit(Exception):
    pass


def read_yaml(path: Path) -> Any:
    """The one document of a file, in YAML 1.2 as DVC reads it; what is wrong with it is one sentence."""
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{path} has {path.stat().st_size:,} bytes; parameters have at most {LARGEST:,}")
        found = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        _weigh(found, {}, set())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist here; run from the project's folder") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply to be read") from error
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except _Unfit as error:
        raise UsageError(f"{path}: {error}") from error
    return found


def _weigh(value: Any, known: dict[int, int], above: set[int]) -> int:
    """How many values there are in all. `known`: of the tables and lists counted before; `above`: those we are in."""
    if isinstance(value, str) and (len(value) > LONGEST or not _encodable(value)):
        raise _Unfit(f"{value[:20]!r}... is no text that a parameter can be")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise _Unfit(f"a whole number has {value.bit_length()} bits; none needs more than {BITS}")
    if not isinstance(value, Mapping | list | tuple | set):
        return 1
    if id(value) in above:
        raise _Unfit("an anchor stands within itself")
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str | int | float | bool | None)), None)
        if odd is not None:
            raise _Unfit(f"{_shown(odd)} is no name; write it in quotes if it is one")
    if id(value) not in known:
        within = above | {id(value)}
        inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [*value]
        known[id(value)] = 1 + sum(_weigh(part, known, within) for part in inner)
    if known[id(value)] > VALUES:
        raise _Unfit(f"with its aliases written out it holds more than {VALUES:,} values")
    return known[id(value)]


def _shown(key: object) -> str:
    return str(key.isoformat() if isinstance(key, date) else key)[:40]


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
