"""params.yaml as frozen typed objects. An unknown key or a wrong type is one sentence that names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from duplex.config.artifacts import RESERVED
from duplex.config.method_entries import Row, read_rows
from duplex.config.plain_yaml import read_yaml
from duplex.data.split_options import SplitOptions
from duplex.errors import UsageError, require
from duplex.features.augmentation import MOST, Augmentation
from duplex.features.identity import IMPORTED
from duplex.labels import World
from duplex.methods import registry
from duplex.options import OptionError, Options, TailOptions, TrainingOptions
from duplex.system.precision import Precision

NAME = r"^[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*$"
Name = Annotated[str, Field(pattern=NAME)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what every random generator takes


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
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

    seed: Seed = SplitOptions.seed
    val_unseen: Share = SplitOptions.val_unseen
    test_unseen: Share = SplitOptions.test_unseen
    val_images: Share = SplitOptions.val_images  # of each seen pair's images
    test_images: Share = SplitOptions.test_images


class SourceParams(Section):
    """Where a data set's pictures and labels come from."""

    kind: Literal["shapes", "standard", "table", "folder"]
    root: Path
    table: Path | None = None
    seed: Seed = 7
    split: SplitParams = SplitParams()
    resplit: Positive | None = None  # which of the splits drawn anew; None: the one that the data come with


class EncoderParams(Section):
    """Which frozen encoder a data set is seen through."""

    name: str
    weights: str | None = None
    precision: Precision = "fp32"
    depth: Annotated[int, Field(ge=0)] | None = None  # of its cache; None: extraction.depth
    bits: Literal[8, 16] = 16  # that are kept of each number of what enters the last blocks
    deep_test: bool = True  # whether it is kept of test pictures too; if not they are encoded for each evaluation


class DatasetParams(Section):
    source: SourceParams
    encoder: EncoderParams
    views: Annotated[int, Field(ge=0, le=MOST)] | None = None  # of each training picture; None: extraction.views
    flip: bool = False  # whether views may be mirrored: not where left and right matter
    training: Annotated[
        TrainingOptions, PlainValidator(TrainingOptions.from_dict), PlainSerializer(TrainingOptions.to_dict)
    ]


class ExtractionParams(Section):
    batch_size: Positive = 64
    num_workers: Workers = "auto"
    max_bad: Share = 0.01
    tokens: Literal["none", "patch"] = "none"
    depth: Annotated[int, Field(ge=0)] = 0
    views: Annotated[int, Field(ge=0, le=MOST)] = 0


class EvaluationParams(Section):
    worlds: tuple[World, ...] = Field(default=("closed", "open"), min_length=1)
    protocol: Literal["exact", "sampled"] = "exact"
    k: tuple[Positive, ...] = Field(default=(1,), min_length=1)
    thresholds: Positive = 50
    feasibility: Literal["words", "likelihood"] = "words"  # who rules compositions out, where both can
    word_vectors: Path | None = None  # GloVe-format file; None: the encoder's own text tower
    bootstrap: Positive = 1000
    terms: bool = True  # the parts of a score alone, in the closed world


