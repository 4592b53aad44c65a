"""Evaluate a run while an adapter adapts it to test images in random orders (`evaluation.stream`).

For each order, one pass over the images collects their scores; the curve is then computed as for
any method, so the bias on unseen pairs does not affect adapting. The adapter's options are chosen
on a stream of the validation images in the closed world; the bias and the feasibility threshold
are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.config.params import EvaluationParams, StreamParams
from duplex.errors import DuplexError
from duplex.evaluation.metrics import METRICS
from duplex.labels import Ints, World
from duplex.methods.base import AdapterInputs, Batch, Inputs, Method, find_stream_adapter
from duplex.options import Options
from duplex.recognition.worlds import WorldResult, evaluate_world
from duplex.system.processes import track
from duplex.training import scoring
from duplex.training.inputs import RunInputs


@dataclass(frozen=True)
class StreamScorer(scoring.SplitScorer):
    """Scores images with an adapter, which gets them in `order`, by its method `scores`."""

    order: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [N] image indices, first image first
    batch: int = 1  # images per batch

    def blocks(self, inputs: Inputs) -> Iterator[tuple[Any, Tensor]]:
        batches = torch.from_numpy(self.order).split(self.batch)
        read = []

        def stream() -> Iterator[Inputs]:
            for rows in batches:
                read.append(rows)
                yield {name: values[rows] for name, values in inputs.items()}

        for place, (rows, scores) in enumerate(zip_longest(batches, self.scorer(stream()))):  # type: ignore[arg-type]
            if rows is None or scores is None:
                expected = f"one tensor of scores for each of the {len(batches)} batches"
                raise DuplexError(f"{self.name} must yield {expected}")
            if len(read) != place + 1:
                raise DuplexError(f"{self.name} must yield the scores of a batch before it reads the next one")
            yield rows.numpy(), scoring.checked_scores(self.name, scores, len(rows), len(self.candidates))


@dataclass(frozen=True)
class AdaptableRun:
    """A trained method to be adapted to images in random orders; `inputs` are on its device."""

    method: Method[Any]
    inputs: RunInputs
    settings: EvaluationParams
    params: StreamParams

    def evaluated(
        self, options: Options, calibration: scoring.Calibration, world: World, split: str, order: int = 0
    ) -> WorldResult:
        """Evaluate while an adapter adapts to `split` in random order; feasible pairs only."""
        plain = scoring.SplitScorer.of(self.method, self.inputs.labels.candidates(world, split))
        candidates = plain.candidates.compositions
        train = self.inputs.examples["train"]
        images = Batch(train.inputs, train.compositions)
        mask = scoring.feasible_compositions(self.method, self.inputs.words, calibration)
        feasible = np.ones(len(candidates), dtype=bool) if mask is None else mask
        adapted = AdapterInputs(self.method, candidates, feasible, images, plain.scorer)
        adapter: Any = find_stream_adapter(self.params.adapter)(adapted, options)
        places = np.random.default_rng([self.params.seed, order]).permutation(len(self.inputs.examples[split]))
        task = StreamScorer(
            plain.candidates, adapter.scores, name=self.params.adapter, order=places, batch=self.params.batch
        )
        return evaluate_world(self.method, self.inputs, self.settings, world, calibration, split, task)

    def chosen_options(self) -> tuple[Options, float]:
        """The adapter's options with the best validation AUC, varied one by one, and this AUC."""
        kind = find_stream_adapter(self.params.adapter)
        values: dict[str, Sequence[Any]] = dict(kind.grid)
        for name, value in self.params.options.items():
            values[name] = value if isinstance(value, list) else [value]
        best = {name: choices[0] for name, choices in values.items()}
        steps = [best]
        for name, choices in values.items():
            steps += [{name: value} for value in choices[1:]]
        found = -1.0
        for step in track(steps, f"{self.params.adapter}, validation", len(steps)):
            options = kind.Options.from_dict({**best, **step})
            auc = self.evaluated(options, scoring.Calibration(0.0), "closed", "val").metrics["auc"]
            if auc > found:
                best = {**best, **step}
                found = auc
        return kind.Options.from_dict(best), found


def evaluate_stream(
    stream: AdaptableRun, plain: Mapping[World, WorldResult], calibrations: Mapping[str, scoring.Calibration]
) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    """Evaluate an adapting run; returns metrics, and predictions in the first order."""
    short = stream.settings.model_copy(update={"bootstrap": 0, "k": (1,)})
    stream = replace(stream, settings=short)
    params = stream.params
    options, auc = stream.chosen_options()
    record: dict[str, Any] = {**params.model_dump(), "options": options.to_dict(), "val_auc": auc}
    predictions = []
    for world, unadapted in plain.items():
        calibration = replace(calibrations[world], alternatives=())
        orders = track(range(params.orders), f"{params.adapter}, {world} world", params.orders)
        found = [stream.evaluated(options, calibration, world, "test", order) for order in orders]
        names = [name for name in (*METRICS, "hm_at_val_bias") if name in unadapted.metrics]
        record[world] = {}
        for n, each in enumerate(found):
            record[world][f"order_{n}"] = {name: each.metrics[name] for name in names}
        record[world]["unadapted"] = {name: unadapted.metrics[name] for name in names}
        candidates = len(stream.inputs.labels.candidates(world, "test"))
        record[world]["entropy_candidates"] = unadapted.metrics.get("feasible", candidates)
        for name in names:
            values = [each.metrics[name] for each in found]
            record[world][name] = fmean(values)
            record[world][f"{name}_sd"] = stdev(values) if len(values) > 1 else 0.0
        predictions.append(found[0].predictions.assign(world=f"{world} stream"))
    return record, predictions
