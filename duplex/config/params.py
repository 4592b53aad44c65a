"""Read params.yaml as frozen, typed objects. Unknown keys and wrong types raise a one-line error with the key.

Entries of `methods:` and `ablations:` in params.yaml: a method's class (`kind`), worlds and (training) options.

    duplex_open:
      {extends: duplex, world: open, shown_as: duplex, training: {epochs: 20}, per_dataset: {cgqa: {momentum: 0.99}}}

`extends` takes kind, options, `training`, `finetune` and `per_dataset` from another entry. All keys other than
`RESERVED_KEYS` are options of the kind. `world`: closed or open; `shown_as`: the method's name in result tables.

Read YAML as plain data of bounded size; excessive anchors, nesting and numbers raise an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from duplex.artifacts import RESERVED
from duplex.data.contents import SourceOptions
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import WORLDS, World
from duplex.methods import registry
from duplex.options import (
    AutoFinetune,
    Count,
    FinetuneOptions,
    Natural,
    OptionError,
    Options,
    Seed,
    Share,
    TrainingOptions,
    finetune_options,
)
from duplex.system.threads import Precision

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


MAX_BYTES = 1 << 20  # of a file
MAX_CHARACTERS = 4096  # of a text
MAX_VALUES = 100_000  # of a file; an alias counts as all values that it stands for
MAX_BITS = 128  # of a whole number


class _Refused(Exception):
    """Error: a value in a YAML file is too long or too large, contains itself, or has a key that is not a word."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML 1.2 file with one document. Raises UsageError for a file that cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(f"{path} has {size:,} bytes; expected at most {MAX_BYTES:,}")
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        _count(content, {}, set())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist here; run from the project's folder") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(
            f"{path} is nested too deeply to be read; write tables and lists inside each other with fewer levels"
        ) from error
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except _Refused as error:
        raise UsageError(f"{path}: {error}") from error
    return content


