"""`Recognizer`, which names the compositions in images, and what turns images into its inputs."""

from __future__ import annotations

import glob
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from duplex.data.images import LINE_END, BadImageFile, ImageTree, as_rgb, describe_skipped, read_image
from duplex.encoders.base import Encoder, resolve_device
from duplex.errors import DuplexError, UsageError, as_usage_error, require, require_whole
from duplex.evaluation.new_share import ENOUGH, NewShare
from duplex.evaluation.vectors import word_vectors_file
from duplex.features.encode import (
    BATCH_MULTIPLE,
    UNREAD,
    ImageRows,
    WantedOutputs,
    decode_batches,
    decoding_workers,
    encode_batches,
    explain_memory_errors,
    pad_batches,
    split_rows,
)
from duplex.features.file import CONTENTS, ENCODED, FIRST_BAD, PIXELS, Features, check_identity, status_reason
from duplex.features.imported import as_numpy, checked_features
from duplex.labels import WORLDS, LabelSpace, World
from duplex.methods.base import Inputs
from duplex.recognition import export
from duplex.recognition.added import as_pair, with_added_compositions
from duplex.recognition.answers import Answer, AnswerBlock, Candidates, Pair, UnreadableImage
from duplex.recognition.trained import TrainedModel, download, open_trained
from duplex.system.files import expanded_path
from duplex.system.processes import track
from duplex.system.threads import in_initial_modes

BATCH = 64
OF_DOWNLOADS = ("revision", "token", "cache_dir", "force_download", "local_files_only")
AUTO = "auto"  # estimate the share of new pairs from the images
Share = float | Literal["auto"] | None
ImageLike = Image.Image | Path | str | NDArray[Any] | Tensor


