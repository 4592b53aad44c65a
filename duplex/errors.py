"""The errors a person may cause. They are shown as one sentence, never as a traceback."""


class DuplexError(Exception):
    """The work could not be done. The message names the file or value and the command that mends it."""

    exit_code = 1


class UsageError(DuplexError):
    """The request itself is wrong: an unknown key, name or option. The message names what is allowed."""

    exit_code = 2


def require(value: str, allowed: object, what: str) -> str:
    """Return `value` if it is among `allowed`; else say what is.

    >>> require("val", ("train", "val"), "split")
    'val'
    """
    names = [str(name) for name in allowed]  # type: ignore[attr-defined]
    if value not in names:
        raise UsageError(f"unknown {what} {value!r}; known: {', '.join(names)}")
    return value
