"""Count the trained parameters of the paper's configuration, and time its step: ViT-L/14 with random weights.

python -m benchmarks.paper [--json] [--encoder ViT-L-14-quickgelu] [--batch 2] [--rounds 1] [--device cpu]

Rows are the methods `cso_paper`, `duplex_paper` without graph and `duplex_paper` of params.yaml, on labels of the sizes
of UT-Zappos; beside them stand the counts of the paper's table of costs. A step is forward and backward, with the
optimiser, from the inputs of the image tower's first block; text is encoded in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.measure import emit, options, say
from benchmarks.text import SIZES, Stopwatch, made_up
from duplex.config.params import Params, load_params
from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import block_count, block_input_shape, last_blocks
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.duplex import DuplexOptions
from duplex.methods.finetuned import FinetunedBlocks
from duplex.methods.registry import make_method
from duplex.options import Options

DATASET = "ut-zappos"
ENCODER = "ViT-L-14-quickgelu"
PAPER = {"cso_paper": 8.9, "duplex_paper, no graph": 9.4, "duplex_paper": 9.5}  # millions, the paper's Tab. 10


@dataclass(frozen=True)
class Tower:
    """A random encoder, cut before its first block."""

    encoder: Any
    labels: LabelSpace

    @classmethod
    def of(cls, name: str, device: str) -> Tower:
        states, objects, count, _ = SIZES[DATASET]
        labels = LabelSpace.from_pairs(dict.fromkeys(("train", "val", "test"), made_up(states, objects, count)))
        return cls(load_encoder(name, "random:0", device=device), labels)

    @property
    def shape(self) -> tuple[int, ...]:
        return block_input_shape(self.encoder, block_count(self.encoder))

    def method(self, kind: str, chosen: Options, finetune: Any, device: str) -> Any:
        cut = last_blocks(self.encoder, block_count(self.encoder))
        blocks = partial(FinetunedBlocks, cut, finetune, self.shape)
        inputs = {"cls": (self.encoder.text.dim,), "block_inputs": self.shape}
        context = MethodContext(self.labels, inputs, self.encoder.text, finetuned_blocks=blocks)
        torch.manual_seed(0)
        return make_method(kind, chosen, context).to(device)

    def batch(self, size: int, device: str) -> Batch:
        seen = torch.as_tensor(self.labels.pairs["train"])
        chosen = seen[torch.arange(size) % len(seen)]
        return Batch({"block_inputs": torch.randn(size, *self.shape, device=device)}, chosen.to(device))


def parts(method: Any) -> dict[str, int]:
    """Trained parameters by what they belong to, in the order of their size."""
    counts: dict[str, int] = {}
    for name, parameter in method.named_parameters():
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
    rows: Iterable[str], params: Params, encoder: str, batch: int, device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Trained parameters, in parts, and seconds and peak memory of a step, of rows of `PAPER`, one after the other."""
    tower, found = Tower.of(encoder, device), dict[str, dict[str, Any]]()
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
        found[row] = {"parameters": sum(counts.values()), "paper": PAPER[row], "parts": counts}
        found[row] |= {"seconds": watch.median(row), "peak_gib": watch.peak[row]}
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--encoder", default=ENCODER)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    rows = measure(PAPER, load_params(), given.encoder, given.batch, given.device, given.rounds)
    if given.json:
        emit(rows)
        return
    for row, found in rows.items():
        count, paper = found["parameters"] / 1e6, found["paper"]
        say(f"{row}: {count:.2f} M (paper {paper} M), {found['seconds']:.2f} s a step, {found['peak_gib']:.1f} GiB")
        say("  " + ", ".join(f"{part} {count / 1e6:.3f} M" for part, count in found["parts"].items()))


if __name__ == "__main__":
    main()
