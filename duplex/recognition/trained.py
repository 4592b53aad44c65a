"""Load the trained model of a recognizer: a run's checkpoint or an exported folder."""

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

from duplex.encoders import Encoder, load_encoder
from duplex.encoders.families import family_code
from duplex.encoders.image_blocks import block_input_shape
from duplex.errors import UsageError, shown
from duplex.evaluation.confidence import Confidence
from duplex.evaluation.glove import read_word_vectors
from duplex.features.encoding import OutputSpec
from duplex.features.identity import IMPORTED
from duplex.labels import LabelSpace, World
from duplex.layers import portable
from duplex.layers.finetuned_blocks import FinetunedBlocks, finetuned_blocks_factory
from duplex.layers.prompt_paths import word_vectors
from duplex.methods.base import Method, MethodContext, PrimitiveVectors
from duplex.methods.registry import find_method
from duplex.methods.with_finetuning import FINETUNED_PREFIX, WithFinetuning, with_finetuned_features
from duplex.options import FinetuneOptions
from duplex.recognition.added_words import portable_terms
from duplex.recognition.candidates import Candidates, sum_of
from duplex.system.files import json_digest, sha256
from duplex.training.calibration import Calibration, feasible_compositions
from duplex.training.checkpoint import WORD_VECTORS, load_checkpoint, read_checkpoint, read_known_images
from duplex.training.known_images import PREFIX, KnownImages


@dataclass
class Backbone:
    """The frozen encoder of a trained model; its image and text towers are loaded at first use."""

    record: Mapping[str, str]  # identity, name and precisions of the encoder, as in the checkpoint
    device: str
    towers: dict[str, Encoder] = field(default_factory=dict)  # "image" or "text" -> loaded encoder

    def __post_init__(self) -> None:
        missing = [key for key in ("name", "tag", "precision", "text_precision", "dim") if key not in self.record]
        if missing:
            raise UsageError(f"the model lacks the {missing[0]} of its encoder; train again with this version")
        if not str(self.record["dim"]).isdecimal() or not 0 < int(self.record["dim"]) < 1 << 20:
            raise UsageError(f"the model's encoder has the width {shown(self.record['dim'])}; train or export it again")

    def tower(self, which: str) -> Encoder:
        """Return the encoder with its "image" or "text" tower loaded.

        Raise `UsageError` if the encoder of that name on this machine is not the one that the model was trained with.
        Both towers are loaded together if they have the same precision, since one file holds the weights of both. Print
        a line on stderr, once, if the code of a plug-in encoder has changed since training.

        which: "image" or "text".
        """
        if which not in self.towers:
            name, tag = self.record["name"], self.record["tag"] or None
            precision = self.record["text_precision" if which == "text" else "precision"]
            both = which == "text" and precision == self.record["precision"] and "image" not in self.towers
            encoder = load_encoder(name, tag, towers="both" if both else which, device=self.device, precision=precision)
            identity = encoder.identity.to_dict()
            for key in ("encoder", "architecture", "weights", "preprocessing"):
                if self.record.get(key) != identity[key]:
                    raise UsageError(
                        f"the model was trained on features of {key} {self.record.get(key)!r}; the encoder named "
                        f"{name!r} on this machine has {identity[key]!r}; restore that encoder or train again"
                    )
            if not self.towers and code_changed(self.record):
                print(f"duplex: the code of {name!r} has changed since the model was trained", file=sys.stderr)
            self.towers |= dict.fromkeys(("image", "text") if both else (which,), encoder)
        return self.towers[which]

    @property
    def dim(self) -> int:
        return int(self.record["dim"])


def code_changed(record: Mapping[str, str]) -> bool:
    """Return whether the code of a model's plug-in encoder has changed since training; False for built-in encoders."""
    return "code" in record and record["code"] != family_code(record["name"])


