"""Trained models, loaded by `open_trained` from a run's checkpoint or an exported folder, to score images.

An export may come from a stranger, so its tensors are checked before they score images.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.encoders.base import Encoder, family_code_hash, first_line, load_encoder, part_widths
from duplex.encoders.image_blocks import block_input_shape, cached_blocks
from duplex.errors import UsageError, as_usage_error, shown
from duplex.evaluation.probabilities import Confidence
from duplex.evaluation.vectors import read_word_vectors
from duplex.features.encode import WantedOutputs
from duplex.features.file import IMPORTED, shortened
from duplex.labels import LabelSpace, World
from duplex.methods import portable
from duplex.methods.base import Method, MethodContext, PrimitiveVectors
from duplex.methods.blocks import FINETUNED_PREFIX, FinetunedBlocks, finetuned_blocks_factory
from duplex.methods.finetuned import WithFinetuning, with_finetuned_features
from duplex.methods.prompts import encode_words
from duplex.methods.registry import find_method
from duplex.options import FinetuneOptions
from duplex.recognition.answers import Candidates, portable_term_function, sum_scorer
from duplex.system.files import expanded_path, sha256
from duplex.training import checkpoint
from duplex.training.novelty import PREFIX, NoveltyDetector
from duplex.training.scoring import Calibration, feasible_compositions


@dataclass
class LazyEncoder:
    """A trained model's frozen encoder, whose two towers are loaded when first used."""

    record: Mapping[str, str]  # identity, name and precisions of the encoder, as in the checkpoint
    device: str
    towers: dict[str, Encoder] = field(default_factory=dict)  # "image" or "text" -> loaded encoder

    def __post_init__(self) -> None:
        width = self.record["dim"]
        if not str(width).isdecimal() or not 0 < int(width) < 1 << 20:
            problem = f"the encoder width {shown(width)} is invalid"
            raise UsageError(f"{problem}; make the model again or choose another")

    def tower(self, which: str) -> Encoder:
        """The encoder with its "image" or "text" tower; `UsageError` if not that of training."""
        if which not in self.towers:
            name = self.record["name"]
            precision = self.record["text_precision" if which == "text" else "precision"]
            both = which == "text" and precision == self.record["precision"] and "image" not in self.towers
            towers = "both" if both else which
            tag = self.record["tag"] or None
            options: Any = {"precision": precision, "resize": self.record.get(checkpoint.RESIZE)}
            encoder = load_encoder(name, tag, towers=towers, device=self.device, **options)
            identity = encoder.identity.to_dict()
            for key in ("encoder", "architecture", "weights", "preprocessing"):
                if self.record.get(key) != identity[key]:
                    raise UsageError(
                        f"the encoder {name!r} differs from that of training ({key} {shortened(identity[key])}, "
                        f"not {shortened(self.record.get(key))}); restore the former encoder or train again"
                    )
            if not self.towers and encoder_code_changed(self.record):
                problem = f"the code of the encoder {name!r} has changed since the model was trained"
                advice = "predictions may be wrong until you train the model again"
                print(f"duplex: {problem}; {advice}", file=sys.stderr)
            self.towers |= dict.fromkeys(("image", "text") if both else (which,), encoder)
        return self.towers[which]

    @property
    def dim(self) -> int:
        return int(self.record["dim"])


def encoder_code_changed(record: Mapping[str, str]) -> bool:
    """Whether the code of a model's plug-in encoder has changed since training."""
    return "code" in record and record["code"] != family_code_hash(record["name"])


