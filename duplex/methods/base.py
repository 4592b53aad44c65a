"""The protocol of a method: everything that training, checkpoints, evaluation and the report call.

A method is a module of this package or of any other distribution (docs/your_method.md). It is built from a
`TaskContext` and its `Options`, computes losses of batches of cached inputs, and afterwards scores images:

    method = make_method("duplex", Options(), task)         # random parameters are drawn here
    method.start(train)                                     # state computed from the training images
    for epoch in ...:
        for step in ...:
            shared = method.shared()                        # once per step, whatever the number of batches
            for batch in ...:
                losses = method.losses(batch, shared)       # {name: term}; the loop sums them and calls backward
                method.after_batch()
            method.after_step()
        method.on_features_changed(train)
        method.after_epoch(epoch)
    scores = method.scorer(candidates)(inputs)              # [B, C]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from duplex.encoders.text_tower import TextTower
from duplex.errors import DuplexError, UsageError
from duplex.labels import Ints, LabelSpace, World
from duplex.layers.composition_index import copy_to_device
from duplex.layers.factors import unit
from duplex.layers.finetuned_blocks import FinetunedBlocks
from duplex.layers.gaussian_prototypes import FittedStatistics
from duplex.layers.paths import Paths
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes
from duplex.options import FinetuneOptions, Options

Inputs = Mapping[str, Tensor]  # {"cls": [B, d], "patch": [B, T, w]}: the inputs that the method needs


@dataclass(frozen=True)
class Inspectable:
    """Functions that return a method's features, factors and prototypes, without gradients; None for missing ones."""

    features: Callable[[Inputs], Tensor] | None = None  # unit features z^c [B, d], compared with prototypes
    semantic: Callable[[Ints], Tensor] | None = None  # compositions [C] -> semantic prototypes t^c [C, d]
    visual: Callable[[Ints], Tensor] | None = None  # compositions [C] -> visual prototypes h [C, d]
    factors: Callable[[Inputs], tuple[Tensor, Tensor]] | None = None  # state and object factors z^s, z^o
    fuse: Callable[[Tensor, Tensor], Tensor] | None = None  # (z^s, z^o) -> counterfactual features
    text_space_features: Callable[[Inputs], Tensor] | None = None  # compared with t^c, if not `features`

    def __post_init__(self) -> None:
        for name in self.present_fields:
            object.__setattr__(self, name, torch.no_grad()(getattr(self, name)))

    @property
    def present_fields(self) -> tuple[str, ...]:
        """Names of the fields that are not None."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


def inspect_paths(paths: Paths) -> Inspectable:
    """Return the `Inspectable` of a prompt method: its features, semantic prototypes and, with three paths, factors."""

    factors = paths.factors
    return Inspectable(
        features=lambda inputs: paths.adapt(inputs["cls"]),
        semantic=paths.semantic,
        factors=None if factors is None else lambda inputs: factors(paths.adapt(inputs["cls"])),
    )


__all__ = ["Batch", "Inputs", "Inspectable", "Method", "PrimitiveVectors", "Scorer", "TaskContext"]

Scorer = Callable[[Inputs], Tensor]  # inputs of B images -> float32 scores [B, C]
ScoreBlocks = Callable[[Inputs], Iterator[tuple[int, Tensor]]]  # inputs -> (first candidate, scores [B, w]) per block
ScoreTerms = Callable[[Inputs], Iterator[tuple[str, Tensor]]]  # inputs -> (name, summand of the scores [B, C])
OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True)
class PrimitiveVectors:
    """Word vectors of all states and objects, from a GloVe-format file or the encoder's text tower."""

    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]


