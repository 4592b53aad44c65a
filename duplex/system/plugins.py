"""Plug-ins: classes found by name through the entry points of this package and of others."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from duplex.errors import DuplexError


def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the installed entry points of a group, sorted: name -> entry point.

    If a name is used twice, the built-in entry point is returned. If neither is built in, it is the one whose target
    comes first in the alphabet; `load_plugin` then refuses it.
    """
    points = sorted(entry_points(group=group), key=lambda point: (not _is_built_in(point), point.value))
    return dict(sorted({point.name: point for point in reversed(points)}.items()))


def _is_built_in(point: EntryPoint) -> bool:
    return point.value.startswith("duplex.")


def module_of(point: EntryPoint) -> str:
    """Return the name of the module that an entry point imports."""
    return point.value.partition(":")[0]


def provider(point: EntryPoint) -> str:
    """Return name and version of the distribution that an entry point belongs to; if unknown, its module's name."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else module_of(point)


@contextmanager
def restored_folder(foreign: bool = True) -> Iterator[None]:
    """Context manager: undo a change of the working directory by the block's code, such as a plug-in's `os.chdir`.

    Relative paths, such as those of results, then stay the same.

    foreign: whether the block runs code of another package; if not, nothing is undone.
    """
    before = os.getcwd() if foreign else None
    try:
        yield
    finally:
        if before is not None:
            os.chdir(before)


def load_plugin(
    point: EntryPoint, kind: str, base: type, advice: str = "", error: type[DuplexError] = DuplexError
) -> Any:
    """Import an entry point's class; raise `error` if that fails, or if the class is not a subclass of `base`.

    The message names the entry point's distribution. A name is refused if two distributions other than this package
    use it for different classes, since either could be meant.

    kind: what the entry point is, for messages, such as "encoder family".
    advice: what else the user can do, for messages.
    """
    others = [each for each in entry_points(group=point.group, name=point.name) if each.value != point.value]
    if others and not _is_built_in(point):
        raise error(
            f"{kind} {point.name!r} comes from both {provider(point)} and {provider(others[0])}; "
            f"uninstall one of them{advice}"
        )
    module, _, attributes = point.value.partition(":")
    try:
        with restored_folder(not _is_built_in(point)):
            plugin = reduce(getattr, attributes.split("."), importlib.import_module(module))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as reason:  # importing foreign code may fail in any way, and may call sys.exit()
        clash = module.partition(".")[0] in sys.stdlib_module_names
        hint = f"; Python has a module of the name {module!r} itself, so rename this one" if clash else ""
        line = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        raise error(
            f"{kind} {point.name!r} of {provider(point)} cannot be loaded ({type(reason).__name__}: {line}); "
            f"fix or uninstall it{advice}{hint}"
        ) from reason
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise error(f"{kind} {point.name!r} of {provider(point)}: {point.value} is no subclass of {wanted}")
    return plugin
