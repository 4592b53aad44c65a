"""Data sets put into params.yaml and taken out of it, with no comment or line touched that is somebody else's."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from duplex.config.artifacts import RESERVED
from duplex.config.params import Params, load_params
from duplex.errors import DuplexError, UsageError, require
from duplex.system.files import replaced

PARAMS = Path("params.yaml")
LONGEST = 100  # letters of a name: it becomes a folder and part of many others' names


def check_name(name: str, path: Path = PARAMS) -> None:
    """Before any work is done: there is a good params.yaml, and the name fits its keys, a folder and DVC's stages."""
    load_params(path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*", name) or len(name) > LONGEST:
        raise UsageError(
            f"{name!r} is no name for a data set; use letters, digits, `_` and single hyphens "
            f"(DVC takes a dot for the way to a key), {LONGEST} at most"
        )
    if not isinstance(YAML(typ="safe", pure=True).load(name), str):
        raise UsageError(f"{name!r} is no name for a data set: YAML reads it as something other than a word")
    if name in RESERVED:
        raise UsageError(f"{name!r} is no name for a data set: artifacts/{name} has another use")


def add_dataset(name: str, entry: Mapping[str, Any], *, run: bool, path: Path = PARAMS) -> None:
    """Put `datasets.NAME` into the file and, with `run`, the name into `run.datasets`. Of one that is there only the
    keys of `entry` change. The file is replaced only if what comes out is a good params.yaml."""
    text = _with_entry(path.read_text(encoding="utf-8"), name, entry)
    if run:
        text = _with_name(text, name)
    with _edited(path, text) as params:
        written = params.datasets.get(name)
        if (
            written is None
            or written.source.root != Path(entry["source"]["root"])
            or (name in params.run.datasets) < run
        ):
            raise DuplexError(f"{path} has a form that cannot be edited; add by hand: {_flow({name: entry})}")


def remove_dataset(name: str, path: Path = PARAMS) -> None:
    """Take `datasets.NAME`, with the comment above it, the name in the lists of `run` and `ablation_run`, and what rows
    say of it under `on:` out."""
    params, text = load_params(path), path.read_text(encoding="utf-8")
    require(name, params.datasets, "data set")
    for section, names in (("run", params.run.datasets), ("ablation_run", params.ablation_run.datasets)):
        if set(names) == {name}:
            raise UsageError(f"{path}: {section}.datasets names only {name}; put another one there first")
        if name in names:
            text = _without_name(text, section, name)
    for section in ("methods", "ablations"):
        for row in [key.value for key, _ in _rows(text, section)]:
            text = _without_overlay(text, section, row, name)
    with _edited(path, _without_entry(text, name)) as params:
        if name in params.datasets or name in (*params.run.datasets, *params.ablation_run.datasets):
            raise DuplexError(f"{path} has a form that cannot be edited; take {name} out of it by hand")


@contextmanager
def _edited(path: Path, text: str) -> Iterator[Params]:
    """What an edited params.yaml would mean; it takes the old one's place if the block agrees. Where `path` is a link,
    the file it leads to is edited."""
    with replaced(path.resolve()) as scratch:
        scratch.write_text(text, encoding="utf-8", newline="\r\n" if b"\r\n" in path.read_bytes() else "\n")
        try:
            params = load_params(scratch)
        except UsageError as error:
            raise UsageError(str(error).replace(str(scratch), str(path))) from error
        yield params


def _with_entry(text: str, name: str, entry: Mapping[str, Any]) -> str:
    datasets = _child(_compose(text), "datasets")
    if datasets is None or datasets.flow_style:
        raise DuplexError(f"params.yaml needs a block `datasets:`; add by hand: {_flow({name: entry})}")
    if _child(datasets, name) is not None:
        for key, value in entry.items():
            node = _child(_child(_child(_compose(text), "datasets"), name), key)
            if node is None or not (isinstance(node, ScalarNode) or node.flow_style):
                raise DuplexError(
                    f"params.yaml: datasets.{name}.{key} is not written as {{...}}; put by hand: {_flow(value)}"
                )
            text = text[: node.start_mark.index] + _flow(value) + text[node.end_mark.index :]
        return text
    indent = " " * datasets.start_mark.column
    lines = [f"{indent}{name}:", *(f"{indent}  {key}: {_flow(value)}" for key, value in entry.items())]
    end = _end(text, datasets)
    return text[:end] + "\n\n" + "\n".join(lines) + text[end:]


def _without_entry(text: str, name: str) -> str:
    datasets = _child(_compose(text), "datasets")
    if datasets is None or datasets.flow_style:
        raise DuplexError(f"params.yaml needs a block `datasets:`; take {name} out of it by hand")
    key, value = next(pair for pair in datasets.value if pair[0].value == name)
    end = min(_end(text, value) + 1, len(text))
    lines = text[: text.rfind("\n", 0, key.start_mark.index) + 1].splitlines(keepends=True)
    while lines and lines[-1].lstrip().startswith("#"):
        lines.pop()
    while lines and not lines[-1].strip() and text[end : end + 1] in ("", "\n"):  # one blank line stays between others
        lines.pop()
    return "".join(lines) + text[end:]


def _without_name(text: str, section: str, name: str) -> str:
    names = _child(_child(_compose(text), section), "datasets")
    place = next(i for i, item in enumerate(names.value) if item.value == name)
    return _without_item(text, names, place)


def _without_item(text: str, parent: CollectionNode, place: int) -> str:
    """A list's or a table's text without one of its items, of which there are more."""
    pairs = parent.value if isinstance(parent, MappingNode) else [(item, item) for item in parent.value]
    begins, ends = [key.start_mark.index for key, _ in pairs], [value.end_mark.index for _, value in pairs]
    if not parent.flow_style:
        start = text.rfind("\n", 0, begins[place]) + 1
        return text[:start] + text[min(_end(text, pairs[place][1]) + 1, len(text)) :]
    last = place == len(pairs) - 1
    return text[: ends[place - 1] if last else begins[place]] + text[ends[place] if last else begins[place + 1] :]


def _rows(text: str, section: str) -> list[tuple[Node, Node]]:
    rows = _child(_compose(text), section)
    return rows.value if isinstance(rows, MappingNode) else []


def _without_overlay(text: str, section: str, row: str, name: str) -> str:
    """A row's text without `on.NAME`; an `on:` of which nothing is left stays as `{}`."""
    on = _child(_child(_child(_compose(text), section), row), "on")
    if _child(on, name) is None:
        return text
    place = next(i for i, (key, _) in enumerate(on.value) if key.value == name)
    if len(on.value) > 1:
        return _without_item(text, on, place)
    end = on.end_mark.index if on.flow_style else _end(text, on)
    return text[: on.start_mark.index] + "{}" + text[end:]


def _with_name(text: str, name: str) -> str:
    names = _child(_child(_compose(text), "run"), "datasets")
    if not isinstance(names, SequenceNode):
        raise DuplexError("params.yaml needs a list `run: {datasets: [...]}`")
    if name in [item.value for item in names.value]:
        return text
    if names.flow_style:
        end = names.value[-1].end_mark.index if names.value else names.start_mark.index + 1
        return text[:end] + (", " if names.value else "") + name + text[end:]
    end = _end(text, names)
    found: str = text[:end] + "\n" + " " * names.start_mark.column + f"- {name}" + text[end:]
    return found


def _compose(text: str) -> MappingNode:
    node = YAML().compose(io.StringIO(text))
    if not isinstance(node, MappingNode):
        raise DuplexError("params.yaml is not a table of keys and values")
    return node


def _child(node: Node | None, key: str) -> Any:
    if not isinstance(node, MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _end(text: str, block: Node) -> int:
    """Where a block's last line ends; the comments and blank lines that follow belong to what comes next."""
    last: Any = block
    while isinstance(last, (MappingNode, SequenceNode)) and not last.flow_style and last.value:
        last = last.value[-1][1] if isinstance(last, MappingNode) else last.value[-1]
    is_flow = isinstance(last, (MappingNode, SequenceNode)) and last.flow_style
    end = text.find("\n", last.end_mark.index - 1 if is_flow else last.start_mark.index)
    return len(text) if end < 0 else end


def _flow(value: Any) -> str:
    """`{kind: folder, root: pictures}`, on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 1 << 20
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue().removesuffix("...\n").strip()
