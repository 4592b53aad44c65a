"""Measurements of `benchmarks.gpu`: those of other benchmarks, on its device and in three precisions.

The docstrings are the texts above the tables of the page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks import bare as bares
from benchmarks import extraction as pictures
from benchmarks import graph as graphs
from benchmarks import paper as costs
from benchmarks import text as texts
from benchmarks import training as steps
from duplex.config.params import Params, load_params
from duplex.data.tables import LabelledImages
from duplex.features.encode import decoding_workers
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.project.paper_rows import paper_rows
from duplex.project.reproduce import PROJECT
from duplex.system.threads import Precision, float32_arithmetic
from duplex.training.run import MethodSpec
from duplex.training.scoring import SplitScorer, score_split

TIMED: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
REPEATS = {"fp32": 4, "tf32": 16, "bf16": 16}  # of 384 images to extract: starting the workers must not count
TIMED_ROWS = ("cso", "duplex_five")
SMALLER = {"layers": 2, "width": 64}  # of a text tower, for a quick trial
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Look:
    """The device and the sizes of a measurement."""

    device: str
    quick: bool

    @property
    def datasets(self) -> tuple[str, ...]:
        return ("ut-zappos",) if self.quick else ("ut-zappos", "mit-states", "cgqa")

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 5

    @property
    def encoder(self) -> str:
        return "ViT-S-32" if self.quick else costs.ENCODER

    @property
    def tower(self) -> dict[str, Any]:
        """The options that make a text tower smaller."""
        return SMALLER if self.quick else {}


def text(look: Look, _: Path) -> Table:
    """Forward and backward pass of all training pairs through ViT-L/14's text tower, by prefix tree and with prompts
    cut to the longest. `times floor`: the tree's time over that of matrix products alone."""
    found: Table = {}
    for name in look.datasets[-2:]:  # the largest two
        for precision in TIMED:
            states, objects, count, _splits = texts.SIZES[name]
            tower = texts.random_tower("ViT-L-14-quickgelu", precision=precision, device=look.device, **look.tower)
            pairs = texts.made_up(states, objects, count)
            names = texts.Names.of(pairs, "learned", tower)
            sizes = texts.Options(look.device, time.perf_counter, look.rounds, sample=8, chunk=1024)
            with float32_arithmetic(precision):
                row = texts.compare(tower, names.pairs(pairs), names.size, sizes)
            found[f"{name}, {precision}"] = {
                "tokens": row["tokens"]["tree"],
                "tree, ms": 1e3 * row["seconds"]["tree"],
                "cut, ms": 1e3 * row["seconds"]["cut"],
                "over cut": row["speedup_over_cut"],
                "times floor": row["times_floor"],
                "peak, GiB": row["peak_gib"]["tree"],
                "error": row["max_error"],
                "gradient error": row["max_gradient_error"],
            }
    return found


def training(look: Look, _: Path) -> Table:
    """A step of `duplex` with cached features and ViT-L/14's text tower. `with images`: times as long with the image
    encoder."""
    device, found = torch.device(look.device), Table()
    encoder = steps.image_encoder(device, **({"layers": 1, "width": 64} if look.quick else {}))
    for name in look.datasets:
        for precision in TIMED:
            row = steps.measure(name, device, look.rounds, encoder, precision, **look.tower)
            found[f"{name}, {precision}"] = {
                **{f"{part}, ms": 1e3 * row[f"{part}_seconds"] for part in ("step", "text", "network", "graph")},
                "epoch, s": row["epoch_seconds"],
                "with images": row["speedup_of_cache"],
                "peak, GiB": row.get("peak_gib"),
            }
    return found


def paper(look: Look, _: Path) -> Table:
    """The paper's own configuration for UT-Zappos, from the inputs of the first block; the paper used an A800."""
    return {
        name: {
            "parameters": row["parameters"],
            "step, s": row["seconds"],
            "epoch, min": row["seconds"] * costs.STEPS / 60,
            "paper's epoch, min": row["paper"]["seconds"] * costs.STEPS / 60,
            "peak, GiB": row["peak_gib"],
            "paper's peak, GB": row["paper"]["peak_gib"],
        }
        for name, row in rows_in_precisions(look, costs.measure, tuple(costs.PAPER)).items()
    }


