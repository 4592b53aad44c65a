"""The protocol: all that the loop, the checkpoint, the evaluation and the report know of a method.

A method is a module of this package, or of anybody's distribution (docs/your_method.md). It is told its `Setting` and
its `Options`, reads batches of cached inputs, and answers with losses while it trains and with scores afterwards:

    method = make(find("duplex"), Options(), setting)     # what is random is drawn here
    method.start(train)                                   # what comes from data
    for batches of one optimiser step:
        shared = method.shared()                          # once, whatever the number of batches
        method.losses(batch, shared) -> {name: term}      # the loop sums and calls backward
        method.after_batch()
      method.after_step()
    method.follow(train)                                  # features may have moved
    method.after_epoch(epoch)
    scores = method.scorer(columns)                       # inputs -> [B, C]

Nothing here reads a file; a method works in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from duplex.encoders.text import TextTower
from duplex.labels import Ints, LabelSpace, World
from duplex.layers.finetuned_blocks import Tail
from duplex.layers.indices import send
from duplex.methods.inspectable import Exhibits, Inputs
from duplex.options import Options

__all__ = ["Batch", "Exhibits", "Inputs", "Method", "Scorer", "Setting", "Words", "columns_of"]

Scorer = Callable[[Inputs], Tensor]  # inputs of B images -> float32 scores [B, C]
Sweep = Callable[[Inputs], Iterator[tuple[int, Tensor]]]  # inputs -> blocks of columns: the first's number, [B, w]
Terms = Callable[[Inputs], Iterator[tuple[str, Tensor]]]  # inputs -> named parts of the scores [B, C]
Row = TypeVar("Row", bound=Options)


@dataclass(frozen=True)
class Words:
    """A vector for every primitive, from a GloVe-format file or the encoder's own text tower."""

    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]


@dataclass(frozen=True)
class Setting:
    """All that a method may know of where it is used."""

    labels: LabelSpace
    inputs: Mapping[str, tuple[int, ...]]  # shape of one image's inputs: {"cls": (d,), "patch": (T, w)}
    text: TextTower | None = None  # the encoder's frozen text tower
    words: Words | None = None
    world: World = "closed"  # the target set that training is for; the paper trains its open-world model on all pairs
    image_tail: Callable[[], Tail] | None = None  # makes the end of the image tower, where it is trained too

    @property
    def dim(self) -> int:
        """Width of the CLS feature."""
        return self.inputs["cls"][0]

    @property
    def tower(self) -> TextTower:
        """The text tower of a method that `needs` it."""
        assert self.text is not None
        return self.text


@dataclass(frozen=True)
class Batch:
    """Some training images: their cached inputs and their compositions [B]."""

    inputs: Inputs
    compositions: Tensor
    host: Ints | None = None  # the same where they are known without asking a device

    def __len__(self) -> int:
        return len(self.compositions)

    def __getitem__(self, rows: Tensor) -> Batch:
        (there,) = send(self.compositions.device, rows.cpu().numpy())
        inputs = {name: values[there if isinstance(values, Tensor) else rows] for name, values in self.inputs.items()}
        return Batch(inputs, self.compositions[there], None if self.host is None else self.host[rows.cpu().numpy()])

    @property
    def labels(self) -> Ints:
        """The compositions [B] on the host."""
        return self.compositions.cpu().numpy() if self.host is None else self.host

    def shuffled(self, order: torch.Generator) -> Tensor:
        """All rows once, in random order. Inputs that stay on the disk say in which order they are best read."""
        for values in self.inputs.values():
            if not isinstance(values, Tensor):
                return values.shuffled(order)
        return torch.randperm(len(self), generator=order)

    @property
    def z(self) -> Tensor:
        """The cached CLS features [B, d]."""
        return self.inputs["cls"]


