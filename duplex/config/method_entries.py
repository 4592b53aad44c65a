"""Entries of `methods:` and `ablations:` in params.yaml: a method's class (`kind`), worlds and (training) options.

    duplex_open:
      {extends: duplex, world: open, shown_as: duplex, training: {epochs: 20}, per_dataset: {cgqa: {momentum: 0.99}}}

`extends` takes kind, options, `training`, `finetune` and `per_dataset` from another entry. All keys other than
`RESERVED_KEYS` are options of the kind. `world`: closed or open; `shown_as`: the method's name in result tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from duplex.errors import UsageError
from duplex.labels import WORLDS, World

DEFAULT_KIND = "duplex"
SHARED_KEYS = {"kind", "extends", "world", "shown_as", "per_dataset"}  # cannot be in a table of `per_dataset`
RESERVED_KEYS = ("kind", "extends", "world", "shown_as", "training", "finetune", "per_dataset")
TABLES = ("training", "finetune")  # keys whose values are tables of options
Table = Mapping[str, Any]


@dataclass(frozen=True)
class MethodEntry:
    """One entry of `methods:` or `ablations:` in params.yaml, merged with the entry that it extends."""

    kind: str
    options: Table = field(default_factory=dict)
    world: Literal["closed", "open", "both"] = "both"  # both: one model, trained for the closed world, scored in each
    shown_as: str | None = None  # method whose name this one, its model of another world, has in tables
    training: Table = field(default_factory=dict)  # overrides training options of the data set
    finetune: Table = field(default_factory=dict)  # options of fine-tuned blocks; empty: no block is fine-tuned
    per_dataset: Mapping[str, Table] = field(default_factory=dict)  # data set -> options, `training` and `finetune`

    @property
    def members(self) -> tuple[str, ...]:
        """Methods whose runs' probabilities this method multiplies (its option `of`); empty if it is trained itself."""
        return tuple(self.options.get("of", ()))

    @property
    def worlds(self) -> tuple[World, ...]:
        """The worlds (closed, open) in which the method is scored."""
        return WORLDS if self.world == "both" else (self.world,)

    @property
    def trained_for(self) -> World:
        """The world (closed or open) whose candidates are used in training."""
        return "open" if self.world == "open" else "closed"

    def options_for(self, dataset: str | None) -> dict[str, Any]:
        """Return the options that the method's class takes on a data set, before they are checked.

        dataset: its entry in `per_dataset` changes the options; None: the options without such changes.
        """
        changes = self.per_dataset.get(dataset, {}) if dataset else {}
        return {**self.options, **{key: value for key, value in changes.items() if key not in TABLES}}

    def training_for(self, dataset: str) -> dict[str, Any]:
        """Return the training options that the method sets for a data set; they override those of the data set."""
        return {**self.training, **self.per_dataset.get(dataset, {}).get("training", {})}

    def finetune_for(self, dataset: str | None) -> dict[str, Any]:
        """Return the options of fine-tuning the image tower on a data set, unchecked; empty without fine-tuning."""
        changes = self.per_dataset.get(dataset, {}).get("finetune", {}) if dataset else {}
        is_auto = [table.get("blocks") == "auto" for table in (self.finetune, changes)]
        replaces = "blocks" in changes and is_auto[0] != is_auto[1]  # `auto` and a number have different options
        return {**({} if replaces else self.finetune), **changes}


def read_entries(methods: Table, ablations: Table, datasets: tuple[str, ...]) -> dict[str, dict[str, MethodEntry]]:
    """Parse `methods:` and `ablations:` of params.yaml; return `{"methods": {name: entry}, "ablations": …}`."""

    def entry(place: str, record: Table, path: tuple[str, ...]) -> MethodEntry:
        return _parse(place, _with_base(place, record, methods, path), datasets)

    return {
        "methods": {name: entry(f"methods.{name}", record, (name,)) for name, record in methods.items()},
        "ablations": {
            name: entry(f"ablations.{name}", {"extends": None, **check_table(f"ablations.{name}", record)}, ())
            for name, record in ablations.items()
        },
    }