class Recognizer:
    """A trained model that names the compositions in images.

    Args:
        trained: model that `open_trained` loaded.
        added: (state, object) pairs to choose from in addition to the model's own candidates.
        exact: pad small batches, so that features equal cached ones.
        new_share: expected share of images of unseen pairs, or auto, as for `load`.
    """

    def __init__(
        self, trained: TrainedModel, added: Sequence[Pair] = (), *, exact: bool = False, new_share: Share = None
    ) -> None:
        if new_share not in (None, AUTO) and not (isinstance(new_share, int | float) and 0 < new_share < 1):
            problem = f"new_share (--new-share) is {new_share}"
            raise UsageError(f"{problem}; expected a number between 0 and 1, such as 0.1, or auto")
        self.trained = trained
        self.added = tuple(added)
        self.new_share = new_share
        self._batch_multiple = BATCH_MULTIPLE if exact else 1
        self._candidates: dict[World, Candidates] = {}

    @classmethod
    @in_initial_modes()
    def load(
        cls,
        where: str | Path,
        *,
        device: str = "auto",
        word_vectors: str | Path | None = None,
        exact: bool = False,
        new_share: Share = None,
    ) -> Recognizer:
        """Load a trained model.

        Args:
            where: a run's folder, a folder of `duplex export`, or `hf-hub:OWNER/NAME`.
            device: auto, cpu or cuda; auto is cuda if there is a GPU.
            word_vectors: the GloVe-format file that training read, if it read one.
            exact: pad small batches to sixteen images, so that features equal those of a feature
                cache to the last bit. Without it, a single image is encoded up to ten times as
                fast, and scores differ from the evaluation's in the fourth digit.
            new_share: expected share of images of pairs without training images. `"auto"` estimates
                it from the images of each call, with a weight that grows up to 50 images. None is
                auto for 50 images or more; for fewer, it is the model's share, at
                which it answered validation images of seen and of unseen pairs best.
        """
        vectors = word_vectors_file(word_vectors)
        trained = open_trained(where, torch.device(resolve_device(device)), vectors)
        return cls(trained, exact=exact, new_share=new_share)

    @classmethod
    def from_pretrained(cls, name: str | Path, **settings: Any) -> Recognizer:
        """Load a model from the Hugging Face hub, or from a folder of `save_pretrained`.

        Args:
            name: `OWNER/NAME` on the hub, or the folder.
            settings: `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`, as
                in huggingface_hub's `ModelHubMixin.from_pretrained`, and arguments of `load`.
        """
        hub = {key: settings.pop(key) for key in OF_DOWNLOADS if key in settings}
        folder = expanded_path(name, "name")
        return cls.load(folder if folder.is_dir() else download(str(name), **hub), **settings)

    def save_pretrained(
        self, folder: str | Path, *, world: World | None = None, licence: str = "other", force: bool = False
    ) -> Path:
        """Export the model, without `new_share`, to a folder usable without this package; returns the folder.

        Args:
            folder: made if it does not exist.
            world: closed or open, whose candidates are scored; None: the first of `worlds`.
            licence: licence on the model card, such as mit; a copy of an export keeps its card.
            force: replace a model in the folder.
        """
        return self._write(expanded_path(folder, "folder"), world, licence, force=force)

    def push_to_hub(self, repo_id: str, *, world: World | None = None, licence: str = "other", **settings: Any) -> str:
        """Upload the model to the Hugging Face hub, and return the address of its repository.

        Args:
            repo_id: `OWNER/NAME` of the repository, which is created if it is missing.
            world: closed or open, whose candidates are scored; None: the first of `worlds`.
            licence: licence on the model card, such as mit.
            settings: `commit_message`, `private`, `token` and `branch`, as in huggingface_hub's
                `ModelHubMixin.push_to_hub`.
        """
        with TemporaryDirectory() as scratch:
            folder = self._write(Path(scratch), world, licence, repository=repo_id)
            return export.upload(folder, repo_id, **settings)

    def _write(
        self, out: Path, world: World | None, licence: str, *, repository: str | None = None, force: bool = False
    ) -> Path:
        if self.added:
            problem = "added compositions cannot be saved with a model"
            raise UsageError(f"{problem}; save the recognizer without them")
        if world is not None:
            self.trained.calibration_of(world)  # raises for another world
        run = Path(self.trained.where)
        if export.copy_export(run, out, force=force):
            if repository is not None:
                export.readdress_card(out / export.README, repository, licence)
            return out
        name = repository or out.resolve().name
        facts = export.model_card_facts(run, name=name, licence=licence, repository=repository)
        chosen = self.worlds[0] if world is None else world
        export.export(self.trained, chosen, out, facts, force=force)
        return out

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
        """A copy with more candidates: `compositions` such as `"rusty kettle"`, whose words may be new to the model."""
        listed = [compositions] if isinstance(compositions, str) else compositions
        pairs = [as_pair(composition, self.labels) for composition in listed]
        exact = self._batch_multiple == BATCH_MULTIPLE
        added = [*self.added, *pairs]
        return Recognizer(self.trained, added, exact=exact, new_share=self.new_share)

    @in_initial_modes()
    def __call__(self, images: Any, top: int = 3, world: World | None = None, batch_size: int = BATCH) -> list[Answer]:
        """Return one answer per image.

        Args:
            images: an image or a list of images, each a path, a PIL image or a uint8 array
                [H, W, 3], [H, W, 4] or [H, W] (grey); or features of the model's encoder, as an
                array of floats [B, d] or [d], or from `read_features`. An array of floats always
                holds features, a uint8 array always an image.
            top: number of most probable compositions per answer.
            world: closed (choose among the pairs of the data set) or open (among all pairs); None:
                the first of `worlds`.
            batch_size: number of images that are encoded at once.
        """
        candidates = self.candidates(world)
        blocks: list[AnswerBlock] = []
        for inputs in self._inputs(images, batch_size):
            blocks += candidates.blocks(inputs, top)
        estimates = self.estimates_share(sum(len(block) for block in blocks))
        share = candidates.estimate(blocks) if estimates else candidates.stored_share
        answers: list[Answer] = []
        for block in blocks:
            answers += block.answers(share)
        return answers

    def estimates_share(self, images: int) -> bool:
        """Whether answers for this number of images use a share of new pairs estimated from them."""
        return self.new_share == AUTO or (self.new_share is None and images >= ENOUGH)

    def stream(
        self,
        paths: str | Path | Iterable[str | Path],
        top: int = 3,
        world: World | None = None,
        batch_size: int = BATCH,
        num_workers: int | Literal["auto"] = "auto",
    ) -> Iterator[Answer | UnreadableImage]:
        """Yield one answer per image file, in order, while other processes decode the next files.

        If the share of new pairs is estimated, the first answer comes after the last image is read.

        Args:
            paths: image files; an `UnreadableImage` takes the place of an answer where needed.
            top: number of most probable compositions per answer.
            world: closed or open; None: the first of `worlds`.
            batch_size: number of images that are encoded at once.
            num_workers: number of decoding processes; auto: one per core, less one; 0: none.
        """
        candidates = self.candidates(world)
        top = require_whole(top, "top")
        batch_size = require_whole(batch_size, "batch_size")
        if num_workers != "auto":
            require_whole(num_workers, "num_workers", 0)
        listed = [paths] if isinstance(paths, str | os.PathLike) else paths
        files = [expanded_path(path, "an item of `paths`") for path in listed]
        encoded = encode_files(self.encoder, files, batch_size=batch_size, num_workers=num_workers, **self._encoding)
        scored = self._scored(encoded, candidates, top)
        share = candidates.stored_share
        if self.estimates_share(len(files)):
            known = []
            if candidates.mass is not None:  # else, waiting for the last image would be in vain
                known = list(track(scored, "batches", math.ceil(len(files) / batch_size)))
            share = candidates.estimate(list(chain.from_iterable(blocks for _, blocks in known)))
            scored = chain(known, scored)
        for statuses, blocks in scored:
            yield from _in_order(statuses, blocks, share)

    def _scored(
        self, encoded: Iterator[tuple[NDArray[np.uint8], Inputs]], candidates: Candidates, top: int
    ) -> Iterator[tuple[NDArray[np.uint8], list[AnswerBlock]]]:
        while True:
            with in_initial_modes():
                batch = next(encoded, None)
                if batch is None:
                    return
                statuses, inputs = batch
                good = torch.from_numpy(np.flatnonzero(statuses < FIRST_BAD)).to(self.device)
                readable = {name: rows[good] for name, rows in inputs.items()}
                blocks = list(candidates.blocks(readable, top))
            yield statuses, blocks

    @in_initial_modes()
    def scores(self, images: Any, world: World | None = None, batch_size: int = BATCH) -> Tensor:
        """Scores [B, C] of `images` for `candidates(world)`, for `batch_size` images at once."""
        candidates = self.candidates(world)
        scores = [candidates.scorer(inputs) for inputs in self._inputs(images, batch_size)]
        return torch.cat([torch.zeros(0, len(candidates), device=self.device), *scores])

    @in_initial_modes()
    def candidates(self, world: World | None = None) -> Candidates:
        """The compositions that answers in a `world` are chosen from, with their scorer."""
        if not self.worlds:
            problem = f"{self.trained.where} has no calibration, which answers need"
            raise UsageError(f"{problem}; repeat `duplex train`")
        world = self.worlds[0] if world is None else world
        require(world, WORLDS, "world")
        if world not in self._candidates:
            candidates = replace(self.trained.candidates(world), novelty=self.trained.novelty)
            if isinstance(self.new_share, int | float):
                confidence = replace(candidates.confidence, new_share=self.new_share)
                candidates = replace(candidates, confidence=confidence)
            self._candidates[world] = self._with_added(candidates, world) if self.added else candidates
        return self._candidates[world]

    def _with_added(self, candidates: Candidates, world: World) -> Candidates:
        tensors = self.trained.tensors(world)
        if tensors is None:
            problem = f"methods of kind {self.trained.kind!r} cannot score added pairs"
            raise UsageError(f"{problem}; omit --add and --compositions")
        with as_usage_error():
            tower = self.trained.backbone.tower("text").text
            more = with_added_compositions(candidates, tensors, self.labels, tower, self.added)
        return self.trained.on_finetuned_features(more)

    def _inputs(self, images: Any, batch_size: int) -> Iterator[Inputs]:
        batch_size = require_whole(batch_size, "batch_size")
        if isinstance(images, Features):
            self.check_cache(images)
        rows = features_if_given(images, self.trained.backbone.dim)
        if rows is not None:
            outputs = self.trained.outputs
            if outputs.patches or outputs.block_inputs or outputs.pixels:
                inputs = "pixels" if outputs.pixels else "block inputs of the image tower"
                more = "patch tokens" if outputs.patches else inputs
                problem = f"{self.trained.where} also needs {more}"
                raise UsageError(f"{problem}; give images instead of features")
            for start in range(0, len(rows), batch_size):
                yield as_inputs({"cls": rows[start : start + batch_size]}, self.device)
            return
        listed = images if isinstance(images, (list, tuple)) else [images]
        for start in range(0, len(listed), batch_size):
            opened = [open_image(image) for image in listed[start : start + batch_size]]
            yield self.encode([self.encoder.image_transform(image) for image in opened])

    def encode(self, pixels: Sequence[Tensor]) -> Inputs:
        """Compute the model's inputs for images, such as `{"cls": features [B, d]}`.

        pixels: an array [3, R, R] of uint8 per image, as the encoder's `image_transform` returns it.
        """
        return encode(self.encoder, torch.stack(list(pixels)), **self._encoding)

    @property
    def _encoding(self) -> dict[str, Any]:
        return {"outputs": self.trained.outputs, "batch_multiple": self._batch_multiple}

    def check_cache(self, features: Features) -> None:
        """Raise `UsageError` unless the model's encoder computed `features`, read from a cache."""
        record = self.trained.backbone.record
        expect = {key: record[key] for key in features.identity if key in record}
        try:
            check_identity(features.identity, expect, features.path)
        except DuplexError as error:
            fix = "if params.yaml has the model's encoder; or choose another model"
            raise UsageError(f"{error} {fix}") from error


