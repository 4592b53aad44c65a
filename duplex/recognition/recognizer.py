"""`Recognizer`: pictures in, compositions out.

recognizer = Recognizer.load("artifacts/shapes/duplex/0")
for answer in recognizer(["kettle.jpg"], top=3):
    print(answer.best.name, answer.best.probability)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from duplex.encoders import resolve_device
from duplex.errors import DuplexError, UsageError, require
from duplex.evaluation.glove import read_word_vectors
from duplex.features.encoding import STEP, Kept
from duplex.features.identity import LIBRARIES, check_identity
from duplex.features.layout import FIRST_BAD, reason
from duplex.features.store import Features
from duplex.labels import WORLDS, LabelSpace, World
from duplex.methods.base import Inputs, Words
from duplex.recognition.added_words import Pair, extended, split_words
from duplex.recognition.answers import Answer, Unreadable
from duplex.recognition.candidates import Panel
from duplex.recognition.images import as_inputs, encode, encode_files, features_of, open_picture
from duplex.recognition.sources import open_trained
from duplex.recognition.trained import Trained
from duplex.system.files import sha256

Bias = float | Literal["calibrated"]
BATCH = 64


class Recognizer:
    """A trained model that answers about pictures. Nothing of it is changed by asking."""

    def __init__(self, trained: Trained, words: Sequence[Pair] = (), *, exact: bool = True) -> None:
        """`words` are compositions to choose from beside the model's own."""
        self.trained, self.words = trained, tuple(words)
        self._step = STEP if exact else 1
        self._panels: dict[World, Panel] = {}

    @classmethod
    def load(
        cls, where: str | Path, *, device: str = "auto", words: Path | None = None, exact: bool = True
    ) -> Recognizer:
        """`where` is a run's folder, a folder of `duplex export`, or `hf-hub:OWNER/NAME`. `words` is the GloVe-format
        file that training read, where it read one.

        `exact` encodes a few pictures as if they were sixteen, which gives the cache's features to the last bit;
        without it single pictures are encoded sooner, and scores differ from the evaluation's in the fourth digit.
        """
        glove = None if words is None else WordFile(words)
        return cls(open_trained(where, torch.device(resolve_device(device)), glove), exact=exact)

    @property
    def labels(self) -> LabelSpace:
        return self.trained.labels

    @property
    def worlds(self) -> tuple[World, ...]:
        """Those that the model was calibrated for; the first is asked by default."""
        return tuple(world for world in WORLDS if world in self.trained.calibration)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.trained.backbone.device)

    @property
    def encoder(self) -> Any:
        """The image tower, loaded when it is first needed."""
        return self.trained.backbone.tower("image")

    def with_words(self, words: Iterable[str | Pair]) -> Recognizer:
        """A recogniser that chooses from these compositions too: `"rusty kettle"`, or `("rusty", "kettle")`."""
        pairs = [split_words(word, self.labels) if isinstance(word, str) else word for word in words]
        return Recognizer(self.trained, [*self.words, *pairs], exact=self._step == STEP)

    # -- answers --------------------------------------------------------------------------------------------------

    def __call__(
        self,
        images: Any,
        top: int = 3,
        world: World | None = None,
        bias: Bias = "calibrated",
        batch_size: int = BATCH,
    ) -> list[Answer]:
        """What is in each of some pictures: paths, PIL pictures, uint8 arrays `[H, W, 3]`; or cached features, as an
        array `[B, d]` or as `open_features` gives them. One picture may stand alone."""
        panel, found = self.panel(world), list[Answer]()
        for inputs in self._inputs(images, batch_size):
            found += panel.answers(inputs, top, None if bias == "calibrated" else float(bias))
        return found

    def stream(
        self,
        paths: Sequence[str | Path],
        top: int = 3,
        world: World | None = None,
        bias: Bias = "calibrated",
        batch_size: int = BATCH,
        num_workers: int | Literal["auto"] = "auto",
    ) -> Iterator[Answer | Unreadable]:
        """One answer for each file, in order, while further ones are decoded and encoded."""
        panel, given = self.panel(world), None if bias == "calibrated" else float(bias)
        files = [Path(path) for path in paths]
        blocks = encode_files(self.encoder, files, batch_size=batch_size, num_workers=num_workers, **self._read)
        for marks, inputs in blocks:
            answers = list(panel.answers(inputs, top, given))
            for mark, answer in zip(marks.tolist(), answers, strict=True):
                yield Unreadable(reason(mark)) if mark >= FIRST_BAD else answer

    def scores(self, images: Any, world: World | None = None, batch_size: int = BATCH) -> Tensor:
        """Scores [B, C] over `panel(world).pairs`: those of the evaluation, without bias."""
        return torch.cat([self.panel(world).scorer(inputs) for inputs in self._inputs(images, batch_size)])

    def panel(self, world: World | None = None) -> Panel:
        """What a world's answers are chosen from; made when it is first asked for."""
        if not self.worlds:
            raise UsageError(f"{self.trained.where} was calibrated for no world; train again")
        world = self.worlds[0] if world is None else world
        require(world, WORLDS, "world")
        if world not in self._panels:
            panel = self.trained.panel(world)
            self._panels[world] = self._extended(panel, world) if self.words else panel
        return self._panels[world]

    def _extended(self, panel: Panel, world: World) -> Panel:
        tensors = self.trained.tensors(world)
        if tensors is None:
            raise UsageError(f"methods of kind {self.trained.kind!r} know their own compositions only; leave --add out")
        try:
            tower = self.trained.backbone.tower("text").text
            return self.trained.moving(extended(panel, tensors, self.labels, tower, self.words))
        except DuplexError as error:
            raise UsageError(str(error)) from error

    # -- inputs ---------------------------------------------------------------------------------------------------

    def _inputs(self, images: Any, batch_size: int) -> Iterator[Inputs]:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it is at least 1")
        dim = self.trained.backbone.dim
        if isinstance(images, Features):
            self.check_cache(images)
        if (rows := features_of(images, dim)) is not None:
            if "patch" in self.trained.needs or self.trained.depth:
                more = "patch tokens" if "patch" in self.trained.needs else "what enters the image tower's last blocks"
                raise UsageError(f"{self.trained.where} reads {more} too; give it pictures")
            for start in range(0, len(rows), batch_size):
                yield as_inputs({"cls": rows[start : start + batch_size]}, self.device)
            return
        pictures = images if isinstance(images, (list, tuple)) else [images]
        for start in range(0, len(pictures), batch_size):
            opened = [open_picture(one) for one in pictures[start : start + batch_size]]
            yield self.encode([self.encoder.image_transform(picture) for picture in opened])

    def encode(self, pixels: Sequence[Tensor]) -> Inputs:
        """What the cache would hold of some transformed pictures."""
        return encode(self.encoder, torch.stack(list(pixels)), **self._read)

    @property
    def _read(self) -> dict[str, Any]:
        """What of a picture is asked for, and how many are encoded at least."""
        trained = self.trained
        return {"kept": Kept("patch" in trained.needs, trained.depth, trained.bits), "step": self._step}

    def check_cache(self, features: Features) -> None:
        """Refuse features of another encoder than the model's."""
        record = {key: value for key, value in features.identity.items() if key not in LIBRARIES}
        expect = {key: self.trained.backbone.record[key] for key in record if key in self.trained.backbone.record}
        try:
            check_identity(features.identity, expect, features.path)
        except DuplexError as error:
            raise UsageError(f"{error}, or choose a model of that encoder") from error


@dataclass(frozen=True)
class WordFile:
    """Word vectors of a GloVe-format file."""

    path: Path

    def __call__(self, labels: LabelSpace) -> Words:
        found = read_word_vectors(self.path, [*labels.states, *labels.objects])
        states, objects = np.split(found.vectors, [len(labels.states)])
        return Words(torch.from_numpy(states), torch.from_numpy(objects))

    def sha256(self) -> str:
        return sha256(self.path)