def bare(look: Look, _: Path) -> Table:
    """The table compares a step of the paper's configurations with that of a bare loop: open_clip's towers with the
    same adapters, autocast, torch's fused optimiser and three cross-entropies. Steps alternate; `ratio` is ours divided
    by the bare one, and `images, ratio` that of the image tower alone. `share of peak` is the model FLOPs utilisation:
    the bare loop's products by the GPU's dense bf16 peak."""
    return {
        name: {
            "step, ms": 1e3 * row["ours"],
            "bare, ms": 1e3 * row["bare"],
            "ratio": row["ratio"],
            "images, ratio": row["images, ratio"],
            "share of peak": row.get("share of peak"),
            "bare, share of peak": row.get("bare, share of peak"),
        }
        for name, row in rows_in_precisions(look, bares.measure, bares.ROWS).items()
    }


def rows_in_precisions(look: Look, measure: Callable[..., Table], names: tuple[str, ...]) -> Table:
    """What `measure` finds for the methods `names` of the paper, a row a method and precision."""
    found: Table = {}
    for precision in TIMED:
        with float32_arithmetic(precision):
            rows = measure(
                rows=("duplex_paper",) if look.quick else names,
                params=load_params(),
                encoder=look.encoder,
                batch=2 if look.quick else 64,
                device=look.device,
                rounds=look.rounds,
                precision=precision,
            )
        found |= {f"{name}, {precision}": row for name, row in rows.items()}
    return found


def hours(look: Look, _: Path) -> Table:
    """Training of `duplex reproduce --rows main` in bf16, by steps of its rows `cso` and `duplex_five`, which are
    `cso_paper` and `duplex_paper`, from the inputs of the first block. `one seed, h`: all rows that train, without
    validation and evaluation. Steps of other methods count as those of `cso`, or as more in proportion to a larger
    batch; `--dry-run` times each row."""
    params = load_params(PROJECT / "params.yaml")
    tower = costs.Tower.of(look.encoder, look.device, "bf16")
    found: Table = {}
    for name in look.datasets:
        own = replace(tower, labels=costs.labels_of_size(name))
        specs = trained_rows(params, name, own.labels)
        duplex = specs[TIMED_ROWS[-1]]
        batch = duplex.training.batch_size
        timed = [specs[row] for row in TIMED_ROWS]
        seconds = bares.measure_steps(timed, own, 2 if look.quick else batch, look.device, min(3, look.rounds), "bf16")
        total = math.fsum(
            run_seconds(name, spec, seconds[TIMED_ROWS[spec.kind == duplex.kind]], batch) for spec in specs.values()
        )
        found[name] = {
            **{f"{row}, ms": 1e3 * value for row, value in seconds.items()},
            "steps": steps.steps_per_epoch(name, batch),
            "epochs": duplex.training.epochs,
            f"{duplex.name}, h": run_seconds(name, duplex, seconds[duplex.name], batch) / 3600,
            "rows": len(specs),
            "one seed, h": total / 3600,
            "seeds": len(params.run.seeds),
        }
    return found


def trained_rows(params: Params, dataset: str, labels: LabelSpace) -> dict[str, MethodSpec]:
    """The rows that `duplex reproduce --rows main` trains on a data set."""
    data = LabelledImages(pd.DataFrame(columns=["image", "state", "object", "split"]), labels)
    specs = {row: MethodSpec.of(params, dataset, row) for row in paper_rows(params, dataset, data, "main").run}
    return {row: spec for row, spec in specs.items() if getattr(spec.options, "losses", True)}


def run_seconds(dataset: str, spec: MethodSpec, step: float, batch: int) -> float:
    """Seconds of all steps of a row if one with `batch` images takes `step` seconds."""
    size = spec.training.batch_size
    return spec.training.epochs * steps.steps_per_epoch(dataset, size) * step * max(1, size / batch)


