"""Read params.yaml and datasets/NAME.yaml as frozen, typed objects; comments in params.yaml explain the keys.

A data set is an entry under `datasets:`, a file datasets/NAME.yaml, which has priority, or both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from duplex.artifacts import RESERVED
from duplex.config.entries import DEFAULT_KIND, Table, auto_as_table, changed_table, completed_entries
from duplex.encoders.base import joined_name, joined_parts
from duplex.errors import DuplexError, UsageError, require, shown
from duplex.labels import WORLDS, World
from duplex.methods import registry
from duplex.options import (
    STRICT,
    AutoFinetune,
    Count,
    FinetuneOptions,
    Natural,
    OptionError,
    Options,
    Seed,
    Share,
    SourceOptions,
    TrainingOptions,
    describe_error,
    finetune_options,
)
from duplex.system.threads import Precision

PACKAGE = Path(__file__).parents[1]
PARAMS_FILE = Path("params.yaml")
DATASETS = "datasets"  # the folder beside params.yaml with one file per data set of the user
MAX_WORKERS = 1024


def is_name(text: str) -> bool:
    """Whether `text` may name a data set or a method, in paths and DVC's stage names."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*", text) is not None


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"{value!r} is not a valid name; use letters, digits, `_` and single hyphens")
    return value


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WORKERS:
        return value
    raise ValueError(f"must be auto or a number of processes from 0 to {MAX_WORKERS} (it is {value!r})")


Name = Annotated[str, AfterValidator(_name)]
Workers = Annotated[int | Literal["auto"], PlainValidator(_workers)]


class ParamsSection(BaseModel):
    """Base class of params.yaml's sections: frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(**STRICT, extra="forbid", frozen=True)


class RunParams(ParamsSection):
    """Section `run:`. `dvc repro` runs every combination of data sets, methods and seeds."""

    datasets: tuple[Name, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)
    methods: tuple[Name, ...] = Field(min_length=1)  # entries of `methods:`; once read, followed by `products`
    products: tuple[Name, ...] = ()  # methods that combine finished runs of `methods`
    recipes: Literal["ours", "published"] = "ours"  # published: entries of recipes.yaml replace those of their names
    published_only: bool = False  # refuse recipes on data sets that the methods' authors did not run


class EncoderParams(ParamsSection):
    """Section `encoder:` of a data set. The frozen encoder, and what feature caches store."""

    name: str  # a name that `duplex encoders` lists, hf-hub:OWNER/MODEL, or a file or folder
    weights: str | None = None  # published tag, or a file; random:SEED for untrained weights
    precision: Precision = "fp32"  # of the image tower
    resize: Literal["crop", "squash", "pad"] | None = None  # how images become square; null: as the weights' own
    block_inputs: Natural | None = None  # number of last blocks whose inputs are cached; null: extraction.block_inputs
    pixels: bool | None = None  # cache the images' pixels, to fine-tune any number of blocks; null: extraction.pixels


def _joined(value: object) -> object:
    """A list of encoders as one entry, whose name joins theirs; other values as they are."""
    if not isinstance(value, list | tuple):
        return value
    entries = [EncoderParams.model_validate(each) for each in value]
    if len(entries) < 2:
        raise ValueError(f"a list of encoders needs two or more (it has {len(entries)}); list another, or give a table")
    shared = {"precision", "resize", "block_inputs", "pixels"}
    if any(each.model_dump(include=shared) != entries[0].model_dump(include=shared) for each in entries):
        raise ValueError(f"listed encoders must not differ in {', '.join(sorted(shared))}; give equal values")
    name = joined_name([(each.name, each.weights) for each in entries])
    return {**entries[0].model_dump(), "name": name, "weights": None, "block_inputs": 0, "pixels": False}


class MethodChanges(ParamsSection):
    """Changes to a method for one data set: options of its kind, `encoder`, `training`, `finetune`."""

    model_config = ConfigDict(extra="allow")
    encoder: str | None = None  # name of the one to read of a data set that lists several encoders; null: all
    training: dict[str, Any] = {}  # overrides training options of the data set
    finetune: Annotated[dict[str, Any], BeforeValidator(auto_as_table)] = {}  # of fine-tuned blocks; empty: none

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _check_keys(self) -> MethodChanges:
        for key in ("kind", "extends", "world", "shown_as", "per_dataset", "of"):
            if key in self.options:
                raise OptionError("cannot differ by data set; set it for the whole method, or add a second method", key)
        return self


class MethodEntry(MethodChanges):
    """One entry under `methods:`, with the settings of the entries that `extends` and `recipe` name."""

    kind: str = DEFAULT_KIND  # a name that `duplex methods` lists, or module:Class
    world: Literal["closed", "open", "both"] = "both"  # both: one model, trained for the closed world, scored in each
    shown_as: str | None = None  # method under whose name tables list this one, for its world; null: its own name
    per_dataset: dict[str, MethodChanges] = {}  # data set -> options, `training` and `finetune`

    @property
    def members(self) -> tuple[str, ...]:
        """The methods whose runs this one combines (its option `of`); empty for most."""
        return tuple(self.options.get("of", ()))

    @property
    def worlds(self) -> tuple[World, ...]:
        return WORLDS if self.world == "both" else (self.world,)

    @property
    def trained_for(self) -> World:
        return "open" if self.world == "open" else "closed"

    def options_for(self, dataset: str | None) -> dict[str, Any]:
        """The method's options on a data set, as written in the files, not yet checked."""
        return {**self.options, **self._changes(dataset).options}

    def kinds_for(self, dataset: str | None) -> list[str]:
        """The method's kind and, with an option `base`, that of the method it builds on."""
        base = self.options_for(dataset).get("base")
        return [self.kind, base["kind"]] if isinstance(base, dict) and "kind" in base else [self.kind]

    def encoder_for(self, dataset: str | None) -> str | None:
        """Name of the one encoder that the method reads on a data set with several; None: all."""
        return self._changes(dataset).encoder or self.encoder

    def training_for(self, dataset: str | None) -> dict[str, Any]:
        """Training options that the method sets, which override the data set's."""
        return {**self.training, **self._changes(dataset).training}

    def finetune_for(self, dataset: str | None) -> dict[str, Any]:
        """The method's `finetune:` options on a data set, as written, not yet checked."""
        changes = self._changes(dataset)
        is_off = "finetune" in changes.model_fields_set and not changes.finetune
        changed: dict[str, Any] = {} if is_off else changed_table(self.finetune, changes.finetune)
        return changed

    def _changes(self, dataset: str | None) -> MethodChanges:
        return self.per_dataset.get(dataset or "", MethodChanges())

    @model_validator(mode="after")
    def _check_keys(self) -> MethodEntry:
        of = self.options.get("of", [])
        if not isinstance(of, list | tuple) or not all(isinstance(name, str) for name in of):
            raise OptionError(f"expected a list of methods (it is {of!r})", "of")
        return self


