"""Edit params.yaml without changing any other line or comment, and remove stages from dvc.lock.

ruamel.yaml's round trip would reformat lines that nobody changed and attach a comment to the entry above it. Its parser
gives the positions of all keys and values instead, and the text is edited there. An edit is written only if parsing the
new text gives exactly the intended values.
"""

from __future__ import annotations

import copy
import io
import re
import shlex
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from duplex.artifacts import RESERVED
from duplex.config.params import load_params
from duplex.errors import DuplexError, UsageError, require
from duplex.system.files import replace_file

PARAMS = Path("params.yaml")
MAX_NAME_LENGTH = 100  # a name becomes a folder and part of other names


def check_name(name: str, path: Path = PARAMS) -> None:
    """Raise `UsageError` unless `name` can name a data set in params.yaml, in paths and in DVC's stages.

    Also raises it if params.yaml is not valid.
    """
    load_params(path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*", name) or len(name) > MAX_NAME_LENGTH:
        raise UsageError(
            f"{name!r} is not a valid name for a data set; use letters, digits, `_` and single hyphens "
            f"(DVC reads a dot as a separator of keys), at most {MAX_NAME_LENGTH} characters"
        )
    if not isinstance(_parse(name), str):
        raise UsageError(
            f"{name!r} is not a valid name for a data set: YAML reads it as a number or the like; choose another"
        )
    if name in RESERVED:
        raise UsageError(f"{name!r} is not a valid name for a data set: it is reserved; choose another")


def add_dataset(name: str, entry: Mapping[str, Any], *, run: bool, path: Path = PARAMS) -> None:
    """Write `datasets.NAME` to params.yaml and, with `run`, add the name to `run.datasets`.

    In an existing data set only the keys of `entry` change. Raises `DuplexError`, with the lines to add by hand, if the
    file's layout cannot be edited, and `UsageError` if the result would not be a valid params.yaml.
    """
    text = path.read_text(encoding="utf-8")
    record = _parse(text)
    intended = copy.deepcopy(record)
    intended["datasets"][name] = {**record["datasets"].get(name, {}), **entry}
    if name in record["datasets"]:
        for key, value in entry.items():
            text = _with_value(text, ("datasets", name, key), value)
    else:
        text = _with_item(text, ("datasets",), name, entry)
    if run and name not in record["run"]["datasets"]:
        text = _with_item(text, ("run", "datasets"), name)
        intended["run"]["datasets"].append(name)
    _write(path, text, intended, f"add by hand: {_one_line({name: entry})}")


def set_for_dataset(method: str, dataset: str, record: Mapping[str, Any], path: Path = PARAMS) -> None:
    """Write a method's options for one data set to params.yaml, as `methods.METHOD.per_dataset.DATASET`.

    An existing entry for the data set is replaced.
    """
    text = path.read_text(encoding="utf-8")
    intended = _parse(text)
    entry = intended["methods"][method]
    by_hand = f"write by hand: methods.{method}.per_dataset.{dataset}: {_one_line(record)}"
    if "per_dataset" in entry:
        text = _with_value(text, ("methods", method, "per_dataset", dataset), record)
    else:
        text = _with_item(text, ("methods", method), "per_dataset", {dataset: record})
    entry.setdefault("per_dataset", {})[dataset] = dict(record)
    _write(path, text, intended, by_hand)


def remove_dataset(name: str, path: Path = PARAMS) -> None:
    """Remove `datasets.NAME` and the comment above it from params.yaml, and all other uses of the name.

    These are in `run.datasets`, in `ablation_run.datasets` and in the `per_dataset` of methods and ablations.
    """
    params = load_params(path)
    require(name, params.datasets, "data set")
    for section, names in (("run", params.run.datasets), ("ablation_run", params.ablation_run.datasets)):
        if set(names) == {name}:
            raise UsageError(f"{path}: {section}.datasets lists only {name}; add another data set there first")
    text = path.read_text(encoding="utf-8")
    intended = _parse(text)
    places: list[tuple[str, ...]] = [("run", "datasets"), ("ablation_run", "datasets")]
    for section in ("methods", "ablations"):
        places += [(section, method, "per_dataset") for method in intended.get(section) or ()]
    for keys in (*places, ("datasets",)):
        items = reduce(lambda table, key: table.get(key) or {}, keys, intended)
        if name in items:
            text = _without_item(text, keys, name, with_comment=keys == ("datasets",))
            items.remove(name) if isinstance(items, list) else items.pop(name)
    _write(path, text, intended, f"remove {name} by hand")


def set_method(
    name: str, dataset: str, options: Mapping[str, Any], training: Mapping[str, Any], path: Path = PARAMS
) -> None:
    """Set options and training options of a method or ablation for one data set in params.yaml.

    They are written to the entry `per_dataset.DATASET` of the method; other options there stay.
    """
    text = path.read_text(encoding="utf-8")
    intended = _parse(text)
    section = next((key for key in ("methods", "ablations") if name in (intended.get(key) or {})), "methods")
    entry = intended[section][require(name, intended[section], "method")]
    by_dataset = entry.get("per_dataset") or {}
    before = by_dataset.get(dataset) or {}
    changed = {**before, **options}
    if training:
        changed["training"] = {**(before.get("training") or {}), **training}
    if by_dataset:
        text = _with_value(text, (section, name, "per_dataset", dataset), changed)
    else:
        text = _with_value(text, (section, name, "per_dataset"), {dataset: changed})
    entry["per_dataset"] = {**by_dataset, dataset: changed}
    _write(path, text, intended, f"add by hand: {name}: {_one_line({'per_dataset': {dataset: changed}})}")


def forget_stages(dataset: str, lock: Path) -> int:
    """Remove the DVC stages of `dataset` from a dvc.lock; return the number of removed stages."""
    if not lock.is_file():
        return 0
    yaml = YAML()
    try:
        record = yaml.load(lock)
        stages = record.get("stages") or {}
    except (YAMLError, AttributeError) as error:
        raise DuplexError(f"{lock} is not a lock file of DVC; restore it, or delete it and run `dvc repro`") from error
    names = [name for name, stage in stages.items() if _is_for(stage.get("cmd"), dataset)]
    for name in names:
        del stages[name]
    if names:
        with replace_file(lock.resolve()) as scratch:
            yaml.dump(record, scratch)
    return len(names)


def _is_for(command: object, dataset: str) -> bool:
    """Return whether a DVC stage's command, such as `python pipeline/train.py shapes duplex 0`, is for `dataset`."""
    words = shlex.split(command) if isinstance(command, str) else []
    arguments = words[3:] if words[2:3] == ["inputs"] else words[2:]
    return arguments[:1] == [dataset]


def _write(path: Path, text: str, intended: object, by_hand: str) -> None:
    """Write edited text to params.yaml, or to the target of a link, if it has exactly the intended values.

    Raises `DuplexError` with the advice `by_hand` if parsing `text` does not give the values `intended`, and
    `UsageError` if these are not valid in params.yaml.
    """
    try:
        edited = _parse(text)
    except YAMLError:
        edited = None
    if edited != intended:
        raise DuplexError(f"the layout of {path} cannot be edited; {by_hand}")
    with replace_file(path.resolve()) as scratch:
        scratch.write_text(text, encoding="utf-8", newline="\r\n" if b"\r\n" in path.read_bytes() else "\n")
        try:
            load_params(scratch)
        except UsageError as error:
            raise UsageError(str(error).replace(str(scratch), str(path))) from error


def _with_value(text: str, keys: tuple[str, ...], value: Any) -> str:
    """Return YAML text with the value at the path `keys` replaced, or added if the last key is missing.

    In a table, only the keys that differ from `value` change, so that comments stay. Raises `DuplexError`, with the
    line to write by hand, if a value to replace has comments inside.
    """
    before = reduce(lambda table, key: (table or {}).get(key), keys, _parse(text))
    if before is not None and _one_line(before) == _one_line(value):
        return text
    node = _node(text, keys)
    if node is None:
        return _with_item(text, keys[:-1], keys[-1], value)
    if isinstance(node, MappingNode) and before and isinstance(value, Mapping) and value:
        for key, part in value.items():
            text = _with_value(text, (*keys, key), part)
        for key in [key.value for key, _ in node.value if key.value not in value]:
            text = _without_item(text, keys, key)
        return text
    end = node.end_mark.index if isinstance(node, ScalarNode) or node.flow_style else _end(text, node)
    if isinstance(node, CollectionNode) and re.search(r"\s#", text[node.start_mark.index : end]):
        raise DuplexError(
            f"params.yaml: {'.'.join(keys)} has comments, which an edit would delete; write by hand: "
            f"{_one_line({keys[-1]: value})}"
        )
    return text[: node.start_mark.index] + _one_line(value) + text[end:]


def _with_item(text: str, keys: tuple[str, ...], name: str, value: Any = None) -> str:
    """Return YAML text with an item added to the collection at the path `keys`.

    The item is `- name` in a list and `name: value` in a table.
    """
    parent = _collection(text, keys)
    is_table = isinstance(parent, MappingNode)
    if parent.flow_style:
        item = _one_line({name: value})[1:-1] if is_table else name
        end = _items(parent)[-1][1].end_mark.index if parent.value else parent.start_mark.index + 1
        return text[:end] + (", " if parent.value else "") + item + text[end:]
    indent, end = " " * parent.start_mark.column, _end(text, parent)
    if is_table and isinstance(value, Mapping):
        lines = [f"{indent}{name}:", *(f"{indent}  {key}: {_one_line(part)}" for key, part in value.items())]
        return text[:end] + ("\n\n" if len(keys) == 1 else "\n") + "\n".join(lines) + text[end:]
    item = f"{name}: {_one_line(value)}" if is_table else f"- {name}"
    return text[:end] + f"\n{indent}{item}" + text[end:]


def _without_item(text: str, keys: tuple[str, ...], name: str, *, with_comment: bool = False) -> str:
    """Return YAML text without the item `name` of the list or table at the path `keys`.

    If no item is left, the list or table is written as `{}`, since YAML would read nothing there as null.

    with_comment: remove the comment above the item too.
    """
    parent = _collection(text, keys)
    items = _items(parent)
    place = next(place for place, (key, _) in enumerate(items) if key.value == name)
    if len(items) == 1:
        end = parent.end_mark.index if parent.flow_style else _end(text, parent)
        return text[: parent.start_mark.index] + "{}" + text[end:]
    if parent.flow_style:
        if place == len(items) - 1:
            return text[: items[place - 1][1].end_mark.index] + text[items[place][1].end_mark.index :]
        return text[: items[place][0].start_mark.index] + text[items[place + 1][0].start_mark.index :]
    end = min(_end(text, items[place][1]) + 1, len(text))
    lines = text[: text.rfind("\n", 0, items[place][0].start_mark.index) + 1].splitlines(keepends=True)
    if with_comment:
        while lines and lines[-1].lstrip().startswith("#"):
            lines.pop()
        while lines and not lines[-1].strip() and text[end : end + 1] in ("", "\n"):  # leave one blank line
            lines.pop()
    return "".join(lines) + text[end:]


def _collection(text: str, keys: tuple[str, ...]) -> CollectionNode:
    node = _node(text, keys)
    if not isinstance(node, CollectionNode):
        raise DuplexError(f"params.yaml: {'.'.join(keys)} is not a list or table; write it as one")
    return node


def _node(text: str, keys: tuple[str, ...]) -> Any:
    node: Any = YAML().compose(io.StringIO(text))
    for key in keys:
        pairs = node.value if isinstance(node, MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    return node


def _items(parent: CollectionNode) -> list[tuple[Node, Node]]:
    """Return a pair of nodes per item of a YAML collection: in a table, key and value; in a list, the node twice."""
    return parent.value if isinstance(parent, MappingNode) else [(item, item) for item in parent.value]


def _end(text: str, block: Node) -> int:
    """Return the position in `text` of the end of a YAML block's last line, before comments and blank lines below."""
    last: Any = block
    while isinstance(last, CollectionNode) and not last.flow_style and last.value:
        last = _items(last)[-1][1]
    is_flow = isinstance(last, CollectionNode) and last.flow_style
    end = text.find("\n", last.end_mark.index - 1 if is_flow else last.start_mark.index)
    return len(text) if end < 0 else end


def _parse(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def _one_line(value: Any) -> str:
    """Return a value as YAML on one line, such as `{kind: folder, root: pictures}`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 1 << 20
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue().removesuffix("...\n").strip()
