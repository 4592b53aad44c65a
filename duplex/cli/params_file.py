"""Adding a data set to params.yaml without touching a comment or a line that is somebody else's."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from duplex.errors import DuplexError, UsageError
from duplex.files import replaced
from duplex.params import Name, Params, load_params

PARAMS = Path("params.yaml")


def check_name(name: str, path: Path = PARAMS) -> None:
    """Before any work is done: there is a good params.yaml, and the name fits its keys."""
    load_params(path)
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise UsageError(
            f"{name!r} is no name for a data set; use letters, digits, `_`, `.` and single hyphens"
        ) from error


def add_dataset(name: str, entry: Mapping[str, Any], *, run: bool, path: Path = PARAMS) -> None:
    """Put `datasets.NAME` into the file (one that is there keeps its encoder and training) and, with `run`, the name
    into `run.datasets`. The file is replaced only if what comes out is a good params.yaml."""
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


@contextmanager
def _edited(path: Path, text: str) -> Iterator[Params]:
    """What an edited params.yaml would mean; it takes the old one's place if the block agrees. Where `path` is a link,
    the file it leads to is edited."""
    with replaced(path.resolve()) as scratch:
        scratch.write_text(text, encoding="utf-8")
        try:
            params = load_params(scratch)
        except UsageError as error:
            raise UsageError(str(error).replace(str(scratch), str(path))) from error
        yield params


def _with_entry(text: str, name: str, entry: Mapping[str, Any]) -> str:
    datasets = _child(_compose(text), "datasets")
    if datasets is None or datasets.flow_style:
        raise DuplexError(f"params.yaml needs a block `datasets:`; add by hand: {_flow({name: entry})}")
    existing = _child(datasets, name)
    if existing is not None:
        source = _child(existing, "source")
        if source is None or not source.flow_style:
            raise DuplexError(
                f"params.yaml: datasets.{name}.source is not written as {{...}}; put by hand: {_flow(entry['source'])}"
            )
        return text[: source.start_mark.index] + _flow(entry["source"]) + text[source.end_mark.index :]
    indent = " " * datasets.start_mark.column
    lines = [f"{indent}{name}:", *(f"{indent}  {key}: {_flow(value)}" for key, value in entry.items())]
    end = _end(text, datasets)
    return text[:end] + "\n\n" + "\n".join(lines) + text[end:]


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
    return text[:end] + "\n" + " " * names.start_mark.column + f"- {name}" + text[end:]


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