class TrainedModel(ABC):
    """Base class of trained models: they score candidates and hold labels, encoder and calibration."""

    where: str  # path of the model, for messages
    kind: str  # kind of the method
    fingerprint: str  # identifies the content: another model may later be saved under the same path
    labels: LabelSpace
    backbone: LazyEncoder
    calibration: Mapping[str, Calibration]  # world -> bias and feasibility threshold
    confidence: Confidence  # temperature and prior of the answers' probabilities
    novelty: NoveltyDetector | None  # finds images unlike all pairs
    needs: frozenset[str]  # inputs of the method, such as "cls" and "patch"
    has_finetuned_blocks: bool  # of the image tower; they need block inputs, too
    finetuned: FinetunedBlocks | None = None  # computes features with the fine-tuned blocks, if any

    @property
    def outputs(self) -> WantedOutputs:
        """Encoder outputs needed besides CLS features: patch tokens, block inputs, pixels."""
        patches = "patch" in self.needs
        return WantedOutputs.of_record(self.backbone.record, patches, self.has_finetuned_blocks)

    @abstractmethod
    def candidates(self, world: World) -> Candidates:
        """The compositions that answers in a world are chosen from, with their scorer."""

    @abstractmethod
    def tensors(self, world: World) -> dict[str, Tensor] | None:
        """The tensors from which an export computes scores; None: no export is possible."""

    def on_finetuned_features(self, candidates: Candidates) -> Candidates:
        """`candidates` with a scorer that first runs the fine-tuned blocks, if there are any."""
        if self.finetuned is None:
            return candidates
        terms = candidates.terms and with_finetuned_features(candidates.terms, self.finetuned)
        scorer = with_finetuned_features(candidates.scorer, self.finetuned)
        return replace(candidates, scorer=scorer, terms=terms)

    def calibration_of(self, world: str) -> Calibration:
        """The calibration for a world; raises `UsageError` if the model was not trained for it."""
        if world not in self.calibration:
            worlds = [f"the {each} world (--world {each})" for each in self.calibration]
            choice = " or ".join(worlds) or "another model"
            raise UsageError(f"{self.where} was not trained for the {world} world; choose {choice}")
        return self.calibration[world]


class TrainedRun(TrainedModel):
    """A trained model, loaded from a run's checkpoint."""

    def __init__(self, path: Path, device: torch.device, words: Path | None = None) -> None:
        """Load a checkpoint; `words` is the GloVe-format file of its training, if any."""
        header = checkpoint.read_checkpoint_header(path)
        record = header.record
        if record.encoder.get("encoder") == IMPORTED:
            problem = f"{path} was trained on features of an unknown encoder"
            raise UsageError(f"{problem}; choose a run with a known encoder")
        self.record = record
        self.where = str(path.parent)
        self.kind = record.kind
        self.fingerprint = header.fingerprint
        self.labels = record.labels
        self.calibration = record.calibration or {}
        self.confidence = record.confidence
        self.needs = find_method(record.kind).needs(record.options)
        self.has_finetuned_blocks = record.finetune is not None
        self.backbone = LazyEncoder(record.encoder, str(device))
        self._words_file = words
        needs_text = "text" in self.needs or ("words" in self.needs and words is None)
        tower = self.backbone.tower("text").text if needs_text else None
        shapes: dict[str, tuple[int, ...]] = {"cls": (self.backbone.dim,)}
        if "patch" in self.needs:
            shapes["patch"] = self.backbone.tower("image").patch_shape
        words_of_labels = self.words if "words" in self.needs else None
        parts = part_widths(record.encoder)
        context = MethodContext(self.labels, shapes, tower, words_of_labels, parts=parts)
        if record.finetune is not None:
            blocks = partial(finetuned_blocks_factory, record.encoder, device=str(device))
            image_tower = self.backbone.tower("image")
            cached = cached_blocks(image_tower, record.encoder)
            shapes["block_inputs"] = block_input_shape(image_tower, cached)
            make_blocks = blocks(record.finetune)
            context = replace(context, finetuned_blocks=make_blocks, member_blocks=lambda options: blocks(options)())
        method = checkpoint.load_checkpoint(header, context, record.encoder)
        self.method: Method[Any] = method.to(device)
        self.finetuned = self.method.blocks if isinstance(self.method, WithFinetuning) else None
        self.novelty = checkpoint.read_novelty(header, device)

    @cached_property
    def words(self) -> PrimitiveVectors:
        """The labels' word vectors as in training: from the same file or the text tower."""
        file = self._words_file
        labels = self.labels
        digest = None if file is None else sha256(file)
        if digest != self.record.encoder.get(checkpoint.WORD_VECTORS):
            problem = f"{self.where} was trained with other word vectors"
            fix = "set evaluation.word_vectors in params.yaml (in Python: `word_vectors`) as in training"
            raise UsageError(f"{problem}; run this in its project, or {fix}")
        if file is None:
            return PrimitiveVectors(*encode_words(labels, self.backbone.tower("text").text))
        vectors = read_word_vectors(file, [*labels.states, *labels.objects]).vectors
        return PrimitiveVectors(*map(torch.from_numpy, np.split(vectors, [len(labels.states)])))

    def candidates(self, world: World) -> Candidates:
        compositions = self.labels.candidates(world, "train")
        method = self.method
        calibration = self.calibration_of(world)
        feasible = None
        if calibration.threshold is not None:
            mask = feasible_compositions(method, self.words, calibration)
            feasible = None if mask is None else mask[compositions]
        terms = method.score_terms(compositions.copy())
        # a sum of terms encodes prompts once
        scorer = method.scorer(compositions.copy()) if terms is None else sum_scorer(terms)
        return Candidates.of(
            self.labels,
            compositions,
            feasible=feasible,
            confidence=self.confidence,
            world=world,
            scorer=scorer,
            terms=terms,
            probabilities=method.probabilities,
        )

    def tensors(self, world: World) -> dict[str, Tensor] | None:
        return self.method.portable(self.labels.candidates(world, "train"))


