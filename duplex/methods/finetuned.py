"""Wrapper that trains any method together with the image tower's last blocks.

The blocks compute the method's CLS features from cached `block_inputs`, the activations that enter them; gradients are
computed in `losses` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Inspectable, Method, ScoreBlocks, Scorer, ScoreTerms
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.gaussian import FittedStatistics
from duplex.options import Options

FINETUNED_PREFIX = "blocks."  # of the names of the blocks' tensors in checkpoints and exports


class FinetunedInputs(Mapping[str, Tensor]):
    """Inputs whose CLS features `cls` fine-tuned blocks compute at first access."""

    def __init__(self, inputs: Inputs, blocks: FinetunedBlocks) -> None:
        self.inputs, self.blocks = inputs, blocks

    @cached_property
    def features(self) -> Tensor:
        features: Tensor = self.blocks(self.inputs["block_inputs"])
        return features

    def __getitem__(self, name: str) -> Tensor:
        return self.features if name == "cls" else self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


def with_finetuned_features(function: Callable[[Inputs], Any], blocks: FinetunedBlocks) -> Callable[[Inputs], Any]:
    """`function` of inputs, without gradients, with CLS features that fine-tuned blocks compute."""
    return torch.no_grad()(lambda inputs: function(FinetunedInputs(inputs, blocks)))


class WithFinetuning(Method[Options]):
    """Wrapper that trains a method together with the image tower's last blocks; one state dict holds both."""

    def __init__(self, method: Method[Any], blocks: FinetunedBlocks) -> None:
        super().__init__(method.context, method.options)
        self.method, self.blocks = method, blocks

    @property
    def class_name(self) -> str:
        return self.method.class_name

    def _finetuned(self, batch: Batch) -> Batch:
        return replace(batch, inputs=FinetunedInputs(batch.inputs, self.blocks))

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        self.method.start(self._finetuned(train))

    def groups(self) -> list[dict[str, Any]]:
        groups = self.method.groups()
        return [*groups, *self.blocks.groups()] if groups else []

    def shared(self) -> tuple[Any, ...]:
        self.method.checkpointing = self.blocks.checkpointing = self.checkpointing
        return self.method.shared()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        return self.method.losses(self._finetuned(batch), shared)

    def after_batch(self) -> None:
        self.method.after_batch()

    def after_step(self) -> None:
        self.method.after_step()

    @torch.no_grad()
    def on_features_changed(self, train: Batch) -> None:
        self.method.on_features_changed(self._finetuned(train))

    def after_epoch(self, epoch: int) -> None:
        self.method.after_epoch(epoch)

    @torch.no_grad()
    def tune(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        self.method.tune(FinetunedInputs(images, self.blocks), candidates, auc)

    def tuned_options(self) -> dict[str, Any]:
        return self.method.tuned_options()

    def scorer(self, candidates: Ints) -> Scorer:
        return with_finetuned_features(self.method.scorer(candidates), self.blocks)

    def score_blocks(self, states: int) -> ScoreBlocks | None:
        return self._wrap(self.method.score_blocks(states))

    def score_terms(self, candidates: Ints) -> ScoreTerms | None:
        return self._wrap(self.method.score_terms(candidates))

    def _wrap(self, function: Callable[[Inputs], Any] | None) -> Callable[[Inputs], Any] | None:
        return None if function is None else with_finetuned_features(function, self.blocks)

    def probabilities(self, scores: Tensor) -> Tensor:
        return self.method.probabilities(scores)

    def likelihood(self) -> Tensor | None:
        return self.method.likelihood()

    def fitted_statistics(self) -> FittedStatistics | None:
        return self.method.fitted_statistics()

    def inspectable(self) -> Inspectable:
        parts = self.method.inspectable()
        return replace(
            parts,
            features=self._wrap(parts.features),
            text_space_features=self._wrap(parts.text_space_features),
            factors=self._wrap(parts.factors),
        )

    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        tensors = self.method.portable(candidates)
        blocks = {f"{FINETUNED_PREFIX}{name}": value.detach() for name, value in self.blocks.state_dict().items()}
        return None if tensors is None else {**tensors, **blocks}

    def summary(self) -> dict[str, int]:
        return {**self.method.summary(), **super().summary(), "finetuned_blocks": self.blocks.options.blocks}
