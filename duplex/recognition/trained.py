"""What a recogniser stands on: a run's checkpoint, or an exported folder; either gives a panel for a world."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from duplex.encoders import Encoder, load_encoder
from duplex.encoders.image_blocks import entering_shape
from duplex.errors import UsageError
from duplex.features.identity import IMPORTED
from duplex.labels import Bools, LabelSpace, World
from duplex.layers import portable
from duplex.layers.finetuned_blocks import Tail, tail_maker
from duplex.layers.word_vectors import word_vectors
from duplex.methods.base import Inputs, Method, Setting, Words, summed
from duplex.methods.registry import find
from duplex.methods.with_finetuning import TAIL, WithFinetuning, moving
from duplex.options import TailOptions
from duplex.recognition.candidates import Panel
from duplex.training.calibration import Calibration, passing
from duplex.training.checkpoint import WORDS, Record, fingerprint, load_checkpoint, read_record


class WordSource(Protocol):
    """Vectors that feasibility and methods compare words by."""

    def __call__(self, labels: LabelSpace) -> Words: ...

    def sha256(self) -> str: ...


@dataclass
class Backbone:
    """The frozen encoder that a model names, loaded one tower at a time, when it is first needed."""

    record: Mapping[str, str]
    device: str
    _towers: dict[str, Encoder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [key for key in ("name", "tag", "precision", "text_precision", "dim") if key not in self.record]
        if missing:
            raise UsageError(f"the model does not say the {missing[0]} of its encoder; train again with this version")

    def tower(self, which: str) -> Encoder:
        if which not in self._towers:
            name, tag = self.record["name"], self.record["tag"] or None
            precision = self.record["text_precision" if which == "text" else "precision"]
            found = load_encoder(name, tag, towers=which, device=self.device, precision=precision)
            self._check(found)
            self._towers[which] = found
        return self._towers[which]

    def _check(self, found: Encoder) -> None:
        for key in ("encoder", "architecture", "weights", "preprocessing"):
            if self.record.get(key) != found.identity.get(key):
                raise UsageError(
                    f"the model was trained on features of {key} {self.record.get(key)!r}; the encoder found here as "
                    f"{self.record['name']!r} has {found.identity.get(key)!r}"
                )

    @property
    def dim(self) -> int:
        return int(self.record["dim"])


class Trained(ABC):
    """A model with its labels, its encoder's name and what validation chose."""

    where: str
    kind: str
    fingerprint: str  # of the model: the same place may hold another one later
    labels: LabelSpace
    backbone: Backbone
    calibration: Mapping[str, Calibration]
    needs: frozenset[str]
    depth = 0  # of what else it reads of a picture: what enters so many last blocks of the image tower
    tail: Tail | None = None  # those blocks, with what was trained in them

    @property
    def bits(self) -> int:
        """That the cache kept of each number of it."""
        return int(self.backbone.record.get("bits", 16))

    @abstractmethod
    def panel(self, world: World) -> Panel:
        """The columns of a world and what scores them."""

    @abstractmethod
    def tensors(self, world: World) -> dict[str, Tensor] | None:
        """The score as `parts.portable` has it; None where the method cannot be written so."""

    def moving(self, panel: Panel) -> Panel:
        """A panel that reads features, over those that the tail makes."""
        if self.tail is None:
            return panel
        terms = None if panel.terms is None else moving(panel.terms, self.tail)
        return replace(panel, scorer=moving(panel.scorer, self.tail), terms=terms)

    def chosen(self, world: str) -> Calibration:
        if world not in self.calibration:
            known = ", ".join(self.calibration) or "none"
            raise UsageError(f"{self.where} was not trained for the {world} world; it answers for: {known}")
        return self.calibration[world]


