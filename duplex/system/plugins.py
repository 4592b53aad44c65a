"""Plug-ins: classes that are found by name through entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from duplex.errors import DuplexError


def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, sorted by name; a built-in one hides others of its name."""
    points = sorted(entry_points(group=group), key=lambda point: (not _is_built_in(point), point.value))
    return dict(sorted({point.name: point for point in reversed(points)}.items()))


def _is_built_in(point: EntryPoint) -> bool:
    return point.value.startswith("duplex.")


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
    same_name = entry_points(group=point.group, name=point.name)
    others = [each for each in same_name if each.value != point.value]
    if others and not _is_built_in(point):
        raise error(
            f"{kind} {point.name!r} comes from both {provider(point)} and {provider(others[0])}; "
            f"uninstall one of them{advice}"
        )
    try:
        plugin = point.load()
    except Exception as reason:
        raise error(
            f"{name} cannot be loaded ({type(reason).__name__}: {reason}); fix or uninstall it{advice}"
        ) from reason
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        raise error(f"{name}: {point.value} is not a subclass of {base.__module__}.{base.__qualname__}")
    return plugin
