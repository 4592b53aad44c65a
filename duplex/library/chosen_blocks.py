"""Train a run with `finetune: auto`: validation chooses the number of fine-tuned blocks and their learning rate."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.encoders import Encoder, load_encoder
from duplex.encoders.image_blocks import last_blocks
from duplex.errors import UsageError
from duplex.library.climb import (
    Attempt,
    Plan,
    Rung,
    Sizes,
    block_cost,
    climb,
    finetuned_rungs,
    load_margins,
    plan,
    report_damage,
    save_margins,
)
from duplex.library.inputs import InputRequest, RunInputs
from duplex.library.run_training import MethodSpec, Run, train_method
from duplex.options import AutoFinetune
from duplex.system.files import write_text
from duplex.training.checkpoint import load_checkpoint, read_checkpoint, read_known_images
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.scoring import validation_margins


@dataclass(frozen=True)
class ChosenBlocks:
    """Training of one run with `finetune: auto`: the training recipes (rungs) tried, and the choice among them.

    The files of finished rungs are kept in the folder `work` until the run is finished.
    """

    spec: MethodSpec  # without fine-tuned blocks
    options: AutoFinetune
    read: Callable[[InputRequest], RunInputs]  # returns the data set's inputs for a request
    seed: int
    device: torch.device
    settings: EvaluationParams
    resume: ResumePoint  # of the run; `key` is part of that of each rung
    work: Path
    say: Callable[[str], None]  # receives lines about the progress

    def train(self) -> Run:
        """Try the rungs and return the run of the chosen one; its record has the table of all rungs."""
        choice = climb(self._levels(), self._attempt, lambda line: self.say(f"{self.resume.label}: {line}"))
        self.say(f"{self.resume.label}: chosen: {choice.rung.name}")
        run = self._load(choice.rung)
        numbers = [
            {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
            for row in choice.table
        ]
        return replace(run, record=replace(run.record, rungs=tuple(numbers)))

    @cached_property
    def _inputs(self) -> RunInputs:
        return self.read(self.spec.request)

    @cached_property
    def _tower(self) -> Encoder:
        record = self._inputs.encoder
        return load_encoder(record["name"], record["tag"] or None, towers="image", device=str(self.device))

    def _levels(self) -> list[list[Rung]]:
        first = Rung("0 blocks", self.spec)
        planned = self._plan(first)
        self.say(f"{self.resume.label}: fine-tuning: {planned.reason}")
        return [[first], *finetuned_rungs(self.spec, planned.depths, planned.rates)]

    def _plan(self, first: Rung) -> Plan:
        """Return the plan of rungs that fit into the time limit, made once from timed steps and stored in `work`."""
        place = self.work / f"plan-{self.options.minutes:g}.json"
        if not place.is_file():
            depth = int(self._inputs.identity.get("block_inputs", 0))
            if not depth:
                raise UsageError(
                    f"{self.spec.name} has `finetune: auto` and the feature cache holds no block inputs; set the data "
                    "set's encoder.block_inputs, or run `duplex data add` with --finetune auto"
                )
            last_blocks(self._tower, depth)  # raises for an encoder that cannot be cut
            train, val = (len(self._inputs.examples[split]) for split in ("train", "val"))
            epoch = self._attempt(first).seconds_per_epoch
            made = plan(
                depth,
                lambda blocks: block_cost(self._tower, blocks, depth),
                Sizes(train, val, 0),
                60 * self.options.minutes,
                epoch,
            )
            write_text(place, json.dumps(made.to_dict()) + "\n")
        with report_damage(self.work):
            return Plan.from_dict(json.loads(place.read_text(encoding="utf-8")))

    def _files(self, rung: Rung) -> RunPaths:
        tuned = None if rung.spec.finetune is None else rung.spec.finetune.to_dict()
        key = [self.resume.key, rung.spec.training.to_dict(), tuned]
        return RunPaths(self.work / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12])

    def _attempt(self, rung: Rung) -> Attempt:
        files = self._files(rung)
        result, margins = files.root / "attempt.json", files.root / "margins.npz"
        if not result.is_file():
            start, inputs = time.monotonic(), self.read(rung.spec.request)
            resume = ResumePoint(f"{self.resume.label}, {rung.name}", files.unfinished_training, files.root.name)
            run = train_method(rung.spec, inputs, self.seed, self.device, self.settings, resume)
            run.save(files.root)
            save_margins(margins, validation_margins(run.method, inputs.examples["val"].to(self.device), inputs.labels))
            record = {
                "epoch": run.record.epoch,
                "seconds": time.monotonic() - start,
                "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
            }
            write_text(result, json.dumps(record) + "\n")
            files.unfinished_training.unlink(missing_ok=True)
        with report_damage(files.root):
            return Attempt(rung.name, load_margins(margins), **json.loads(result.read_text(encoding="utf-8")))

    def _load(self, rung: Rung) -> Run:
        """Read the finished run of a training recipe (a `Rung`) from its files.

        Files are read even if this process trained the run, so that an interrupted choice gives the same result.
        """
        files, inputs = self._files(rung), self.read(rung.spec.request)
        with report_damage(files.root):
            header = read_checkpoint(files.checkpoint)
            method = load_checkpoint(header, inputs.task(), inputs.encoder).to(self.device)
            rows = pd.read_csv(files.history).to_dict("records")
            history = [
                {str(name): int(value) if name == "epoch" else float(value) for name, value in row.items()}
                for row in rows
            ]
            timing = json.loads(files.timing.read_text(encoding="utf-8"))
        record = replace(header.record, known_images=read_known_images(header, self.device))
        result = TrainingResult(record.epoch, record.val_auc, history, timing, record.selected_by)
        return Run(self.spec.name, method, record, rung.spec.training, result)
