"""Write the user's data sets: a file datasets/NAME.yaml each, and their names in `run.datasets` of params.yaml.

An edit is checked as a whole before anything is written. In params.yaml only the line of `run.datasets` changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from duplex.artifacts import RESERVED
from duplex.config.params import DATASETS, MethodChanges, Params, dataset_files, is_name, parse_params, read_yaml
from duplex.errors import UsageError, require
from duplex.system.files import replace_file

PARAMS = Path("params.yaml")
MAX_NAME_LENGTH = 100  # a name becomes a folder and part of other names
# `run:`, its indented lines, comments and empty lines up to `datasets:`, and the list
RUN_DATASETS = re.compile(r"(^run:[^\n]*\n(?:[ \t#\r][^\n]*\n|\n)*?[ \t]+datasets:[ \t]*)\[[^\[\]\n]*\]", re.MULTILINE)


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can name a data set in YAML, in paths and in DVC's stages."""
    why = ""
    if not is_name(name) or len(name) > MAX_NAME_LENGTH:
        why = f"use letters, digits, `_` and single hyphens, at most {MAX_NAME_LENGTH} characters"
    elif not isinstance(YAML(typ="safe", pure=True).load(name), str):
        why = "YAML reads it as a number or the like; choose another"
    elif name in RESERVED:
        why = "it is reserved; choose another"
    if why:
        raise UsageError(f"{name!r} is not a valid name for a data set: {why}")


def write_dataset(name: str, entry: Mapping[str, Any], *, run: bool, path: Path = PARAMS) -> None:
    """Set keys of datasets/NAME.yaml, whose other keys and comments stay; with `run`, list it in `run.datasets`."""
    record, files = read_yaml(path), dataset_files(path)
    listed = record["run"]["datasets"]
    text = None
    if run and name not in listed:
        text = _with_run_datasets(path, [*listed, name])
        record["run"]["datasets"] = [*listed, name]
    files[name] = {**files.get(name, {}), **entry}
    parse_params(record, files, path)
    file = path.parent / DATASETS / f"{name}.yaml"
    yaml = YAML()  # keeps comments
    yaml.width = 1 << 20
    content: Any = yaml.load(file) if file.exists() else {}
    content.update(entry)
    if entry:
        file.parent.mkdir(exist_ok=True)
        with replace_file(file) as scratch:
            yaml.dump(content, scratch)
    if text is not None:
        _replace(path, text)


def set_method(
    params: Params,
    name: str,
    dataset: str,
    options: Mapping[str, Any],
    training: Mapping[str, Any],
    path: Path = PARAMS,
) -> None:
    """Set options and training options of a method in `methods:` of a data set's file; other options there stay."""
    before = params.entry(name).per_dataset.get(dataset, MethodChanges())
    changed = before.model_copy(update={**options, "training": {**before.training, **training}})
    methods = dataset_files(path).get(dataset, {}).get("methods", {})
    write_dataset(
        dataset, {"methods": {**methods, name: changed.model_dump(exclude_defaults=True)}}, run=False, path=path
    )


def remove_dataset(name: str, path: Path = PARAMS) -> None:
    """Delete datasets/NAME.yaml and its name in `run.datasets`; UsageError if params.yaml needs it."""
    record, files = read_yaml(path), dataset_files(path)
    require(name, parse_params(read_yaml(path), files, path).datasets, "data set")
    if name in record.get("datasets", {}):
        raise UsageError(f"{name} is an entry of `datasets:` in {path}; delete it there, and its other uses")
    listed = record["run"]["datasets"]
    left = [other for other in listed if other != name]
    if not left:
        raise UsageError(f"{path}: run.datasets lists only {name}; add another data set there first")
    text = _with_run_datasets(path, left) if left != listed else None
    record["run"]["datasets"] = left
    del files[name]
    parse_params(record, files, path)
    if text is not None:
        _replace(path, text)
    (path.parent / DATASETS / f"{name}.yaml").unlink()


def _with_run_datasets(path: Path, names: Sequence[str]) -> str:
    text = path.read_bytes().decode()
    edited = RUN_DATASETS.sub(rf"\1[{', '.join(names)}]", text, count=1)
    if edited == text or YAML(typ="safe", pure=True).load(edited)["run"]["datasets"] != names:
        line = f"datasets: [{', '.join(names)}]"
        raise UsageError(f"{path}: run.datasets is not a list on one line, which can be edited; make it `{line}`")
    return edited


def _replace(path: Path, text: str) -> None:
    with replace_file(path.resolve()) as scratch:  # a link stays one
        scratch.write_bytes(text.encode())