class ExportedModel(TrainedModel):
    """A trained model in a folder of `duplex export`: tensors that score one world's candidates."""

    def __init__(self, header: checkpoint.ModelHeader, tensors: Mapping[str, Tensor], device: torch.device):
        fields = header.fields
        self.where = str(header.path.parent)
        self.kind = fields["kind"]
        self.fingerprint = header.fingerprint
        self.labels = LabelSpace.from_dict(fields["labels"])
        self.calibration = {fields["world"]: Calibration(**fields["calibration"])}
        self.confidence = Confidence(**fields["confidence"])
        self.needs = frozenset({"cls"})
        self.has_finetuned_blocks = bool(fields["finetune"])
        self.backbone = LazyEncoder(fields["encoder"], str(device))
        self.novelty = NoveltyDetector.from_tensors(tensors, device)
        scoring = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        self._tensors = {name: tensor.to(device) for name, tensor in scoring.items()}
        if self.has_finetuned_blocks:
            self.backbone.tower("image")  # raises unless it is the encoder of training
            options = FinetuneOptions.from_dict(fields["finetune"])
            blocks = finetuned_blocks_factory(fields["encoder"], options, str(device))().to(device)
            finetuned = [name for name in scoring if name.startswith(FINETUNED_PREFIX)]
            named = {name.removeprefix(FINETUNED_PREFIX): self._tensors[name] for name in finetuned}
            try:
                blocks.load_state_dict(named)
            except RuntimeError as error:
                raise ValueError("its fine-tuned blocks do not fit the encoder") from error
            self.finetuned = blocks.eval()

    def candidates(self, world: World) -> Candidates:
        t = self.tensors(world)
        compositions = self.labels.composition(*(t[name].cpu().numpy() for name in ("state_of", "object_of")))
        feasible = t["feasible"].cpu().numpy() if "feasible" in t else None
        terms = portable_term_function(t)
        candidates = Candidates.of(
            self.labels,
            compositions,
            feasible=feasible,
            confidence=self.confidence,
            world=world,
            scorer=sum_scorer(terms),
            terms=terms,
            probabilities=partial(portable.probabilities, t),
        )
        return self.on_finetuned_features(candidates)

    def tensors(self, world: World) -> dict[str, Tensor]:
        self.calibration_of(world)
        return self._tensors