class Method(nn.Module, Generic[Row]):
    """One way to recognise compositions. A subclass gives `losses` and `scorer`; all else has a default.

    What a checkpoint holds is `state_dict()`: parameters and persistent buffers, nothing of the frozen encoder.
    """

    Options: ClassVar[type[Options]] = Options
    checkpointing = False  # training asks to recompute activations in the backward pass

    def __init__(self, setting: Setting, options: Row) -> None:
        """Build the method; draw what starts at random. `start` does what needs data."""
        super().__init__()
        self.setting, self.labels = setting, setting.labels
        self.options: Row = options

    # -- what it reads and how it starts ------------------------------------------------------------------------

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        """Which inputs it reads (`cls`, `patch`), and whether it asks for `text` (a text tower) or `words`."""
        return frozenset({"cls"})

    def start(self, train: Batch) -> None:
        """Whatever is made from the training images before the first epoch; not called on loading."""

    # -- training -----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser; none: nothing is trained."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": parameters}] if parameters else []

    def batches(self, train: Batch, size: int, order: torch.Generator) -> Iterable[Tensor]:
        """Rows of each optimiser step's images in one epoch; `order` is the only randomness to use."""
        found: Iterable[Tensor] = train.shuffled(order).split(size)
        return found

    def shared(self) -> tuple[Any, ...]:
        """What all batches of an optimiser step have in common: a tuple (or named tuple), such as prototypes of
        prompts. Gradients of the batches gather at its tensors and go on from there once."""
        return ()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        """Loss terms of a batch by name; their sum is minimised."""
        raise UnfinishedMethod(type(self), "losses")

    def after_batch(self) -> None:
        """After the backward pass of a batch."""

    def after_step(self) -> None:
        """After the optimiser has moved the parameters."""

    def follow(self, train: Batch) -> None:
        """After an epoch, in evaluation mode: the training images, whose features may have moved. What was made from
        them may be made anew."""

    def after_epoch(self, epoch: int) -> None:
        """After an epoch, before its validation; `epoch` counts from 1."""

    def tune(self, images: Inputs, columns: Ints, auc: Callable[[Tensor], float]) -> None:
        """After training: choose what validation images choose, such as the weights of a score's terms, and keep it in
        the state. `auc` of scores [N, C] over the closed world's `columns` is the validation AUC."""

    # -- inference ------------------------------------------------------------------------------------------------

    def scorer(self, columns: Ints) -> Scorer:
        """A function from inputs to scores over the target set `columns`; built once, asked for many batches."""
        raise UnfinishedMethod(type(self), "scorer")

    def sweep(self, states: int) -> Sweep | None:
        """Scores over all `M * N` compositions, block by block of so many states, where that takes nothing of the size
        `M * N`; asked where the scores of a single image are too many to be held."""
        return None

    def evidence(self, columns: Ints) -> Terms | None:
        """Where the score is a sum: what its parts say, by name. Recognition shows which evidence spoke."""
        return None

    def probabilities(self, scores: Tensor) -> Tensor:
        """`p(c|x)` among the columns of some scores [B, C], of which -inf is a column that cannot be."""
        return scores.softmax(-1)

    def likelihood(self) -> Tensor | None:
        """Where training images tell which compositions there may be: a number for each of the `M * N`, larger for a
        likelier one. The open world rules out unseen ones by it as by words."""
        return None

    def portable(self, columns: Ints) -> dict[str, Tensor] | None:
        """All that scores of these columns take, where `parts.portable` can compute them: what an export holds."""
        return None

    def exhibits(self) -> Exhibits:
        """What the report, `retrieve` and `swap` may look at."""
        return Exhibits()

    def summary(self) -> dict[str, int]:
        """Sizes worth reporting."""
        return {"parameters": sum(p.numel() for group in self.groups() for p in group["params"])}


class UnfinishedMethod(TypeError):
    """A subclass of `Method` lacks what every method must have."""

    def __init__(self, kind: type, name: str) -> None:
        super().__init__(f"{kind.__module__}.{kind.__qualname__} defines no `{name}`; every method must")


def columns_of(labels: LabelSpace, columns: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
    """States and objects [C] of compositions, as indices on a device."""
    states, objects = labels.state_of(columns), labels.object_of(columns)
    return torch.as_tensor(states, device=device), torch.as_tensor(objects, device=device)


def summed(terms: Terms, columns: int, device: torch.device) -> Scorer:
    """The scorer of a sum; one part at a time is in memory beside it."""

    @torch.no_grad()
    def scores(inputs: Inputs) -> Tensor:
        total = torch.zeros(len(inputs["cls"]), columns, device=device)
        for _, part in terms(inputs):
            total += part
        return total

    return scores
