"""A data set and a run of the pipeline as objects: parameters, files, and stamps.

data = ProjectData(params, "shapes")
data.require()                          # an error if it must be prepared or extracted again
run = data.run("duplex", seed=0)
run.difference("train", "evaluate")     # "", or why its files are outdated
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import DatasetParams, EncoderParams, MethodEntry, Params, shipped_project
from duplex.encoders.base import family_modules, joined_parts
from duplex.errors import DuplexError, UsageError
from duplex.features.file import IMPORTED, read_cache_digest
from duplex.methods.base import find_stream_adapter
from duplex.methods.registry import method_entry_point
from duplex.options import CombinedRunsOptions, FinetuneOptions
from duplex.project import stamps
from duplex.project.stamps import UNSTAMPED, Stamp
from duplex.system.code import code_hash
from duplex.system.files import sha256_once
from duplex.system.plugins import installed_plugins, module_of
from duplex.training.checkpoint import ModelHeader, read_checkpoint_header
from duplex.training.inputs import Data, InputRequest, RunInputs, open_data
from duplex.training.run import MethodSpec

DATA_STAGES = ("prepare", "extract")
RUN_STAGES = ("train", "evaluate")
CALIBRATION = ("thresholds", "feasibility", "word_vectors")  # keys of `evaluation:` that training uses


def stage_code(stage: str, *modules: str) -> str:
    """Hash of the code of a stage's script, and of `modules` found through entry points."""
    return code_hash(shipped_project() / "pipeline" / f"{stage}.py", *modules)


@dataclass(frozen=True)
class ProjectData:
    """A data set of params.yaml, with the files that the pipeline makes of it."""

    params: Params
    dataset: str
    paths: ArtifactPaths = field(default_factory=ArtifactPaths)

    @property
    def entry(self) -> DatasetParams:
        return self.params.dataset(self.dataset)

    def run(self, method: str, seed: int) -> ProjectRun:
        return ProjectRun(self.dataset, method, seed, self.params, self.paths)

    def settings(self, stage: str) -> Stamp:
        """What `plan` writes of a stamp: parameters set for a stage, and its code's hash."""
        made: Stamp = {}
        modules: list[str] = []
        if stage in DATA_STAGES:
            made |= self._source_settings(stage)
        if stage == "extract":
            made |= self._extraction_settings()
            modules = family_modules(self.entry.encoder.name)
        if stage == "inventory":
            made |= rows_shown(self.params)
        if stage == "maps":
            modules = method_modules(self.params)
        return {**made, "code": stage_code(stage, *modules)}

    def _source_settings(self, stage: str) -> Stamp:
        from duplex.data.sources import source_record  # which training does not need

        earlier = stamps.read(self.paths.stamp(self.dataset, "prepare")) or {}
        source = source_record(self.entry.source, earlier.get("source"), self.paths.image_digests(self.dataset))
        made: Stamp = {}
        if self.entry.features is not None:  # images with equal features are kept in one split
            made["features"] = _features_digest(self.entry.features, self.dataset, earlier)
        if stage == "prepare":
            return {**made, "source": source}
        is_encoded = self.entry.features is None and self.entry.encoder.name != IMPORTED
        if is_encoded and self.entry.source.recorded_root is not None:
            made["images"] = {"root": self.entry.source.recorded_root, "files": source["images"]}
        return made

    def _extraction_settings(self) -> Stamp:
        settings = self.params.extraction
        return {
            **_encoder_settings(self.entry.encoder),
            "batch_size": settings.batch_size,
            "max_bad": settings.max_bad,
            "tokens": settings.tokens,
            "block_inputs": self.params.block_inputs(self.dataset),
            "pixels": self.params.pixels(self.dataset),
        }

    def stamp(self, stage: str) -> Stamp:
        """The stamp of files made now: the stage's settings, checksums of the files it reads."""
        manifest = {"manifest.csv": _checksum(self.paths.manifest(self.dataset))}
        return {**self.settings(stage), "inputs": {} if stage == "prepare" else manifest}

    def outdated(self, stage: str) -> str:
        """Why a stage's files are outdated; "" if they are not, or if no stage wrote them."""
        found = stamps.difference(self.paths.stamp(self.dataset, stage), self.stamp(stage))
        return "" if found == UNSTAMPED else found

    def difference(self, *stages: str) -> str:
        """Why, and by which command, the data set must be prepared or extracted again, or ""."""
        for stage in stages or DATA_STAGES:
            if found := self.outdated(stage):
                done = {"prepare": "prepared", "extract": "extracted"}[stage]
                return (
                    f"the data set {self.dataset} has to be {done} again: {found}; `duplex "
                    f"{stage} --dataset {self.dataset}` does that, and `dvc repro` runs "
                    "everything that depends on it"
                )
        return ""

    def require(self, *stages: str) -> None:
        """Raise `DuplexError` if the data set must be prepared or extracted again."""
        if found := self.difference(*stages):
            raise DuplexError(found)

    def write_stamp(self, stage: str, made: Stamp) -> None:
        stamps.write(self.paths.stamp(self.dataset, stage), made)

    def require_features(self) -> None:
        """Raise `DuplexError`, with the command to run, if the data set is not yet extracted."""
        places = {self.paths.manifest: "prepare", self.paths.labels: "prepare", self.paths.features: "extract"}
        for path, stage in places.items():
            if not path(self.dataset).exists():
                command = f"duplex {stage} --dataset {self.dataset}"
                raise DuplexError(f"{path(self.dataset)} does not exist; `{command}` writes it")

    def checksums(self) -> dict[str, str | None]:
        """Checksums of the files that runs read, as they are now (`RunInputs.read`: as they were)."""
        features = self.paths.features(self.dataset)
        return {
            "manifest.csv": _checksum(self.paths.manifest(self.dataset)),
            "labels.json": _checksum(self.paths.labels(self.dataset)),
            "features.h5": read_cache_digest(features) if features.is_file() else None,
        }

    def open(self) -> Data:
        return open_data(self.params, self.dataset, self.paths)