def _with_base(place: str, record: Table, methods: Table, path: tuple[str, ...]) -> Table:
    """Return an entry's table, completed from the entry that its key `extends` names.

    place: where params.yaml has the entry, such as `methods.duplex`, for messages.
    path: names of the entries that led to this one by `extends`, to find circles.
    """
    if "extends" not in check_table(place, record):
        return record
    base = record["extends"]
    if not isinstance(base, str) or base not in methods:
        raise UsageError(f"{place}.extends is {base!r}; known methods: {', '.join(methods)}")
    if base in path:
        raise UsageError(f"{place}.extends: {' -> '.join((*path, base))} is a circle; remove one `extends`")
    return _merge(_with_base(f"methods.{base}", methods[base], methods, (*path, base)), record)


def _merge(base: Table, record: Table) -> Table:
    """Return the entry `base` without `extends`, `world`, `shown_as`, updated by the entry `record` that extends it."""
    taken = {key: value for key, value in base.items() if key not in ("extends", "world", "shown_as")}
    merged = {**taken, **{key: value for key, value in record.items() if key != "extends"}}
    for key in (*TABLES, "per_dataset"):
        if isinstance(base.get(key), Mapping) and isinstance(record.get(key), Mapping):
            merged[key] = {**base[key], **record[key]}
    return merged


def _parse(place: str, record: Table, datasets: tuple[str, ...]) -> MethodEntry:
    """Return the `MethodEntry` of the table `record` at `place` in params.yaml; raise UsageError for a wrong value."""
    kind = record.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or not kind:
        raise UsageError(f"{place}.kind is {kind!r}; expected a name that `duplex methods` lists, or module:Class")
    world = record.get("world", "both")
    if world not in (*WORLDS, "both"):
        raise UsageError(f"{place}.world is {world!r}; known: closed, open, both")
    shown_as = record.get("shown_as")
    if shown_as is not None and not isinstance(shown_as, str):
        raise UsageError(f"{place}.shown_as is {shown_as!r}; expected the name of a method")
    per_dataset = {
        name: _with_finetune_table(changes)
        for name, changes in check_table(f"{place}.per_dataset", record.get("per_dataset", {})).items()
    }
    for name, changes in per_dataset.items():
        where = f"{place}.per_dataset.{name}"
        if name not in datasets:
            raise UsageError(f"{where}: unknown data set; known: {', '.join(datasets)}")
        for key in TABLES:
            check_table(f"{where}.{key}", check_table(where, changes).get(key, {}))
        for key in SHARED_KEYS & changes.keys():
            raise UsageError(f"{where}.{key}: `{key}` cannot differ by data set; set it in {place}, or add a method")
    options = {key: value for key, value in record.items() if key not in RESERVED_KEYS}
    _check_members(place, options, per_dataset)
    training = check_table(f"{place}.training", record.get("training", {}))
    finetune = check_table(f"{place}.finetune", _with_finetune_table(record).get("finetune", {}))
    return MethodEntry(kind, options, world, shown_as, training, finetune, per_dataset)


def _with_finetune_table(record: Any) -> Any:
    """Return a method entry with `finetune: auto` (depth from validation) written as `finetune: {blocks: auto}`."""
    is_auto = isinstance(record, Mapping) and record.get("finetune") == "auto"
    return {**record, "finetune": {"blocks": "auto"}} if is_auto else record


def _check_members(place: str, options: Table, per_dataset: Table) -> None:
    """Raise UsageError if the option `of` (methods whose runs form a product) is wrong or varies by data set."""
    if "of" not in options:
        return
    of = options["of"]
    if not isinstance(of, list | tuple) or not all(isinstance(name, str) for name in of):
        raise UsageError(f"{place}.of is {of!r}; expected a list of names of methods")
    if "members" in options:
        raise UsageError(f"{place}.members: training fills it in; remove it")
    for dataset, changes in per_dataset.items():
        if "of" in changes:
            raise UsageError(f"{place}.per_dataset.{dataset}.of: all data sets combine the same methods; remove it")


def check_table(place: str, value: Any) -> Table:
    """Return `value`, found at `place` in params.yaml; raise UsageError unless it is a table with text keys."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} is {value!r}; expected a table of keys and values")
    numbers = [key for key in value if not isinstance(key, str)]
    if numbers:
        raise UsageError(f"{place} has the key {numbers[0]!r}, which is not text; correct it, or write it in quotes")
    return value
