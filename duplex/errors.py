"""Errors that a user can fix. Commands print them as one line, without a traceback."""

from collections.abc import Iterable


class DuplexError(Exception):
    """A command failed. The message names the file or value, and the command that fixes it."""

    exit_code = 1


class UsageError(DuplexError):
    """A request is invalid: an unknown key, name or option. The message lists what is allowed."""

    exit_code = 2


def require(value: str, allowed: Iterable[object], noun: str) -> str:
    """Return `value` if it is among `allowed`; otherwise raise `UsageError` listing them. `noun` describes the value.

    >>> require("val", ("train", "val"), "split")
    'val'
    """
    names = [str(name) for name in allowed]
    if value not in names:
        raise UsageError(f"unknown {noun} {value!r}; known: {', '.join(names)}")
    return value