@dataclass(frozen=True)
class TaskContext:
    """The data set and encoder that a method is built for."""

    labels: LabelSpace
    inputs: Mapping[str, tuple[int, ...]]  # shape of one image's inputs: {"cls": (d,), "patch": (T, w)}
    text: TextTower | None = None  # the encoder's frozen text tower
    words: PrimitiveVectors | None = None  # word vectors of states and objects
    world: World = "closed"  # whose candidates training uses; "open": all compositions
    finetuned_blocks: Callable[[], FinetunedBlocks] | None = None  # builds the blocks to fine-tune, if any
    members: tuple[Method[Any], ...] = ()  # trained methods, for a kind that combines finished runs
    member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None  # builds a member's blocks to fine-tune

    def __post_init__(self) -> None:
        """Raise UsageError for labels, shapes or word vectors of a wrong form."""
        if not isinstance(self.labels, LabelSpace):
            raise UsageError(f"labels is {self.labels!r:.80}; expected a LabelSpace")
        for name, shape in self.inputs.items():
            if not (isinstance(shape, tuple) and shape and all(isinstance(n, Integral) and n > 0 for n in shape)):
                raise UsageError(f"inputs[{name!r}] is {shape!r}; expected the shape of one image's input, as (768,)")
        if self.words is not None:
            rows = [len(self.words.states), len(self.words.objects)]
            expected = [len(self.labels.states), len(self.labels.objects)]
            if rows != expected:
                raise UsageError(f"words has vectors of {rows} states and objects; expected {expected}, as labels has")

    @property
    def dim(self) -> int:
        """Width `d` of the CLS features."""
        return self.inputs["cls"][0]

    @property
    def tower(self) -> TextTower:
        """The encoder's text tower, for methods whose `needs` include `text`."""
        assert self.text is not None
        return self.text

    def encode_prompts(self, compositions: Ints, templates: str | Sequence[str] = TEMPLATE) -> Prototypes:
        """Return unit text features of fixed prompts for compositions [C, d], all states [M, d] and all objects [N, d].

        A prompt is a template with the names after it, such as "a photo of" + "sliced apple", "sliced" or "apple".

        compositions: numbers `m N + n` [C] of the compositions to encode, such as the candidates of a scorer.
        templates: words before the names, or a list of templates, whose features are averaged.
        """
        if self.text is None:
            raise UsageError('there is no text tower to encode prompts with; add "text" to the result of needs()')
        listed: list[Any] = list(templates) if isinstance(templates, list | tuple) else [templates]
        if not listed or not all(isinstance(words, str) and words.strip() for words in listed):
            raise UsageError(f"templates is {templates!r:.80}; expected words such as 'a photo of', or a list of these")
        encoded = [Prompts(self.labels, self.text, template=words).encode(compositions) for words in listed]
        return Prototypes(*(unit(torch.stack(parts).mean(0)) for parts in zip(*encoded, strict=True)))


@dataclass(frozen=True)
class Batch:
    """Cached inputs and compositions of B training images."""

    inputs: Inputs
    compositions: Tensor  # [B]
    compositions_np: Ints = None  # type: ignore[assignment]  # `compositions` in NumPy; copied if missing
    rows_np: Ints = None  # type: ignore[assignment]  # index of each image among all training images; 0..B-1 if missing

    def __post_init__(self) -> None:
        if self.compositions_np is None:
            object.__setattr__(self, "compositions_np", self.compositions.cpu().numpy())
        if self.rows_np is None:
            object.__setattr__(self, "rows_np", np.arange(len(self)))

    def __len__(self) -> int:
        return len(self.compositions)

    def __getitem__(self, rows: Tensor) -> Batch:
        host_rows = rows.cpu().numpy()
        (device_rows,) = copy_to_device(self.compositions.device, host_rows)
        inputs = {
            name: values[device_rows if isinstance(values, Tensor) else rows] for name, values in self.inputs.items()
        }
        return Batch(inputs, self.compositions[device_rows], self.compositions_np[host_rows], self.rows_np[host_rows])

    def shuffled_rows(self, order: torch.Generator) -> Tensor:
        """Return the indices [B] of all images in random order; inputs on disk choose an order that is fast to read.

        order: generator of the random numbers.
        """
        for values in self.inputs.values():
            if not isinstance(values, Tensor):
                return values.shuffled_rows(order)
        return torch.randperm(len(self), generator=order)

    @property
    def rows(self) -> Tensor:
        """Index [B] of each image among the training images that `Method.start` receives."""
        return copy_to_device(self.compositions.device, self.rows_np)[0]

    @property
    def cls(self) -> Tensor:
        """The cached CLS features [B, d]."""
        return self.inputs["cls"]


