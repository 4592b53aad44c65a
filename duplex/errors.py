"""Errors that a user can fix. Commands print them as one line, without a traceback."""

from collections.abc import Iterable

DISTRIBUTION = "duplex-czsl"  # in package indexes, where the name `duplex` belongs to another project


class DuplexError(Exception):
    """Error that a user can fix; its message names the file or value, and the command that fixes it."""

    exit_code = 1


class UsageError(DuplexError):
    """Error for an invalid request: an unknown key, name or option; its message lists the allowed ones."""

    exit_code = 2


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra of this package.

    >>> install_command("serve")
    "pip install 'duplex-czsl[serve]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_type(value: object, kind: type, noun: str) -> None:
    """Raise `UsageError` unless `value` is an instance of `kind`; `noun` names the value in the message."""
    if not isinstance(value, kind):
        raise UsageError(f"{noun} is {value!r:.80}; expected a {kind.__name__}")


def require(value: str, allowed: Iterable[object], noun: str) -> str:
    """Return `value` if it is among `allowed`; otherwise raise `UsageError`. `noun` names the value in the message.

    >>> require("val", ("train", "val"), "split")
    'val'
    """
    names = [str(name) for name in allowed]
    if value not in names:
        raise UsageError(f"unknown {noun} {value!r}; known: {', '.join(names)}")
    return value