class TrainedModel(ABC):
    """Base class of trained models, which score candidate compositions and hold labels, encoder and calibration."""

    where: str  # path of the model, for messages
    kind: str  # kind of the method
    fingerprint: str  # digest of the model's content, since another model may later be saved under the same path
    labels: LabelSpace
    backbone: Backbone
    calibration: Mapping[str, Calibration]  # world -> bias and feasibility threshold
    confidence: Confidence  # temperature and prior of the answers' probabilities
    known_images: KnownImages | None  # finds images that resemble no training image
    needs: frozenset[str]  # inputs of the method, such as "cls" and "patch"
    finetuned: FinetunedBlocks | None = None  # computes features with the fine-tuned blocks; None if there are none

    @property
    def outputs(self) -> OutputSpec:
        """Which outputs of the image tower the model takes as inputs besides CLS features: patch tokens, or the
        activations that enter the last blocks."""
        blocks = int(self.backbone.record["block_inputs"]) if self.reads_block_inputs else 0
        return OutputSpec("patch" in self.needs, blocks, int(self.backbone.record.get("bits", 16)))

    @property
    def reads_block_inputs(self) -> bool:
        """Whether the model has fine-tuned blocks of the image tower; it then computes features from block inputs, the
        activations that enter these blocks."""
        return self.finetuned is not None

    @abstractmethod
    def candidates(self, world: World) -> Candidates:
        """Return the compositions that answers in a world (closed or open) are chosen from, with their scorer."""

    @abstractmethod
    def tensors(self, world: World) -> dict[str, Tensor] | None:
        """Return the tensors that an export needs to compute scores; None if the model's method cannot be exported."""

    def on_finetuned_features(self, candidates: Candidates) -> Candidates:
        """Return `candidates` with another scoring function, which first computes features by the fine-tuned blocks.

        Return them unchanged if the model has no such blocks.
        """
        if self.finetuned is None:
            return candidates
        terms = None if candidates.terms is None else with_finetuned_features(candidates.terms, self.finetuned)
        return replace(candidates, scorer=with_finetuned_features(candidates.scorer, self.finetuned), terms=terms)

    def calibration_of(self, world: str) -> Calibration:
        """Return the calibration for a world (closed or open): the bias on unseen pairs and the feasibility threshold.

        Raise `UsageError` if the model was not trained for that world.
        """
        if world not in self.calibration:
            known = ", ".join(self.calibration) or "none"
            raise UsageError(f"{self.where} was not trained for the {world} world; its worlds: {known}")
        return self.calibration[world]


