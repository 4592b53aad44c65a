"""Options as frozen, checked records: the base of every method's row, and the optimiser's settings.

A record refuses a wrong value where it is made, in Python as from a file: `Options(context="lerned")` raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from duplex.errors import UsageError
from duplex.system.precision import Precision

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Kind = TypeVar("Kind", bound="Options")


class OptionError(UsageError, ValueError):
    """An option that cannot be. `key` is its name where one option alone is at fault. As a ValueError it reaches
    whoever parses a file, with the record's place there."""

    def __init__(self, sentence: str, key: str | None = None) -> None:
        super().__init__(sentence if key is None else f"{key}: {sentence}")
        self.key, self.sentence = key, sentence


@dataclass(frozen=True)
class Options:
    """A record whose fields are checked against their annotations, then against `rules`."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, adapter in _adapters(kind).items():
            given = getattr(self, name)
            value = tuple(given) if isinstance(given, list) else given
            try:
                object.__setattr__(self, name, adapter.validate_python(value))
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                said = f"{fault['msg'][0].lower()}{fault['msg'][1:]} (it is {fault['input']!r})"
                raise OptionError(said, name) from None
        for holds, sentence in self.rules():
            if not holds:
                raise OptionError(sentence)

    def rules(self) -> Iterable[tuple[object, str]]:
        """What must hold between options, and the sentence where it does not."""
        return ()

    @classmethod
    def spoken_types(cls) -> dict[str, str]:
        """Option -> what it takes, as a person writes it: `learned | fixed`."""
        hints = get_type_hints(cls)
        return {field.name: _spoken(hints[field.name]) for field in fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls: type[Kind], record: Mapping[str, Any]) -> Kind:
        """From a table of a file; unknown and missing keys are named."""
        known = {field.name: field for field in fields(cls)}
        for key in record:
            if key not in known:
                raise OptionError(f"unknown key; known: {', '.join(known) or 'none'}", str(key))
        for key, field in known.items():
            if key not in record and field.default is MISSING and field.default_factory is MISSING:
                raise OptionError("missing", key)
        return cls(**record)


def _spoken(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(str(value) for value in inside)
    if origin is tuple:
        return f"list of {_spoken(inside[0])}"
    if inside:
        return " | ".join(_spoken(part) for part in inside)
    return {bool: "true | false", str: "text", type(None): "null"}.get(hint, getattr(hint, "__name__", str(hint)))


@cache
def _adapters(kind: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind)
    return {field.name: TypeAdapter(hints[field.name], config=STRICT) for field in fields(kind)}


@dataclass(frozen=True)
class TrainingOptions(Options):
    """The optimiser's settings. The paper's Tab. 2 gives rate, batch and epochs for the benchmarks: Adam, the rate
    halved every five epochs."""

    learning_rate: float
    batch_size: int
    epochs: int
    optimiser: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    schedule: Literal["step", "cosine", "constant"] = "step"
    decay: float = 0.5  # of `schedule: step`
    decay_every: int = 5  # epochs
    warm_up: int = 0  # epochs over which the rate rises to its value
    patience: int | None = None  # stop after so many epochs without a better validation AUC
    accumulate: int = 1  # batches an optimiser step; text is encoded once for all of them
    precision: Precision = "fp32"  # of the text tower; logits are fp32 always
    threads: int | Literal["auto"] = "auto"  # of the CPU, in evaluation too; auto: all cores. They decide the last bits
    memory: float = (
        2.0  # GiB of tokens that are held; more stay on the disk and are read ahead, in an order of their own
    )
    checkpointing: bool = False  # recompute the text tower's activations in the backward pass: less memory, more time

    def rules(self) -> Iterable[tuple[object, str]]:
        for key in ("batch_size", "epochs", "decay_every", "accumulate"):
            yield getattr(self, key) >= 1, f"{key} is {getattr(self, key)}; it is at least 1"
        yield (
            self.threads == "auto" or 1 <= self.threads <= 1024,
            f"threads is {self.threads}; it is at least 1, or auto",
        )
        block = 2**-8  # of tokens, which are read so many GiB at once
        yield self.memory >= block, f"memory is {self.memory}; it is at least {block}, one block of tokens (GiB)"
        yield self.patience is None or self.patience >= 1, f"patience is {self.patience}; it is at least 1, or null"
        yield 0 < self.learning_rate < 10, f"learning_rate is {self.learning_rate}; it lies between 0 and 10"
        yield 0 < self.decay <= 1, f"decay is {self.decay}; it lies in (0, 1]"
        yield 0 <= self.weight_decay < 1, f"weight_decay is {self.weight_decay}; it lies in [0, 1)"
        yield 0 <= self.warm_up < self.epochs, f"warm_up is {self.warm_up}; it is at least 0 and below epochs"


WIDTHS = {"tail": 64, "lora": 8}


@dataclass(frozen=True)
class TailOptions(Options):
    """What is trained in the image tower's last blocks, over a cache that holds what enters them."""

    depth: int  # blocks
    adapter: Literal["tail", "lora", "trained"] = "tail"  # bottlenecks, low-rank updates, or the blocks themselves
    width: int | None = None  # hidden units of a bottleneck (null: 64), rank of an update (null: 8)
    dropout: float = 0.1  # inside a bottleneck
    learning_rate: float | None = None  # of the tail; null: that of training

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.depth >= 1, f"depth is {self.depth}; it is at least 1, or leave the tail out"
        yield self.width is None or self.width >= 1, f"width is {self.width}; it is at least 1, or null"
        yield self.width is None or self.adapter in WIDTHS, f"adapter: {self.adapter} has no width; leave it out"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        alone = self.adapter == "tail" or self.dropout == type(self).dropout
        yield alone, f"adapter: {self.adapter} has no dropout; leave it out"
        rate = self.learning_rate
        yield rate is None or 0 < rate < 10, f"learning_rate is {rate}; it lies between 0 and 10, or null"

    @property
    def inner(self) -> int:
        """Hidden units, or rank."""
        return self.width or WIDTHS[self.adapter]
