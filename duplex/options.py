"""Options of methods, training, fine-tuning and data: frozen dataclasses that check their values.

Optimiser, learning rate and its schedule are in `TrainingOptions`; each method's own options are
in its module. pydantic checks each field; `describe_error` words its errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from dataclasses import field as option_field
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from duplex.errors import UsageError, require, shown
from duplex.system.plugins import installed_plugins
from duplex.system.threads import Precision

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
OptionsType = TypeVar("OptionsType", bound="Options")


@cache
def type_hints(cls: Any, include_extras: bool = False) -> dict[str, Any]:
    """The types of a class's fields, by name; with `Annotated` if `include_extras`."""
    return get_type_hints(cls, include_extras=include_extras)


def _has_words(template: str) -> str:
    if not template.strip():
        raise PydanticCustomError("template", "is empty; expected at least one word, such as 'a photo of'")
    return template


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


LARGEST = 1_000_000  # limit of counts such as images, epochs and units; larger ones could overflow

# Types of options
Count = Annotated[int, BeforeValidator(_as_int), Field(ge=1, le=LARGEST)]
Natural = Annotated[int, BeforeValidator(_as_int), Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # the range that every random generator takes
Rate = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, lt=10)]
Template = Annotated[str, AfterValidator(_has_words)]  # words before the names in a prompt


class OptionError(UsageError, ValueError):
    """Raised for a wrong option `key`, or for several that contradict each other (None)."""

    # a ValueError, so that pydantic adds the option's place in the file

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message if key is None else f"{key}: {message}")
        self.key = key
        self.message = message


def refuse(fault: object, message: str) -> tuple[bool, str]:
    """A rule, for `Options.rules`: `message` is shown if the options have this `fault`."""
    return not fault, message


