"""Any method over features that move: the end of the image tower is trained with it (duplex/layers/finetuned_blocks.py).

The method knows nothing of it. It reads `cls`, which is here what the tail makes of `deep`, the cached input of the
tower's last blocks: in losses with gradients, elsewhere without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.finetuned_blocks import Tail
from duplex.methods.base import Batch, Exhibits, Inputs, Method, Scorer, Sweep, Terms
from duplex.options import Options

TAIL = "tail."  # begins the names of its tensors in an export


class FinetunedInputs(Mapping[str, Tensor]):
    """Inputs whose CLS features a tail makes, once somebody asks for them."""

    def __init__(self, inputs: Inputs, tail: Tail) -> None:
        self.inputs, self.tail = inputs, tail

    @cached_property
    def features(self) -> Tensor:
        found: Tensor = self.tail(self.inputs["deep"])
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self.features if name == "cls" else self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


def moving(read: Callable[[Inputs], Any], tail: Tail) -> Callable[[Inputs], Any]:
    """`read` of inputs whose features a tail makes."""

    @torch.no_grad()
    def moved(inputs: Inputs) -> Any:
        return read(FinetunedInputs(inputs, tail))

    return moved


class WithFinetuning(Method[Options]):
    """`method` with `tail` before it; both are its state."""

    def __init__(self, method: Method[Any], tail: Tail) -> None:
        super().__init__(method.setting, method.options)
        self.method, self.tail = method, tail

    def _moved(self, batch: Batch) -> Batch:
        return Batch(FinetunedInputs(batch.inputs, self.tail), batch.compositions, batch.host)

    # -- training -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        self.method.start(self._moved(train))

    def groups(self) -> list[dict[str, Any]]:
        own = self.method.groups()
        return [*own, *self.tail.groups()] if own else []

    def batches(self, train: Batch, size: int, order: torch.Generator) -> Iterable[Tensor]:
        return self.method.batches(train, size, order)

    def shared(self) -> tuple[Any, ...]:
        self.method.checkpointing = self.tail.checkpointing = self.checkpointing
        return self.method.shared()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        return self.method.losses(self._moved(batch), shared)

    def after_batch(self) -> None:
        self.method.after_batch()

    def after_step(self) -> None:
        self.method.after_step()

    @torch.no_grad()
    def follow(self, train: Batch) -> None:
        self.method.follow(self._moved(train))

    def after_epoch(self, epoch: int) -> None:
        self.method.after_epoch(epoch)

    @torch.no_grad()
    def tune(self, images: Inputs, columns: Ints, auc: Callable[[Tensor], float]) -> None:
        self.method.tune(FinetunedInputs(images, self.tail), columns, auc)

    # -- inference ------------------------------------------------------------------------------------------------

    def scorer(self, columns: Ints) -> Scorer:
        return moving(self.method.scorer(columns), self.tail)

    def sweep(self, states: int) -> Sweep | None:
        own = self.method.sweep(states)
        return None if own is None else moving(own, self.tail)

    def evidence(self, columns: Ints) -> Terms | None:
        terms = self.method.evidence(columns)
        return None if terms is None else moving(terms, self.tail)

    def probabilities(self, scores: Tensor) -> Tensor:
        return self.method.probabilities(scores)

    def likelihood(self) -> Tensor | None:
        return self.method.likelihood()

    def exhibits(self) -> Exhibits:
        own = self.method.exhibits()
        read = (own.features, own.spoken, own.factors)
        features, spoken, factors = (None if one is None else moving(one, self.tail) for one in read)
        return replace(own, features=features, spoken=spoken, factors=factors)

    def portable(self, columns: Ints) -> dict[str, Tensor] | None:
        """The score over features that the tail has made, and what was trained in it."""
        found = self.method.portable(columns)
        own = {f"{TAIL}{name}": value.detach() for name, value in self.tail.state_dict().items()}
        return None if found is None else {**found, **own}

    def summary(self) -> dict[str, int]:
        return {**self.method.summary(), **super().summary(), "tail_blocks": self.tail.options.depth}