def _in_order(
    statuses: NDArray[np.uint8], blocks: Sequence[AnswerBlock], share: NewShare
) -> Iterator[Answer | UnreadableImage]:
    answers = chain.from_iterable(block.answers(share) for block in blocks)
    for code in statuses.tolist():
        yield UnreadableImage(status_reason(code)) if code >= FIRST_BAD else next(answers)


def encode(encoder: Encoder, pixels: Tensor, *, outputs: WantedOutputs, batch_multiple: int = BATCH_MULTIPLE) -> Inputs:
    """A model's inputs for pixels [B, 3, R, R]; `UsageError` if some are not finite.

    Batches are padded to a multiple of `batch_multiple`, so that inputs equal cached ones.
    """
    decoded = torch.full((len(pixels),), ENCODED, dtype=torch.uint8)
    batches = pad_batches([(0, pixels, decoded, UNREAD.expand(len(pixels), -1))], batch_multiple)
    ((_, statuses, values),) = encode_batches(encoder, batches, outputs)
    bad = np.flatnonzero(statuses[: len(pixels)] >= FIRST_BAD)
    if bad.size:
        reason = status_reason(statuses[bad[0]]).replace("features", "features are")
        problem = f"an image (index {bad[0]} in its batch) cannot be used: its {reason}"
        raise UsageError(f"{problem}; leave it out")
    return as_inputs({name: value[: len(pixels)] for name, value in values.items()}, encoder.device)