@dataclass(frozen=True)
class ProjectRun:
    """A method of params.yaml on a data set with a seed; two runs with equal names are equal."""

    dataset: str
    method: str
    seed: int
    params: Params = field(compare=False, repr=False)
    paths: ArtifactPaths = field(default_factory=ArtifactPaths, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.dataset} {self.method} {self.seed}"

    @property
    def data(self) -> ProjectData:
        return ProjectData(self.params, self.dataset, self.paths)

    @property
    def entry(self) -> MethodEntry:
        return self.params.entry(self.method)

    @property
    def spec(self) -> MethodSpec:
        return MethodSpec.of(self.params, self.dataset, self.method)

    @property
    def files(self) -> RunPaths:
        return self.paths.run(self.dataset, self.method, self.seed)

    @property
    def command(self) -> str:
        """The command that trains the run."""
        return f"duplex train --dataset {self.dataset} --method {self.method} --seed {self.seed}"

    @property
    def combined(self) -> dict[str, ProjectRun]:
        """The runs that a product combines, by name; empty for other methods."""
        options = self.params.method(self.method, self.dataset)
        if not isinstance(options, CombinedRunsOptions):
            return {}
        seeds = self.params.run.seeds if options.seeds == "all" else (self.seed,)
        return {f"{name}-{seed}": self.data.run(name, seed) for name in options.of for seed in seeds}

    def settings(self, stage: str) -> Stamp:
        """The part of a stamp that `plan` writes; it is the same for all seeds."""
        params = self.params
        evaluation = params.evaluation.model_dump(mode="json")
        encoder = params.dataset(self.dataset).encoder
        finetune = params.finetune(self.method, self.dataset)
        made: Stamp = {"kind": self.entry.kind, "world": self.entry.world, **_encoder_settings(encoder)}
        if (reads := params.encoder_of(self.method, self.dataset)) is not None:
            made["reads"] = reads
        if params.evaluation.word_vectors is not None:
            made["word_vectors"] = _checksum(params.evaluation.word_vectors)
        if (stream := params.evaluation.stream) is not None:
            evaluation["stream"]["code"] = code_hash(find_stream_adapter(stream.adapter).__module__)
        if stage == "train":
            made["options"] = self.entry.options_for(self.dataset)
            made["training"] = params.training(self.dataset, self.method).result_settings()
            made["finetune"] = None if finetune is None else finetune.to_dict()
            made["calibration"] = {key: evaluation[key] for key in CALIBRATION}
            if self.entry.members:
                members = {name: self.data.run(name, self.seed) for name in self.entry.members}
                made["members"] = {name: member.settings(stage) for name, member in members.items()}
                if params.method(self.method, self.dataset).to_dict().get("seeds") == "all":
                    made["seeds"] = list(params.run.seeds)
        else:
            made["threads"] = params.training(self.dataset, self.method).threads
            made["evaluation"] = evaluation
        modules = [module_of(method_entry_point(kind)) for kind in self.entry.kinds_for(self.dataset)]
        modules += family_modules(encoder.name)
        if isinstance(finetune, FinetuneOptions):
            adapters = installed_plugins("duplex.adapters")
            modules += [module_of(adapters[name]) for name in finetune.adapters]
        return {**made, "code": stage_code(stage, *modules)}

    def stamp(self, stage: str, read: Mapping[str, str | None] | None = None) -> Stamp:
        """The stamp of files made now: settings, seed, and checksums of the files that are read.

        read: checksums of the data as the run read it (`RunInputs.read`). None: as it is now.
        """
        inputs: dict[str, Any] = dict(self.data.checksums() if read is None else read)
        if stage == "evaluate":
            inputs["checkpoint.safetensors"] = _checksum(self.files.checkpoint)
        elif self.entry.members:
            inputs["members"] = {name: _checksum(run.files.checkpoint) for name, run in self.combined.items()}
        return {**self.settings(stage), "seed": self.seed, "inputs": inputs}

    def difference(self, *stages: str) -> str:
        """Why the run is outdated (params.yaml, data or code changed); "" if it is not."""
        for stage in stages or ("train",):
            if found := stamps.difference(self.files.stamp(stage), self.stamp(stage)):
                return found
        return ""

    def checkpoint(self, *, current: bool = True) -> ModelHeader:
        """Header of the checkpoint; `DuplexError` if the data or (`current`) run is outdated."""
        header = read_checkpoint_header(self.files.checkpoint)
        self.data.require()
        if current:
            self.require_current()
        return header

    def write_stamp(self, stage: str, made: Stamp, outputs: Sequence[Path]) -> None:
        """Write the stamp `made` beside a stage's `outputs`, in the run's folder or another."""
        stamps.write(RunPaths(outputs[0].parent).stamp(stage), made, outputs)

    def require_current(self) -> None:
        """Raise `DuplexError` if the run is outdated; the message says how to train it again."""
        if found := self.difference():
            raise DuplexError(
                f"{self.files.root} does not match the method {self.method!r} in params.yaml: "
                f"{found}; `{self.command}` trains it again"
            )


