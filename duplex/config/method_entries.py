"""Rows of params.yaml: a kind of method with some options, in some worlds, trained in some way.

    duplex_open: {of: duplex, world: open, shown_as: duplex, training: {epochs: 20}, on: {cgqa: {momentum: 0.99}}}

`of` takes over kind, options, `training`, `tail` and `on` of another row. All keys but those below are options of the
kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from duplex.errors import UsageError
from duplex.labels import WORLDS, World

DEFAULT_KIND = "duplex"
OWN = ("kind", "of", "world", "shown_as", "training", "tail", "on")
NESTED = ("training", "tail")  # tables of their own
Table = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row as it is written, with what it takes over from the row it is made `of`."""

    kind: str
    options: Table = field(default_factory=dict)
    world: Literal["closed", "open", "both"] = "both"  # both: one model, trained for the closed world, scored in either
    shown_as: str | None = None  # the method that tables show it as, where it is that method in another world
    training: Table = field(default_factory=dict)
    tail: Table = field(default_factory=dict)  # what is trained in the image tower's last blocks; empty: nothing
    on: Mapping[str, Table] = field(default_factory=dict)  # data set -> options, and its own `training` and `tail`

    @property
    def worlds(self) -> tuple[World, ...]:
        """The worlds that it is scored in."""
        return WORLDS if self.world == "both" else (self.world,)

    @property
    def trained_for(self) -> World:
        """The world whose target set training knows."""
        return "open" if self.world == "open" else "closed"

    def options_on(self, dataset: str | None) -> dict[str, Any]:
        changes = self.on.get(dataset, {}) if dataset else {}
        return {**self.options, **{key: value for key, value in changes.items() if key not in NESTED}}

    def training_on(self, dataset: str) -> dict[str, Any]:
        return {**self.training, **self.on.get(dataset, {}).get("training", {})}

    def tail_on(self, dataset: str | None) -> dict[str, Any]:
        return {**self.tail, **(self.on.get(dataset, {}).get("tail", {}) if dataset else {})}


def read_rows(methods: Table, ablations: Table, datasets: tuple[str, ...]) -> dict[str, dict[str, Row]]:
    """`methods:` and `ablations:`; every ablation is a method with some options changed."""
    rows = {name: _row(f"methods.{name}", _whole(name, methods, ()), datasets) for name in methods}
    lines = {}
    for name, written in ablations.items():
        place = f"ablations.{name}"
        base = _table(place, written).get("of")
        if not isinstance(base, str) or base not in methods:
            raise UsageError(f"{place}.of is {base!r}; known methods: {', '.join(methods)}")
        lines[name] = _row(place, _joined(_whole(base, methods, ()), _table(place, written)), datasets)
    return {"methods": rows, "ablations": lines}


def _whole(name: str, methods: Table, below: tuple[str, ...]) -> Table:
    """A method's row with what it takes over."""
    row = _table(f"methods.{name}", methods[name])
    if "of" not in row:
        return row
    base = row["of"]
    if not isinstance(base, str) or base not in methods:
        raise UsageError(f"methods.{name}.of is {base!r}; known methods: {', '.join(methods)}")
    if base == name or base in below:
        raise UsageError(f"methods.{name}.of: {' -> '.join((*below, name, base))} goes in a circle")
    return _joined(_whole(base, methods, (*below, name)), row)


def _joined(base: Table, row: Table) -> Table:
    """A row over the one it is made of. Where a row is scored and what it is shown as are its own affair."""
    taken = {key: value for key, value in base.items() if key not in ("of", "world", "shown_as")}
    merged = {**taken, **{key: value for key, value in row.items() if key != "of"}}
    for key in (*NESTED, "on"):
        if isinstance(base.get(key), Mapping) and isinstance(row.get(key), Mapping):
            merged[key] = {**base[key], **row[key]}
    return merged


def _row(place: str, record: Table, datasets: tuple[str, ...]) -> Row:
    kind, world, shown = record.get("kind", DEFAULT_KIND), record.get("world", "both"), record.get("shown_as")
    if not isinstance(kind, str) or not kind:
        raise UsageError(f"{place}.kind is {kind!r}; it is a name that `duplex methods` lists, or module:Class")
    if world not in (*WORLDS, "both"):
        raise UsageError(f"{place}.world is {world!r}; known: closed, open, both")
    if shown is not None and not isinstance(shown, str):
        raise UsageError(f"{place}.shown_as is {shown!r}; it is the name of a method")
    on = _table(f"{place}.on", record.get("on", {}))
    for name, changes in on.items():
        if name not in datasets:
            raise UsageError(f"{place}.on.{name}: there is no such data set; known: {', '.join(datasets)}")
        for key in NESTED:
            _table(f"{place}.on.{name}.{key}", _table(f"{place}.on.{name}", changes).get(key, {}))
    options = {key: value for key, value in record.items() if key not in OWN}
    training, tail = (_table(f"{place}.{key}", record.get(key, {})) for key in NESTED)
    return Row(kind, options, world, shown, training, tail, on)


def _table(place: str, value: Any) -> Table:
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} is {value!r}; it must be a table of keys and values")
    return value
