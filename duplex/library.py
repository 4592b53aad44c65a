"""The library's functions: load a data set, `fit` a method, `evaluate` it.

A data set comes from params.yaml, from a folder or table of images, or from arrays of features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from duplex.artifacts import ArtifactPaths, RunPaths, log_folder
from duplex.config.params import EncoderParams, EvaluationParams, MethodEntry, Params, load_params, shipped_project
from duplex.data.check import alike_labels, content_issues
from duplex.data.contents import file_digests, row_keys
from duplex.data.download import local_source
from duplex.data.sources import detect_source, load_source
from duplex.data.tables import from_rows
from duplex.encoders.base import encoder_identity, is_random, load_encoder, resolve_device, unknown_words
from duplex.errors import DuplexError, UsageError, require, require_type, require_whole, shown
from duplex.evaluation.vectors import word_vectors_file
from duplex.features.file import IMPORTED
from duplex.features.imported import FEATURES, checked_features
from duplex.features.shared import encode_shared, user_cache
from duplex.labels import SPLITS, WORLDS, LabelSpace, World, prompt_name
from duplex.methods.base import Method
from duplex.methods.registry import find_method, installed_methods, parse_options
from duplex.options import DEFAULT_TRAINING, AutoFinetune, SplitOptions, TrainingOptions, finetune_options
from duplex.recognition.recognizer import Recognizer
from duplex.recognition.worlds import calibration_for, evaluate_world
from duplex.report.result import Result
from duplex.system.entry import LARGEST_SEED
from duplex.system.files import expanded_path, refuse_existing, replace_file
from duplex.system.threads import in_initial_modes
from duplex.training.checkpoint import check_inputs
from duplex.training.inputs import Data, InputRequest, RunInputs, label_table, open_data, pandas_index
from duplex.training.logs import EpochReport, StepReport, TrainingHooks, TrainingLog, open_log
from duplex.training.run import MethodSpec, TrainedMethod, reproducible, train_run
from duplex.training.scoring import Calibration, ChooseBy, SplitScorer, feasible_compositions

REPLACED = {  # argument of `fit` -> training options without effect if it is a function
    "optimiser": ("weight_decay", "eps"),
    "schedule": ("decay", "decay_every"),
}


class Dataset:
    """Data set: images as encoder features, with labels and a train, val and test split.

    `load_dataset` and `Dataset.from_arrays` make one.
    """

    def __init__(self, name: str, data: Data, *, project: Params | None = None) -> None:
        """Users call `load_dataset` or `from_arrays`; no `project`: the shipped params.yaml."""
        self.name = name
        self.labels = data.labels
        self._data = data
        self.in_project = project is not None
        self.params = project or _shipped_params()
        self.evaluation = project.evaluation if project else EvaluationParams()
        # Training options where neither the method nor the caller sets others
        self.training = project.dataset(name).training if project else TrainingOptions.from_dict(DEFAULT_TRAINING)
        self.inputs = data.inputs
        self.device = data.device

    @property
    def manifest(self) -> pd.DataFrame:
        """A copy of the table (image, state, object, split), for `from_arrays` if changed."""
        return self._data.manifest.copy()

    @property
    def features(self) -> NDArray[np.float32]:
        """CLS features [images, width], not normalised; zero for unreadable images."""
        opened = self._data.open()
        return np.where(opened.bad[:, None], np.float32(0), opened.cls)

    @classmethod
    @in_initial_modes()
    def from_arrays(
        cls,
        features: Any,
        table: pd.DataFrame | Mapping[str, Sequence[str]],
        *,
        encoder: str | None = None,
        weights: str | None = None,
        word_vectors: str | Path | None = None,
        device: str = "auto",
        name: str = "arrays",
    ) -> Dataset:
        """Make a data set from features that are already computed.

        features: numbers [images, width], as an array or a tensor, not normalised.
        table: a row per image, with the columns state, object and, optionally, image (its name) and
            split (train, val, test). Without split, images are split at random as by `duplex data
            add`. Rows match features by position; indexes of pandas objects must be equal.
        encoder: name of the encoder that computed the features (`duplex encoders`). Without it,
            only methods without prompts can be trained.
        weights: the encoder's weights, a published tag or a file.
        word_vectors: file in GloVe format, for methods that use word vectors, and to exclude
            implausible unseen pairs in the open world.
        device: device for training and evaluation: auto, cpu or cuda.
        name: name of the data set, for messages.
        """
        if encoder is None and weights is not None:
            raise UsageError("weights are given without an encoder; give their encoder as `encoder=`")
        if is_random(weights):
            reason = f"weights={weights!r} is only for images"
            raise UsageError(f"{reason}; give the tag or file that made the features")
        values = checked_features(features)
        try:
            rows = label_table(table, len(values), pandas_index(features))
            keys = row_keys(values)
            # `label_table` keeps all rows
            data = from_rows(rows, SplitOptions(), "the table", lambda images: keys)
        except DuplexError as error:
            raise UsageError(str(error)) from None
        issues = content_issues(data.manifest, dict(zip(rows["image"], keys, strict=True)), FEATURES)
        for line in [*alike_labels(data), *(issue for issue in issues if issue.count)]:
            print(f"{name}: {line}", file=sys.stderr)
        entry = EncoderParams(name=IMPORTED)
        if encoder is not None:
            entry = _known_encoder(encoder, weights, data.labels)
            width = encoder_identity(encoder, weights).dim
            if width != values.shape[1]:
                raise UsageError(
                    f"the features have the width {values.shape[1]}, but those of {encoder} have the "
                    f"width {width}; give the encoder that made them, or leave out `encoder=`"
                )
        words = word_vectors_file(word_vectors)
        return cls(name, Data(data.manifest, data.labels, values, entry, _checked_device(device), words))

    def __repr__(self) -> str:
        images = {split: int((self.manifest["split"] == split).sum()) for split in SPLITS}
        counts = ", ".join(f"{count:,} {split}" for split, count in images.items())
        return (
            f"Dataset({self.name}: {counts} images; {len(self.labels.states)} states, "
            f"{len(self.labels.objects)} objects, {len(self.labels.pairs['train'])} seen pairs)"
        )


@in_initial_modes()
def load_dataset(
    source: str | Path,
    *,
    encoder: str | None = None,
    weights: str | None = None,
    images: str | Path | None = None,
    split_seed: int | None = None,
    tokens: Literal["none", "patch"] = "none",
    block_inputs: int = 0,
    resize: Literal["crop", "squash", "pad"] | None = None,
    word_vectors: str | Path | None = None,
    cache: str | Path | None = None,
    device: str | None = None,
) -> Dataset:
    """Load a data set of the params.yaml here or, given `encoder`, one of image files.

    Features of image files are computed once: the cache recognises the files by content. All
    arguments but `source` and `device` are for image files; params.yaml describes its own data sets.

    source: name of a data set of params.yaml; or a folder `state/object/*.jpg`, the folder of a
        published benchmark, or a table (CSV or Parquet) with the columns image, state, object and
        optionally split; or, on the Hugging Face hub, `hf-datasets:OWNER/NAME`.
    encoder: name of the frozen encoder (`duplex encoders` lists those on disk).
    weights: the encoder's weights, a published tag or a file.
    images: folder that a table's image paths start from; by default the table's folder.
    split_seed: seed of the random split, for data without a split. None: 0.
    tokens: "patch" also keeps patch tokens, for the methods that need them.
    block_inputs: number of the image tower's last blocks that `fit` may fine-tune.
    resize: how images become square: "crop", "squash" (distort) or "pad"; None: as the weights' own
        preprocessing.
    word_vectors: as in `Dataset.from_arrays`.
    cache: folder of the feature caches; by default `duplex` in the user's cache folder.
    device: auto, cpu or cuda. None: as in params.yaml, else auto.
    """
    if encoder is None:
        given: dict[str, object] = {"weights": weights, "images": images, "word_vectors": word_vectors}
        given |= {"cache": cache, "split_seed": split_seed, "resize": resize}
        given |= {"tokens": tokens if tokens != "none" else None, "block_inputs": block_inputs or None}
        if names := [f"`{name}=`" for name, value in given.items() if value is not None]:
            used = f"{' and '.join(names)} can be used only with `encoder=`"
            raise UsageError(f"{used}; add it, or omit the others")
        return _project_dataset(str(source), device)
    seed = SplitOptions.seed
    if split_seed is not None:
        seed = require_whole(split_seed, "split_seed", 0, LARGEST_SEED)
    require_whole(block_inputs, "block_inputs", 0)
    device = _checked_device(device or "auto")
    folder = user_cache() if cache is None else expanded_path(cache, "cache").resolve()
    image_folder = None if images is None else expanded_path(images, "images").resolve()
    try:
        place = local_source(source, folder)
        description = detect_source(place, SplitOptions(seed=seed), image_folder)
        data = load_source(description)
    except DuplexError as error:
        raise UsageError(str(error)) from None
    if split_seed is not None and not data.made_split:
        raise UsageError(f"split_seed is {seed}, but {place} has a split of its own; leave split_seed out")
    for note, count in data.notes.items():
        print(f"{place.name}: {note}: {count:,}", file=sys.stderr)
    for line in alike_labels(data):
        print(f"{place.name}: {line}", file=sys.stderr)
    entry = _known_encoder(encoder, weights, data.labels).model_copy(update={"resize": resize})
    words = word_vectors_file(word_vectors)
    names = data.manifest["image"].tolist()
    root = description.root
    digests = file_digests(root, names)
    present = {image: digest for image, digest in zip(names, digests, strict=True) if digest}
    for issue in (issue for issue in content_issues(data.manifest, present) if issue.count):
        print(f"{place.name}: {issue}", file=sys.stderr)
    tower = load_encoder(entry.name, entry.weights, towers="image", device=device, resize=resize)
    features, bad = encode_shared(folder, tower, root, names, digests, tokens=tokens, block_inputs=block_inputs)
    if bad:
        print(
            f"{len(bad)} of {len(names)} images cannot be encoded and are left out; the first is "
            f"{bad[0].image} ({bad[0].reason})",
            file=sys.stderr,
        )
    loaded = Data(data.manifest, data.labels, features, entry, device, words, skip_frozen_blocks=True)
    return Dataset(place.stem, loaded)


@lru_cache(maxsize=1)
def _shipped_params() -> Params:
    return load_params(shipped_project() / "params.yaml")


def _project_dataset(name: str, device: str | None) -> Dataset:
    if not Path("params.yaml").is_file():
        raise UsageError(
            f"this folder has no params.yaml; change to the project of {name!r}, or give `encoder=` to load image files"
        )
    params = load_params()
    if name not in params.datasets and Path(name).exists():
        raise UsageError(f"{name!r} is a path, not a data set of params.yaml; `encoder=` loads its images")
    data = open_data(params, name, ArtifactPaths(ArtifactPaths.root.resolve()))
    if device is not None:
        data = replace(data, device=_checked_device(device))
    return Dataset(name, data, project=params)


def _checked_device(device: str | torch.device) -> str:
    device = str(device)
    require(device.partition(":")[0], ("auto", "cpu", "cuda"), "device")
    resolve_device(device)  # raises for a GPU that is not there
    return device


def _known_encoder(name: str, weights: str | None, labels: LabelSpace) -> EncoderParams:
    encoder_identity(name, weights)
    if unknown := unknown_words(name, map(prompt_name, (*labels.states, *labels.objects))):
        words = ", ".join(unknown[:5])
        raise UsageError(f"encoder {name!r} does not know the label words {words}; choose another")
    return EncoderParams(name=name, weights=weights)


class Run(TrainedMethod):
    """A trained method with its metadata and training history; `duplex.fit` returns it."""

    @property
    def val_auc(self) -> float:
        """Validation AUC of the best epoch, in percent."""
        return 100 * self.record.val_auc

    @property
    def selected_by(self) -> str:
        """The metric that chose the epoch: a value of `select`, or the caller's function."""
        return self.result.selected_by

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write the run to a folder for `Recognizer.load`, which must not hold an exported model.

        force: replace an earlier run; its metrics are removed if the checkpoint changes.
        """
        files = RunPaths(expanded_path(folder, "folder"))
        if (files.root / "model.safetensors").is_file():
            found = f"{files.root} has an exported model, which would be loaded instead"
            raise UsageError(f"{found}; use another folder")
        for file in (files.checkpoint, files.history, files.timing):
            refuse_existing(file, force=force)
        self.write(files)
        return files.root

    def export(self, out: str | Path, *, word_vectors: str | Path | None = None, **settings: Any) -> Path:
        """Write the model to a folder that works without this package, as `duplex export` does.

        out: made if it does not exist.
        word_vectors: the GloVe-format file that training read, if it read one.
        settings: `world`, `licence` and `force` of `Recognizer.save_pretrained`.
        """
        with TemporaryDirectory() as scratch:
            recognizer = Recognizer.load(self.save(scratch), device="cpu", word_vectors=word_vectors)
            return recognizer.save_pretrained(out, **settings)

    def write_scores(
        self, data: Dataset, file: str | Path, *, world: World = "closed", split: str = "test", force: bool = False
    ) -> Path:
        """Write the scores that `evaluate` measures as a file .npz for `duplex score`; they must fit into memory.

        data, world, split: as of `evaluate`.
        force: replace an earlier file.
        """
        place = expanded_path(file, "file")
        if place.suffix != ".npz":
            raise UsageError(f"{place}: scores are written as .npz; give a file such as {place.with_suffix('.npz')}")
        refuse_existing(place, force=force)
        with reproducible(self.training.threads), torch.no_grad():
            inputs, method, calibration = _for_split(self, data, world, split)
            task = SplitScorer.of(method, inputs.labels.candidates(world, split))
            images = inputs.examples[split]
            scores = [block.cpu().numpy() for _, block in task.blocks(images.inputs)]
            feasible = feasible_compositions(method, inputs.words if world == "open" else None, calibration)
        labels, pairs = inputs.labels, task.candidates.compositions
        arrays = {
            "scores": np.concatenate(scores),
            "target": np.searchsorted(pairs, images.compositions.cpu().numpy()),
            "seen": labels.is_seen(pairs),
            "state": np.array(labels.states)[labels.state_of(pairs)],
            "object": np.array(labels.objects)[labels.object_of(pairs)],
        }
        if feasible is not None:
            arrays["feasible_mask"] = feasible[pairs]
        with replace_file(place) as scratch, scratch.open("wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
        return place

    def __repr__(self) -> str:
        chosen = "" if self.selected_by == "auc" else f" by {self.selected_by}"
        epoch = f"epoch {self.record.epoch}{chosen}"
        return f"Run({self.name}, seed {self.record.seed}, {epoch}, val AUC {self.val_auc:.2f})"


def fit(
    data: Dataset,
    method: str | type[Method[Any]],
    *,
    seed: int = 0,
    world: World | None = None,
    select: str | ChooseBy | None = None,
    optimiser: str | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    schedule: str | Callable[[int], float] | None = None,
    on_step: Callable[[StepReport], object] | None = None,
    on_epoch: Callable[[EpochReport], object] | None = None,
    log: str | TrainingLog | None = None,
    **settings: Any,
) -> Run:
    """Train a method on the training images and return it as a `Run`.

    The epoch, the bias on unseen pairs and the open world's feasibility threshold are chosen on
    validation images.

    data: data set from `load_dataset` or `Dataset.from_arrays`.
    method: name of a method in params.yaml (outside of a project, in the one that ships with the
        package); or, with default options, an installed kind (`duplex methods`), `module:Class` or
        a subclass of `Method`.
    seed: seed of the initial parameters and of the order of images.
    world: closed or open: the world whose candidates are used in training, and for which bias and threshold are chosen.
        None: as the method's entry in params.yaml says; a kind or a class is trained for the closed world, and its bias
        is chosen for both worlds.
    select: validation metric that chooses the epoch: auc, hm, unseen, loss; `last` for the last epoch; or a function of
        a dict with seen, unseen, hm and auc (fractions, closed world) that returns the number to maximise.
    optimiser: adam, adamw, or a function of parameter groups that returns an optimiser, such as
        `torch.optim.NAdam`. Groups without a learning rate are trained with the option `learning_rate`.
    schedule: step, cosine, constant, or a function of the epoch (from 0) that returns the factor of the learning rates.
    on_step: function that is called with a `StepReport` after each optimiser step.
    on_epoch: the same with an `EpochReport` after each epoch, first before training (epoch 0).
    log: dvclive, tensorboard, wandb or mlflow, whose files go to a subfolder of that name; a
        plug-in's log; or an object with the methods of `TrainingLog`.
    settings: training options, such as `epochs` and `precision`, options of the method's kind, and
        `finetune`: the number of the image tower's last blocks to fine-tune, or a dict as in
        params.yaml, such as `{"blocks": 2, "adapter": "full", "learning_rate": 1e-3}`.
    """
    if not isinstance(data, Dataset):
        raise UsageError(f"data is {shown(data)}; expected what load_dataset or Dataset.from_arrays returns")
    seed = require_whole(seed, "seed", 0, LARGEST_SEED)
    if world is not None:
        require(world, WORLDS, "world")
    chosen: dict[str, Any] = {"select": select, "optimiser": optimiser}
    chosen |= {"schedule": schedule, "log": log}
    settings |= {key: value for key, value in chosen.items() if isinstance(value, str)}
    own = {key: value for key, value in chosen.items() if not isinstance(value, str)}
    name, entry = _entry(data, method)
    spec = _spec(data, name, entry, world, settings)
    if spec.finetune is not None and isinstance(data._data.features, np.ndarray):
        call = f"load_dataset(..., block_inputs={spec.finetune.blocks})"
        raise UsageError(f"fine-tuning {spec.name!r} needs images; use {call}")
    precision = settings.get("precision")
    reads_text = find_method(spec.kind).needs(spec.options) & {"text", "words"}
    has_tower = reads_text or (precision == "bf16" and spec.finetune is not None)
    if precision in ("bf16", "fp16") and not has_tower:
        unused = f"precision is for the text tower, which {spec.name} does not use"
        raise UsageError(f"{unused}; leave out precision")
    for key, names in REPLACED.items():
        given = [each for each in names if each in settings]
        if given and own.get(key) is not None:
            unused = f"{given[0]} has no effect with your own {key}"
            raise UsageError(f"{unused}; set it in that function, or leave it out")
    training_log = own.get("log")
    if training_log is None:
        training_log = open_log(spec.training.log, log_folder(spec.training.log, data.name, name, seed))
    hooks = TrainingHooks(on_step, on_epoch, own.get("optimiser"), own.get("schedule"), training_log)
    with reproducible(spec.training.threads):
        inputs = data.inputs(spec.request)
        require_both_groups(inputs, "val", data.name)
        device = torch.device(resolve_device(data.device))
        run = train_run(spec, inputs, seed, device, data.evaluation, hooks=hooks, choose_by=own.get("select"))
    return Run(**vars(run))


def require_both_groups(inputs: RunInputs, split: str, name: str) -> None:
    """Raise UsageError unless a split has images of seen and of unseen pairs: AUC needs both."""
    is_seen = inputs.labels.is_seen(inputs.examples[split].compositions.cpu().numpy())
    if is_seen.all() or not is_seen.any():
        group = "unseen" if is_seen.all() else "seen"
        found = f"data set {name!r} has no {split} images of {group} pairs"
        raise UsageError(f"{found}, so AUC is undefined; add some")


def _entry(data: Dataset, method: str | type[Method[Any]]) -> tuple[str, MethodEntry]:
    if isinstance(method, type) and issubclass(method, Method):
        return method.__name__, MethodEntry(kind=_kind_of(method))
    if not isinstance(method, str):
        raise UsageError(f"method is {shown(method)}; expected a name or a subclass of Method")
    if method in data.params.methods:
        return method, data.params.methods[method]
    if ":" not in method:
        require(method, dict.fromkeys([*data.params.methods, *installed_methods()]), "method")
    return method, MethodEntry(kind=method)


def _kind_of(method: type[Method[Any]]) -> str:
    """A class's name in checkpoints: that of a registered kind, else `module:Class`."""
    target = f"{method.__module__}:{method.__qualname__}"
    if "<locals>" in target:
        found = f"{method.__name__} is defined in a function"
        raise UsageError(f"{found}, so saved runs cannot load it; move it outside")
    names = [name for name, source in installed_methods().items() if source.value == target]
    kind = names[0] if names else target
    if find_method(kind) is not method:
        found = f"{kind!r} now names another class"
        raise UsageError(f"{found}; pass that one, or define the old one under a new name")
    return kind


