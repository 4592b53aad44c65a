"""Write a trained model as a folder that works without this package: tensors, labels, model card, numpy script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from duplex.encoders.random_weights import is_random
from duplex.errors import DuplexError, UsageError
from duplex.labels import World
from duplex.layers import score_formula
from duplex.recognition import numpy_example
from duplex.recognition.card import RunFacts, model_card, read_notes
from duplex.recognition.fitted_files import FIT, STATISTICS
from duplex.recognition.onnx_files import EXAMPLE as ONNX_EXAMPLE
from duplex.recognition.onnx_files import TOWER, TRAINED
from duplex.recognition.sources import CONFIG, FINETUNED_FORMAT, FORMAT, TENSORS, first_line
from duplex.recognition.trained import TrainedModel
from duplex.system.files import refuse_existing, replace_folder, save_tensors, sha256
from duplex.training.checkpoint import digest, with_checksum

README, EXAMPLE, FORMULA = "README.md", "recognize.py", "score_formula.py"
NAMES = {CONFIG, TENSORS, README, EXAMPLE, FORMULA, TRAINED, TOWER, ONNX_EXAMPLE, FIT, STATISTICS, "__pycache__"}


def export(
    trained: TrainedModel,
    world: World,
    out: Path,
    facts: RunFacts,
    add_files: Callable[[Path], None] = lambda folder: None,
    *,
    force: bool = False,
) -> None:
    """Export a trained model to the folder `out`, atomically.

    Raise `UsageError` if it cannot be exported, or has an encoder with random weights, or `out` exists.

    world: closed or open, the world whose candidates the exported model scores.
    facts: metrics and counts for the model card.
    add_files: function that writes further files to the folder given to it.
    force: replace a model at `out`.
    """
    refuse_existing_model(out, force=force)
    if is_random(trained.backbone.record.get("tag")):
        raise UsageError(f"{trained.where} has an encoder with random weights, for trials; train with a pretrained one")
    tensors = exported_tensors(trained, world)
    options = None if trained.finetuned is None else trained.finetuned.options.to_dict()
    with replace_folder(out.resolve()) as folder:  # a link to a folder stays
        save_tensors(folder / TENSORS, tensors)
        (folder / TENSORS).chmod(0o644)  # safetensors writes files that their owner alone may read
        add_files(folder)
        fields = {
            "format": FORMAT if options is None else FINETUNED_FORMAT,
            "kind": trained.kind,
            "world": world,
            "labels": trained.labels.to_dict(),
            "encoder": dict(trained.backbone.record),
            "calibration": trained.calibration_of(world).to_dict(),
            "confidence": trained.confidence.to_dict(),
            **({} if options is None else {"finetune": options}),
            "tensors": digest(tensors),
            "files": {name: sha256(folder / name) for name in (TRAINED, TOWER) if (folder / name).is_file()},
        }
        config = with_checksum(fields)
        (folder / CONFIG).write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        (folder / README).write_text(model_card(config, tensors, facts, read_notes(out / README)), encoding="utf-8")
        shutil.copyfile(score_formula.__file__, folder / FORMULA)
        example = Path(numpy_example.__file__).read_text(encoding="utf-8")
        (folder / EXAMPLE).write_text(
            example.replace(score_formula.__name__, FORMULA.removesuffix(".py")), encoding="utf-8"
        )


def exported_tensors(trained: TrainedModel, world: World) -> dict[str, Tensor]:
    """Return the tensors of an export: for scores, for probabilities of answers, and to detect unknown images.

    These include masks [C] of seen and of feasible candidates and their log prior probabilities [C]. Raise `UsageError`
    if the model's method cannot be exported.
    """
    tensors = trained.tensors(world)
    if tensors is None:
        raise UsageError(f"methods of kind {trained.kind!r} cannot be exported; choose another run")
    candidates = trained.candidates(world)
    masks = {"seen": candidates.seen, "feasible": candidates.feasible}
    tensors = {**tensors, **{name: torch.from_numpy(mask.copy()) for name, mask in masks.items()}}
    tensors |= {} if trained.known_images is None else trained.known_images.tensors()
    tensors["log_prior"] = torch.from_numpy(candidates.confidence.log_prior(**masks))
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def refuse_existing_model(out: Path, *, force: bool) -> None:
    """`refuse_existing` for a model's folder; even `force` deletes no files but a model's."""
    refuse_existing(out, force=force)
    others = sorted({path.name for path in out.iterdir()} - NAMES) if out.is_dir() else []
    if others:
        raise UsageError(f"{out} holds other files than a model's, such as {others[0]}; choose another folder")


def upload(folder: Path, name: str) -> str:
    """Upload a folder to the Hugging Face repository `name`, which is created if missing; return its URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by duplex")
    except Exception as error:  # of many kinds: network and hub
        raise DuplexError(f"{name} could not be uploaded to {api.endpoint}: {first_line(error)}; log in and try again"
        ) from error  # fmt: skip
    return f"{api.endpoint}/{name}"
