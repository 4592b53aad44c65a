"""Trials: trainings that are compared by validation, each in a folder named by a digest of what it is made from.

`duplex tune` tries a grid of trials, `finetune: auto` and `duplex fit` a sequence in which a trial's result decides the
next (`duplex.training.recipes`). A trial whose files exist is not trained again, and an interrupted one continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.errors import DuplexError
from duplex.evaluation.metrics import Components, Margins
from duplex.features.tokens import Examples
from duplex.methods.base import Method
from duplex.system.files import json_digest, sha256, write_text
from duplex.training.checkpoint import ModelHeader, Record, load_checkpoint, read_checkpoint, read_novelty
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.run import MethodSpec, Run, train_run


@dataclass(frozen=True)
class Trial:
    """A method with its options, to be trained with a seed on the data set of a store of trials."""

    name: str  # for messages, such as `2 blocks, rate 0.0003`
    spec: MethodSpec
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Number of the image tower's last blocks that are fine-tuned; 0: none."""
        return 0 if self.spec.finetune is None else self.spec.finetune.blocks

    @property
    def rate(self) -> float | None:
        """Learning rate of the fine-tuned blocks."""
        return None if self.spec.finetune is None else self.spec.finetune.learning_rate


@dataclass(frozen=True)
class TrialResult:
    """What validation says about a trial."""

    name: str
    margins: Margins  # of the validation images, closed world
    epoch: int  # the best one
    auc_all: float | None = None  # percent, with every pair a candidate; None: not for the open world
    accuracy: float | None = None  # percent, of the most probable answers
    seconds: float = 0.0  # of training and validation
    seconds_per_epoch: float = 0.0

    @property
    def components(self) -> Components:
        return Components.of(self.margins)

    @property
    def auc(self) -> float:
        """Validation AUC, in percent."""
        return 100 * (self.components.auc or 0.0)


@dataclass(frozen=True)
class Trials:
    """Store of the trials on one data set, each with a folder of its own inside `folder`.

    Results and tensors are always read from files, even those of a trial trained in this process, so that an
    interrupted search makes the same choice.
    """

    folder: Path
    read: Callable[[InputRequest], RunInputs]  # returns the data set's inputs for a request
    device: torch.device
    settings: EvaluationParams
    label: str = ""  # name of what is trained, for the progress
    key: str = ""  # hash of what the trials depend on besides their methods and seeds
    accuracy: Callable[[Run, Examples], float | None] | None = None  # percent, of a run on validation images

    def files(self, trial: Trial) -> RunPaths:
        spec = trial.spec
        tuned = None if spec.finetune is None else spec.finetune.to_dict()
        key = [self.key, spec.kind, spec.options.to_dict(), spec.training.to_dict(), tuned, trial.seed]
        return RunPaths(self.folder / json_digest(key)[:12])

    def result(self, trial: Trial) -> TrialResult:
        """The result of a trial, which is trained first unless its files exist; `DuplexError` for damaged ones."""
        files = self.files(trial)
        result, margins = files.root / "result.json", files.root / "margins.npz"
        if not result.is_file():
            self._train(trial, files, result, margins)
        with report_damage(files.root), np.load(margins) as arrays:
            record = json.loads(result.read_text(encoding="utf-8"))
            for name, digest in self._digests(trial, margins).items():
                if record.pop(name, None) != digest:
                    raise DuplexError(f"{result.name} is of another {name}")
            return TrialResult(trial.name, Margins(**arrays), **record)

    def _train(self, trial: Trial, files: RunPaths, result: Path, margins: Path) -> None:
        start, inputs = time.monotonic(), self.read(trial.spec.request)
        label = ", ".join(filter(None, (self.label, trial.name)))
        resume = ResumePoint(label, files.unfinished_training, files.root.name)
        run = train_run(trial.spec, inputs, trial.seed, self.device, self.settings, resume)
        accuracy = None if self.accuracy is None else self.accuracy(run, inputs.examples["val"].to(self.device))
        run.write(files)
        assert run.margins is not None
        np.savez(margins, **asdict(run.margins))
        record = {
            "epoch": run.record.epoch,
            "auc_all": run.val_auc_all,
            "accuracy": accuracy,
            "seconds": time.monotonic() - start,
            "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
            **self._digests(trial, margins),
        }
        write_text(result, json.dumps(record) + "\n")
        files.unfinished_training.unlink(missing_ok=True)

    def _header(self, trial: Trial) -> ModelHeader:
        header, spec = read_checkpoint(self.files(trial).checkpoint), trial.spec
        record, training = header.record, spec.training.result_settings()
        stored = [record.kind, record.options, record.finetune, record.seed, dict(record.training) | training]
        if stored != [spec.kind, spec.options, spec.finetune, trial.seed, record.training]:
            raise DuplexError(f"{header.path.name} is of another trial")
        return header

    def _digests(self, trial: Trial, margins: Path) -> dict[str, str]:
        """Digests that a result stores, so that a file that was replaced afterwards is noticed."""
        return {"checkpoint": self._header(trial).fingerprint, "margins": sha256(margins)}

    def load(self, trial: Trial) -> tuple[Record, Method[Any], RunInputs]:
        """Checkpoint metadata and trained method of a finished trial, and the inputs that it was trained on."""
        files, inputs = self.files(trial), self.read(trial.spec.request)
        with report_damage(files.root):
            header = self._header(trial)
            method = load_checkpoint(header, inputs.context(), inputs.encoder).to(self.device)
            record = replace(header.record, novelty=read_novelty(header, self.device))
        return record, method, inputs

    def run(self, trial: Trial) -> Run:
        """A finished trial as the run that its training returned."""
        record, method, _ = self.load(trial)
        files = self.files(trial)
        with report_damage(files.root):
            rows = pd.read_csv(files.history).to_dict("records")
            history = [
                {str(name): int(value) if name == "epoch" else float(value) for name, value in row.items()}
                for row in rows
            ]
            timing = json.loads(files.timing.read_text(encoding="utf-8"))
        result = TrainingResult(record.epoch, record.val_auc, history, timing, record.selected_by)
        return Run(trial.spec.name, method, record, trial.spec.training, result)


@contextmanager
def report_damage(folder: Path) -> Iterator[None]:
    """Context manager: raise a `DuplexError` that names `folder` if files of trials in it cannot be read."""
    try:
        yield
    except (DuplexError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, BadZipFile
    ) as error:  # fmt: skip
        problem = str(error).partition(";")[0]  # what comes after is advice for other folders
        raise DuplexError(
            f"{folder} has a damaged file ({problem}); delete the folder and run the same command again"
        ) from error