def _spec(data: Dataset, name: str, entry: MethodEntry, world: World | None, settings: dict[str, Any]) -> MethodSpec:
    dataset = data.name if data.in_project else ""
    asked = settings.pop("finetune", None)
    asked = entry.finetune_for(dataset) if asked is None else asked
    finetune = finetune_options(asked if isinstance(asked, Mapping) else {"blocks": asked})
    if isinstance(finetune, AutoFinetune):
        found = f"{name} has `finetune: auto`, which only `duplex train` supports"
        raise UsageError(f"{found}; give `finetune=` a number")
    spec = MethodSpec(
        name,
        entry.kind,
        parse_options(entry.kind, entry.options_for(dataset)),
        data.training.changed(entry.training_for(dataset)),
        entry.worlds if world is None else (world,),
        world or entry.trained_for,
        finetune,
    )
    return spec.with_settings(settings)


def evaluate(run: Run, data: Dataset, *, world: World = "closed", split: str = "test") -> Result:
    """Measure a trained method; returns metrics with 95 % intervals, as in the DVC pipeline.

    run: the trained method, as `fit` returns it.
    data: the data set of training, or another with the same labels and encoder.
    world: closed (the candidates are the seen pairs and those of the split) or open (all pairs,
        except unseen ones below the feasibility threshold that validation chose).
    split: test or val.
    """
    require_type(run, Run, "run")
    with reproducible(run.training.threads):
        inputs, method, calibration = _for_split(run, data, world, split)
        found = evaluate_world(method, inputs, data.evaluation, world, calibration, split)
    name = f"{run.name} seed {run.record.seed}"
    return Result(name, data.name, world, split, found.metrics, found.predictions, found.margins)


def _for_split(run: Run, data: Dataset, world: World, split: str) -> tuple[RunInputs, Method[Any], Calibration]:
    """What scores a split: inputs, and the method on their device, with what validation chose for the world."""
    require_type(data, Dataset, "data")
    require(world, WORLDS, "world")
    require(split, ("val", "test"), "split")
    calibration = calibration_for(run.record, world, f"run {run.name!r}")
    inputs = data.inputs(InputRequest.of(run.record, run.training))
    try:
        check_inputs(f"run {run.name!r}", run.record, inputs.labels, inputs.encoder)
    except DuplexError as error:
        raise UsageError(str(error)) from None
    trained_on = run.record.training.get("manifest")
    if trained_on not in (None, inputs.identity.get("manifest")):
        print(
            f"the image table of {data.name!r} differs from the one that run {run.name!r} was "
            f"trained on; results are too high if training used any of the {split} images: "
            f"remove such images from {split}",
            file=sys.stderr,
        )
    require_both_groups(inputs, split, data.name)
    device = torch.device(resolve_device(data.device))
    images = inputs.examples[split].to(device)
    inputs = replace(inputs, examples={**inputs.examples, split: images})
    return inputs, run.method.to(device).eval(), calibration