def encode_files(
    encoder: Encoder,
    paths: Sequence[Path],
    *,
    batch_size: int,
    num_workers: int | Literal["auto"],
    outputs: WantedOutputs,
    batch_multiple: int = BATCH_MULTIPLE,
) -> Iterator[tuple[NDArray[np.uint8], Inputs]]:
    """Encode image files in batches; yields status codes [B] (encoded, or why not) and inputs."""
    blocks = split_rows(range(len(paths)), batch_size)
    images = ImageRows([str(path) for path in paths], Path(), encoder.image_transform)
    workers = min(decoding_workers(num_workers), max(0, len(blocks) - 1))  # starting one takes longer than a block
    decoded = decode_batches(images, blocks, workers, pinned=encoder.device.type == "cuda")
    encoded = encode_batches(encoder, pad_batches(decoded, batch_multiple), outputs)
    with explain_memory_errors(batch_size, kept=""):
        for block, (_, statuses, values) in zip(blocks, encoded, strict=True):
            rows = len(block)
            inputs = {name: value[:rows] for name, value in values.items()}
            yield statuses[:rows], as_inputs(inputs, encoder.device)


def as_inputs(values: dict[str, NDArray[Any]], device: Any) -> Inputs:
    """Encoder outputs as tensors of the types used in training: CLS in float32, tokens in float16."""
    values = {name: value for name, value in values.items() if name != CONTENTS}
    if PIXELS in values:
        values["block_inputs"] = values.pop(PIXELS)
    inputs = {}
    for name, value in values.items():
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        inputs[name] = (tensor.float() if name == "cls" else tensor).to(device)
    return inputs