def _count(value: Any, counts: dict[int, int], outer: set[int]) -> int:
    """Return the number of values in `value`, itself included; raise an error for values beyond the limits.

    counts: number of values by id, for the tables and lists counted before.
    outer: ids of the tables and lists that contain `value`.
    """
    if isinstance(value, str) and (len(value) > MAX_CHARACTERS or value.encode(errors="ignore").decode() != value):
        raise _Refused(
            f"text {value[:20]!r}... is too long or not Unicode; expected at most {MAX_CHARACTERS} characters"
        )
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Refused(f"a whole number has {value.bit_length()} bits; expected at most {MAX_BITS}")
    if not isinstance(value, Mapping | list | tuple | set):
        return 1
    if id(value) in outer:
        raise _Refused("an anchor contains itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise _Refused(f"the key {str(key)[:40]} is not a word; write it in quotes")
    if id(value) not in counts:
        inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [*value]
        counts[id(value)] = 1 + sum(_count(part, counts, outer | {id(value)}) for part in inner)
    if counts[id(value)] > MAX_VALUES:
        raise _Refused(f"it has more than {MAX_VALUES:,} values, counted with aliases expanded")
    return counts[id(value)]


PACKAGE = Path(__file__).parents[1]
NAME = r"^[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*$"
Name = Annotated[str, Field(pattern=NAME)]
MAX_WORKERS = 1024


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WORKERS:
        return value
    raise ValueError(f"must be a number of processes, 0–{MAX_WORKERS}, or auto (it is {value!r})")


Workers = Annotated[int | Literal["auto"], PlainValidator(_workers)]


class ParamsSection(BaseModel):
    """Base class of the sections of params.yaml: frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class AblationRunParams(ParamsSection):
    """Section `ablation_run:`. Every entry of `ablations:` is trained on these data sets with these seeds."""

    datasets: tuple[Name, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)


class RunParams(AblationRunParams):
    """Section `run:`. `dvc repro` trains and evaluates every combination of data set, method and seed."""

    methods: tuple[Name, ...] = Field(min_length=1)  # entries of `methods:`; once read, those of `products` too
    products: tuple[Name, ...] = ()  # methods that combine finished runs of `methods`


class EncoderParams(ParamsSection):
    """Section `encoder:` of a data set. The frozen image and text encoder, and what the feature cache stores."""

    name: str  # a name that `duplex encoders` lists, hf-hub:OWNER/MODEL, or a file or folder
    weights: str | None = None  # published tag, or a file; random:SEED for untrained weights
    precision: Precision = "fp32"  # of the image tower
    block_inputs: Natural | None = None  # number of last blocks whose inputs are cached; null: extraction.block_inputs
    bits: Literal[8, 16] = 16  # bits per cached value of block inputs


class DatasetParams(ParamsSection):
    """Section `datasets.NAME:`. The images, encoder and training options of a data set."""

    source: SourceOptions  # where images and labels are read from
    encoder: EncoderParams
    features: Path | None = None  # .npy or .npz file of features that were computed elsewhere; null: images are encoded
    training: Annotated[
        TrainingOptions, PlainValidator(TrainingOptions.from_dict), PlainSerializer(TrainingOptions.to_dict)
    ]


class ExtractionParams(ParamsSection):
    """Section `extraction:`. How encoders compute features and what feature caches store."""

    batch_size: Count = 64  # images per batch
    num_workers: Workers = "auto"  # processes that decode images; auto: one per core, less one
    max_bad: Share = 0.01  # largest share of unreadable images; more is an error
    tokens: Literal["none", "patch"] = "none"  # patch: store patch tokens beside the CLS feature
    block_inputs: Natural = 0  # number of the image tower's last blocks whose inputs are cached, for fine-tuning


class EvaluationParams(ParamsSection):
    """Section `evaluation:`. How scores are measured on the test split."""

    worlds: tuple[World, ...] = Field(default=("closed", "open"), min_length=1)  # the choices of candidates
    protocol: Literal["exact", "sampled"] = "exact"  # sampled: the literature's 20 values of the bias
    k: tuple[Count, ...] = Field(default=(1,), min_length=1)  # an image is right if its pair is among the best k
    thresholds: Count = 50  # number of feasibility thresholds tried on validation data
    feasibility: Literal["auto", "words", "likelihood", "none"] = "auto"  # auto: a threshold only if AUC gains by it
    word_vectors: Path | None = None  # file in GloVe's format; null: embeddings of the encoder's text tower
    bootstrap: Count = 1000  # number of bootstrap resamples for confidence intervals
    terms: bool = True  # measure each score term alone too, in the closed world (protocol: exact)


class Params(ParamsSection):
    """All sections of params.yaml, the project's settings."""

    run: RunParams
    ablation_run: AblationRunParams
    device: Literal["auto", "cpu", "cuda"] = "auto"
    extraction: ExtractionParams
    evaluation: EvaluationParams
    datasets: dict[Name, DatasetParams]
    methods: dict[str, MethodEntry] = {}
    ablations: dict[str, MethodEntry] = {}

    def dataset(self, name: str) -> DatasetParams:
        """Return the entry of a data set under `datasets:`. Raises UsageError for an unknown name."""
        return self.datasets[require(name, self.datasets, "data set")]

    def block_inputs(self, dataset: str) -> int:
        """Return the number of last image tower blocks whose inputs a data set's cache stores, to fine-tune them."""
        count = self.dataset(dataset).encoder.block_inputs
        return self.extraction.block_inputs if count is None else count

    def entry(self, name: str) -> MethodEntry:
        """Return the entry of a method or an ablation. Raises UsageError for an unknown name."""
        return self._entries[require_method(name, self._entries)]

    def method_for_world(self, name: str, world: World) -> str:
        """Return the method whose results are shown as `name` in a world: itself, or a method with `shown_as: name`.

        Raises UsageError if no method is for this world.
        """
        if world in self.entry(name).worlds:
            return name
        for other, entry in self._entries.items():
            if entry.shown_as == name and world in entry.worlds:
                return other
        only = self.entry(name).world
        raise UsageError(f"method {name} is for the {only} world alone; change --world, or its `world` in params.yaml")

    def worlds(self, name: str) -> tuple[World, ...]:
        """Return the worlds (closed, open) in which a method is evaluated. Raises UsageError if there is none."""
        worlds = tuple(world for world in self.entry(name).worlds if world in self.evaluation.worlds)
        if not worlds:
            only = self.entry(name).world
            raise UsageError(
                f"params.yaml: evaluation.worlds is {list(self.evaluation.worlds)} and {name} is for the {only} world "
                f"alone; remove it from run.methods, or add {only} to evaluation.worlds"
            )
        return worlds

    def method(self, name: str, dataset: str | None = None) -> Options:
        """Return a method's options on a data set, checked by the options class of its kind."""
        entry = self.entry(name)
        with self._located(name):
            return registry.parse_options(entry.kind, entry.options_for(dataset))

    def training(self, dataset: str, name: str) -> TrainingOptions:
        """Return a method's training options on a data set: those of the data set, overridden by the method's."""
        base = self.dataset(dataset).training
        with self._located(name, ".training"):
            return TrainingOptions.from_dict({**base.to_dict(), **self.entry(name).training_for(dataset)})

    def finetune(self, name: str, dataset: str | None = None) -> FinetuneOptions | AutoFinetune | None:
        """Return a method's `finetune:` options, `AutoFinetune` if validation chooses them; None if it has none."""
        record = self.entry(name).finetune_for(dataset)
        with self._located(name, ".finetune"):
            return finetune_options(record)

    def check_entries(self) -> None:
        """Raise UsageError if an option of a method or ablation in params.yaml is not allowed, on any data set."""
        for name, entry in self._entries.items():
            for dataset in (None, *entry.per_dataset):
                self.method(name, dataset)
                self.finetune(name, dataset)
            for dataset in self.datasets:
                self.training(dataset, name)

    def check_run(self) -> None:
        """Check that names under `run:` exist, and that no name or value is given twice. Raises UsageError."""
        for key, names in (("run", self.run.datasets), ("ablation_run", self.ablation_run.datasets)):
            for name in names:
                require(name, self.datasets, f"data set in params.yaml, {key}.datasets:")
        for name in self.run.methods:
            require_method(name, self.methods, " in params.yaml, run.methods:")
        for section in ("run", "ablation_run", "evaluation"):
            for key, values in getattr(self, section):
                if isinstance(values, tuple) and len(set(values)) != len(values):
                    raise UsageError(f"params.yaml: {section}.{key} has a value twice: {list(values)}; remove one")
        self._check_products()
        self._check_stage_names()
        words = self.evaluation.word_vectors
        if words is not None and not words.is_file():
            raise UsageError(
                f"params.yaml: evaluation.word_vectors: {words} is not a file; null uses the encoder's text tower"
            )
        for name in sorted(set(self.datasets) & set(RESERVED)):
            raise UsageError(f"params.yaml: datasets.{name}: the name is reserved; choose another")
        for name in sorted(set(self.methods) & set(self.ablations)):
            raise UsageError(f"params.yaml: {name!r} is both a method and an ablation; rename one of them")
        self._check_shown_as()

    def _check_stage_names(self) -> None:
        """Check that no two runs have the same name in dvc.yaml, where data set and method are joined by a hyphen."""
        for methods in (self.run.methods, self.run.products):
            joined: dict[str, tuple[str, str]] = {}
            for dataset, method in product(self.run.datasets, methods):
                other = joined.setdefault(f"{dataset}-{method}", (dataset, method))
                if other != (dataset, method):
                    raise UsageError(
                        f"params.yaml: {method} on {dataset} and {other[1]} on {other[0]} have the same name in "
                        f"dvc.yaml, {dataset}-{method}; rename a method or a data set"
                    )

    def _check_products(self) -> None:
        """Check that methods that combine finished runs are in `run.products`, the runs' methods in `run.methods`."""
        for name, entry in self._entries.items():
            if entry.members and name in self.ablations:
                raise UsageError(f"params.yaml: ablations.{name}: an ablation cannot combine runs; move it to methods")
            for member in entry.members:
                place = f"params.yaml: methods.{name}.of:"
                if self.entry(require_method(member, self.methods, f" in {place}")).members:
                    raise UsageError(f"{place} {member} combines runs itself; list its methods instead")
        for name in self.run.products:
            members = self.entry(require_method(name, self.methods, " in params.yaml, run.products:")).members
            if not members:
                raise UsageError(f"params.yaml: run.products: {name} combines no runs; list it under run.methods")
            for member in members:
                if member not in self.run.methods:
                    raise UsageError(f"params.yaml: run.products: {name} combines {member}; add it to run.methods")
        for name in self.run.methods:
            if self.entry(name).members:
                raise UsageError(f"params.yaml: run.methods: {name} combines runs; list it under run.products")

    def _check_shown_as(self) -> None:
        """Check that each method is evaluated in some world, and that no two share a name in one world's tables."""
        names: dict[tuple[str, str], str] = {}
        for name in self.run.methods:
            self.worlds(name)
            entry = self.methods[name]
            for world in entry.worlds:
                other = names.setdefault((entry.shown_as or name, world), name)
                if other != name:
                    raise UsageError(
                        f"params.yaml: run.methods: {other} and {name} are both shown as {entry.shown_as or name} "
                        f"in the {world} world; change `world` or `shown_as` of one"
                    )

    @property
    def _entries(self) -> dict[str, MethodEntry]:
        return {**self.methods, **self.ablations}

    @contextmanager
    def _located(self, name: str, section: str = "") -> Iterator[None]:
        """Context manager: prefix option errors with their place, as in `params.yaml: methods.duplex.momentum: ...`."""
        try:
            yield
        except OptionError as error:
            place = f"{'methods' if name in self.methods else 'ablations'}.{name}{section}"
            raise UsageError(f"params.yaml: {place}{'.' if error.key else ': '}{error}") from None


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check params.yaml; options of methods are checked when they are used, or by `Params.check_entries`.

    Raises UsageError with one line that gives the key.
    """
    record = dict(check_table(str(path), read_yaml(path)))
    entries = {key: _read_entries(key, record.pop(key, None) or {}) for key in ("methods", "ablations")}
    try:
        params = Params.model_validate_json(json.dumps(record, default=str))
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_fault(error)}") from None
    try:
        checked = read_entries(entries["methods"], entries["ablations"], tuple(params.datasets))
    except UsageError as error:
        raise UsageError(f"params.yaml: {error}") from None
    params = params.model_copy(update=checked)
    params.check_run()
    methods = (*params.run.methods, *params.run.products)
    return params.model_copy(update={"run": params.run.model_copy(update={"methods": methods})})


def shipped_project() -> Path:
    """Return the folder of the files dvc.yaml and params.yaml that ship with the package."""
    for folder in (PACKAGE / "shipped", PACKAGE.parent):  # in a wheel (setup.py), in a clone
        if (folder / "dvc.yaml").is_file():
            return folder
    raise DuplexError("this installation of duplex has no dvc.yaml; install duplex from a wheel")


def require_method(name: str, known: Mapping[str, MethodEntry], where: str = "") -> str:
    """Return the method's `name` if it is among `known`; otherwise raise UsageError.

    where: text for the message after the word "method", such as " in params.yaml, run.methods:".
    """
    return require(name, known, f"method{where}")


def _read_entries(key: str, value: Any) -> Mapping[str, Any]:
    """Return the table `value` of `methods:` or `ablations:`; raise UsageError for a name that no folder can have."""
    table = check_table(f"params.yaml: {key}", value)
    for name in table:
        if not re.fullmatch(NAME, name):
            raise UsageError(f"params.yaml: {key} has the name {name!r}; use letters, digits, `_` and single hyphens")
    return table


def _first_fault(error: ValidationError) -> str:
    """Return a pydantic error's first fault in one line, such as `run.seeds: input should be … (it is 0)`."""
    unknown = ("extra_forbidden", "unexpected_keyword_argument", "unexpected_property")
    faults = error.errors(include_url=False)
    fault = next((each for each in faults if each["type"] in unknown), faults[0])
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in unknown:
        known = _known_keys(fault["loc"][:-1])
        return f"{place}: unknown key; known: {', '.join(known)}"
    if fault["type"].startswith("missing"):
        return f"{place}: missing"
    if fault["type"] == "value_error":  # raised by our own validators
        cause = fault["ctx"]["error"]
        return f"{place}{'.' if getattr(cause, 'key', None) else ': '}{cause}"
    return f"{place}: {fault['msg'][0].lower()}{fault['msg'][1:]} (it is {fault['input']!r})"


def _known_keys(place: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are allowed at a place of params.yaml, from the type annotations of its sections."""
    table: Any = Params
    for part in place:
        if hint := get_type_hints(table).get(str(part)):
            types = [hint, *get_args(hint)]
            table = next((kind for kind in types if is_dataclass(kind) or hasattr(kind, "model_fields")), table)
    return list(table.model_fields if hasattr(table, "model_fields") else table.__dataclass_fields__)
