"""Merge entries under `methods:`: `recipe`, `extends`, `per_dataset`, and data-set files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duplex.errors import UsageError, require

DEFAULT_KIND = "duplex"
Table = Mapping[str, Any]


def completed_entries(methods: Table, datasets: Table, recipes: Table) -> dict[str, Any]:
    """Entries with the settings that `recipe`, data sets and `extends` give them; `recipes`: published ones."""
    completed = {name: _with_recipe(name, entry, datasets, recipes) for name, entry in methods.items()}
    completed = _with_dataset_changes(completed, datasets)
    completed = {name: _with_base(f"methods.{name}", entry, completed, (name,)) for name, entry in completed.items()}
    for name, entry in methods.items():
        if "recipe" in entry:
            _check_kind(name, completed[name].get("kind", DEFAULT_KIND), entry["recipe"], recipes)
    return completed


def _with_recipe(name: str, entry: Table, datasets: Table, recipes: Table) -> Table:
    """An entry whose `recipe` gives the kind, and the settings on the benchmarks that have published ones."""
    if "recipe" not in entry:
        return entry
    place = f"published recipe in params.yaml, methods.{name}.recipe:"
    recipe = recipes[require(str(entry["recipe"]), recipes, place)]
    shared = {key: value for key, value in recipe.items() if key not in ("kind", "world", "shown_as", "per_dataset")}
    tables = dict(entry.get("per_dataset") or {})
    for dataset, own in recipe["per_dataset"].items():
        if dataset in datasets and dataset not in tables:
            tables[dataset] = changed_entry(shared, own)
    kind = {} if "extends" in entry else {"kind": recipe["kind"]}
    own_settings = {key: value for key, value in entry.items() if key != "recipe"}
    return {**kind, **own_settings, "per_dataset": tables}


def _check_kind(name: str, kind: object, recipe: str, recipes: Table) -> None:
    wanted = recipes[recipe]["kind"]
    if kind != wanted:
        raise UsageError(
            f"params.yaml: methods.{name}.recipe: {recipe} has settings of the kind {wanted}, but the entry's kind is "
            f"{kind}; set `kind: {wanted}`, or remove `recipe`"
        )


def auto_as_table(value: Any) -> Any:
    return {"blocks": "auto"} if value == "auto" else value


def changed_table(table: Any, changes: Any) -> Any:
    # of `training` or `finetune`, whose blocks have other options if their number is `auto`
    if not (isinstance(table, dict) and isinstance(changes, dict)):
        return changes
    is_auto = [each.get("blocks") == "auto" for each in (table, changes)]
    replaces = "blocks" in changes and is_auto[0] != is_auto[1]
    return {**({} if replaces else table), **changes}


def _with_dataset_changes(entries: Table, datasets: Table) -> dict[str, Any]:
    completed = dict(entries)
    for name, table in datasets.items():
        own = table.get("methods")
        for method, changes in own.items() if isinstance(own, dict) else ():
            before = completed.get(method, {}).get("per_dataset", {})
            if method in completed and isinstance(before, dict):
                completed[method] = changed_entry(completed[method], {"per_dataset": {name: changes}})
    return completed


def changed_entry(entry: Any, changes: Any) -> Any:
    """Merge changes into an entry; other keys of `training`, `finetune`, `per_dataset` stay."""
    if not (isinstance(entry, dict) and isinstance(changes, dict)):
        return changes
    changed = {**entry, **changes}
    for key in ("training", "finetune"):
        # `finetune: {}` means no block
        replaces = key == "training" or changes.get(key) != {}
        if key in entry and key in changes and replaces:
            changed[key] = changed_table(auto_as_table(entry[key]), auto_as_table(changes[key]))
    before = entry.get("per_dataset")
    after = changes.get("per_dataset")
    if isinstance(before, dict) and isinstance(after, dict):
        by_dataset = {name: changed_entry(before.get(name), table) for name, table in after.items()}
        changed["per_dataset"] = {**before, **by_dataset}
    return changed


def _with_base(place: str, record: Table, methods: Table, path: tuple[str, ...]) -> Table:
    if "extends" not in record:
        return record
    name = record["extends"]
    if not isinstance(name, str) or name not in methods:
        raise UsageError(f"params.yaml: {place}.extends: unknown method {name!r}; known: {', '.join(methods)}")
    if name in path:
        circle = " -> ".join((*path, name))
        raise UsageError(f"params.yaml: {place}.extends: {circle} is circular; remove `extends` from one of them")
    base = _with_base(f"methods.{name}", methods[name], methods, (*path, name))
    copied = {key: value for key, value in base.items() if key not in ("world", "shown_as")}
    tables = copied.get("per_dataset")
    if isinstance(tables, dict):  # what the entry sets itself holds for all data sets
        copied["per_dataset"] = {
            dataset: changed_entry(table, {key: record[key] for key in table or () if key in record})
            for dataset, table in tables.items()
        }
    changed: Table = changed_entry(copied, {key: value for key, value in record.items() if key != "extends"})
    return changed
