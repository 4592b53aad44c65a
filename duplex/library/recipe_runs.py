"""Training runs of recipes (settings that a search compares): each is trained once, and its result read from files."""

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
import torch

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.features.examples import Examples
from duplex.library.finetuned_recipes import SearchPlan
from duplex.library.inputs import InputRequest, RunInputs
from duplex.library.recipe_search import Recipe, RecipeResult
from duplex.library.run_training import Run, train_method
from duplex.methods.base import Method
from duplex.system.files import json_digest, sha256, write_text
from duplex.training.checkpoint import CheckpointHeader, Record, load_checkpoint, read_checkpoint, read_known_images
from duplex.training.loop import ResumePoint
from duplex.training.scoring import validation_margins


@dataclass(frozen=True)
class RecipeRuns:
    """Store of the runs that a search for training settings (recipes) makes on one data set with one seed.

    Each recipe has a folder of files inside `folder`. Results and tensors are always read from files, even for a recipe
    trained in this process, so that an interrupted search makes the same choice.
    """

    folder: Path
    read: Callable[[InputRequest], RunInputs]  # returns the data set's inputs for a request
    seed: int
    device: torch.device
    settings: EvaluationParams
    label: str = ""  # name of what is trained, for the progress
    key: str = ""  # hash of what the runs depend on besides their recipes
    accuracy: Callable[[Run, Examples], float | None] = lambda *_: None  # percent, of a run on validation images

    def files(self, recipe: Recipe) -> RunPaths:
        """Return the paths of a training's files, such as the checkpoint; a hash of its settings names the folder."""
        spec = recipe.spec
        tuned = None if spec.finetune is None else spec.finetune.to_dict()
        key = [self.key, spec.kind, spec.options.to_dict(), spec.training.to_dict(), tuned]
        return RunPaths(self.folder / json_digest(key)[:12])

    def result(self, recipe: Recipe) -> RecipeResult:
        """Return the validation result of a training recipe (settings tried), trained first unless its files exist.

        Raises `DuplexError` if the files are damaged or of another recipe.
        """
        files = self.files(recipe)
        result, margins = files.root / "attempt.json", files.root / "margins.npz"
        if not result.is_file():
            self._train(recipe, files, result, margins)
        with report_damage(files.root), np.load(margins) as arrays:
            record = json.loads(result.read_text(encoding="utf-8"))
            for name, digest in self._digests(recipe, margins).items():
                if record.pop(name, None) != digest:
                    raise DuplexError(f"{result.name} is of another {name}")
            return RecipeResult(recipe.name, Margins(**arrays), **record)

    def _train(self, recipe: Recipe, files: RunPaths, result: Path, margins: Path) -> None:
        start, inputs = time.monotonic(), self.read(recipe.spec.request)
        label = ", ".join(filter(None, (self.label, recipe.name)))
        resume = ResumePoint(label, files.unfinished_training, files.root.name)
        run = train_method(recipe.spec, inputs, self.seed, self.device, self.settings, resume)
        val = inputs.examples["val"].to(self.device)
        accuracy = self.accuracy(run, val)
        run.write(files)
        np.savez(margins, **asdict(validation_margins(run.method, val, inputs.labels)))
        record = {
            "epoch": run.record.epoch,
            "accuracy": accuracy,
            "seconds": time.monotonic() - start,
            "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
            **self._digests(recipe, margins),
        }
        write_text(result, json.dumps(record) + "\n")
        files.unfinished_training.unlink(missing_ok=True)

    def _header(self, recipe: Recipe) -> CheckpointHeader:
        """Read a checkpoint's metadata; raise `DuplexError` if it was trained with other settings than `recipe`."""
        header, spec = read_checkpoint(self.files(recipe).checkpoint), recipe.spec
        record, training = header.record, spec.training.result_settings()
        stored = [record.kind, record.options, record.finetune, record.seed, dict(record.training) | training]
        if stored != [spec.kind, spec.options, spec.finetune, self.seed, record.training]:
            raise DuplexError(f"{header.path.name} is of another recipe")
        return header

    def _digests(self, recipe: Recipe, margins: Path) -> dict[str, str]:
        """Return digests of a training's checkpoint and of its file of margins (from which validation AUC is computed).

        They are stored with the training's result, so that a file that was replaced afterwards is noticed.
        """
        return {"checkpoint": self._header(recipe).fingerprint, "margins": sha256(margins)}

    def load(self, recipe: Recipe) -> tuple[Record, Method[Any], RunInputs]:
        """Load a training with the settings `recipe`: checkpoint metadata, trained method, features with labels."""
        files, inputs = self.files(recipe), self.read(recipe.spec.request)
        with report_damage(files.root):
            header = self._header(recipe)
            method = load_checkpoint(header, inputs.context(), inputs.encoder).to(self.device)
            record = replace(header.record, known_images=read_known_images(header, self.device))
        return record, method, inputs

    def plan(self, minutes: float, make: Callable[[], SearchPlan]) -> SearchPlan:
        """Return the plan of a search (numbers of fine-tuned blocks and learning rates to try) for a time limit.

        The plan is read from its file; without a file, `make` is called and its result is stored.
        """
        path = self.folder / f"plan-{minutes:g}.json"
        if not path.is_file():
            write_text(path, json.dumps(make().to_dict()) + "\n")
        with report_damage(self.folder):
            return SearchPlan.from_dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def report_damage(folder: Path) -> Iterator[None]:
    """Context manager: raise a `DuplexError` that names `folder` if files of trainings in it cannot be read."""
    try:
        yield
    except (DuplexError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, BadZipFile
    ) as error:  # fmt: skip
        problem = str(error).partition(";")[0]  # what comes after is advice for other folders
        raise DuplexError(
            f"{folder} has a damaged file ({problem}); delete the folder and run the same command again"
        ) from error
