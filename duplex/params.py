"""params.yaml as frozen typed objects. An unknown key or a wrong type is one sentence that names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from duplex.artifacts import RESERVED
from duplex.errors import UsageError, pick
from duplex.labels import World
from duplex.model.options import Options, TrainingOptions

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*$"
Name = Annotated[str, Field(pattern=NAME)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what every random generator takes


def _workers(value: Any) -> int | Literal["auto"]:
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"must be a number of processes, 0 or more, or auto (it is {value!r})")


Workers = Annotated[int | Literal["auto"], PlainValidator(_workers)]


class Section(BaseModel):
    """A part of params.yaml: frozen, and strict about what it holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunParams(Section):
    """What `dvc repro` runs: every data set x method x seed."""

    datasets: tuple[Name, ...] = Field(min_length=1)
    methods: tuple[Name, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)


class AblationRunParams(Section):
    """What the ablation tables are made of."""

    datasets: tuple[Name, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)


class SplitParams(Section):
    """The compositional split made for a data set that comes without one: shares of the pairs that become unseen."""

    seed: Seed = 0
    val_unseen: Share = 0.15
    test_unseen: Share = 0.15
    val_images: Share = 0.1  # of each seen pair's images
    test_images: Share = 0.2


class SourceParams(Section):
    """Where a data set's pictures and labels come from."""

    kind: Literal["shapes", "standard", "table", "folder"]
    root: Path
    table: Path | None = None
    seed: Seed = 7
    split: SplitParams = SplitParams()


class EncoderParams(Section):
    """Which frozen encoder a data set is seen through."""

    name: str
    weights: str | None = None
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"


class DatasetParams(Section):
    source: SourceParams
    encoder: EncoderParams
    training: TrainingOptions


class ExtractionParams(Section):
    batch_size: Positive = 64
    num_workers: Workers = "auto"
    max_bad: Share = 0.01
    tokens: Literal["none", "patch"] = "none"


class EvaluationParams(Section):
    worlds: tuple[World, ...] = Field(default=("closed", "open"), min_length=1)
    protocol: Literal["exact", "sampled"] = "exact"
    k: tuple[Positive, ...] = Field(default=(1,), min_length=1)
    thresholds: Positive = 50
    word_vectors: Path | None = None  # GloVe-format file; None: the encoder's own text tower
    bootstrap: Positive = 1000


class Params(Section):
    """All of params.yaml."""

    run: RunParams
    ablation_run: AblationRunParams
    device: Literal["auto", "cpu", "cuda"] = "auto"
    extraction: ExtractionParams
    evaluation: EvaluationParams
    datasets: dict[Name, DatasetParams]
    methods: dict[str, Options] = {}
    ablations: dict[str, Options] = {}

    def dataset(self, name: str) -> DatasetParams:
        return self.datasets[pick(name, self.datasets, "data set")]

    def method(self, name: str) -> Options:
        rows = {**self.methods, **self.ablations}
        return rows[pick(name, rows, "method")]


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check params.yaml."""
    record = _read(path)
    methods = _rows("methods", record.pop("methods", None))
    ablations = _rows("ablations", record.pop("ablations", None) or {})
    rows = {
        "methods": {name: _options(f"methods.{name}", row) for name, row in methods.items()},
        "ablations": {name: _ablation(name, row, methods) for name, row in ablations.items()},
    }
    try:
        params = Params.model_validate_json(json.dumps(record, default=str)).model_copy(update=rows)
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_fault(error, Params)}") from None
    _check_run(params)
    return params


def _check_run(params: Params) -> None:
    """What `run:` names exists, and nothing is named twice."""
    for key, names in (("run", params.run.datasets), ("ablation_run", params.ablation_run.datasets)):
        for name in names:
            pick(name, params.datasets, f"data set in params.yaml, {key}.datasets:")
    for name in params.run.methods:
        pick(name, params.methods, "method in params.yaml, run.methods:")
    for section in ("run", "ablation_run", "evaluation"):
        for key, values in getattr(params, section):
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise UsageError(f"params.yaml: {section}.{key} names a value twice: {list(values)}")
    words = params.evaluation.word_vectors
    if words is not None and not words.is_file():
        raise UsageError(f"params.yaml: evaluation.word_vectors: {words} is not a file; null takes the encoder's own")
    taken = sorted(set(params.datasets) & set(RESERVED))
    if taken:
        raise UsageError(f"params.yaml: datasets.{taken[0]}: artifacts/{taken[0]} has another use; choose another name")
    both = sorted(set(params.methods) & set(params.ablations))
    if both:
        raise UsageError(f"params.yaml: {both[0]!r} is both a method and an ablation; give one another name")


def _read(path: Path) -> dict[str, Any]:
    try:
        record = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist here; run from the project's folder") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return dict(_table(str(path), record))


def _table(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"params.yaml: {key} is {value!r}; it must be a table of keys and values")
    strange = [name for name in value if not isinstance(name, str)]
    if strange:
        raise UsageError(f"params.yaml: {key} has the key {strange[0]!r}; keys are words")
    return value


def _rows(key: str, value: Any) -> Mapping[str, Any]:
    """Methods or ablations by name; a name becomes a folder."""
    table = _table(key, value)
    for name in table:
        if not re.fullmatch(NAME, name):
            raise UsageError(
                f"params.yaml: {key} has the name {name!r}; use letters, digits, `_`, `.` and single hyphens"
            )
    return table


def _ablation(name: str, row: Any, methods: Mapping[str, Any]) -> Options:
    """An ablation is a method with some options changed: `{of: duplex, momentum: 1.0}`."""
    changes = dict(_table(f"ablations.{name}", row))
    base = changes.pop("of", None)
    if not isinstance(base, str) or base not in methods:
        raise UsageError(f"params.yaml: ablations.{name}.of is {base!r}; known methods: {', '.join(methods)}")
    return _options(f"ablations.{name}", {**_table(f"methods.{base}", methods[base]), **changes})


def _options(place: str, row: Any) -> Options:
    table = _table(place, row)
    try:
        return TypeAdapter(Options).validate_json(json.dumps(dict(table), default=str))
    except ValidationError as error:
        raise UsageError(f"params.yaml: {_first_fault(error, Options, place)}") from None


def _first_fault(error: ValidationError, table: type, within: str = "") -> str:
    """`datasets.shapes.training.epochs: input should be greater than 0 (it is 0)`."""
    unknown = ("extra_forbidden", "unexpected_keyword_argument", "unexpected_property")
    faults = error.errors(include_url=False)
    fault = next((one for one in faults if one["type"] in unknown), faults[0])
    place = ".".join(str(part) for part in (within, *fault["loc"]) if part != "")
    if fault["type"] in unknown:
        return f"{place}: unknown key; known: {', '.join(_known_keys(table, fault['loc'][:-1]))}"
    if fault["type"].startswith("missing"):
        return f"{place}: missing"
    if fault["type"] == "value_error":  # a sentence of our own
        return f"{place}: {fault['ctx']['error']}"
    return f"{place}: {fault['msg'][0].lower()}{fault['msg'][1:]} (it is {fault['input']!r})"


def _known_keys(table: Any, place: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place of params.yaml, found by walking the sections' own types."""
    for part in place:
        entry = getattr(table, "model_fields", {}).get(part)
        if entry:
            inner = [entry.annotation, *getattr(entry.annotation, "__args__", ())]
            table = next((kind for kind in inner if hasattr(kind, "model_fields") or is_dataclass(kind)), table)
    return [entry.name for entry in fields(table)] if is_dataclass(table) else list(table.model_fields)
