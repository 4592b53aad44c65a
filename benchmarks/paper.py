"""Measure the paper's table of costs (Tab. 10): parameters, seconds and memory with a random ViT-L/14.

    python -m benchmarks.paper --json

Labels have the sizes of UT-Zappos. A step is forward and backward, with the optimiser; text is encoded in each.

* `cso_paper`, `duplex_paper` and `duplex_paper_trained` of params.yaml, without and with graph: steps from the inputs
  of the image tower's first block, which runs in each, beside the numbers of the paper's table
* `duplex` as it is run by default: a step from features in the cache, and one that encodes its images first
* the frozen image encoder alone

Parameters are those that are trained; a codebook that is not trained is counted beside them. Memory is the peak of a
step above what is held before it, weights of encoder and method included. The paper's seconds a step
are its minutes an epoch over the steps of an epoch, on an A800 with batches of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks.measure import emit, options, say
from benchmarks.text import SIZES, Stopwatch, made_up
from benchmarks.training import steps_per_epoch
from duplex.config.params import Params, load_params
from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import block_count, block_input_shape, last_blocks
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.duplex import DuplexOptions
from duplex.methods.registry import make_method
from duplex.options import Options

DATASET = "ut-zappos"
ENCODER = "ViT-L-14-quickgelu"
STEPS = steps_per_epoch(DATASET, 64)
PAPER = {  # Tab. 10: trained parameters in millions, peak memory in GB, minutes an epoch
    "cso_paper": (8.9, 17.8, 12.0),
    "duplex_paper, no graph": (9.4, 21.1, 16.4),
    "duplex_paper": (9.5, 21.1, 16.6),
    "duplex_paper_trained, no graph": (9.4, 21.1, 16.4),
    "duplex_paper_trained": (9.5, 21.1, 16.6),
}
CACHED = "duplex"  # the method whose step is measured in and out of the cache


@dataclass(frozen=True)
class Tower:
    """A random encoder, cut before its first block."""

    encoder: Any
    text: Any
    labels: LabelSpace
    precision: str = "fp32"  # of matrix products in training

    @classmethod
    def of(cls, name: str, device: str, precision: str = "fp32") -> Tower:
        encoder = load_encoder(name, "random:0", device=device)
        text = load_encoder(name, "random:0", towers="text", device=device, precision=precision).text
        return cls(encoder, text, labels_of_size(DATASET), precision)

    @property
    def shape(self) -> tuple[int, ...]:
        return block_input_shape(self.encoder, block_count(self.encoder))

    def method(self, kind: str, chosen: Options, finetune: Any, device: str) -> Any:
        blocks = None
        if finetune is not None:
            cut = last_blocks(self.encoder, block_count(self.encoder))
            blocks = partial(FinetunedBlocks, cut, finetune, self.shape, self.precision)
        inputs = {"cls": (self.text.dim,), "block_inputs": self.shape}
        context = MethodContext(self.labels, inputs, self.text, finetuned_blocks=blocks)
        torch.manual_seed(0)
        return make_method(kind, chosen, context).to(device)

    def batch(self, size: int, device: str) -> Batch:
        seen = torch.as_tensor(self.labels.pairs["train"])
        chosen = seen[torch.arange(size) % len(seen)]
        shapes = {"block_inputs": self.shape, "cls": (self.text.dim,)}
        inputs = {name: torch.randn(size, *shape, device=device) for name, shape in shapes.items()}
        return Batch(inputs, chosen.to(device))

    def images(self, size: int, device: str) -> Tensor:
        pixels = self.encoder.image_transform(Image.new("RGB", (8, 8)))
        return pixels.expand(size, *pixels.shape).to(device)


def labels_of_size(dataset: str) -> LabelSpace:
    """Labels as many as a benchmark has, each pair in every split."""
    states, objects, count, _ = SIZES[dataset]
    return LabelSpace.from_pairs(dict.fromkeys(("train", "val", "test"), made_up(states, objects, count)))


def parts(method: Any) -> dict[str, int]:
    """Trained parameters by what they belong to, in the order of their size."""
    counts: dict[str, int] = {}
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        words = name.removeprefix("method.").split(".")
        part = ".".join(words[:2]) if words[0] == "paths" else words[0]
        counts[part] = counts.get(part, 0) + parameter.numel()
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def step(method: Any, batch: Batch) -> Callable[[], None]:
    optimiser = torch.optim.Adam(method.groups(), lr=1e-5)

    def run() -> None:
        optimiser.zero_grad(set_to_none=True)
        torch.stack(list(method.losses(batch, method.shared()).values())).sum().backward()
        method.after_batch()
        optimiser.step()

    return run


def measure(
    rows: Iterable[str], params: Params, encoder: str, batch: int, device: str, rounds: int, precision: str = "fp32"
) -> dict[str, dict[str, Any]]:
    """Trained parameters, in parts, and seconds and peak memory of a step, of rows of `PAPER`, one after the other."""
    tower, found = Tower.of(encoder, device, precision), dict[str, dict[str, Any]]()
    for row in rows:
        name = row.partition(",")[0]
        chosen, finetune = params.method(name, DATASET), params.finetune(name, DATASET)
        if isinstance(chosen, DuplexOptions) and name != row:
            chosen = replace(chosen, graph=False, reading=replace(chosen.reading, fusion_rank=None))
        method = tower.method(params.entry(name).kind, chosen, finetune, device)
        counts = parts(method)
        watch = Stopwatch(torch.device(device))
        work = step(method, tower.batch(batch, device))
        for _ in range(rounds):
            watch.run(row, work)
        millions, gigabytes, minutes = PAPER[row]
        published = {"parameters": millions * 1e6, "peak_gib": gigabytes, "seconds": 60 * minutes / STEPS}
        found[row] = {**sizes(method), "parts": counts, "paper": published}
        found[row] |= {"seconds": watch.median(row), "peak_gib": watch.peak[row]}
    return found


def sizes(method: Any) -> dict[str, int]:
    """Trained parameters, and with them the values of a codebook that is not trained."""
    summary = method.summary()
    trained = summary["parameters"]
    return {"parameters": trained, "with_codebook": trained + summary.get("codebook_values", 0)}


def measure_cache(params: Params, encoder: str, batch: int, device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """A step of `duplex` from cached features, one that encodes its images first, and the image encoder alone."""
    tower = Tower.of(encoder, device)
    method = tower.method(params.entry(CACHED).kind, params.method(CACHED, DATASET), None, device)
    examples, images = tower.batch(batch, device), tower.images(batch, device)
    work = step(method, examples)

    def encode() -> None:
        for few in images.split(batch if device == "cuda" else 8):
            tower.encoder.encode_images(few)

    def both() -> None:
        encode()
        work()

    watch = Stopwatch(torch.device(device))
    works = {"in the cache": work, "out of the cache": both}
    for _ in range(rounds):
        for name, one in {**works, "encoder": encode}.items():
            watch.run(name, one)
    rows = {f"{CACHED}, images {name}": {**sizes(method), "parts": parts(method)} for name in works}
    rows["image encoder alone"] = {"parameters": 0, "with_codebook": 0, "parts": {}}
    for row, name in zip(rows, (*works, "encoder"), strict=True):
        rows[row] |= {"seconds": watch.median(name), "peak_gib": watch.peak[name]}
    return rows


def main() -> None:
    parser = options(__doc__)
    given, params = parser.parse_args(), load_params()
    rows = measure(PAPER, params, ENCODER, 2, "cpu", 1) | measure_cache(params, ENCODER, 2, "cpu", 1)
    emit(rows) if given.json else say(str(rows))


if __name__ == "__main__":
    main()