LoadInputs = Callable[[ProjectData, InputRequest], RunInputs]


def load_inputs(data: ProjectData, request: InputRequest = InputRequest()) -> RunInputs:
    """Read what `request` asks for from a data set."""
    return data.open().read(request)


def reader(
    data: ProjectData, read: Mapping[str, str | None], load: LoadInputs = load_inputs
) -> Callable[[InputRequest], RunInputs]:
    """A function that reads a data set's inputs, and refuses them if its files are not those of `read`."""

    def inputs_of(request: InputRequest) -> RunInputs:
        inputs = load(data, request)
        if inputs.read != read:
            changed = f"the data set {data.dataset} has changed since this began"
            raise DuplexError(f"{changed}; run the same command again")
        return inputs

    return inputs_of


class LastDatasetLoader:
    """Reads inputs; those of the last data set stay in memory while its files are the same."""

    def __init__(self) -> None:
        self._dataset = ""
        self._data: Data | None = None

    def __call__(self, data: ProjectData, request: InputRequest) -> RunInputs:
        if self._data is None or data.dataset != self._dataset or not self._data.is_current():
            self._data = None  # frees memory before the next data set is loaded
            self._dataset = data.dataset
            self._data = data.open()
        return self._data.inputs(request)


def rows_shown(params: Params) -> Stamp:
    """What params.yaml says about the rows of the report, apart from the methods themselves."""
    shown_as = {name: shown for name in params.run.methods if (shown := params.entry(name).shown_as) is not None}
    return {"featured": params.report.featured, "shown_as": shown_as}


def method_modules(params: Params) -> list[str]:
    return sorted({module_of(method_entry_point(params.entry(name).kind)) for name in params.run.methods})


def _checksum(path: Path) -> str | None:
    return sha256_once(path) if path.is_file() else None


def _encoder_settings(encoder: EncoderParams) -> Stamp:
    files: list[Path] = []
    for name, weights in joined_parts(encoder.name, encoder.weights):
        files += [Path(weights).expanduser()] if weights is not None else []
        if folder := name.partition(":")[2]:
            files += sorted(Path(folder).expanduser().glob("*"))
    digests = {path.name: sha256_once(path) for path in files if path.is_file()}
    settings = encoder.model_dump(mode="json", exclude=set() if encoder.resize else {"resize"})
    return {"encoder": settings, **({"encoder_files": digests} if digests else {})}


def _features_digest(features: Path, dataset: str, earlier: Mapping[str, Any]) -> str:
    if features.is_file():
        return sha256_once(features)
    if isinstance(digest := earlier.get("features"), str):  # on this machine there are only the results
        return digest
    raise UsageError(
        f"params.yaml: datasets.{dataset}.features: {features} does not exist; correct it, or set null to encode images"
    )
