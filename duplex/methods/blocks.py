"""Copies of an image tower's last blocks, which fine-tuning trains, and adapters of text towers.

The blocks compute a method's CLS features from their cached inputs or from cached pixels, for
which the frozen layers before the first block run, too. Plug-ins (`duplex.methods.adapters`)
determine what is trained in the blocks. Batch norms keep their pretrained statistics. Adapters in
the text tower act on each token alone, so prompts that begin with the same tokens still share the
encoding of this beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import LastBlocks, block_count, block_input_shape, cached_blocks, last_blocks, stem
from duplex.errors import UsageError
from duplex.methods.adapters import BlockAdapters, ConceptBottlenecks, Run, find_adapters
from duplex.methods.team import ALONE, Team
from duplex.options import FinetuneOptions
from duplex.system.threads import bf16_products, float32_arithmetic

IMAGES = 256  # computed at once without gradients
CONCEPT_FEATURES = ("cls", "cls_state", "cls_object")  # of `concepts`
FINETUNED_PREFIX = "blocks."  # of the names of the blocks' tensors in checkpoints and exports


def finetuned_blocks_factory(
    encoder: Mapping[str, str], options: FinetuneOptions, device: str
) -> Callable[[], FinetunedBlocks]:
    """A function that builds the float32 blocks to fine-tune of an image tower, as recorded."""
    tower = load_encoder(encoder["name"], encoder["tag"] or None, towers="image", device=device)
    count = cached_blocks(tower, encoder)
    shape = block_input_shape(tower, count)
    begin = stem(tower) if count == block_count(tower) else None
    precision = encoder["precision"]
    if encoder.get("text_precision") == "bf16":  # `training.precision`, of both towers
        precision = "bf16"
    return partial(FinetunedBlocks, last_blocks(tower, count), options, shape, precision, begin)


class FinetunedBlocks(nn.Module):
    """Trainable copies of an image tower's last blocks, which compute a method's inputs.

    The state dict, and so a checkpoint, holds only trained parameters.

    shape: shape of one image's block input: (T, w) for tokens, (C, H, W) for feature maps.
    precision: bf16: matrix products are in bf16, weights, norms and outputs in float32, in training and evaluation;
        otherwise the number format in which the encoder computed the cached block inputs.
    begin: computes the first block's input from pixels [B, 3, R, R], for caches that hold pixels.
    """

    team: Team = ALONE  # which divides a batch's images in training; set by training
    compiled: Callable[[Tensor], dict[str, Tensor]] | None = None  # `run_blocks` of training steps; set by training

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
        self._begin = begin
        self._end = cut.end
        self._tokens = cut.tokens if options.tokens else None
        self._frozen = len(blocks) - self.count
        self._device = next(blocks[-1].parameters()).device
        channels = list[int]()
        x = torch.zeros((1, *shape), device=self._device)
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
        """The optimiser's parameter group: the blocks' trained parameters, and `more`."""
        rate = self.options.learning_rate
        return [{"params": [*self.parameters(), *more], **({} if rate is None else {"lr": rate})}]

    def forward(self, block_inputs: Tensor) -> Tensor:
        return self.method_inputs(block_inputs)["cls"]

    def method_inputs(self, block_inputs: Tensor) -> dict[str, Tensor]:
        """Inputs by name: `cls` [B, d] and, if set, `cls_state`, `cls_object` and `patch`."""
        if torch.is_grad_enabled():
            return self._compute_together(block_inputs) if self.training else self._compute(block_inputs)
        starts = range(0, max(1, len(block_inputs)), IMAGES)
        parts = [self._compute(block_inputs[start : start + IMAGES]) for start in starts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def features(self, block_inputs: Tensor) -> Tensor:
        """CLS features [B, d] of all images in one pass, with gradients if these are enabled."""
        return self._compute(block_inputs)["cls"]

    def _compute_together(self, block_inputs: Tensor) -> dict[str, Tensor]:
        total = len(block_inputs)
        if not self.team.divides(total):
            return self._compute(block_inputs, compiled=self.compiled)
        own = self._compute(block_inputs, self.team)
        return {name: self.team.join(values, total) for name, values in own.items()}

    def _compute(
        self,
        block_inputs: Tensor,
        team: Team = ALONE,
        compiled: Callable[[Tensor], dict[str, Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        # TF32 only as in the cache, without gradients
        with nullcontext() if torch.is_grad_enabled() else float32_arithmetic(self.precision):
            alone = team.size == 1  # the length of a batch, once read, is fixed in an exported graph
            own = block_inputs if alone else block_inputs[team.part(len(block_inputs))]
            x = own.to(self._device)
            is_pixels = x.dtype == torch.uint8
            if is_pixels and self.options.augment and self.training and torch.is_grad_enabled():
                from duplex.methods.augmentation import draw_matrices, warp

                total = len(block_inputs)
                x = warp(x, draw_matrices(total, self.options.augment, self._device)[team.part(total)])
            with torch.no_grad(), bf16_products(self.precision, self._device):
                x = self._begin(x) if self._begin is not None and is_pixels else x.float()
            if compiled is not None:
                return compiled(x)
            again = self.checkpointing and torch.is_grad_enabled()
            apply = nn.Module.__call__ if alone else partial(team.run, total=len(block_inputs))
            return self.run_blocks(x, partial(recompute, apply, use_reentrant=False) if again else apply)

    def run_blocks(self, x: Tensor, run: Run = nn.Module.__call__) -> dict[str, Tensor]:
        """The method's inputs by name, from the first block's input; trained blocks are called by `run`."""
        with bf16_products(self.precision, self._device):
            with torch.no_grad():
                for block in self._blocks[: self._frozen]:
                    x = block(x)
            outputs = self.trained.outputs(x, list(self._blocks[self._frozen :]), run)
        outputs = [output.float() for output in outputs]
        inputs = {name: self._end(x) for name, x in zip(CONCEPT_FEATURES, outputs, strict=False)}
        if self._tokens is not None:
            inputs["patch"] = self._tokens(outputs[0])
        return inputs


def add_text_adapters(tower: Any, options: FinetuneOptions) -> BlockAdapters:
    """Add and return the adapters that `options.text` names, in all blocks of a text tower."""
    if not hasattr(tower, "own_blocks"):
        found = "no text tower" if tower is None else "a text tower with blocks of an unknown kind"
        raise UsageError(f"finetune.text is {options.text}, but the encoder has {found}; leave the setting out")
    assert options.text is not None
    cut = tower.own_blocks()
    own = replace(options, adapter=options.text, text=None)
    trained = find_adapters(options.text)(cut.blocks, cut, [tower.width] * len(cut.blocks), own)
    if isinstance(trained, ConceptBottlenecks):
        _, states, objects = trained.passes
        tower.of_paths = {"state": tower.with_blocks(states), "object": tower.with_blocks(objects)}
    for parameter in trained.parameters():  # `full`: of a tower in half precision
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return trained
