"""Plug-ins: classes that are found by name through entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from duplex.errors import DuplexError


def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, sorted by name; a built-in one hides others of its name."""
    points = sorted(entry_points(group=group), key=lambda point: point.value.startswith("duplex."))
    return dict(sorted({point.name: point for point in points}.items()))


def module_of(point: EntryPoint) -> str:
    return point.value.partition(":")[0]


def provider(point: EntryPoint) -> str:
    """Name and version of an entry point's distribution; if unknown, its module's name."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else module_of(point)


def load_plugin(
    point: EntryPoint, kind: str, base: type, advice: str = "", error: type[DuplexError] = DuplexError
) -> Any:
    """Import an entry point's class; raises `error` if that fails, or if it is no subclass of `base`.

    In messages, `kind` is what it is, such as "encoder family", and `advice` what the user can do.
    """
    name = f"{kind} {point.name!r} of {provider(point)}"
    try:
        plugin = point.load()
    except Exception as reason:
        raise error(
            f"{name} cannot be loaded ({type(reason).__name__}: {reason}); fix or uninstall it{advice}"
        ) from reason
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        raise error(f"{name}: {point.value} is not a subclass of {base.__module__}.{base.__qualname__}")
    return plugin
