"""Fine-tune an image tower's last blocks, and all blocks of the text tower, together with any method.

The blocks compute the method's CLS features from their cached inputs or from cached pixels, for which the frozen layers
before the first block run, too. Plug-ins (`duplex.methods.adapters`) determine what is trained in the blocks. Batch
norms keep their pretrained statistics. Adapters in the text tower act on each token alone, so prompts that begin with
the same tokens still share the encoding of this beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import LastBlocks, block_count, block_input_shape, cached_blocks, last_blocks, stem
from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.adapters import BlockAdapters, ConceptBottlenecks, find_adapters
from duplex.methods.base import Batch, Inputs, Inspectable, Method, Scorer, ScoreTerms
from duplex.methods.gaussian import FittedStatistics
from duplex.options import FinetuneOptions, Options
from duplex.system.threads import float32_arithmetic

IMAGES = 256  # computed at once without gradients
CONCEPT_FEATURES = ("cls", "cls_state", "cls_object")  # inputs that blocks with adapters of concepts compute
FINETUNED_PREFIX = "blocks."  # of the names of the blocks' tensors in checkpoints and exports


def finetuned_blocks_factory(
    encoder: Mapping[str, str], options: FinetuneOptions, device: str
) -> Callable[[], FinetunedBlocks]:
    """A function that builds the blocks to fine-tune, with float32 weights, for the image tower of an encoder.

    encoder: the encoder's `name`, `tag`, `precision` and so on, as checkpoints store them.
    """
    tower = load_encoder(encoder["name"], encoder["tag"] or None, towers="image", device=device)
    count = cached_blocks(tower, encoder)
    shape = block_input_shape(tower, count)
    begin = stem(tower) if count == block_count(tower) else None
    return partial(FinetunedBlocks, last_blocks(tower, count), options, shape, encoder["precision"], begin)


class FinetunedBlocks(nn.Module):
    """Trainable copies of an image tower's last blocks, which compute a method's inputs from block inputs.

    The state dict, and so a checkpoint, holds only trained parameters; frozen weights stay on the tower's device.

    shape: shape of one image's block input: (T, w) for tokens, (C, H, W) for feature maps.
    precision: number format in which the encoder computed the cached block inputs.
    begin: computes the first block's input from pixels [B, 3, R, R] uint8, for caches that hold pixels.
    """

    def __init__(
        self,
        cut: LastBlocks,
        options: FinetuneOptions,
        shape: tuple[int, ...],
        precision: str = "fp32",
        begin: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.checkpointing = False
        self.precision = precision
        blocks = copy.deepcopy(cut.blocks)
        for block in blocks:
            block.eval().requires_grad_(False)
        self.count = len(blocks) if options.blocks == "all" else options.blocks
        tuned = blocks[len(blocks) - self.count :]
        self._blocks = tuple(blocks)  # in a tuple, so that they are not part of the state
        self._begin, self._end = begin, cut.end
        self._tokens = cut.tokens if options.tokens else None
        self._frozen = len(blocks) - self.count
        self._device = next(blocks[-1].parameters()).device
        channels, x = list[int](), torch.zeros((1, *shape), device=self._device)
        with torch.no_grad():
            for block in blocks:
                x = block(x)
                channels.append(x.shape[1 if x.ndim == 4 else -1])  # its branches have as many
        self.trained = find_adapters(options.adapter)(tuned, cut, channels[self._frozen :], options)

    def train(self, mode: bool = True) -> FinetunedBlocks:
        super().train(mode)
        for block in self._blocks:
            block.eval()
        return self

    def groups(self, more: Sequence[Tensor] = ()) -> list[dict[str, Any]]:
        """The optimiser's parameter group: the blocks' trained parameters, and the tensors in `more`."""
        rate = self.options.learning_rate
        return [{"params": [*self.parameters(), *more], **({} if rate is None else {"lr": rate})}]

    def forward(self, block_inputs: Tensor) -> Tensor:
        return self.method_inputs(block_inputs)["cls"]

    def method_inputs(self, block_inputs: Tensor) -> dict[str, Tensor]:
        """Compute inputs by name: `cls` [B, d] and, if the options ask, `cls_state`, `cls_object` and `patch`."""
        if torch.is_grad_enabled():
            return self._compute(block_inputs)
        starts = range(0, max(1, len(block_inputs)), IMAGES)
        parts = [self._compute(block_inputs[start : start + IMAGES]) for start in starts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def features(self, block_inputs: Tensor) -> Tensor:
        """CLS features [B, d] of all images, computed in one pass, with gradients if these are enabled."""
        return self._compute(block_inputs)["cls"]

    def _compute(self, block_inputs: Tensor) -> dict[str, Tensor]:
        # TF32 only as in the cache, without gradients
        with nullcontext() if torch.is_grad_enabled() else float32_arithmetic(self.precision):
            x = block_inputs.to(self._device)
            is_pixels = x.dtype == torch.uint8
            if is_pixels and self.options.augment and self.training and torch.is_grad_enabled():
                from duplex.methods.augmentation import augment

                x = augment(x, self.options.augment)
            is_bf16 = self.precision == "bf16"  # no cache: within another autocast, it would keep a step's old weights
            with torch.autocast(self._device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False):
                with torch.no_grad():
                    x = self._begin(x) if self._begin is not None and is_pixels else x.float()
                    for block in self._blocks[: self._frozen]:
                        x = block(x)
                again = self.checkpointing and torch.is_grad_enabled()
                run = partial(recompute, use_reentrant=False) if again else nn.Module.__call__
                outputs = self.trained.outputs(x, list(self._blocks[self._frozen :]), run)
                inputs = {name: self._end(x).float() for name, x in zip(CONCEPT_FEATURES, outputs, strict=False)}
                if self._tokens is not None:
                    inputs["patch"] = self._tokens(outputs[0]).float()
        return inputs


def add_text_adapters(tower: Any, options: FinetuneOptions) -> BlockAdapters:
    """Add the adapters named by `options.text` to all blocks of a text tower; returns the adapters."""
    if not hasattr(tower, "own_blocks"):
        found = "no text tower" if tower is None else "a text tower with blocks of an unknown kind"
        raise UsageError(f"finetune.text is {options.text}, but the encoder has {found}; leave the setting out")
    assert options.text is not None
    cut = tower.own_blocks()
    own = replace(options, adapter=options.text, text=None)
    trained = find_adapters(options.text)(cut.blocks, cut, [tower.width] * len(cut.blocks), own)
    if isinstance(trained, ConceptBottlenecks):
        _, *others = trained.passes
        tower.of_paths = {path: tower.with_blocks(each) for path, each in zip(("state", "object"), others, strict=True)}
    return trained


class FinetunedInputs(Mapping[str, Tensor]):
    """A batch's inputs by name; the blocks compute the fine-tuned features when one of them is first read."""

    def __init__(self, inputs: Inputs, blocks: FinetunedBlocks) -> None:
        self.inputs, self.blocks = inputs, blocks
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
    """Wrap `function` so that the CLS features in its inputs come from `blocks`; no gradients are computed."""
    return torch.no_grad()(lambda inputs: function(FinetunedInputs(inputs, blocks)))