class TrainedRun(TrainedModel):
    """A trained model that is loaded from the checkpoint of a run."""

    def __init__(self, path: Path, device: torch.device, words: Path | None = None) -> None:
        """Load the checkpoint and the encoder's towers that its method needs.

        path: path of the checkpoint.
        words: the GloVe-format file of word vectors that training read; None if it read none.
        """
        checkpoint = read_checkpoint(path)
        record = checkpoint.record
        if record.encoder.get("encoder") == IMPORTED:
            raise UsageError(f"{path} was trained on imported features of an unknown encoder, so it cannot take images")
        self.record, self.fingerprint = record, checkpoint.fingerprint
        self.where, self.kind, self.labels = str(path.parent), record.kind, record.labels
        self.calibration, self.confidence = record.calibration or {}, record.confidence
        self.needs = find_method(record.kind).needs(record.options)
        self.backbone = Backbone(record.encoder, str(device))
        self._words_file = words
        needs_text = "text" in self.needs or ("words" in self.needs and words is None)
        tower = self.backbone.tower("text").text if needs_text else None
        shapes: dict[str, tuple[int, ...]] = {"cls": (self.backbone.dim,)}
        if "patch" in self.needs:
            shapes["patch"] = self.backbone.tower("image").patch_shape
        blocks = None
        if record.finetune is not None:
            blocks = partial(finetuned_blocks_factory, record.encoder, device=str(device))
            shapes["block_inputs"] = block_input_shape(
                self.backbone.tower("image"), int(record.encoder["block_inputs"])
            )
        vectors = self.words if "words" in self.needs else None
        context = MethodContext(self.labels, shapes, tower, vectors)
        if blocks is not None and record.finetune is not None:
            make_blocks, members = blocks(record.finetune), lambda options: blocks(options)()
            context = replace(context, finetuned_blocks=make_blocks, member_blocks=members)
        self.method: Method[Any] = load_checkpoint(checkpoint, context, record.encoder).to(device)
        self.finetuned = self.method.blocks if isinstance(self.method, WithFinetuning) else None
        self.known_images = read_known_images(checkpoint, device)

    @property
    def reads_block_inputs(self) -> bool:
        return self.record.finetune is not None

    @cached_property
    def words(self) -> PrimitiveVectors:
        """Word vectors of states and objects as in training, from the same file or from the encoder's text tower.

        Raise `UsageError` if the file is not the one that training read.
        """
        file, labels = self._words_file, self.labels
        digest = None if file is None else sha256(file)
        if digest != self.record.encoder.get(WORD_VECTORS):
            fix = "set evaluation.word_vectors in params.yaml, or `word_vectors` in Python, to those"
            raise UsageError(f"{self.where} was trained with other word vectors; {fix}")
        if file is None:
            return PrimitiveVectors(*word_vectors(labels, self.backbone.tower("text").text))
        vectors = read_word_vectors(file, [*labels.states, *labels.objects]).vectors
        return PrimitiveVectors(*map(torch.from_numpy, np.split(vectors, [len(labels.states)])))

    def candidates(self, world: World) -> Candidates:
        compositions, method = self.labels.candidates(world, "train"), self.method
        calibration, feasible = self.calibration_of(world), None
        if calibration.threshold is not None:
            words = self.words if calibration.feasibility_source == "words" else None
            mask = feasible_compositions(method, words, calibration)
            feasible = None if mask is None else mask[compositions]
        terms = method.score_terms(compositions.copy())
        scorer = method.scorer(compositions.copy()) if terms is None else sum_of(terms)  # prompts are encoded once
        return Candidates.of(self.labels, compositions, feasible, self.confidence, scorer, terms, method.probabilities)

    def tensors(self, world: World) -> dict[str, Tensor] | None:
        return self.method.portable(self.labels.candidates(world, "train"))


class ExportedModel(TrainedModel):
    """Trained model in a folder of `duplex export`: tensors that score the candidates of one world, closed or open."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device):
        self.where, self.kind = str(folder), config["kind"]
        self.fingerprint = json_digest(config)
        self.labels = LabelSpace.from_dict(config["labels"])
        self.calibration = {config["world"]: Calibration.from_dict(config["calibration"])}
        self.confidence = Confidence.from_dict(config["confidence"])
        self.needs = frozenset({"cls"})
        self.backbone = Backbone(config["encoder"], str(device))
        self.known_images = KnownImages.from_tensors(tensors, device)
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        if config.get("finetune"):
            self.finetuned = self._load_finetuned(config, device)

    def _load_finetuned(self, config: Mapping[str, Any], device: torch.device) -> FinetunedBlocks:
        self.backbone.tower("image")  # raises unless it is the encoder of training
        options = FinetuneOptions.from_dict(config["finetune"])
        blocks = finetuned_blocks_factory(config["encoder"], options, str(device))().to(device)
        named = {key.removeprefix(FINETUNED_PREFIX): value for key, value in self._tensors.items()
                 if key.startswith(FINETUNED_PREFIX)}  # fmt: skip
        try:
            blocks.load_state_dict(named)
        except RuntimeError as error:
            raise ValueError("its fine-tuned blocks have other tensors") from error
        return blocks.eval()

    def candidates(self, world: World) -> Candidates:
        t = self.tensors(world)
        compositions = self.labels.composition(*(t[name].cpu().numpy() for name in ("state_of", "object_of")))
        feasible = t["feasible"].cpu().numpy() if "feasible" in t else None
        terms, probabilities = portable_terms(t), partial(portable.probabilities, t)
        parts = compositions, feasible, self.confidence, sum_of(terms), terms, probabilities
        return self.on_finetuned_features(Candidates.of(self.labels, *parts))

    def tensors(self, world: World) -> dict[str, Tensor]:
        self.calibration_of(world)
        return self._tensors
