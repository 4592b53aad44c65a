"""Errors that a user can fix. Commands print them as one line, without a traceback."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral

DISTRIBUTION = "duplex-czsl"  # in package indexes, where the name `duplex` belongs to another project


class DuplexError(Exception):
    """Raised for an error that a user can fix; the message names the file or value, and says what to do."""

    exit_code = 1


class UsageError(DuplexError):
    """Raised for an invalid request, such as an unknown key, name or option; the message lists what is allowed."""

    exit_code = 2


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Context manager or decorator: re-raise a `DuplexError` as a `UsageError`, for a fault in a user's argument."""
    try:
        yield
    except DuplexError as error:
        raise UsageError(str(error)) from error


def install_command(extra: str) -> str:
    """The pip command that installs an extra of this package.

    >>> install_command("serve")
    "pip install 'duplex-czsl[serve]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_type(value: object, kind: type, noun: str) -> None:
    """Raise `UsageError` unless `value` is an instance of `kind`; `noun` names the value in the message."""
    if not isinstance(value, kind):
        raise UsageError(f"{noun} is {shown(value)}; expected a {kind.__name__}")


def require_whole(value: object, noun: str, low: int = 1, high: int | None = None) -> int:
    """`value` as an int; UsageError, calling it `noun`, unless it is whole, from `low` to `high` (None: no limit)."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        expected = "a whole number " + (f"of at least {low}" if high is None else f"from {low} to {high}")
        raise UsageError(f"{noun} is {shown(value)}; expected {expected}")
    return number


def shown(value: object) -> str:
    """`repr(value)` on one line for error messages, cut after 80 characters."""
    return f"{' '.join(repr(value).split()):.80}"


def require(value: str, allowed: Iterable[object], noun: str) -> str:
    """`value` if it is one of `allowed`; otherwise raises `UsageError`. `noun` names the value in the message."""
    names = [str(name) for name in allowed]
    if value not in names:
        raise UsageError(f"unknown {noun} {value!r}; known: {', '.join(names)}")
    return value