class DatasetParams(ParamsSection):
    """Section `datasets.NAME:`, or datasets/NAME.yaml. Images, encoder and options."""

    source: SourceOptions  # where images and labels are read from
    encoder: Annotated[EncoderParams, BeforeValidator(_joined)]  # or a list of encoders, whose features are joined
    features: Path | None = None  # .npy or .npz file of features that were computed elsewhere; null: images are encoded
    training: Annotated[
        TrainingOptions, PlainValidator(TrainingOptions.from_dict), PlainSerializer(TrainingOptions.to_dict)
    ]
    methods: dict[Name, MethodChanges] = {}  # method -> its options, `training` and `finetune` on this data set


class ExtractionParams(ParamsSection):
    """Section `extraction:`. How encoders compute features and what feature caches store."""

    batch_size: Count = 64  # images per batch
    num_workers: Workers = "auto"  # processes that decode images; auto: one per core, less one
    max_bad: Share = 0.01  # largest share of unreadable images; more is an error
    tokens: Literal["none", "patch"] = "none"  # patch: store patch tokens beside the CLS feature
    block_inputs: Natural = 0  # number of the image tower's last blocks whose inputs are cached, for fine-tuning
    pixels: bool = False  # cache the images' pixels after resize and crop, to fine-tune any number of blocks


class StreamParams(ParamsSection):
    """Section `evaluation.stream:`. How runs adapt to unlabelled test images."""

    adapter: str = "tomcat"  # name of an entry point in the group `duplex.stream_adapters`
    orders: Count = 5  # random orders of the images, for mean and spread
    seed: Seed = 0  # of the orders
    batch: Count = 1  # images between two steps of the adapter
    options: dict[str, Any] = {}  # of the adapter; validation chooses among listed values, and sets options left out


class EvaluationParams(ParamsSection):
    """Section `evaluation:`. How scores are measured on the test split."""

    worlds: tuple[World, ...] = Field(default=("closed", "open"), min_length=1)  # the choices of candidates
    k: tuple[Count, ...] = Field(default=(1,), min_length=1)  # an image is right if its pair is among the best k
    thresholds: Count = 50  # number of feasibility thresholds tried on validation data
    feasibility: Literal["auto", "words", "none"] = "auto"  # auto: a threshold only if AUC gains by it
    word_vectors: Path | None = None  # file in GloVe's format; null: embeddings of the encoder's text tower
    bootstrap: Count = 1000  # number of bootstrap resamples for confidence intervals
    terms: bool = True  # measure each score term alone too, in the closed world
    stream: StreamParams | None = None  # also adapt each run to the unlabelled test images