@dataclass(frozen=True)
class Options:
    """Base class of options: a frozen dataclass that checks its fields, then `rules`."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, adapter in _adapters(cls).items():
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, list) else value
            group = _group(type_hints(cls)[name])
            try:
                is_table = group is not None and isinstance(value, Mapping)
                checked = group.from_dict(value) if is_table else adapter.validate_python(value)
            except OptionError as error:
                raise OptionError(error.message, ".".join(filter(None, (name, error.key)))) from None
            except ValidationError as error:
                raise OptionError(describe_error(error)[1], name) from None
            object.__setattr__(self, name, checked)
        for holds, message in self.rules():
            if not holds:
                raise OptionError(message)

    def rules(self) -> Iterable[tuple[object, str]]:
        """Yield each condition that the options must meet together, and the message if not met."""
        return ()

    @classmethod
    def describe_types(cls) -> dict[str, str]:
        """Option (`group.option` if nested) -> its allowed values, such as `learned | fixed`."""
        described: dict[str, str] = {}
        hints = type_hints(cls)  # type: ignore[arg-type]  # mypy looks at the hash of an instance
        for field in fields(cls):
            group = _group(hints[field.name])
            if group is None:
                described[field.name] = _describe(hints[field.name])
            else:
                types = group.describe_types()
                described |= {f"{field.name}.{key}": text for key, text in types.items()}
        return described

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for JSON and YAML; tuples become lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls: type[OptionsType], record: Mapping[str, Any]) -> OptionsType:
        """Make options from a record of a file; OptionError for unknown or missing keys."""
        known = {field.name: field for field in fields(cls)}
        if not isinstance(record, Mapping):
            raise OptionError(f"the options are {record!r}; expected a table of keys and values")
        for key in record:
            if key not in known:
                raise OptionError(f"unknown key; known: {', '.join(known) or 'none'}", str(key))
        for key, field in known.items():
            if key not in record and field.default is MISSING and field.default_factory is MISSING:
                raise OptionError("missing", key)
        return cls(**record)


def _group(hint: Any) -> Any:
    # the field's type if it is itself a class of options
    return hint if isinstance(hint, type) and issubclass(hint, Options) else None


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin is tuple:
        return f"list of {_describe(arguments[0])}"
    if arguments:
        return " | ".join(_describe(part) for part in arguments)
    words = {bool: "true | false", str: "text", type(None): "null"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


@cache
def _adapters(cls: Any) -> dict[str, TypeAdapter[Any]]:
    hints = type_hints(cls, include_extras=True)
    adapters = {}
    for field in fields(cls):
        hint = hints[field.name]
        adapters[field.name] = TypeAdapter(hint, config=None if is_dataclass(hint) else STRICT)
    return adapters


UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument", "unexpected_property")
NO_TABLE = ("dict_type", "model_type", "dataclass_type")


def describe_error(error: ValidationError, table: Any = None) -> tuple[str, str]:
    """Place, such as `run.seeds`, and message of one fault, if possible of an unknown key of `table`."""
    faults = error.errors(include_url=False)
    fault = next((each for each in faults if each["type"] in UNKNOWN_KEY), faults[0])
    path = [str(part) for part in fault["loc"] if part != "[key]"]
    cause = fault.get("ctx", {}).get("error")  # of our own validators
    if isinstance(cause, OptionError):
        return ".".join([*path, *([cause.key] if cause.key else [])]), cause.message
    message = f"{fault['msg'][0].lower()}{fault['msg'][1:]} (it is {shown(fault['input'])})"
    if fault["type"] in UNKNOWN_KEY:
        message = f"unknown key; known: {', '.join(_known_keys(table, path[:-1]))}"
    elif fault["type"].startswith("missing"):
        message = "missing"
    elif fault["type"] in NO_TABLE:
        message = f"expected a table of keys and values (it is {shown(fault['input'])})"
    elif cause is not None:
        message = str(cause)
    return ".".join(path), message


def _known_keys(table: Any, path: Iterable[str]) -> list[str]:
    for key in path:
        if hint := type_hints(table).get(key):
            kinds = [hint, *get_args(hint)]
            tables = (k for k in kinds if is_dataclass(k) or hasattr(k, "model_fields"))
            table = next(tables, table)
    return list(table.model_fields if hasattr(table, "model_fields") else table.__dataclass_fields__)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of training (`training:` in params.yaml): learning rates, batches, epochs."""

    learning_rate: LearningRate  # of the method's parameters
    batch_size: Count  # images per batch
    epochs: Count  # passes over the training images
    optimiser: Literal["adam", "adamw"] = "adam"
    weight_decay: Rate = 0.0  # of the optimiser
    eps: Positive = 1e-8  # added to the root of the mean squared gradient
    word_dropout: Rate = 0.0  # share of the elements of learned words that a step zeroes
    clip: Positive | None = None  # largest norm of all gradients together; null: no limit
    # of the learning rate, by epoch; cosine_steps: a cosine that falls with every step
    schedule: Literal["step", "cosine", "cosine_steps", "constant"] = "step"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5  # factor every `decay_every` epochs (step)
    decay_every: Count = 5  # epochs between two decays (schedule: step)
    select: Literal["auc", "hm", "unseen", "loss", "last"] = "auc"  # validation chooses the epoch
    select_world: Literal["closed", "open"] = "closed"  # open: with every pair as a candidate, which takes longer
    validate_every: Count = 1  # epochs between two validations; the last epoch is always validated
    patience: Count | None = None  # stop after epochs without a better validation; null: never
    accumulate: Count = 1  # batches per optimiser step; prompts are encoded once per step
    # of the text tower; bf16: of fine-tuned image blocks, too. Trained weights, norms, losses and scores are fp32
    precision: Precision = "fp32"
    # CPU threads; auto: one or all, by timing. The last bits of results depend on their number
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    memory: Annotated[float, Field(ge=2**-8)] = 2.0  # GiB of inputs; larger ones stay on disk
    checkpointing: bool = False  # recompute the text tower's activations: slower, less memory
    # run image blocks and prompts as code that torch compiles for their shapes, on a GPU with few launches
    compile: bool = False
    devices: Count = 1  # GPUs of this machine (processes on a CPU) that train a run together
    log: str = "none"  # of losses: dvclive, tensorboard, wandb, mlflow, a plug-in's, or none

    def rules(self) -> Iterable[tuple[object, str]]:
        unused = self.select == "last" and self.select_world == "open"
        yield refuse(unused, "select: last keeps the last epoch in any world; leave out select_world")
        several = f"compile works on one device, and devices is {self.devices}; set compile to false or devices to 1"
        yield refuse(self.compile and self.devices > 1, several)
        message = "checkpointing recomputes what compile has compiled together; leave out one of them"
        yield refuse(self.compile and self.checkpointing, message)

    def result_settings(self) -> dict[str, Any]:
        """The options that training results depend on: all except `log`."""
        return {key: value for key, value in self.to_dict().items() if key != "log"}

    def changed(self, changes: Mapping[str, Any]) -> TrainingOptions:
        """A copy with other values."""
        return TrainingOptions.from_dict({**self.to_dict(), **changes})


# Training options of a user's data set where neither params.yaml nor the caller sets them
DEFAULT_TRAINING: dict[str, Any] = {"learning_rate": 0.0001, "batch_size": 64, "epochs": 15}
Augmentation = Literal["crop", "flip", "perspective", "rotation"]
WITHOUT_DROPOUT = ("lora", "full", "concepts", "experts")  # adapters
DEFAULT_WIDTHS = {"bottleneck": 64, "parallel": 64, "lora": 8, "experts": 8}