def graph(look: Look, _: Path) -> Table:
    """The local graph against a dense matrix, forward and backward, in MIT-States' open world."""
    rows = graphs.by_batch((8,) if look.quick else (32, 64, 128, 512), look.device)
    return {
        f"batch {row['batch']}": {
            "candidates": row["candidates"],
            "ms": row["factored_ms"],
            "dense, ms": row.get("dense_ms"),
            "MiB": row["factored_mib"],
            "dense, MiB": row.get("dense_mib"),
        }
        for row in rows
    }


def extraction(look: Look, folder: Path) -> Table:
    """Images per second with ViT-L/14: of `extract`, the encoder alone (`bare`), decoding alone, and open_clip's
    example (`plain`). `held by` names the bottleneck."""
    found: Table = {}
    for precision in TIMED:
        here = folder / precision
        here.mkdir()
        name, scale = ("small", 1) if look.quick else ("ViT-L-14", 16)
        row = pictures.compare(
            name,
            here,
            decoding_workers("auto"),
            precision=precision,
            device=look.device,
            scale=scale,
            repeats=1 if look.quick else REPEATS[precision],
        )
        kinds = ("extract", "bare", "decoding", "plain")
        found[precision] = {kind: row[f"{kind}_per_second"] for kind in kinds} | {"held by": row["held_by"]}
    return found


def evaluation(look: Look, _: Path) -> Table:
    """Scores of C-GQA's pairs for as many images as its test split has, without the encoding of prompts."""
    labels = small_world() if look.quick else texts.cgqa_labels()
    method, train = begun(labels, look.device)
    images = 16 if look.quick else 5_098
    found: Table = {}
    for world, split in (("closed", "val"), ("open", "val")):
        own = torch.from_numpy(np.resize(labels.pairs[split], images)).to(look.device)
        examples = Examples(np.arange(images), {"cls": train.cls[torch.arange(images) % len(train)]}, own)
        field = SplitScorer.of(method, labels.candidates(world, split))
        score_split(field, examples, labels, top=3)
        began = time.perf_counter()
        score_split(field, examples, labels, top=3)  # ends in a copy to the host
        seconds = time.perf_counter() - began
        columns = len(field.candidates)
        found[world] = {"pairs": columns, "images": images, "s": seconds, "scores/s": images * columns / seconds}
    return found


def begun(labels: LabelSpace, device: str) -> tuple[Duplex, Batch]:
    """A method after its first images of every seen pair."""
    torch.manual_seed(0)
    tower, dim = texts.random_tower("ViT-L-14", layers=2, width=64, device=device), 768
    chosen = DuplexOptions(losses=("state", "object"), inference=("visual", "factors"))
    method = Duplex(MethodContext(labels, {"cls": (dim,)}, tower), chosen).to(device)
    own = np.resize(labels.pairs["train"], max(2_000, len(labels.pairs["train"])))
    z = torch.nn.functional.normalize(torch.randn(len(own), dim), dim=-1).to(device)
    train = Batch({"cls": z}, torch.from_numpy(own).to(device), own)
    method.start(train)
    return method, train


def small_world() -> LabelSpace:
    pairs = texts.made_up(6, 5, 20)
    return LabelSpace.from_pairs({"train": pairs[:15], "val": pairs[10:], "test": pairs[10:]})


def compiled(look: Look, _: Path) -> Table:
    """A step of the paper's configurations with `training.compile` and without; `compiling` comes once, before the
    first step."""
    found: Table = {}
    for name in bares.ROWS[-1:] if look.quick else bares.ROWS:
        row = bares.measure_compiled(
            name,
            load_params(),
            encoder=look.encoder,
            batch=2 if look.quick else 64,
            device=look.device,
            rounds=look.rounds,
            precision="bf16",
        )
        seconds = row.get("compiled")
        found[f"{name}, bf16"] = {
            "step, ms": 1e3 * row["step"],
            "compiled, ms": None if seconds is None else 1e3 * seconds,
            "ratio": None if seconds is None else seconds / row["step"],
            "compiling, s": row["compiling"],
        }
    return found


PARTS: tuple[Any, ...] = (text, training, paper, bare, hours, graph, extraction, evaluation, compiled)
TIMES: dict[str, Callable[[Look, Path], Table]] = {part.__name__: part for part in PARTS}