class Params(Section):
    """All of params.yaml."""

    run: RunParams
    ablation_run: AblationRunParams
    device: Literal["auto", "cpu", "cuda"] = "auto"
    extraction: ExtractionParams
    evaluation: EvaluationParams
    datasets: dict[Name, DatasetParams]
    methods: dict[str, Row] = {}
    ablations: dict[str, Row] = {}

    def dataset(self, name: str) -> DatasetParams:
        return self.datasets[require(name, self.datasets, "data set")]

    def depth(self, dataset: str) -> int:
        """How many of the image tower's last blocks a data set's cache holds the input of."""
        own = self.dataset(dataset).encoder.depth
        return self.extraction.depth if own is None else own

    def augmentation(self, dataset: str) -> Augmentation | None:
        """The views of a data set's training pictures; None for the plain ones alone, as of features brought along."""
        entry = self.dataset(dataset)
        count = self.extraction.views if entry.views is None else entry.views
        return Augmentation(count, entry.flip) if count and entry.encoder.name != IMPORTED else None

    def row(self, name: str) -> Row:
        """A method or an ablation as it is written."""
        rows = {**self.methods, **self.ablations}
        return rows[require(name, rows, "method")]

    def shown(self, name: str, world: World) -> str:
        """The row whose runs stand for a method in a world: its own, or one that is shown as it there."""
        if world in self.row(name).worlds:
            return name
        rows = {**self.methods, **self.ablations}
        others = [other for other, row in rows.items() if row.shown_as == name and world in row.worlds]
        if not others:
            raise UsageError(
                f"{name} is for the {self.row(name).world} world alone; correct --world or the row's `world`"
            )
        return others[0]

    def worlds(self, name: str) -> tuple[World, ...]:
        """Those of a row's that are evaluated; one at least."""
        found = tuple(world for world in self.row(name).worlds if world in self.evaluation.worlds)
        if not found:
            raise UsageError(
                f"params.yaml: evaluation.worlds is {list(self.evaluation.worlds)} and {name} is for the "
                f"{self.row(name).world} world alone; leave it out of run.methods, or have that world evaluated"
            )
        return found

    def method(self, name: str, dataset: str | None = None) -> Options:
        """A row's options on a data set, checked by its kind."""
        row = self.row(name)
        try:
            return registry.parse(row.kind, row.options_on(dataset))
        except OptionError as error:
            raise _at(self._place(name), error) from None

    def training(self, dataset: str, name: str) -> TrainingOptions:
        """The data set's settings, overlaid by what the row says."""
        row, base = self.row(name), self.dataset(dataset).training
        try:
            return TrainingOptions.from_dict({**base.to_dict(), **row.training_on(dataset)})
        except OptionError as error:
            raise _at(f"{self._place(name)}.training", error) from None

    def tail(self, name: str, dataset: str | None = None) -> TailOptions | None:
        """What a row trains in the image tower's last blocks; None: nothing."""
        written = self.row(name).tail_on(dataset)
        try:
            return TailOptions.from_dict(written) if written else None
        except OptionError as error:
            raise _at(f"{self._place(name)}.tail", error) from None

    def _place(self, name: str) -> str:
        return f"methods.{name}" if name in self.methods else f"ablations.{name}"

    def check_rows(self) -> None:
        """Every row makes sense to its kind, on every data set that it names apart."""
        for name, row in {**self.methods, **self.ablations}.items():
            for dataset in (None, *row.on):
                self.method(name, dataset)
                self.tail(name, dataset)
            for dataset in self.datasets:
                self.training(dataset, name)


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check params.yaml. What a method's options mean is its kind's to say, when it is asked for."""
    record = _read(path)
    written = {key: _rows(key, record.pop(key, None) or {}) for key in ("methods", "ablations")}
    try:
        params = Params.model_validate_json(json.dumps(record, default=str))
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_fault(error, Params)}") from None
    try:
        rows = read_rows(written["methods"], written["ablations"], tuple(params.datasets))
    except UsageError as error:
        raise UsageError(f"params.yaml: {error}") from None
    params = params.model_copy(update=rows)
    _check_run(params)
    return params


def _at(place: str, error: OptionError) -> UsageError:
    """`params.yaml: methods.duplex.momentum: ...`"""
    return UsageError(f"params.yaml: {place}{'.' if error.key else ': '}{error}")


def _check_run(params: Params) -> None:
    """What `run:` names exists, and nothing is named twice."""
    for key, names in (("run", params.run.datasets), ("ablation_run", params.ablation_run.datasets)):
        for name in names:
            require(name, params.datasets, f"data set in params.yaml, {key}.datasets:")
    for name in params.run.methods:
        require(name, params.methods, "method in params.yaml, run.methods:")
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
    _check_shown(params)


def _check_shown(params: Params) -> None:
    """Each method of `run:` is evaluated in some world, and in no world are two shown as one."""
    shown: dict[tuple[str, str], str] = {}
    for name in params.run.methods:
        params.worlds(name)
        row = params.methods[name]
        for world in row.worlds:
            other = shown.setdefault((row.shown_as or name, world), name)
            if other != name:
                raise UsageError(
                    f"params.yaml: run.methods: {other} and {name} are both shown as {row.shown_as or name} "
                    f"in the {world} world; give one another `world` or `shown_as`"
                )


def _read(path: Path) -> dict[str, Any]:
    return dict(_table(str(path), read_yaml(path)))


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
            raise UsageError(f"params.yaml: {key} has the name {name!r}; use letters, digits, `_` and single hyphens")
    return table


def _first_fault(error: ValidationError, table: type) -> str:
    """`datasets.shapes.training.epochs: input should be greater than 0 (it is 0)`."""
    unknown = ("extra_forbidden", "unexpected_keyword_argument", "unexpected_property")
    faults = error.errors(include_url=False)
    fault = next((one for one in faults if one["type"] in unknown), faults[0])
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in unknown:
        return f"{place}: unknown key; known: {', '.join(_known_keys(table, fault['loc'][:-1]))}"
    if fault["type"].startswith("missing"):
        return f"{place}: missing"
    if fault["type"] == "value_error":  # a sentence of our own
        own = fault["ctx"]["error"]
        return f"{place}{'.' if getattr(own, 'key', None) else ': '}{own}"
    return f"{place}: {fault['msg'][0].lower()}{fault['msg'][1:]} (it is {fault['input']!r})"


def _known_keys(table: Any, place: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place of params.yaml, found by walking the sections' own types."""
    for part in place:
        entry = getattr(table, "model_fields", {}).get(part)
        if entry:
            inner = [entry.annotation, *getattr(entry.annotation, "__args__", ())]
            table = next((kind for kind in inner if hasattr(kind, "model_fields")), table)
    return list(table.model_fields)
