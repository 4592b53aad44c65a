"""The interface of methods, which learn to score compositions: all that callers know of them.

A method is a class, of this package or a plug-in (docs/your_method.md), that is used like this:

    method = make_method("duplex", Options(), context)          # random parameters are drawn here
    method.start(train)                                         # state from the training images
    for epoch in ...:
        for step in ...:
            shared = method.shared()                            # once per step, for all batches
            for batch in ...:
                losses = method.losses(batch, shared)           # {name: term}; the loop sums them
                method.after_batch()
            method.after_step()
        method.on_features_changed(train)                       # before validation at least
        method.after_epoch(epoch)
    scores = method.scorer(candidates)(inputs)                  # [B, C]: B images, C compositions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from duplex.encoders.base import TextTower
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.layers import copy_to_device, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes
from duplex.options import FinetuneOptions, Options
from duplex.system.plugins import installed_plugins, load_plugin

STEPS = (4.0, 2.0, 2**0.5)  # by which weights are tried larger and smaller, in turn
LARGEST_WEIGHT = 64
STREAM = "stream adapter"
UNKNOWN = -100  # `ignore_index` of cross_entropy
Inputs = Mapping[str, Tensor]  # {"cls": [B, d], "patch": [B, T, w]}
Scorer = Callable[[Inputs], Tensor]  # inputs of B images -> float32 scores [B, C]
ScoreTerms = Callable[[Inputs], Iterator[tuple[str, Tensor]]]  # -> (name, summand [B, C])
Weights = tuple[float, ...]
OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True)
class Inspectable:
    """A method's functions that return features, for reports and `duplex retrieve`, if any."""

    features: Callable[[Inputs], Tensor] | None = None  # unit features z^c [B, d]
    semantic: Callable[[Ints], Tensor] | None = None  # [C] -> semantic prototypes [C, d]
    visual: Callable[[Ints], Tensor] | None = None  # [C] -> visual prototypes [C, d]
    factors: Callable[[Inputs], tuple[Tensor, Tensor]] | None = None  # z^s, z^o [B, d]
    fuse: Callable[[Tensor, Tensor], Tensor] | None = None  # (z^s, z^o) -> counterfactual features
    text_space_features: Callable[[Inputs], Tensor] | None = None  # if not `features`

    def __post_init__(self) -> None:
        for name in self.present_fields:
            object.__setattr__(self, name, torch.no_grad()(getattr(self, name)))

    @property
    def present_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


@dataclass(frozen=True)
class PrimitiveVectors:
    """Word vectors of all states and objects, from a GloVe-format file or the text tower."""

    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]


@dataclass(frozen=True)
class MethodContext:
    """Everything that a method's constructor receives besides its options."""

    labels: LabelSpace
    inputs: Mapping[str, tuple[int, ...]]  # shapes: {"cls": (d,), "patch": (T, w)}
    text: TextTower | None = None  # the encoder's frozen text tower
    words: PrimitiveVectors | None = None  # word vectors of states and objects
    world: World = "closed"  # whose candidates training uses; "open": all compositions
    finetuned_blocks: Callable[[], FinetunedBlocks] | None = None  # builds the blocks to train
    members: tuple[Method[Any], ...] = ()  # trained methods that this one combines
    member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None  # builds a member's
    parts: tuple[int, ...] = ()  # widths of the features of joined encoders, side by side in the CLS features

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
        """Encode prompts such as "a photo of wet dog"; returns unit features of compositions, all states, all objects.

        compositions: the compositions to encode [C]; state m with object n has the number `m N + n`.
        templates: words before the names; the features of several templates are averaged.
        """
        if self.text is None:
            raise UsageError('a method that encodes prompts needs the text tower; its needs() must return "text" too')
        encoded = []
        for template in [templates] if isinstance(templates, str) else templates:
            encoded.append(Prompts(self.labels, self.text, template=template).encode(compositions))
        return Prototypes(*(unit(torch.stack(parts).mean(0)) for parts in zip(*encoded, strict=True)))