class Run(Trained):
    """A checkpoint, as training wrote it."""

    _words: Words | None = None

    def __init__(self, path: Path, device: torch.device, words: WordSource | None = None) -> None:
        record = read_record(path)
        if record.encoder.get("encoder") == IMPORTED:
            raise UsageError(f"{path} was trained on imported features: there is no encoder that pictures could take")
        self.record: Record = record
        self.fingerprint = fingerprint(path)
        self.where, self.kind, self.labels = str(path.parent), record.kind, record.labels
        self.calibration = record.calibration or {}
        self.needs = find(record.kind).needs(record.options)
        self.backbone = Backbone(record.encoder, str(device))
        self._source = words
        asked = {"text"} if self.needs & {"text", "words"} and words is None else self.needs & {"text"}
        tower = self.backbone.tower("text").text if asked else None
        shapes: dict[str, tuple[int, ...]] = {"cls": (self.backbone.dim,)}
        if "patch" in self.needs:
            shapes["patch"] = self.backbone.tower("image").patches
        tail = None
        if record.tail is not None:
            self.depth, tail = int(record.encoder["depth"]), tail_maker(record.encoder, record.tail, str(device))
            shapes["deep"] = entering_shape(self.backbone.tower("image"), self.depth)
        words_asked = self.words() if "words" in self.needs else None
        setting = Setting(self.labels, shapes, tower, words_asked, image_tail=tail)
        self.method: Method[Any] = load_checkpoint(path, setting, record.encoder).to(device)
        if isinstance(self.method, WithFinetuning):
            self.tail = self.method.tail

    def words(self) -> Words:
        """Those of training: of the same file, or of the encoder."""
        if self._words is None:
            self._words = self._read_words()
        return self._words

    def _read_words(self) -> Words:
        given = None if self._source is None else self._source.sha256()
        if given != self.record.encoder.get(WORDS):
            mend = "evaluation.word_vectors in params.yaml, or `words` in Python, names them"
            raise UsageError(f"{self.where} was trained with other word vectors; {mend}")
        if self._source is not None:
            return self._source(self.labels)
        return Words(*word_vectors(self.labels, self.backbone.tower("text").text))

    def panel(self, world: World) -> Panel:
        calibration, columns = self.chosen(world), self.labels.target(world, "test")
        method = self.method
        return Panel.of(
            self.labels,
            columns,
            self.live(world),
            calibration.bias,
            method.scorer(columns),
            method.evidence(columns),
            method.probabilities,
        )

    def live(self, world: World) -> Bools:
        """Of the world's columns, those that the feasibility threshold lets through."""
        columns, calibration = self.labels.target(world, "test"), self.chosen(world)
        if calibration.threshold is None:
            return np.ones(len(columns), dtype=bool)
        mask = passing(self.method, self.words() if calibration.judge == "words" else None, calibration)
        return np.ones(len(columns), dtype=bool) if mask is None else mask[columns]

    def tensors(self, world: World) -> dict[str, Tensor] | None:
        return self.method.portable(self.labels.target(world, "test"))


class Exported(Trained):
    """A folder that `duplex export` wrote: one world's columns as tensors."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device):
        self.where, self.kind = str(folder), config["kind"]
        self.fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        self.labels = LabelSpace.from_dict(config["labels"])
        self.calibration = {config["world"]: Calibration.from_dict(config["calibration"])}
        self.needs = frozenset({"cls"})
        self.backbone = Backbone(config["encoder"], str(device))
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        if config.get("tail"):
            self.depth, self.tail = int(config["encoder"]["depth"]), self._tail(config, device)

    def _tail(self, config: Mapping[str, Any], device: torch.device) -> Tail:
        self.backbone.tower("image")  # refuses another one than training saw
        tail = tail_maker(config["encoder"], TailOptions.from_dict(config["tail"]), str(device))().to(device)
        own = {name.removeprefix(TAIL): value for name, value in self._tensors.items() if name.startswith(TAIL)}
        try:
            tail.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError("its tail has other tensors") from error
        return tail.eval()

    def panel(self, world: World) -> Panel:
        return self.moving(exported_panel(self.labels, self.tensors(world), self.chosen(world).bias))

    def tensors(self, world: World) -> dict[str, Tensor]:
        self.chosen(world)
        return self._tensors


def exported_panel(labels: LabelSpace, tensors: Mapping[str, Tensor], bias: float) -> Panel:
    """A panel whose score is arithmetic on tensors."""

    @torch.no_grad()
    def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.terms(tensors, inputs["cls"])

    columns = labels.composition(_numpy(tensors["state_of"]), _numpy(tensors["object_of"]))
    live = _numpy(tensors["live"]) if "live" in tensors else np.ones(len(columns), dtype=bool)
    scorer = summed(parts, len(columns), tensors["state_of"].device)
    return Panel.of(labels, columns, live, bias, scorer, parts, partial(portable.probabilities, tensors))


def _numpy(values: Tensor) -> Any:
    return cast(Any, values.cpu().numpy())