CANDIDATE_TYPES = {"state_of": torch.int64, "object_of": torch.int64, "seen": torch.bool, "feasible": torch.bool}


def check_tensors(tensors: Mapping[str, Tensor], labels: LabelSpace, dim: int) -> None:
    """Raise `ValueError` if an export's tensors cannot score features of width `dim`."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (tensor.isnan() if name == "log_prior" else ~tensor.isfinite()).any():
            raise ValueError(f"its tensor {name!r} contains NaN or infinity")
    size = len(tensors["state_of"])
    if not size:
        raise ValueError("it has no candidates")
    for name, dtype in CANDIDATE_TYPES.items():
        found = tuple(tensors[name].shape), tensors[name].dtype
        if found != ((size,), dtype):
            problem = f"its tensor {name!r} has shape {found[0]} and type {found[1]}"
            raise ValueError(f"{problem}; expected {(size,)} and {dtype}")
    for name, words in (("state_of", labels.states), ("object_of", labels.objects)):
        if not ((tensors[name] >= 0) & (tensors[name] < len(words))).all():
            numbers = f"numbers outside the range 0 to {len(words) - 1}"
            raise ValueError(f"its tensor {name!r} has {numbers}")
    if not tensors["feasible"].any():
        raise ValueError("it excludes every candidate")
    features = torch.full((1, dim), dim**-0.5, device=tensors["state_of"].device)
    try:
        scores = sum_scorer(portable_term_function(tensors))({"cls": features})
    except (RuntimeError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"its tensors have mismatched shapes or types: {reason}") from error
    if scores.shape != (1, size) or scores.isnan().any():
        shapes = f"have shape {tuple(scores.shape)}, not {(1, size)}"
        problem = "contain NaN" if scores.shape == (1, size) else shapes
        raise ValueError(f"its scores for one image {problem}")


HUB = "hf-hub:"
CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"  # in a run's folder, in an export


@as_usage_error()
def open_trained(where: str | Path, device: torch.device, words: Path | None = None) -> TrainedModel:
    """Load a trained model; every error is a `UsageError`, since the user named the model.

    where: a run's folder or checkpoint, a folder of `duplex export`, or `hf-hub:OWNER/NAME`.
    """
    is_on_hub = str(where).startswith(HUB)
    path = download(str(where).removeprefix(HUB)) if is_on_hub else expanded_path(where, "model")
    if is_on_hub or (path / MODEL).is_file():
        return _open_export(path, device)
    if path.is_file():
        return TrainedRun(path, device, words)
    if (path / CHECKPOINT).is_file():
        return TrainedRun(path / CHECKPOINT, device, words)
    problem = f"holds neither {CHECKPOINT} nor {MODEL}" if path.is_dir() else "does not exist"
    expected = f"a run such as artifacts/shapes/duplex/0, a folder of `duplex export`, or {HUB}OWNER/NAME"
    raise UsageError(f"{path} {problem}; expected {expected}")


def _open_export(folder: Path, device: torch.device) -> ExportedModel:
    header = checkpoint.read_header(folder / MODEL, "export")
    tensors = checkpoint.read_tensors(header)
    try:
        model = ExportedModel(header, tensors, device)
        check_tensors(tensors, model.labels, model.backbone.dim)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        problem = f"{header.path} cannot score images ({reason})"
        raise UsageError(f"{problem}; export or fit the model again") from error
    return model


def download(name: str, **settings: Any) -> Path:
    """The local folder of the export in the repository `name`, downloaded unless cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[MODEL], **settings))
    except Exception as error:  # of many kinds: network, cache and hub
        problem = f"{HUB}{name} is not on disk and could not be downloaded ({first_line(error)})"
        raise UsageError(f"{problem}; check the name and the network connection") from error