class WithFinetuning(Method[Options]):
    """Trains a method together with the last blocks of the image tower; one state dict holds both.

    With `finetune.text`, adapters in the method's text tower are trained, too.
    """

    def __init__(self, method: Method[Any], blocks: FinetunedBlocks) -> None:
        super().__init__(method.context, method.options)
        self.method, self.blocks = method, blocks
        if blocks.options.tokens and "patch" not in type(method).needs(method.options):
            raise UsageError(
                f"the method ({method.class_name}) reads no patch tokens, so finetune.tokens changes nothing; remove it"
            )
        self.text = None if blocks.options.text is None else add_text_adapters(method.context.text, blocks.options)

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

    def before_step(self, compositions: Ints) -> None:
        self.method.before_step(compositions)

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
    def tune(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        self.method.tune(FinetunedInputs(images, self.blocks), candidates, auc)

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
        if self.text is not None or isinstance(self.blocks.trained, ConceptBottlenecks):
            return None  # an export has one feature per image, and encodes added prompts with the frozen text tower
        tensors = self.method.portable(candidates)
        blocks = {f"{FINETUNED_PREFIX}{name}": value.detach() for name, value in self.blocks.state_dict().items()}
        return None if tensors is None else {**tensors, **blocks}

    def summary(self) -> dict[str, int]:
        return {**self.method.summary(), **super().summary(), "finetuned_blocks": self.blocks.count}
