"""Adapt finished runs to the unlabelled test images with TOMCAT: AUC beside that of the runs themselves.

    duplex sweep --datasets shapes,photos --methods cso,dual,dual_finetuned
    python -m benchmarks.stream --datasets shapes,photos --csv docs/results/stream.csv

Validation chooses the options, which are listed by seed. Numbers are means over seeds and orders; ± is the mean over
seeds of the standard deviation over orders; CPU ms is the processor's time per image. `--cgqa` instead measures memory
and time in the open world of C-GQA's size, with all rows in use, for a method with prompts of a small random text tower
and features of 768 dimensions.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import emit, memory, options, say, write_csv
from benchmarks.text import cgqa_labels, random_tower
from duplex.config.params import StreamParams, load_params
from duplex.methods import tomcat
from duplex.methods.base import AdapterInputs, Batch, Inputs, MethodContext
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.tomcat import Tomcat, TomcatOptions
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import ProjectRun

CSP = PromptOptions(paths="composition", adapter="none", losses=("semantic",), inference=("semantic",))
DIM, IMAGES = 768, 5


class TimedTomcat(Tomcat):
    """TOMCAT that records the processor's seconds for each image, by the number of competing candidates."""

    seconds: ClassVar[dict[int, list[float]]] = defaultdict(list)

    def scores(self, stream: Iterable[Inputs]) -> Iterator[Tensor]:
        start = time.process_time()
        for scores in super().scores(stream):
            self.seconds[int(self.run.feasible.sum())].append((time.process_time() - start) / len(scores))
            yield scores
            start = time.process_time()


def streams(dataset: str, method: str, seeds: list[int], orders: int) -> list[dict[str, Any]]:
    """The group `stream` of each seed's metrics, with the milliseconds per image of each world."""
    params = load_params()
    evaluation = params.evaluation.model_copy(update={"stream": StreamParams(orders=orders), "terms": False})
    changed, found = params.model_copy(update={"evaluation": evaluation}), []
    for seed in seeds:
        TimedTomcat.seconds.clear()
        with patch("duplex.project.stream.find_stream_adapter", lambda name: TimedTomcat):
            record = evaluate_stage(ProjectRun(dataset, method, seed, changed))["stream"]
        for world in params.worlds(method):
            record[world]["ms"] = 1000 * fmean(TimedTomcat.seconds[record[world]["entropy_candidates"]])
        found.append(record)
        say(f"{dataset} {method} seed {seed}: {record['options']}")
    return found


def rows_of(dataset: str, method: str, records: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The table's lines for the two worlds, from the results of `streams`."""
    rows = []
    for world in [name for name in ("closed", "open") if name in records[0]]:
        auc = fmean([record[world]["auc"] for record in records])
        plain = fmean([record[world]["unadapted"]["auc"] for record in records])
        row = {"data": dataset, "method": method, "world": world, "AUC": f"{plain:.2f}"}
        row |= {"adapted": f"{auc:.2f}", "gain": f"{auc - plain:+.2f}"}
        row["±"] = f"{fmean([record[world]['auc_sd'] for record in records]):.2f}"
        row["validation AUC"] = f"{fmean([record['val_auc'] for record in records]):.2f}"
        for name in ("learning_rate", "alpha", "warm"):
            row[name.replace("_", " ")] = " / ".join(f"{record['options'][name]:g}" for record in records)
        rows.append({**row, "CPU ms": f"{fmean([record[world]['ms'] for record in records]):.1f}"})
    return rows


def at_cgqa() -> dict[str, float]:
    """The processor's seconds for an image and the process's peak memory in the open world of C-GQA's size."""
    labels = cgqa_labels()
    context = MethodContext(labels, {"cls": (DIM,)}, random_tower("ViT-L-14", layers=1, width=64))
    method = PromptMethod(context, CSP).eval()
    own, every = labels.pairs["train"], np.arange(labels.size)
    train = Batch({"cls": torch.randn(len(own), DIM)}, torch.from_numpy(own), own)
    run = AdapterInputs(method, every, np.ones(labels.size, dtype=bool), train, method.scorer(every))
    scores = Tomcat(run, TomcatOptions(warm=True)).scores({"cls": z[None]} for z in torch.randn(IMAGES, DIM))
    start = time.process_time()
    with patch.object(tomcat, "TOP", tomcat.MOST):  # else it takes a thousand images until all rows are in use
        deque(scores, maxlen=0)
    return {"cpu_s_per_image": (time.process_time() - start) / IMAGES, "peak_gib": memory("VmHWM") / 2**30}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--datasets", default="shapes")
    parser.add_argument("--methods", default="cso,dual,dual_finetuned")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--cgqa", action="store_true", help="measure memory at C-GQA's size instead")
    wanted = parser.parse_args()
    if wanted.cgqa:
        emit(at_cgqa())
        return
    rows, seeds = [], [int(seed) for seed in wanted.seeds.split(",")]
    for dataset in wanted.datasets.split(","):
        for method in wanted.methods.split(","):
            rows += rows_of(dataset, method, streams(dataset, method, seeds, wanted.orders))
    emit(rows)
    write_csv(rows, wanted.csv)


if __name__ == "__main__":
    main()