@dataclass(frozen=True)
class FinetuneOptions(Options):
    """Options of `finetune:` in params.yaml: how many of the image tower's last blocks to train.

    `text` fine-tunes all blocks of the text tower as well. The feature cache must hold the
    activations that enter the image tower's blocks (`block_inputs`), or the images' `pixels`.
    """

    blocks: int | Literal["all"]  # number of the image tower's last blocks to fine-tune
    adapter: str = "bottleneck"  # or parallel, lora, full, concepts, experts, a plug-in's
    text: str | None = None  # adapter in the text tower's blocks; null: none
    width: Count | None = None  # units (null: 64; concepts: channels / 4), rank (null: 8)
    dropout: Rate = 0.1  # inside a bottleneck
    learning_rate: LearningRate | None = None  # of the fine-tuned blocks; null: that of training
    tokens: bool = False  # patch tokens come from the fine-tuned blocks too; false: from the cache
    augment: tuple[Augmentation, ...] = ()  # random changes of images; needs cached pixels

    def rules(self) -> Iterable[tuple[object, str]]:
        message = f"blocks is {self.blocks}; expected all, or 1 or more; "
        message += "to train no block, set finetune to {}"
        yield refuse(self.blocks != "all" and self.blocks < 1, message)
        for adapter in self.adapters:
            require(adapter, installed_plugins("duplex.adapters"), "adapter")
            has_width = self.width is not None
            message = f"adapter: {adapter} has no width; leave out width"
            yield refuse(adapter == "full" and has_width, message)
            has_dropout = self.dropout != type(self).dropout
            message = f"adapter: {adapter} has no dropout; leave out dropout"
            yield refuse(adapter in WITHOUT_DROPOUT and has_dropout, message)
        message = f"augment is {list(self.augment)}; name each augmentation once"
        yield refuse(len(set(self.augment)) < len(self.augment), message)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters in the image tower and, if `text` is set, in the text tower."""
        return (self.adapter,) if self.text is None else (self.adapter, self.text)

    @property
    def depth(self) -> int:
        """Number of fine-tuned blocks, to sort by; `all` counts as larger than any other."""
        return LARGEST if self.blocks == "all" else self.blocks

    @property
    def inner_width(self) -> int:
        """Number of hidden units in a bottleneck, or rank of a low-rank update."""
        return self.width or DEFAULT_WIDTHS.get(self.adapter, 64)


@dataclass(frozen=True)
class CombinedRunsOptions(Options):
    """Base class of options for methods that add the log probabilities of finished runs."""

    of: tuple[str, ...]  # methods whose runs are combined
    seeds: Literal["own", "all"] = "own"  # own: runs with this run's seed; all: of every seed
    # filled in by training
    members: tuple[dict[str, Any], ...] = option_field(default=(), metadata={"hidden": True})

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        named = list(self.of)
        yield refuse(len(set(named)) < len(named), f"`of` has a method twice: {named}; remove one")
        fewest = 1 if self.seeds == "all" else 2
        message = f"`of` is {named}; expected a list of {fewest} or more methods"
        yield refuse(len(named) < fewest, message)


@dataclass(frozen=True)
class AutoFinetune(Options):
    """Options of `finetune: auto`: validation chooses number of blocks and learning rate."""

    blocks: Literal["auto"] = "auto"
    adapter: ClassVar[str] = "full"
    minutes: float | None = None  # time per run to try both; null: however long it takes

    def rules(self) -> Iterable[tuple[object, str]]:
        message = f"minutes is {self.minutes}; expected more than 0"
        yield refuse(self.minutes is not None and self.minutes <= 0, message)


def finetune_options(record: Mapping[str, Any]) -> FinetuneOptions | AutoFinetune | None:
    """The checked options of a table `finetune:` of params.yaml; None for an empty table."""
    if not record:
        return None
    kind = AutoFinetune if record.get("blocks") == "auto" else FinetuneOptions
    return kind.from_dict(record)


CHECKED = ConfigDict(**STRICT, extra="forbid")  # of values in params.yaml
# drawn, the benchmarks' layout, a table, state/object/*.jpg
Kind = Literal["shapes", "standard", "table", "folder"]


@dataclass(frozen=True)
class SplitOptions(Options):
    """Shares of pairs, and of seen pairs' images, that a random split holds out."""

    seed: Seed = 0  # of the random choice
    val_unseen: Share = 0.15  # share of the pairs that are unseen, with images in validation only
    test_unseen: Share = 0.15  # share of the pairs that are unseen, with images in test only
    val_images: Share = 0.1  # share of each seen pair's images
    test_images: Share = 0.2  # share of each seen pair's images
    unseen_states: Rate = 0.0  # share of the states that have no training images
    unseen_objects: Rate = 0.0  # share of the objects that have no training images
    images_per_pair: Count | None = None  # most training images of a pair; null: all are used
    __pydantic_config__ = CHECKED

    def rules(self) -> Iterable[tuple[object, str]]:
        for kind in ("unseen", "images"):
            shares = [getattr(self, f"{split}_{kind}") for split in ("val", "test")]
            names = f"val_{kind} and test_{kind}"
            message = f"{names} are {shares}; expected numbers above 0 with a sum below 1"
            yield refuse(min(shares) <= 0 or sum(shares) >= 1, message)


@dataclass(frozen=True)
class SourceOptions(Options):
    """Where a data set comes from (folder, table, benchmark, drawn images), and its split."""

    kind: Kind
    root: Path  # folder that image paths are relative to
    table: Path | None = None  # for kind "table"
    seed: Seed = 7  # of the drawn images of kind "shapes"
    split: SplitOptions = option_field(default_factory=SplitOptions)  # for data without a split
    resplit: Count | None = None  # number of a new split (`duplex data split`); null: its own
    __pydantic_config__ = CHECKED

    @property
    def recorded_root(self) -> str | None:
        """The image folder that a feature cache records; None for `shapes`."""
        return None if self.kind == "shapes" else self.root.as_posix()
