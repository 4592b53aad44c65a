"""Public names, their first sentences, and those without a docstring, found in the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

NAMES = re.compile(r"^<!-- names: ([^>]+) -->$", re.M)


def names_on_page(page: Path) -> list[str]:
    """The dotted names that an API page shows."""
    return " ".join(NAMES.findall(page.read_text(encoding="utf-8"))).split()


def undocumented(root: Path, names: list[str]) -> list[str]:
    """The public names, and public members of classes, that have no docstring, and parameters without a note."""
    missing: list[str] = []
    for name, item in zip(names, _items(root, names), strict=True):
        missing += _missing(item, name)
    return missing


def names_list(root: Path, names: list[str]) -> str:
    """A line per name, without its module, and the first sentence of its docstring."""
    found = zip(names, summaries(root, names), strict=True)
    return "\n".join(f"* `{name.rpartition('.')[2]}`: {summary}" for name, summary in found)


def summaries(root: Path, names: list[str]) -> list[str]:
    """The first paragraph of each name's docstring."""
    docstrings = [item.docstring for item in _items(root, names)]
    return [" ".join(text.value.partition("\n\n")[0].split()) if text else "" for text in docstrings]


def _items(root: Path, names: list[str]) -> Iterator[griffe.Object]:
    package = _package(root)
    for name in names:
        item = package[name.removeprefix("duplex.")]
        yield item.final_target if isinstance(item, griffe.Alias) else item


@cache
def _package(root: Path) -> griffe.Object | griffe.Alias:
    return griffe.load(
        "duplex", search_paths=[str(root)], allow_inspection=False, resolve_aliases=True, try_relative_path=False
    )


def _missing(item: griffe.Object, name: str) -> Iterator[str]:
    if not item.docstring:
        yield name
    if isinstance(item, griffe.Function):
        notes = item.docstring.value if item.docstring else ""
        yield from (f"{name}({word})" for word in _parameters(item) if not re.search(rf"\b{word}\b", notes))
    if isinstance(item, griffe.Class):
        for key, member in item.members.items():
            if not key.startswith("_") and isinstance(member, griffe.Function) and not _inherits(item, key):
                yield from _missing(member, f"{name}.{key}")


def _parameters(function: griffe.Function) -> list[str]:
    return [item.name for item in function.parameters if item.name not in ("self", "cls") and item.name[0] != "_"]


def _inherits(cls: griffe.Class, key: str) -> bool:
    """Whether a method's description stands in a base class of the package."""
    return any(key in base.members and base.members[key].docstring for base in cls.mro())