class ReportParams(ParamsSection):
    """Section `report:`. Names the method whose run is shown in examples, swaps and maps."""

    featured: Name | None = None  # null: the last of run.methods with visual prototypes


class Params(ParamsSection):
    """All settings of a project: the sections of params.yaml, and the files of data sets."""

    run: RunParams
    device: Literal["auto", "cpu", "cuda"] = "auto"
    extraction: ExtractionParams
    evaluation: EvaluationParams
    report: ReportParams = ReportParams()
    datasets: dict[Name, DatasetParams] = {}
    methods: dict[Name, MethodEntry] = {}

    def dataset(self, name: str) -> DatasetParams:
        """The settings of a data set; raises UsageError for an unknown name."""
        return self.datasets[require(name, self.datasets, "data set")]

    def block_inputs(self, dataset: str) -> int:
        """Number of last blocks whose inputs a data set's cache stores, for fine-tuning."""
        count = self.dataset(dataset).encoder.block_inputs
        return self.extraction.block_inputs if count is None else count

    def pixels(self, dataset: str) -> bool:
        """Whether a data set's cache stores pixels, to fine-tune any number of blocks."""
        wanted = self.dataset(dataset).encoder.pixels
        return self.extraction.pixels if wanted is None else wanted

    def entry(self, name: str) -> MethodEntry:
        """The settings of a method; raises UsageError for an unknown name."""
        return self.methods[require(name, self.methods, "method")]

    def method_for_world(self, name: str, world: World) -> str:
        """The method that tables of a world list as `name`; UsageError if there is none."""
        if world in self.entry(name).worlds:
            return name
        for other in (*self.run.methods, *self.methods):  # first those that the tables show
            if self.methods[other].shown_as == name and world in self.methods[other].worlds:
                return other
        only = self.entry(name).world
        raise UsageError(f"{name} is only for the {only} world; use --world {only}, or edit its `world` in params.yaml")

    def worlds(self, name: str) -> tuple[World, ...]:
        """The worlds in which a method is evaluated; raises UsageError if there is none."""
        worlds = tuple(world for world in self.entry(name).worlds if world in self.evaluation.worlds)
        if not worlds:
            only = self.entry(name).world
            raise UsageError(
                f"params.yaml: evaluation.worlds is {list(self.evaluation.worlds)}, but {name} is for the {only} world "
                f"alone; remove {name} from run.methods, or add {only} to evaluation.worlds"
            )
        return worlds

    def method(self, name: str, dataset: str | None = None) -> Options:
        """A method's options on a data set, checked by the options class of its kind."""
        entry = self.entry(name)
        with self._located(name, dataset):
            return registry.parse_options(entry.kind, entry.options_for(dataset))

    def training(self, dataset: str, name: str) -> TrainingOptions:
        """Training options on a data set: the data set's, overridden by the method's own."""
        base = self.dataset(dataset).training
        with self._located(name, dataset, ".training"):
            return base.changed(self.entry(name).training_for(dataset))

    def finetune(self, name: str, dataset: str | None = None) -> FinetuneOptions | AutoFinetune | None:
        """`finetune:` options; `AutoFinetune` if validation chooses; None without blocks."""
        record = self.entry(name).finetune_for(dataset)
        with self._located(name, dataset, ".finetune"):
            return finetune_options(record)

    def encoder_of(self, name: str, dataset: str) -> str | None:
        """The one encoder that a method reads of several; UsageError if the data set does not list it."""
        chosen = self.entry(name).encoder_for(dataset)
        if chosen is not None:
            listed = [part for part, _ in joined_parts(self.dataset(dataset).encoder.name)]
            require(chosen, listed, f"encoder of {dataset} in params.yaml, methods.{name}.encoder:")
        return chosen

    def check_entries(self) -> None:
        """Raise UsageError if any method has an invalid option, on any data set."""
        for name, entry in self.methods.items():
            for dataset in (None, *entry.per_dataset):
                self.method(name, dataset)
                self.finetune(name, dataset)
            for dataset in self.datasets:
                self.training(dataset, name)

    def check_run(self) -> None:
        """Raise UsageError if settings do not fit together."""
        for name in self.run.datasets:
            require(name, self.datasets, "data set in params.yaml, run.datasets:")
        for name in self.run.methods:
            if self.run.recipes == "published" and name not in self.methods:
                remedy = f"correct the name, or add an entry {name} to `methods:` in params.yaml"
                known = ", ".join(published_recipes())
                raise UsageError(f"unknown published recipe {name!r}; known: {known}; {remedy}")
            require(name, self.methods, "method in params.yaml, run.methods:")
        if self.report.featured is not None:
            require(self.report.featured, self.methods, "method in params.yaml, report.featured:")
        for section in ("run", "evaluation"):
            for key, values in getattr(self, section):
                if isinstance(values, tuple) and len(set(values)) != len(values):
                    repeated = max(values, key=values.count)
                    raise UsageError(f"params.yaml: {section}.{key} lists {repeated} twice; remove one of them")
        self._check_options_by_dataset()
        if self.run.recipes == "published":
            self._check_recipes()
        self._check_products()
        words = self.evaluation.word_vectors
        if words is not None and not words.is_file():
            raise UsageError(
                f"params.yaml: evaluation.word_vectors: there is no file {words}; "
                "correct the path, or set null to use the encoder's text tower instead"
            )
        for name in sorted(set(self.datasets) & set(RESERVED)):
            raise UsageError(f"params.yaml: datasets.{name}: the name is reserved; choose another")
        self._check_shown_as()

    def _check_options_by_dataset(self) -> None:
        for name, entry in self.methods.items():
            for dataset in entry.per_dataset:
                require(dataset, self.datasets, f"data set in params.yaml, {name}.per_dataset:")
        for dataset, options in self.datasets.items():
            for name in options.methods:
                require(name, self.methods, f"method in {DATASETS}/{dataset}.yaml, methods:")

    def not_run_by_authors(self, dataset: str) -> dict[str, list[str]]:
        """Methods with a recipe whose authors did not run `dataset` -> the data sets that they ran."""
        if self.run.recipes != "published":
            return {}
        recipes = published_recipes()
        ran = {name: list(recipes[name]["per_dataset"]) for name in self.run.methods if name in recipes}
        return {name: datasets for name, datasets in ran.items() if dataset not in datasets}

    def authors_note(self, dataset: str) -> str:
        """What a plan says of recipes whose authors did not run `dataset`; empty if there is none."""
        ran = [f"{name} ({', '.join(datasets)})" for name, datasets in self.not_run_by_authors(dataset).items()]
        if not ran:
            return ""
        return f"did not run {dataset}: {'; '.join(ran)}; settings by data set are those of {dataset} in params.yaml"

    def own_settings_note(self) -> str:
        """What a plan by published recipes says of methods without one; empty if there is none."""
        if self.run.recipes != "published":
            return ""
        others = [name for name in self.run.methods if name not in published_recipes()]
        names = [name for name in others if not self.methods[name].members]
        return f"no published recipe, so with their own settings of params.yaml: {', '.join(names)}" if names else ""

    def _check_recipes(self) -> None:
        for dataset, name in product(self.run.datasets, self.run.methods):
            ran = self.not_run_by_authors(dataset).get(name)
            if ran and self.run.published_only:
                raise UsageError(
                    f"{name} has no published settings for {dataset}; choose from {', '.join(ran)}, "
                    "or leave out run.published_only"
                )
            entry = self.methods[name]
            values = {**entry.options_for(dataset), **entry.training_for(dataset), **entry.finetune_for(dataset)}
            undecided = [key for key, value in values.items() if value == "?"]
            if undecided:
                keys = " or ".join(undecided)
                raise UsageError(
                    f"{name} has no published {keys} for {dataset}; "
                    f"set your own under methods.{name}.training in {DATASETS}/{dataset}.yaml"
                )

    def _check_products(self) -> None:
        for name, entry in self.methods.items():
            if entry.members and "members" in entry.options:
                raise UsageError(f"params.yaml: methods.{name}.members: training sets this option; remove it")
            for member in entry.members:
                place = f"params.yaml: methods.{name}.of:"
                if self.entry(require(member, self.methods, f"method in {place}")).members:
                    raise UsageError(f"{place} {member} is itself a product; list the methods that it combines")
        for name in self.run.products:
            members = self.entry(require(name, self.methods, "method in params.yaml, run.products:")).members
            if not members:
                raise UsageError(f"params.yaml: run.products: {name} is not of kind product; move it to run.methods")
            for member in members:
                if member not in self.run.methods:
                    raise UsageError(f"params.yaml: run.products: {name} needs {member}; add {member} to run.methods")
        for name in self.run.methods:
            if self.entry(name).members:
                raise UsageError(f"params.yaml: run.methods: {name} combines runs; list it under run.products")

    def _check_shown_as(self) -> None:
        names: dict[tuple[str, str], str] = {}
        for name in self.run.methods:
            self.worlds(name)
            entry = self.methods[name]
            for world in entry.worlds:
                other = names.setdefault((entry.shown_as or name, world), name)
                if other != name:
                    raise UsageError(
                        f"params.yaml: run.methods: {other} and {name} are both shown as {entry.shown_as or name} "
                        f"in the {world} world; change `world` or `shown_as` of one of them"
                    )

    @contextmanager
    def _located(self, name: str, dataset: str | None, section: str = "") -> Iterator[None]:
        try:
            yield
        except OptionError as error:
            place = f"params.yaml: methods.{name}{section}"
            if dataset in self.datasets and name in self.datasets[dataset].methods:
                place = f"{DATASETS}/{dataset}.yaml: methods.{name}{section}"
            raise UsageError(f"{place}{'.' if error.key else ': '}{error}") from None


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and check params.yaml and datasets/NAME.yaml; methods' options come later."""
    return parse_params(read_yaml(path), dataset_files(path), path)