@dataclass(frozen=True)
class Batch:
    """Training images as a method receives them: cached encoder outputs and labels."""

    inputs: Inputs
    compositions: Tensor  # [B]
    compositions_np: Ints = None  # type: ignore[assignment]  # in NumPy; copied if missing
    rows_np: Ints = None  # type: ignore[assignment]  # `rows` in NumPy; 0..B-1 if missing

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
        inputs = {}
        for name, values in self.inputs.items():
            inputs[name] = values[device_rows if isinstance(values, Tensor) else rows]
        compositions = self.compositions[device_rows]
        return Batch(inputs, compositions, self.compositions_np[host_rows], self.rows_np[host_rows])

    @property
    def rows(self) -> Tensor:
        """Index of each image [B] among all training images, as `Method.start` receives them."""
        return copy_to_device(self.compositions.device, self.rows_np)[0]

    @property
    def cls(self) -> Tensor:
        """CLS features [B, d], from the cache or, with fine-tuning, from the fine-tuned blocks."""
        return self.inputs["cls"]


class Method(nn.Module, Generic[OptionsT]):
    """Base class of all methods; a subclass defines `losses`, and `scorer` or `score_terms`.

    Checkpoints store `state_dict()`: parameters and persistent buffers, nothing of the encoder.
    """

    Options: ClassVar[type[Options]] = Options  # or in brackets: `Method[MyOptions]`
    required_inputs: ClassVar[tuple[str, ...]] = ("cls",)  # what `needs` returns
    growing: tuple[str, ...] = ()  # names of buffers whose length depends on data; set by `grow`
    combines_runs: ClassVar[bool] = False  # whether it combines finished runs
    reads_joined: ClassVar[bool] = False  # whether it reads the features of several encoders at once
    trains_on_buffers = True  # whether losses may read what `on_features_changed` recomputes
    checkpointing = False  # whether to recompute activations in the backward pass; set by training

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__dict__.get("__orig_bases__", ()):
            for kind in get_args(base):
                if "Options" not in cls.__dict__ and isinstance(kind, type) and issubclass(kind, Options):
                    cls.Options = kind

    def __init__(self, context: MethodContext, options: OptionsT) -> None:
        super().__init__()
        self.context = context
        self.labels = context.labels
        self.options: OptionsT = options

    @property
    def class_name(self) -> str:
        return type(self).__name__

    def grow(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        """Register a buffer `name` [0, *shape] of type `dtype`, which `start` fills with any number of rows."""
        self.register_buffer(name, torch.empty(0, *shape, dtype=dtype))
        self.growing = (*self.growing, name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in self.growing:  # only their first dimension may differ
            own = self.get_buffer(name)
            stored = state_dict.get(prefix + name)
            if stored is not None:
                setattr(self, name, own.new_empty(*stored.shape[:1], *own.shape[1:]))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def accepts_partial_labels(cls, options: Any) -> bool:
        """Whether training with `options` can use images of which only the state or only the object is known."""
        return False

    def known_primitives(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        """State and object index of each of the `compositions`; -100, which PyTorch's losses ignore, if unknown."""
        m, n = self.primitives(compositions)
        states = len(self.labels.states)
        alone = -1 - compositions
        m = torch.where(compositions < 0, torch.where(alone < states, alone, UNKNOWN), m)
        n = torch.where(compositions < 0, torch.where(alone < states, UNKNOWN, alone - states), n)
        return m, n

    def primitives(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        """The state index and the object index of each of the `compositions`."""
        return compositions // len(self.labels.objects), compositions % len(self.labels.objects)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        """What a method with `options` requires, among `cls`, `patch` (tokens), `text` (tower), `words` (vectors)."""
        return frozenset(cls.required_inputs)

    @classmethod
    def scores_new_words(cls, options: Any) -> bool:
        """Whether a method with `options` can score states and objects that have no training images."""
        return not cls.needs(options).isdisjoint(("text", "words"))

    def start(self, train: Batch) -> None:
        """Compute buffers, which checkpoints store, from all training images `train`; called before the first epoch."""

    def groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups, dicts with `params` and perhaps `lr`; maybe none."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": parameters}] if parameters else []

    def shared(self) -> tuple[Any, ...]:
        """What all batches of a step share, as a tuple; its gradients are propagated once."""
        return ()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        """A batch's loss terms by name, which training sums; `shared`: result of `shared()`."""
        raise DuplexError(f"{type(self).__name__} must define losses()")

    def after_batch(self) -> None:
        """Update buffers; called after the backward pass of each batch."""

    def after_step(self) -> None:
        """Update buffers that depend on the parameters; called after each optimiser step."""

    def on_features_changed(self, train: Batch) -> None:
        """Recompute buffers that depend on the features of all training images, `train`.

        Called after each epoch; where `trains_on_buffers` is False, after those that are validated and the last.
        """

    def after_epoch(self, epoch: int) -> None:
        """Update what depends on `epoch`, the number of finished epochs; called after each epoch, before validation."""

    def choose_options(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        """Choose options such as score weights by validation AUC; called after training.

        images: inputs of the V validation images.
        candidates: compositions of the closed world [C].
        auc: function that returns the validation AUC of scores [V, C]; if they exclude all unseen
            pairs (by -inf), it returns the accuracy on images of seen pairs instead.
        """

    def chosen_options(self) -> dict[str, Any]:
        """The values that `choose_options` chose, by name, to train without validation images."""
        return {}

    @torch.no_grad()
    def scorer(self, candidates: Ints) -> Scorer:
        """A function from inputs to scores [B, C] of the sorted `candidates`."""
        terms = self.score_terms(candidates)
        if terms is None:
            raise DuplexError(f"{type(self).__name__} must define scorer() or score_terms()")
        if not callable(terms):
            raise DuplexError(
                f"{type(self).__name__}: score_terms() returned a {type(terms).__name__}; return a function that takes "
                "inputs and yields pairs of a name and a tensor [B, C]"
            )
        return torch.no_grad()(lambda inputs: torch.stack([term for _, term in terms(inputs)]).sum(0))

    def score_terms(self, candidates: Ints) -> ScoreTerms | None:
        """A function from inputs to (name, summand) pairs of `candidates`' scores; None if scores are not sums."""
        return None

    def probabilities(self, scores: Tensor) -> Tensor:
        """Convert `scores` [B, C] to probabilities; an excluded candidate has the score -inf."""
        return scores.softmax(-1)

    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        """Named tensors from which an export computes `candidates`' scores; None if the method has no export."""
        return None

    def inspectable(self) -> Inspectable:
        """Functions that return features and prototypes, for reports and `duplex retrieve`."""
        return Inspectable()

    def summary(self) -> dict[str, int]:
        """Numbers for the report by name, such as the number of trained parameters."""
        return {"parameters": sum(p.numel() for group in self.groups() for p in group["params"])}

    def stored_values(self) -> int:
        """The largest number of values that a checkpoint of the method may hold after training."""
        return sum(value.numel() for value in self.state_dict().values())


@dataclass(frozen=True)
class AdapterInputs:
    """The trained method that a stream adapter adapts, with its candidates and training images."""

    method: Method[Any]
    candidates: Ints  # compositions that are scored, ascending [C]
    feasible: Bools  # whether each candidate can win [C]
    train: Batch
    scorer: Scorer  # inputs -> scores [B, C] of the trained method


class UnsuitableMethod(UsageError):
    """Raised by a stream adapter that cannot adapt a method; the run is then scored as it is."""


class StreamAdapter:
    """Base class of stream adapters, which adapt a trained method to unlabelled images."""

    Options: ClassVar[type[Options]] = Options
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # option -> values to try

    def __init__(self, run: AdapterInputs, options: Any) -> None:
        self.run = run
        self.options = options

    def scores(self, stream: Iterable[Inputs]) -> Iterable[Tensor]:
        """Yield scores [B, C] of each batch of images in `stream`, in their order."""
        raise DuplexError(f"{type(self).__name__} must define scores()")


def find_stream_adapter(name: str) -> type[StreamAdapter]:
    """The class of a stream adapter; UsageError if its name is unknown."""
    points = installed_plugins("duplex.stream_adapters")
    found: type[StreamAdapter] = load_plugin(points[require(name, points, STREAM)], STREAM, StreamAdapter)
    return found


def tuned_weights(
    first: Tensor, weighted: Callable[[Weights], Sequence[Tensor]], auc: Callable[[Tensor], float]
) -> Tensor:
    """Search for the weights of K score summands with the best validation AUC, one at a time.

    The last weight stays fixed, because multiplying all weights by one factor changes no ranking.

    first: the weights [K] to start from; weighted: summands [B, C], each times its weight.
    """

    def auc_with(weights: Weights) -> float:
        return auc(torch.stack([*weighted(weights)]).sum(0))

    best: Weights = tuple(first.tolist())
    best_auc = auc_with(best)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for place, factor in product(range(len(best) - 1), (step, 1 / step)):
                trial = tuple(w * factor if i == place else w for i, w in enumerate(best))
                if max(trial) < LARGEST_WEIGHT and (trial_auc := auc_with(trial)) > best_auc:
                    best, best_auc = trial, trial_auc
                    improved = True
    return torch.tensor(best)