class Method(nn.Module, Generic[OptionsT]):
    """Base class of all methods. A subclass defines `losses` and `scorer`; everything else has a default.

    A checkpoint holds `state_dict()`: parameters and persistent buffers, nothing of the frozen encoder.
    """

    Options: ClassVar[type[Options]] = Options  # by default the class in brackets: `class MyMethod(Method[MyOptions])`
    required_inputs: ClassVar[tuple[str, ...]] = ("cls",)  # names that `needs` returns, unless they depend on options
    growing: tuple[str, ...] = ()  # names of buffers whose length depends on data; set by `grow`
    combines_runs: ClassVar[bool] = False  # whether the class combines finished runs, by CombinedOptions
    checkpointing = False  # whether to recompute activations in the backward pass; set by training

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for kind in (argument for base in cls.__dict__.get("__orig_bases__", ()) for argument in get_args(base)):
            if "Options" not in cls.__dict__ and isinstance(kind, type) and issubclass(kind, Options):
                cls.Options = kind

    def __init__(self, task: TaskContext, options: OptionsT) -> None:
        """Register all parameters and buffers with their random values; `start` computes values that need data."""
        super().__init__()
        self.task, self.labels = task, task.labels
        self.options: OptionsT = options

    @property
    def class_name(self) -> str:
        """Name of the method's class, for messages."""
        return type(self).__name__

    def grow(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        """Register an empty buffer [0, *shape]; `start` assigns a tensor of any length, such as features to store.

        name: attribute for the tensor [length, *shape] of type `dtype`; a checkpoint stores all of it.
        """
        self.register_buffer(name, torch.empty(0, *shape, dtype=dtype))
        self.growing = (*self.growing, name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in self.growing:  # torch compares shapes next: the first dimension alone may differ
            own, stored = self.get_buffer(name), state_dict.get(prefix + name)
            if stored is not None:
                setattr(self, name, own.new_empty(*stored.shape[:1], *own.shape[1:]))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def primitives(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state index and the object index of each of the compositions."""
        return compositions // len(self.labels.objects), compositions % len(self.labels.objects)

    # -- inputs and initial state ---------------------------------------------------------------------------------

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        """Return the names of required inputs: cached `cls` and `patch`, `text` (text tower), `words` (word vectors).

        options: the kind's options, on which the inputs may depend.
        """
        return frozenset(cls.required_inputs)

    def start(self, train: Batch) -> None:
        """Compute buffers before the first epoch; not called when a checkpoint is loaded.

        train: all training images.
        """

    # -- training -------------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for the optimiser, dicts with lists of parameters under `params` and, if they differ
        from the training options, settings such as `lr`; an empty list if the method trains nothing."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": parameters}] if parameters else []

    def shared(self) -> tuple[Any, ...]:
        """Return values that all batches of an optimiser step use, such as encoded prompts: a tuple or named tuple.

        Batches' gradients accumulate at the tuple's tensors and are propagated further once per step."""
        return ()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        """Return scalar loss terms by name; training minimises their sum.

        batch: training images.
        shared: a copy of `shared()`'s result.
        """
        raise DuplexError(f"{type(self).__name__} must define losses()")

    def after_batch(self) -> None:
        """Update buffers after a batch's backward pass, which needs them unchanged."""

    def after_step(self) -> None:
        """Update buffers after the optimiser changed the parameters."""

    def on_features_changed(self, train: Batch) -> None:
        """Recompute buffers made from features. Called after every epoch, in evaluation mode.

        train: all training images.
        """

    def after_epoch(self, epoch: int) -> None:
        """Update values that depend on the number of epochs, before validation; `epoch` counts from 1."""

    def tune(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        """Choose settings on validation images after training, such as weights of score terms, and store them in
        buffers. `auc` returns the validation AUC of scores [N, C] over closed-world `candidates`."""

    def tuned_options(self) -> dict[str, Any]:
        """Return, by option name, the values that `tune` chose, so that a further fit needs no validation images."""
        return {}

    # -- inference ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scorer(self, candidates: Ints) -> Scorer:
        """Return a function from inputs to scores [B, C] over `candidates`, built once and called per batch; by default
        the sum of `score_terms`."""
        terms = self.score_terms(candidates)
        if terms is None:
            raise DuplexError(f"{type(self).__name__} must define scorer() or score_terms()")
        return torch.no_grad()(lambda inputs: torch.stack([term for _, term in terms(inputs)]).sum(0))

    def score_blocks(self, states: int) -> ScoreBlocks | None:
        """Return a function that scores all M·N compositions in blocks of `states` states, never with M·N numbers per
        image in memory; None if the method cannot."""
        return None

    def score_terms(self, candidates: Ints) -> ScoreTerms | None:
        """Return a function that yields the named summands of the scores; None if the scores are no sum.

        candidates: compositions that are scored [C], sorted.
        """
        return None

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the probability of each candidate per image [B, C].

        scores: the method's scores [B, C]; excluded candidates have -inf.
        """
        return scores.softmax(-1)

    def likelihood(self) -> Tensor | None:
        """Return one number per composition [M·N], larger if the training images make it likelier; None without such
        an estimate. The open world can exclude the least likely unseen compositions."""
        return None

    def fitted_statistics(self) -> FittedStatistics | None:
        """Return the statistics of training features from which prototypes in closed form are computed; None if the
        method has no such prototypes. `duplex update` adds the statistics of further images."""
        return None

    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        """Return tensors from which `duplex.layers.portable` computes scores without the method, or None.

        candidates: compositions that are scored [C], sorted.
        """
        return None

    def inspectable(self) -> Inspectable:
        """Return the method's functions for features and prototypes, for reports, `duplex retrieve` and `swap`."""
        return Inspectable()

    def summary(self) -> dict[str, int]:
        """Return sizes of the method by name for the report, such as its parameter count."""
        return {"parameters": sum(p.numel() for group in self.groups() for p in group["params"])}