def features_if_given(images: Any, dim: int) -> NDArray[np.float32] | None:
    """Features as an array [B, dim], if `images` are arrays of floats; None if they are images."""
    if isinstance(images, Features):
        if images.bad.any():
            problem = f"{images.path} has rows of unreadable images"
            raise UsageError(f"{problem}; give only `features.cls[~features.bad]`")
        return images.cls
    images = as_numpy(images)
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        return None
    rows = np.atleast_2d(images)
    if rows.ndim != 2 or rows.shape[1] != dim:
        hint = "; to give an image as an array, use uint8 [H, W, 3]" if rows.ndim == 3 else ""
        problem = f"features have the shape {tuple(images.shape)}"
        raise UsageError(f"{problem}; expected [images, {dim}] for this model{hint}")
    return checked_features(rows) if len(rows) else np.asarray(rows, dtype=np.float32)


def open_image(image: ImageLike) -> Image.Image:
    name = image if isinstance(image, (str, Path)) else f"the image (type {type(image).__name__})"
    try:
        if isinstance(image, (str, Path)):
            return read_image(Path(image))
        if isinstance(image, Image.Image):
            if not all(image.size):
                size = f"{image.width} × {image.height} pixels"
                raise UsageError(f"the image has {size}; give an image with at least one")
            return as_rgb(image)
        array = as_numpy(image)
        if not isinstance(array, np.ndarray):
            kind = f"an object of type {type(array).__name__}"
        elif array.dtype == np.uint8 and array.size and (array.ndim == 2 or array.shape[2:] in ((3,), (4,))):
            return as_rgb(Image.fromarray(array))
        else:
            kind = f"an array of shape {array.shape} and type {array.dtype}"
    except BadImageFile as error:
        if isinstance(image, (str, Path)) and Path(image).is_dir():
            raise UsageError(f"{image} is a folder; give a list of the image files in it") from error
        if error.reason == "missing":
            raise UsageError(f"{image} does not exist; correct the path") from error
        raise UsageError(f"{name} cannot be used: {error.reason}; replace it or leave it out") from error
    except (OSError, ValueError) as error:  # a PIL image that is closed, cut off or of a rare mode
        raise UsageError(f"{name} cannot be used: {error}; replace it") from error
    expected = "give a path, a PIL image, a uint8 array [H, W, 3], or encoder features"
    raise UsageError(f"{kind} is not an image; {expected}")


def list_images(names: Iterable[str], stdin: TextIO, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files meant by `names`, each once, in order: files, folders, patterns, `-` for stdin.

    log: called with a line on the files in folders that were skipped, if any.
    """
    paths: dict[Path, None] = {}
    skipped: Counter[str] = Counter()
    for name in names:
        paths.update(dict.fromkeys(_expand(name, stdin, skipped)))
    if not paths:
        problem = "the given paths lead to no image"
        raise UsageError(f"{problem}; give at least one image, or a folder that contains some")
    if skipped:
        total = skipped.total()
        log(f"{total:,} {'file' if total == 1 else 'files'} skipped: {describe_skipped(skipped)}")
    return list(paths)


def _expand(name: str, stdin: TextIO, skipped: Counter[str]) -> list[Path]:
    path = Path(name)
    if name == "-":
        text = stdin.read()
        if "\0" in text:
            problem = "stdin has NUL bytes and may be UTF-16"
            raise UsageError(f"{problem}; expected UTF-8 text, one path per line")
        listed = [Path(line) for line in LINE_END.split(text) if line.strip()]
        if not listed:
            raise UsageError("stdin lists no files; expected one path per line")
        return listed
    if path.is_dir():
        images = _images_in(path, skipped)
        if not images:
            hint = f"; skipped: {describe_skipped(skipped)}" if skipped else ""
            raise UsageError(f"{path} holds no images (files ending in .jpg, .png and the like){hint}")
        return images
    if not path.exists() and glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        if not matches:
            raise UsageError(f"no file matches {name}; correct the pattern")
        files: list[Path] = []
        for match in matches:
            files += _images_in(match, skipped) if match.is_dir() else [match]
        return files
    return [path]  # a missing file is reported among the answers, as every unreadable one


def _images_in(folder: Path, skipped: Counter[str]) -> list[Path]:
    tree = ImageTree(folder)
    images = [folder / image for image in tree.images(refuse_links=False)]
    skipped.update({kind: len(paths) for kind, paths in tree.skipped.items()})
    return images
