"""The class `Recognizer`, which names the compositions in images.

recognizer = Recognizer.load("artifacts/shapes/duplex/0")
for answer in recognizer(["kettle.jpg"], top=3):
    print(answer.best.name, answer.best.probability)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from duplex.encoders.base import resolve_device
from duplex.errors import DuplexError, UsageError, as_usage_error, require, require_whole
from duplex.features.encode import BATCH_MULTIPLE
from duplex.features.file import FIRST_BAD, LIBRARIES, Features, check_identity, status_reason
from duplex.labels import WORLDS, LabelSpace, World
from duplex.methods.base import Inputs
from duplex.recognition.answers import Answer, Candidates, UnreadableImage
from duplex.recognition.inputs import as_features, as_inputs, encode, encode_files, open_image
from duplex.recognition.trained import TrainedModel, open_trained
from duplex.recognition.words import Pair, as_pairs, with_added_compositions
from duplex.system.files import checked_path
from duplex.system.threads import initial_modes

BATCH = 64


class Recognizer:
    """A trained model that names the compositions in images. Calls do not change it.

    Args:
        trained: model that `open_trained` loaded.
        added: (state, object) pairs that are candidates in addition to the model's own.
        exact: pad small batches, so that features equal cached ones.
        new_share: expected share of images of unseen pairs.
    """

    def __init__(
        self, trained: TrainedModel, added: Sequence[Pair] = (), *, exact: bool = False, new_share: float | None = None
    ) -> None:
        if new_share is not None and not 0 < new_share < 1:
            raise UsageError(f"new_share is {new_share}; expected a number between 0 and 1")
        self.trained = trained
        self.added = tuple(added)
        self.new_share = new_share
        self._batch_multiple = BATCH_MULTIPLE if exact else 1
        self._candidates: dict[World, Candidates] = {}

    @classmethod
    @initial_modes()
    def load(
        cls,
        where: str | Path,
        *,
        device: str = "auto",
        word_vectors: Path | None = None,
        exact: bool = False,
        new_share: float | None = None,
    ) -> Recognizer:
        """Load a trained model.

        Args:
            where: a run's folder, a folder of `duplex export`, or `hf-hub:OWNER/NAME`.
            device: auto, cpu or cuda; auto is cuda if there is a GPU.
            word_vectors: the GloVe-format file that training read, if it read one.
            exact: pad small batches to sixteen images, so that features equal those of a feature cache to the last
                bit. Without it, a single image is encoded up to ten times as fast, and scores differ from the
                evaluation's in the fourth digit.
            new_share: share of images that are expected to show pairs without training images; None: the share stored
                with the model, 0.1 by default.
        """
        trained = open_trained(where, torch.device(resolve_device(device)), word_vectors)
        return cls(trained, exact=exact, new_share=new_share)

    @property
    def labels(self) -> LabelSpace:
        return self.trained.labels

    @property
    def worlds(self) -> tuple[World, ...]:
        """The worlds (`closed`, `open`) that the model was calibrated for; the first is the default."""
        return tuple(world for world in WORLDS if world in self.trained.calibration)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.trained.backbone.device)

    @property
    def encoder(self) -> Any:
        """The encoder with its image tower, loaded at first use."""
        return self.trained.backbone.tower("image")

    def with_compositions(self, compositions: Iterable[str | Pair]) -> Recognizer:
        """A recognizer with `compositions` such as `"rusty kettle"` as more candidates; words may be new."""
        pairs = as_pairs([compositions] if isinstance(compositions, str) else compositions, self.labels)
        exact = self._batch_multiple == BATCH_MULTIPLE
        return Recognizer(self.trained, [*self.added, *pairs], exact=exact, new_share=self.new_share)

    @initial_modes()
    def __call__(self, images: Any, top: int = 3, world: World | None = None, batch_size: int = BATCH) -> list[Answer]:
        """One answer per image.

        Args:
            images: an image or a list of images, each a path, a PIL image or a uint8 array [H, W, 3], [H, W, 4] or
                [H, W] (grey); or features of the model's encoder, as an array of floats [B, d] or [d], or from
                `read_features`. An array of floats always holds features, a uint8 array always an image.
            top: number of most probable compositions per answer.
            world: closed (choose among the pairs of the data set) or open (among all pairs); None: the first of
                `worlds`.
            batch_size: number of images that are encoded at once.
        """
        candidates = self.candidates(world)
        answers: list[Answer] = []
        for inputs in self._inputs(images, batch_size):
            answers += candidates.answers(inputs, top)
        return answers

    def stream(
        self,
        paths: str | Path | Iterable[str | Path],
        top: int = 3,
        world: World | None = None,
        batch_size: int = BATCH,
        num_workers: int | Literal["auto"] = "auto",
    ) -> Iterator[Answer | UnreadableImage]:
        """One answer per image file, in order, while other processes decode the next files.

        Args:
            paths: image files; a file that cannot be read as an image gives an `UnreadableImage`.
            top: as for a call of the recognizer.
            world: likewise.
            batch_size: likewise.
            num_workers: number of decoding processes; auto: one per core, less one; 0: decode in this process.
        """
        candidates = self.candidates(world)
        top = require_whole(top, "top")
        batch_size = require_whole(batch_size, "batch_size")
        if num_workers != "auto":
            require_whole(num_workers, "num_workers", 0)
        listed = [paths] if isinstance(paths, str | os.PathLike) else paths
        files = [checked_path(path, "a path") for path in listed]
        blocks = encode_files(self.encoder, files, batch_size=batch_size, num_workers=num_workers, **self._encoding)
        while True:
            with initial_modes():
                block = next(blocks, None)
                answers = [] if block is None else list(candidates.answers(block[1], top))
            if block is None:
                return
            for code, answer in zip(block[0].tolist(), answers, strict=True):
                yield UnreadableImage(status_reason(code)) if code >= FIRST_BAD else answer

    @initial_modes()
    def scores(self, images: Any, world: World | None = None, batch_size: int = BATCH) -> Tensor:
        """Scores [B, C] of `images` for `candidates(world)`, computed for `batch_size` images at once."""
        candidates = self.candidates(world)
        scores = [candidates.scorer(inputs) for inputs in self._inputs(images, batch_size)]
        return torch.cat([torch.zeros(0, len(candidates), device=self.device), *scores])

    @initial_modes()
    def candidates(self, world: World | None = None) -> Candidates:
        """The compositions of a `world` that answers are chosen from, with the function that scores them."""
        if not self.worlds:
            raise UsageError(f"{self.trained.where} was calibrated for no world; train again")
        world = self.worlds[0] if world is None else world
        require(world, WORLDS, "world")
        if world not in self._candidates:
            candidates = replace(self.trained.candidates(world), novelty=self.trained.novelty)
            if self.new_share is not None:
                confidence = replace(candidates.confidence, new_share=self.new_share)
                candidates = replace(candidates, confidence=confidence)
            self._candidates[world] = self._with_added(candidates, world) if self.added else candidates
        return self._candidates[world]

    def _with_added(self, candidates: Candidates, world: World) -> Candidates:
        tensors = self.trained.tensors(world)
        if tensors is None:
            raise UsageError(
                f"methods of kind {self.trained.kind!r} cannot score added pairs; omit --add and --compositions"
            )
        with as_usage_error():
            tower = self.trained.backbone.tower("text").text
            more = with_added_compositions(candidates, tensors, self.labels, tower, self.added)
        return self.trained.on_finetuned_features(more)

    def _inputs(self, images: Any, batch_size: int) -> Iterator[Inputs]:
        batch_size = require_whole(batch_size, "batch_size")
        if isinstance(images, Features):
            self.check_cache(images)
        if (rows := as_features(images, self.trained.backbone.dim)) is not None:
            outputs = self.trained.outputs
            if outputs.patches or outputs.block_inputs:
                more = "patch tokens" if outputs.patches else "block inputs of the image tower"
                raise UsageError(f"{self.trained.where} also reads {more}; give images instead of features")
            for start in range(0, len(rows), batch_size):
                yield as_inputs({"cls": rows[start : start + batch_size]}, self.device)
            return
        listed = images if isinstance(images, (list, tuple)) else [images]
        for start in range(0, len(listed), batch_size):
            opened = [open_image(image) for image in listed[start : start + batch_size]]
            yield self.encode([self.encoder.image_transform(image) for image in opened])

    def encode(self, pixels: Sequence[Tensor]) -> Inputs:
        """The model's inputs for the `pixels` of images after the encoder's `image_transform`, uint8 [3, R, R] each."""
        return encode(self.encoder, torch.stack(list(pixels)), **self._encoding)

    @property
    def _encoding(self) -> dict[str, Any]:
        return {"outputs": self.trained.outputs, "batch_multiple": self._batch_multiple}

    def check_cache(self, features: Features) -> None:
        """Raise `UsageError` if features read from a cache were not computed by the model's encoder."""
        record = self.trained.backbone.record
        expect = {key: record[key] for key in features.identity if key in record and key not in LIBRARIES}
        try:
            check_identity(features.identity, expect, features.path)
        except DuplexError as error:
            raise UsageError(f"{error}, or choose a model of that encoder") from error
