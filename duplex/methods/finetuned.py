"""Train a method together with its image tower's last blocks (`duplex.methods.blocks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.adapters import ConceptBottlenecks
from duplex.methods.base import Batch, Inputs, Inspectable, Method, Scorer, ScoreTerms
from duplex.methods.blocks import CONCEPT_FEATURES, FINETUNED_PREFIX, FinetunedBlocks, add_text_adapters
from duplex.methods.gaussian import FittedStatistics, HasStatistics
from duplex.options import Options


class FinetunedInputs(Mapping[str, Tensor]):
    """A batch's inputs; the blocks compute the fine-tuned ones when one is first read."""

    def __init__(self, inputs: Inputs, blocks: FinetunedBlocks) -> None:
        self.inputs = inputs
        self.blocks = blocks
        self._names = {*CONCEPT_FEATURES, *(["patch"] if blocks.options.tokens else [])}

    @cached_property
    def computed(self) -> dict[str, Tensor]:
        return self.blocks.method_inputs(self.inputs["block_inputs"])

    def __getitem__(self, name: str) -> Tensor:
        return self.computed[name] if name in self._names else self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


def with_finetuned_features(function: Callable[[Inputs], Any], blocks: FinetunedBlocks) -> Callable[[Inputs], Any]:
    """Wrap `function` so that the CLS features in its inputs come from `blocks`."""
    return torch.no_grad()(lambda inputs: function(FinetunedInputs(inputs, blocks)))


class WithFinetuning(Method[Options]):
    """Trains a method together with blocks of the image tower and adapters of the text tower."""

    def __init__(self, method: Method[Any], blocks: FinetunedBlocks) -> None:
        super().__init__(method.context, method.options)
        self.method = method
        self.blocks = blocks
        self.trains_on_buffers = method.trains_on_buffers
        if blocks.options.tokens and "patch" not in type(method).needs(method.options):
            raise UsageError(
                f"the method ({method.class_name}) reads no patch tokens, so finetune.tokens changes nothing; remove it"
            )
        adds_text = blocks.options.text is not None
        self.text = add_text_adapters(method.context.text, blocks.options) if adds_text else None

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
        texts = [] if self.text is None else [*self.text.parameters()]
        return [*groups, *self.blocks.groups(texts)] if groups else []

    def shared(self) -> tuple[Any, ...]:
        self.method.checkpointing = self.blocks.checkpointing = self.checkpointing
        return self.method.shared()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        return self.method.losses(self._finetuned(batch), shared)

    def after_batch(self) -> None:
        self.method.after_batch()

    def after_step(self) -> None:
        if self.text is not None and all(parameter.grad is None for parameter in self.text.parameters()):
            raise UsageError(f"method {self.class_name} uses no prompts, so finetune.text trains nothing; remove it")
        self.method.after_step()

    @torch.no_grad()
    def on_features_changed(self, train: Batch) -> None:
        self.method.on_features_changed(self._finetuned(train))

    def after_epoch(self, epoch: int) -> None:
        self.method.after_epoch(epoch)

    @torch.no_grad()
    def choose_options(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        self.method.choose_options(FinetunedInputs(images, self.blocks), candidates, auc)

    def chosen_options(self) -> dict[str, Any]:
        return self.method.chosen_options()

    def scorer(self, candidates: Ints) -> Scorer:
        return with_finetuned_features(self.method.scorer(candidates), self.blocks)

    def score_terms(self, candidates: Ints) -> ScoreTerms | None:
        return self._wrap(self.method.score_terms(candidates))

    def _wrap(self, function: Callable[[Inputs], Any] | None) -> Callable[[Inputs], Any] | None:
        return None if function is None else with_finetuned_features(function, self.blocks)

    def probabilities(self, scores: Tensor) -> Tensor:
        return self.method.probabilities(scores)

    def fitted_statistics(self) -> FittedStatistics | None:
        return self.method.fitted_statistics() if isinstance(self.method, HasStatistics) else None

    def inspectable(self) -> Inspectable:
        parts = self.method.inspectable()
        return replace(
            parts,
            features=self._wrap(parts.features),
            text_space_features=self._wrap(parts.text_space_features),
            factors=self._wrap(parts.factors),
        )

    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        if self.text is not None or isinstance(self.blocks.trained, ConceptBottlenecks):
            return None  # an export has one feature per image and a frozen text tower
        tensors = self.method.portable(candidates)
        trained = self.blocks.state_dict()
        blocks = {f"{FINETUNED_PREFIX}{name}": value.detach() for name, value in trained.items()}
        return None if tensors is None else {**tensors, **blocks}

    def summary(self) -> dict[str, int]:
        return {**self.method.summary(), **super().summary(), "finetuned_blocks": self.blocks.count}

    def stored_values(self) -> int:
        added = super().stored_values() - Method.stored_values(self.method)  # by blocks and adapters
        return self.method.stored_values() + added
