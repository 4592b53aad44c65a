"""Edit the user's files datasets/NAME.yaml and, in params.yaml, only the line `run.datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from duplex.artifacts import RESERVED
from duplex.config.entries import Table
from duplex.config.params import (
    DATASETS,
    PARAMS_FILE,
    MethodChanges,
    Params,
    dataset_files,
    is_name,
    load_params,
    parse_params,
    read_yaml,
)
from duplex.errors import UsageError, require
from duplex.options import TrainingOptions
from duplex.system.files import replace_file

MAX_NAME_LENGTH = 100  # a name becomes a folder and part of other names
# `run:`, its indented lines, comments and empty lines up to `datasets:`, and the list
RUN_DATASETS = re.compile(r"(^run:[^\n]*\n(?:[ \t#\r][^\n]*\n|\n)*?[ \t]+datasets:[ \t]*)\[[^\[\]\n]*\]", re.MULTILINE)


def check_name(name: str) -> None:
    """Raise UsageError unless a data set may have this name in YAML, paths and DVC's stages."""
    why = ""
    if not is_name(name) or len(name) > MAX_NAME_LENGTH:
        why = f"use letters, digits, `_` and single hyphens, at most {MAX_NAME_LENGTH} characters"
    elif not isinstance(YAML(typ="safe", pure=True).load(name), str):
        why = "YAML does not read it as text; choose another name"
    elif name in RESERVED:
        why = "it is reserved; choose another name"
    if why:
        raise UsageError(f"{name!r} is not a valid name for a data set: {why}")


def write_dataset(name: str, entry: Mapping[str, Any], *, run: bool) -> None:
    """Write keys to datasets/NAME.yaml, keeping others; `run`: add it to `run.datasets`."""
    record = read_yaml(PARAMS_FILE)
    files = dataset_files(PARAMS_FILE)
    files[name] = {**files.get(name, {}), **entry}
    listed = record["run"]["datasets"]
    text = _checked_edit(record, files, [*listed, name] if run and name not in listed else listed)
    file = Path(DATASETS) / f"{name}.yaml"
    yaml = YAML()  # keeps comments
    yaml.width = 1 << 20
    content: Any = yaml.load(file) if file.exists() else {}
    content.update(entry)
    if entry:
        file.parent.mkdir(exist_ok=True)
        with replace_file(file) as scratch:
            yaml.dump(content, scratch)
    _write_params(text)


def write_settings(params: Params, name: str, dataset: str, settings: Mapping[str, Any]) -> None:
    """Write options of a method or of its training to datasets/DATASET.yaml; keeps others."""
    before = params.entry(name).per_dataset.get(dataset, MethodChanges())
    known = {field.name for field in fields(TrainingOptions)}
    training = dict(before.training)
    training |= {key: value for key, value in settings.items() if key in known}
    options = {key: value for key, value in settings.items() if key not in known}
    changed = before.model_copy(update={**options, "training": training} if training else options)
    record = read_yaml(PARAMS_FILE)
    entry = {**record.get("datasets", {}).get(dataset, {}), **dataset_files(PARAMS_FILE).get(dataset, {})}
    methods = {**entry.get("methods", {}), name: changed.model_dump(exclude_unset=True)}
    write_dataset(dataset, {"methods": methods}, run=False)


def remove_dataset(name: str) -> None:
    """Delete datasets/NAME.yaml and its name in `run.datasets`, unless it is still needed."""
    record = read_yaml(PARAMS_FILE)
    files = dataset_files(PARAMS_FILE)
    require(name, load_params().datasets, "data set")
    if name in record.get("datasets", {}):
        raise UsageError(f"only files in {DATASETS}/ can be removed; delete datasets.{name} in {PARAMS_FILE} by hand")
    left = [other for other in record["run"]["datasets"] if other != name]
    if not left:
        raise UsageError(f"{PARAMS_FILE}: run.datasets must not be empty, but lists only {name}; first add another")
    del files[name]
    _write_params(_checked_edit(record, files, left))
    (Path(DATASETS) / f"{name}.yaml").unlink()


def _checked_edit(record: dict[str, Any], files: Mapping[str, Table], names: list[str]) -> str:
    text = PARAMS_FILE.read_bytes().decode()
    if names != record["run"]["datasets"]:
        listed = f"[{', '.join(names)}]"
        text = RUN_DATASETS.sub(rf"\1{listed}", text, count=1)
        if YAML(typ="safe", pure=True).load(text)["run"]["datasets"] != names:
            raise UsageError(
                f"{PARAMS_FILE}: run.datasets is not a list on one line, so this command cannot edit it; "
                f"write `datasets: {listed}`"
            )
    record["run"]["datasets"] = names
    parse_params(record, files, PARAMS_FILE)
    return text


def _write_params(text: str) -> None:
    if text.encode() != PARAMS_FILE.read_bytes():
        with replace_file(PARAMS_FILE.resolve()) as scratch:  # a link stays one
            scratch.write_bytes(text.encode())
