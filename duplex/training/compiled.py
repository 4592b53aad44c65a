"""Compiled encoders in training steps (`training.compile`): image blocks with adapters, text towers over prefix trees.

    with compiled_encoders(method, images, settings, "own duplex seed 0"):
        train_epoch(...)

torch.compile writes one function for each encoder and its gradient, for fixed sizes: a batch that is smaller than the
others is filled up with copies of its last image, whose features are dropped. On a GPU, each function is recorded as a
CUDA graph and launched at once. Random numbers are those of uncompiled code, sums and roundings are not.

Before the first step, the encoders run a step's images and prompts both ways. Where compiling fails, or where features
or gradients differ, a line on stderr says so, and training is that without the option.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from duplex.encoders.prompt_tree import TreeLayout
from duplex.errors import UsageError
from duplex.methods.base import Batch, Method
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.prompts import Prompts
from duplex.options import TrainingOptions
from duplex.system.threads import float32_arithmetic

LATER_STEPS = 2  # after the one that compiles: a CUDA graph is recorded, replayed
ALLOWED = {"fp32": 1e-3, "tf32": 1e-2}  # relative differences of features and gradients
ALLOWED_HALF = 0.1


@contextmanager
def compiled_encoders(method: Method[Any], images: Batch, settings: TrainingOptions, label: str) -> Iterator[bool]:
    """Context manager in which training steps run a method's encoders as compiled code; yields whether that works."""
    parts = find_encoders(method) if method.groups() else []
    if not parts:
        lack = f"{method.class_name} trains neither blocks of the image tower (`finetune`) nor prompts of a prefix tree"
        raise UsageError(f"training.compile is true, but {lack}, whose encoding is compiled; set it to false")
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with float32_arithmetic(settings.precision), torch.random.fork_rng(gpus):
            failure = _compile(method, parts, images, settings)
        if failure:
            print(f"{label}: training.compile is true, but {failure}; training runs uncompiled", file=sys.stderr)
            _reset(parts)
        mark = register_optimizer_step_post_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        try:
            yield not failure
        finally:
            mark.remove()
    finally:
        _reset(parts)


def find_encoders(method: Method[Any]) -> list[Any]:
    """A method's image blocks, and the text towers that encode changing prompts through a prefix tree."""
    parts = list[Any]()
    for part in method.modules():
        if isinstance(part, FinetunedBlocks):
            parts.append(part)
        elif isinstance(part, Prompts) and (part.learned_rows is not None or getattr(part.tower, "is_trained", False)):
            towers = (part.tower, *getattr(part.tower, "of_paths", {}).values())
            parts += [tower for tower in towers if getattr(tower, "shares_prefixes", False) and tower not in parts]
    return parts


def _reset(parts: list[Any]) -> None:
    for part in parts:
        part.compiled = None
    torch.compiler.reset()


def _compile(method: Method[Any], parts: list[Any], images: Batch, settings: TrainingOptions) -> str:
    """Compile the encoders; returns what went wrong, if anything."""
    rows = torch.arange(min(settings.batch_size, len(images)))
    encoders = list[CompiledTree | CompiledBlocks]()
    for part in parts:
        is_tower = not isinstance(part, FinetunedBlocks)
        encoders.append(CompiledTree(part.encode_tree) if is_tower else CompiledBlocks(part.run_blocks, len(rows)))
        part.compiled = encoders[-1]
    method.train()
    expected = _take_step(method, parts, images, rows)
    for encoder in encoders:
        encoder.is_fixed = True
        encoder.run = torch.compile(encoder.run, fullgraph=True, dynamic=False, options=_options(images))
    logged = logging.root.manager.disable
    logging.disable()  # torch logs tracebacks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _take_step(method, parts, images, rows)
            for _ in range(LATER_STEPS):
                _take_step(method, parts, images, rows)
    except Exception as error:  # of torch, a C++ compiler or a plug-in
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"torch cannot compile the encoders ({type(error).__name__}: {lines[0] if lines else 'no message'})"
    finally:
        logging.disable(logged)
    allowed = ALLOWED.get(settings.precision, ALLOWED_HALF)
    for name, compiled, eager in zip(("features", "gradients"), found, expected, strict=True):
        difference = float((compiled - eager).norm() / eager.norm().clamp(min=1e-12))
        if not difference <= allowed:
            return f"compiled encoders change {name} by {difference:.2g} of their norm"
    return ""


def _options(images: Batch) -> dict[str, Any]:
    chosen: dict[str, Any] = {"fallback_random": True, "deterministic": True}
    if images.compositions.device.type == "cuda":
        chosen["triton.cudagraphs"] = True  # the mode "reduce-overhead", beside which torch takes no options
    return chosen


def _take_step(method: Method[Any], parts: list[Any], images: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the encoders give in a step, and the gradients of all parameters."""
    torch.manual_seed(0)
    torch.compiler.cudagraph_mark_step_begin()
    outputs = [value for value in method.shared() if isinstance(value, Tensor) and value.requires_grad]
    for part in parts:
        if isinstance(part, FinetunedBlocks):
            outputs += part.method_inputs(images[rows].inputs["block_inputs"]).values()
    weights = [torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each) for each in outputs]
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(outputs, parameters, weights, allow_unused=True)
    reached = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
    return torch.cat([each.detach().flatten() for each in outputs]), torch.cat([each.flatten() for each in reached])


class CompiledBlocks:
    """Image blocks for batches of `size` images; smaller ones are filled up, larger ones run uncompiled."""

    is_fixed = False

    def __init__(self, blocks: Callable[[Tensor], dict[str, Tensor]], size: int) -> None:
        self.run: Any = blocks
        self.eager = blocks
        self.size = size

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        count = len(x)
        if count > self.size:
            return self.eager(x)
        if count < self.size:
            x = torch.cat([x, x[-1:].expand(self.size - count, *x.shape[1:])])
        # copies, as the next step overwrites a CUDA graph's results
        return {name: values[:count].clone() for name, values in self.run(x).items()}


class CompiledTree:
    """A text tower for trees of the sizes that it met before `is_fixed`; others run uncompiled."""

    is_fixed = False

    def __init__(self, encode: Callable[[TreeLayout, Tensor], Tensor]) -> None:
        self.run: Any = encode
        self.eager = encode
        self.layouts = list[TreeLayout]()

    def __call__(self, layout: TreeLayout, lexicon: Tensor) -> Tensor:
        if not self.is_fixed and layout not in self.layouts:
            self.layouts.append(layout)
        if sizes(layout) not in map(sizes, self.layouts):
            return self.eager(layout, lexicon)
        features: Tensor = self.run(layout, lexicon)
        return features.clone()


def sizes(layout: TreeLayout) -> tuple[int, ...]:
    first, last = layout.layers[0].mask, layout.layers[-1].mask
    return (len(layout.entry_rows), len(layout.ends), *first.shape, *last.shape)