@lru_cache
def published_recipes() -> dict[str, Any]:
    """Published method -> its published settings on each benchmark, from recipes.yaml."""
    return dict(read_yaml(PACKAGE / "config" / "recipes.yaml")["recipes"])


def dataset_files(path: Path) -> dict[str, dict[str, Any]]:
    """Read the files datasets/NAME.yaml beside params.yaml; returns their content by name."""
    return {file.stem: read_yaml(file) for file in sorted((path.parent / DATASETS).glob("*.yaml"))}


def parse_params(record: Table, files: Mapping[str, Table], path: Path) -> Params:
    """Check params.yaml (`record`, read from `path`) and datasets/NAME.yaml (`files`)."""
    datasets = _tables(path, record, "datasets")
    for name, table in files.items():
        datasets[name] = {**datasets.get(name, {}), **table}
    published = published_recipes()
    methods = completed_entries(_tables(path, record, "methods"), datasets, published)
    run = record.get("run")
    if isinstance(run, dict) and run.get("recipes") == "published" and isinstance(run.get("methods"), list):
        recipes = {}
        for name, recipe in published.items():
            if name in run["methods"]:
                known = {key: table for key, table in recipe["per_dataset"].items() if key in datasets}
                recipes[name] = {**recipe, "per_dataset": known}
        # after `extends`, so that an entry that extends one of these names has its settings from params.yaml
        methods |= completed_entries(recipes, datasets, published)
    try:
        params = Params.model_validate_json(json.dumps({**record, "datasets": datasets, "methods": methods}))
    except ValidationError as error:
        place, message = describe_error(error, Params)
        section, _, key = place.partition(".")
        name, _, key = key.partition(".")
        if section == "datasets" and key.partition(".")[0] in files.get(name, {}):
            path = path.parent / DATASETS / f"{name}.yaml"
            place = key
        raise UsageError(f"{path}: {place}: {message}") from None
    params.check_run()
    names = (*params.run.methods, *params.run.products)
    return params.model_copy(update={"run": params.run.model_copy(update={"methods": names})})


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 file as JSON-compatible data; UsageError if it is no table."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        content = json.loads(json.dumps(content, default=str, ensure_ascii=False).encode())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist here; run the command in the project's folder") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; make it a file that you may read") from error
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = re.sub(r"\n {4}.*\n *\^.*", "", str(error)).replace('in "<unicode string>",', "at")
        reason = " ".join(reason.split()).rstrip(":")
        raise UsageError(f"{path} cannot be read as YAML: {reason}; correct the file") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds {shown(content)}"
        raise UsageError(f"{path} {found}; expected a table of keys and values")
    return content


def _tables(path: Path, record: Table, section: str) -> dict[str, Any]:
    tables = record.get(section) or {}
    if not isinstance(tables, dict):
        raise UsageError(f"{path}: {section} is {shown(tables)}; expected a table of keys and values")
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise UsageError(f"{path}: {section}.{name} is {shown(value)}; expected a table of keys and values")
    return dict(tables)


def shipped_project() -> Path:
    """Folder that holds the dvc.yaml and params.yaml shipped with the package."""
    for folder in (PACKAGE / "shipped", PACKAGE.parent):  # in a wheel (setup.py), in a clone
        if (folder / "dvc.yaml").is_file():
            return folder
    raise DuplexError("this installation of duplex lacks its own dvc.yaml; reinstall duplex from a wheel")
