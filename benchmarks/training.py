"""Measure seconds per epoch at the three benchmarks' sizes, from cached features, with a random ViT-L/14 text tower.

    python -m benchmarks.training --json

An epoch is split into text, network and graph, and compared with steps that include the image encoder.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import numpy as np
import torch

from benchmarks.measure import alternate, emit, finished, options, say
from benchmarks.text import SIZES, made_up, random_tower
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.prompts import Prototypes
from duplex.options import TrainingOptions
from duplex.system.threads import Precision, float32_arithmetic
from duplex.training.loop import optimiser_step

IMAGES = {"ut-zappos": 22998, "mit-states": 30338, "cgqa": 26920}
ROUNDS = 2


def steps_per_epoch(name: str, batch: int) -> int:
    return math.ceil(IMAGES[name] / batch)


def world(name: str, device: torch.device, dim: int) -> tuple[LabelSpace, Batch]:
    """Labels of the benchmark's size and a few batches of random features."""
    states, objects, count, batch = SIZES[name]
    labels = LabelSpace.from_pairs({"train": [(s, o) for s, o in made_up(states, objects, count)]})
    compositions = np.random.default_rng(0).choice(labels.pairs["train"], size=8 * batch)
    z = torch.nn.functional.normalize(torch.randn(len(compositions), dim), dim=-1)
    return labels, Batch({"cls": z.to(device)}, torch.from_numpy(compositions).to(device), compositions)


def measure(
    name: str,
    device: torch.device,
    rounds: int,
    encoder: torch.nn.Module,
    precision: Precision = "fp32",
    **smaller: Any,
) -> dict[str, Any]:
    """Measure one data set: whole steps and text alone; then the network with and without its graph.

    `smaller`: layers and width of a text tower for a quick trial.
    """
    tower = random_tower("ViT-L-14-quickgelu", precision=precision, device=str(device), **smaller)
    labels, examples = world(name, device, tower.dim)
    batch = SIZES[name][3]
    settings = TrainingOptions(1e-4, batch, 1, precision=precision)
    context = MethodContext(labels, {"cls": (tower.dim,)}, tower)
    method = Duplex(context, DuplexOptions()).to(device).train()
    optimiser, turns = torch.optim.Adam(method.groups(), lr=1e-4), count()

    def step() -> None:
        chosen = torch.arange(batch) + batch * (next(turns) % 8)
        with float32_arithmetic(precision):
            optimiser_step(method, examples, chosen, settings, optimiser)

    def text() -> None:
        with float32_arithmetic(precision):
            prototypes = method.shared()
            torch.autograd.backward(list(prototypes), [torch.ones_like(t) for t in prototypes])

    def with_images() -> None:
        """Run the frozen image encoder for each batch; a few images at a time on a CPU."""
        with torch.no_grad():
            for chunk in images.split(8 if device.type == "cpu" else batch):
                encoder(chunk)
        step()

    works = {"whole": step, "text": text}
    seconds = alternate({key: finished(work, device) for key, work in works.items()}, rounds)
    images = torch.randn(batch, 3, 224, 224, device=device)
    works = {"with images": with_images, "whole beside it": step}
    seconds |= alternate({key: finished(work, device) for key, work in works.items()}, 1, warm=0)
    with torch.no_grad():
        held = method.shared()
    static = Duplex(context, DuplexOptions(graph=False)).to(device).train()

    def rest(part: Duplex) -> None:
        chosen = torch.arange(batch) + batch * (next(turns) % 8)
        leaves = Prototypes(*(tensor.detach().requires_grad_() for tensor in held))
        torch.stack(list(part.losses(examples[chosen], leaves).values())).sum().backward()
        part.after_batch()

    parts = {"network": lambda: rest(static), "network and graph": lambda: rest(method)}
    seconds |= alternate({key: finished(work, device) for key, work in parts.items()}, 7)
    return summarise(name, seconds, device)


def summarise(name: str, seconds: dict[str, float], device: torch.device) -> dict[str, Any]:
    steps = steps_per_epoch(name, SIZES[name][3])
    row: dict[str, Any] = {
        "steps_per_epoch": steps,
        "step_seconds": seconds["whole"],
        "text_seconds": seconds["text"],
        "network_seconds": seconds["network"],
        "graph_seconds": seconds["network and graph"] - seconds["network"],
        "epoch_seconds": steps * seconds["whole"],
        "step_seconds_with_images": seconds["with images"],
        "speedup_of_cache": seconds["with images"] / seconds["whole beside it"],
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    say(f"{name}: " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()))
    return row


def image_encoder(device: torch.device, **smaller: Any) -> torch.nn.Module:
    """A random ViT-L/14 image tower; `smaller` are layers and width for a quick trial."""
    from duplex.encoders.libraries import open_clip

    config = open_clip.get_model_config("ViT-L-14-quickgelu")
    tower = open_clip.model._build_vision_tower(
        config["embed_dim"], open_clip.model.CLIPVisionCfg(**{**config["vision_cfg"], **smaller}), quick_gelu=True
    )
    return tower.to(device).eval()


def main() -> None:
    wanted = options(__doc__).parse_args()
    device = torch.device("cpu")
    encoder = image_encoder(device)
    rows = {name: measure(name, device, ROUNDS, encoder) for name in IMAGES}
    record = {"threads": torch.get_num_threads(), "datasets": rows}
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
