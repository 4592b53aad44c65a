"""What the runs of a plan cost on this machine: seconds, measured on made features, and sizes of checkpoints."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from duplex.config.params import Params
from duplex.data.tables import LabelledImages
from duplex.encoders.base import Encoder, load_encoder, resolve_device
from duplex.encoders.image_blocks import block_count, block_input_shape, last_blocks
from duplex.errors import UsageError
from duplex.features.encode import WantedOutputs, encode_outputs
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, Method
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.registry import make_method
from duplex.options import FinetuneOptions
from duplex.project.doctor import outputs_to_cache, weights_for_timing
from duplex.training.inputs import Data, InputRequest, RunInputs
from duplex.training.lineup import BlockCost, block_cost
from duplex.training.loop import make_optimiser, optimiser_step
from duplex.training.run import MethodSpec, initialised_method, reproducible
from duplex.training.scoring import Validation

FEW = 2  # images in a timed batch on a CPU; on a GPU it is a whole batch
LONG = 20.0  # seconds; what takes longer is timed once
SOME = 128  # validation images whose scoring is timed
VALUE = 4  # bytes of a number in a checkpoint


@dataclass(frozen=True)
class RowCost:
    """What one run of a row costs."""

    seconds: float  # of training, validation and evaluation
    checkpoint: int  # bytes, at most
    activations: int  # bytes that a training step keeps for its backward pass


@dataclass(frozen=True)
class Estimate:
    """The costs of rows, measured with the encoder of a data set."""

    rows: dict[str, RowCost]
    timed: tuple[str, ...]  # rows of which a step was timed; the others train alike
    image_seconds: float  # to encode an image for the cache
    is_random: bool  # whether the encoder had random weights of its size


def estimate(params: Params, dataset: str, data: LabelledImages, rows: Iterable[str]) -> Estimate | None:
    """Measure the costs of `rows`; None for an encoder that cannot be made without its weights."""
    device = resolve_device(params.device)
    own = params.dataset(dataset).encoder
    entry = weights_for_timing(own)
    try:
        tower = load_encoder(entry.name, entry.weights, towers="image", device=device, precision=entry.precision)
    except UsageError:
        return None
    features = np.random.default_rng(0).standard_normal((len(data.manifest), tower.dim), dtype=np.float32)
    made = Data(data.manifest, data.labels, features, entry, str(tower.device), params.evaluation.word_vectors)
    blocks = BlockCosts(tower)
    measured: dict[str, tuple[float, int]] = {}
    timed = []
    costs = {}
    for name in rows:
        spec = MethodSpec.of(params, dataset, name)
        alike = _trains_like(spec)
        if alike not in measured:
            print(f"timing {name}", file=sys.stderr)
            measured[alike] = _run_costs(spec, made, tower, blocks)
            timed.append(name)
        seconds, activations = measured[alike]
        costs[name] = RowCost(seconds, VALUE * _stored_values(spec, made, tower), activations)
    return Estimate(costs, tuple(timed), _image_seconds(params, dataset, tower), entry != own)


def _trains_like(spec: MethodSpec) -> str:
    """What decides how long a step takes; options beside paths and losses change that little."""
    tuned = None if spec.finetune is None else spec.finetune.to_dict()
    options = [getattr(spec.options, "paths", ""), bool(getattr(spec.options, "losses", True))]
    record = [spec.kind, spec.trained_for, spec.worlds, options, spec.training.to_dict(), tuned]
    return json.dumps(record, sort_keys=True, default=str)


def _stored_values(spec: MethodSpec, data: Data, tower: Encoder) -> int:
    inputs = _with_blocks(_inputs(spec, data, tower), spec, tower)
    return make_method(spec.kind, spec.options, inputs.context(spec.trained_for)).stored_values()


def _run_costs(spec: MethodSpec, data: Data, tower: Encoder, costs: BlockCosts) -> tuple[float, int]:
    """Seconds of a run, and bytes that a step keeps for its backward pass."""
    images = data.manifest["split"].value_counts()
    with reproducible(spec.training.threads):
        step, validation, kept = _step_costs(spec, data, tower)
        blocks = costs.of(spec)
        kept += costs.activations(spec)
    steps = math.ceil(images["train"] / spec.training.batch_size)
    validation += images["val"] * blocks.forward
    epoch = steps * step + images["train"] * blocks.train + validation
    # each world is scored on validation images after training, then on test images
    scored = len(spec.worlds) * (1 + images["test"] / images["val"])
    return float(spec.training.epochs * epoch + scored * validation), kept


def _image_seconds(params: Params, dataset: str, tower: Encoder) -> float:
    count = params.extraction.batch_size if tower.device.type == "cuda" else FEW
    pixels = torch.stack([tower.image_transform(Image.new("RGB", (8, 8)))] * count).to(tower.device)
    outputs = outputs_to_cache(params, dataset)
    return _seconds(lambda: encode_outputs(tower, pixels, outputs)["cls"]) / count


def _inputs(spec: MethodSpec, data: Data, tower: Encoder) -> RunInputs:
    """Made features of all images; the tokens of all are those of one."""
    needs = spec.request.needs
    inputs = data.read(InputRequest(needs, spec.training.precision, None, spec.training.memory))
    examples = {split: each.to(tower.device) for split, each in inputs.examples.items()}
    shapes = WantedOutputs(patches="patch" in needs).row_shapes(tower)
    for (name, shape), (split, each) in product(shapes.items(), examples.items()):
        repeated = torch.randn(1, *shape, device=tower.device).expand(len(each), *shape)
        examples[split] = replace(each, inputs={**each.inputs, name: repeated})
    return replace(inputs, examples=examples)


@contextmanager
def kept_bytes(*owners: object) -> Iterator[Callable[[], int]]:
    """Context manager that yields a function: bytes that autograd has kept inside it, apart from the owners' weights.

    Each storage counts once. Casts of frozen weights to bf16 count, too, as they are kept.
    """
    own = {value.untyped_storage().data_ptr() for value in _weights(owners)}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        yield lambda: sum(kept.values())


def _weights(owners: Iterable[object]) -> Iterator[Tensor]:
    """Parameters and buffers of modules, and of the modules that other owners, such as text towers, have."""
    for owner in owners:
        for part in [owner] if isinstance(owner, nn.Module) else vars(owner).values():
            if isinstance(part, nn.Module):
                yield from part.parameters()
                yield from part.buffers()
            elif isinstance(part, Tensor):
                yield part


def _step_costs(spec: MethodSpec, data: Data, tower: Encoder) -> tuple[float, float, int]:
    """Seconds of a step and of a validation from features, and bytes that the step keeps."""
    inputs = _inputs(spec, data, tower)
    if spec.finetune is not None and spec.finetune.text is not None:  # its adapters run in each step
        inputs = _with_blocks(inputs, spec, tower)
    images = inputs.examples["train"]
    context = inputs.context(spec.trained_for)
    method = initialised_method(spec.kind, spec.options, context, inputs, 0, tower.device)
    method.train()
    batch = Batch(images.inputs, images.compositions)
    rows = torch.arange(min(spec.training.batch_size, len(images)))
    work = partial(optimiser_step, method, batch, rows, spec.training, make_optimiser(method, spec.training))
    step = 0.0
    kept = 0
    if method.groups():
        with kept_bytes(method, *([] if context.text is None else [context.text])) as count:
            work()
        kept = count()
        step = _seconds(lambda: next(iter(work().values())))
    return step, _validation_seconds(method, inputs.examples["val"], data.labels), kept


def _validation_seconds(method: Method[Any], images: Examples, labels: LabelSpace) -> float:
    """Seconds of validating all images: those of some, and more in proportion, as texts are encoded once."""
    count = min(SOME, len(images))
    some = _seconds(_validation(method, images, labels, count))
    half = _seconds(_validation(method, images, labels, count // 2))
    per_image = max(0.0, some - half) / (count - count // 2)
    return some + (len(images) - count) * per_image


def _validation(method: Method[Any], images: Examples, labels: LabelSpace, count: int) -> Callable[[], torch.Tensor]:
    """A validation of `count` images, evenly spaced, and one of a seen and one of an unseen pair."""
    is_seen = torch.from_numpy(labels.is_seen(images.compositions.cpu().numpy())).int()
    rows = torch.linspace(0, len(images) - 1, max(1, count)).long()
    rows = torch.cat([rows, is_seen.argmax()[None], is_seen.argmin()[None]]).unique()
    own = {name: values[rows.to(values.device)] for name, values in images.inputs.items()}
    chosen = Examples(images.rows[rows.numpy()], own, images.compositions[rows.to(images.compositions.device)])
    validate = Validation(chosen, labels)
    return lambda: torch.tensor(validate(method).value)


def _with_blocks(inputs: RunInputs, spec: MethodSpec, tower: Encoder) -> RunInputs:
    """The inputs of one image of seen and one of unseen pairs in each split, with the blocks to fine-tune."""
    if not isinstance(spec.finetune, FinetuneOptions):
        return inputs
    count = _tuned_blocks(spec.finetune, tower)
    shape = block_input_shape(tower, count)
    examples = {}
    for split, each in inputs.examples.items():
        is_seen = torch.from_numpy(inputs.labels.is_seen(each.compositions.cpu().numpy()))
        chosen = torch.tensor(sorted({int(is_seen.int().argmax()), int(is_seen.int().argmin())}))
        chosen = chosen.to(tower.device)
        own = {name: values[chosen] for name, values in each.inputs.items()}
        own["block_inputs"] = torch.randn(len(chosen), *shape, device=tower.device)
        examples[split] = Examples(each.rows[chosen.cpu().numpy()], own, each.compositions[chosen])
    blocks = partial(FinetunedBlocks, last_blocks(tower, count), spec.finetune, shape)
    return replace(inputs, examples=examples, make_blocks=blocks)


class BlockCosts:
    """What fine-tuned blocks cost, measured once for each kind of them."""

    def __init__(self, tower: Encoder) -> None:
        self._tower = tower
        self._measured: dict[tuple[int, int, str], BlockCost] = {}
        self._kept: dict[tuple[str, str], list[int]] = {}

    def of(self, spec: MethodSpec) -> BlockCost:
        if not isinstance(spec.finetune, FinetuneOptions):
            return BlockCost(0.0, 0.0)
        count = _tuned_blocks(spec.finetune, self._tower)
        batch = spec.training.batch_size if self._tower.device.type == "cuda" else FEW
        key = (count, batch, spec.training.precision)
        if key not in self._measured:
            self._measured[key] = block_cost(self._tower, count, count, batch, precision=spec.training.precision)
        return self._measured[key]

    def activations(self, spec: MethodSpec) -> int:
        """Bytes that a batch's pass through the blocks keeps: of one image, and as many more as the second adds."""
        if not isinstance(spec.finetune, FinetuneOptions):
            return 0
        key = (json.dumps(spec.finetune.to_dict(), sort_keys=True), spec.training.precision)
        if key not in self._kept:
            self._kept[key] = self._kept_by_images(spec.finetune, spec.training.precision)
        first, second = self._kept[key]
        return first + (spec.training.batch_size - 1) * (second - first)

    def _kept_by_images(self, finetune: FinetuneOptions, precision: str) -> list[int]:
        count = _tuned_blocks(finetune, self._tower)
        shape = block_input_shape(self._tower, count)
        blocks = FinetunedBlocks(last_blocks(self._tower, count), finetune, shape, precision).to(self._tower.device)
        found = []
        for images in (1, 2):
            with kept_bytes(blocks, *blocks._blocks) as kept:
                blocks.train().features(torch.randn(images, *shape, device=self._tower.device))
            found.append(kept())
        return found


def _tuned_blocks(finetune: FinetuneOptions, tower: Encoder) -> int:
    return block_count(tower) if finetune.blocks == "all" else finetune.blocks


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Median seconds of three calls after a first one, which allocates memory."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        work().sum().item()
        taken.append(time.perf_counter() - start)
        if taken[0] > LONG:  # of which allocating is a small part
            break
    return median(taken[1:] or taken)
