"""Check the machine and the project (`duplex doctor`), and write a new project (`duplex init`)."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import PARAMS_FILE, DatasetParams, EncoderParams, Params, load_params, shipped_project
from duplex.data.sources import is_on_disk, load_source
from duplex.data.tables import read_manifest
from duplex.encoders.base import encoder_identity, has_text, is_random, load_encoder, missing_weights
from duplex.errors import DuplexError, UsageError, install_command
from duplex.features.encode import WantedOutputs
from duplex.features.file import IMPORTED, ROOT, cache_shapes, partial_path, read_features, row_bytes
from duplex.project.prepare import images_remedy
from duplex.project.run import ProjectData
from duplex.report.page import package_version
from duplex.system.files import report_write_errors, sha256, size_text
from duplex.system.version import __version__

LIBRARIES = ("torch", "torchvision", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
LOW_DISK = 2e9  # bytes
DOWNLOADED = "they are downloaded when first needed; without a network, set encoder.weights to a file"


@dataclass(frozen=True)
class DoctorFinding:
    """Result of one check of `duplex doctor`; `remedy` is empty unless there is a problem."""

    topic: str
    message: str
    remedy: str = ""


def examine() -> list[DoctorFinding]:
    """Check machine and project without changing or downloading anything; returns all results."""
    free = free_bytes(Path.cwd())
    remedy = "free some space before extracting features" if free < LOW_DISK else ""
    disk = DoctorFinding("disk", f"{free / 1e9:.1f} GB free in {Path.cwd()}", remedy)
    python = f"Python {platform.python_version()} on {platform.system()}"
    version = DoctorFinding("duplex", f"{__version__}, {python}")
    libraries = ", ".join(f"{name} {package_version(name)}" for name in LIBRARIES)
    findings = [version, DoctorFinding("packages", libraries), *_device(), disk]
    if not PARAMS_FILE.exists():
        remedy = "change to a project's folder, or make one with `duplex init FOLDER`"
        found = f"{PARAMS_FILE} does not exist in this folder"
        return [*findings, DoctorFinding("project", found, remedy)]
    try:
        params = load_params()
    except DuplexError as error:
        return [*findings, DoctorFinding("project", str(error), "correct params.yaml")]
    for name in params.datasets:
        findings += _dataset(params, name)
    return findings


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def outputs_to_cache(params: Params, dataset: str) -> WantedOutputs:
    """What the data set's feature cache stores for each image besides the CLS feature."""
    patches = params.extraction.tokens == "patch"
    return WantedOutputs(patches, params.block_inputs(dataset), params.pixels(dataset))


def weights_for_timing(entry: EncoderParams) -> EncoderParams:
    """Settings to time an encoder with: `entry`, or random weights if its own are missing."""
    if missing_weights(entry.name, entry.weights) is None:
        return entry
    return entry.model_copy(update={"weights": "random"})


def cache_row_bytes(params: Params, dataset: str) -> dict[str, int]:
    """Bytes per image in a data set's feature cache, by what is stored; tokens are those of a blank image."""
    entry = weights_for_timing(params.dataset(dataset).encoder)
    outputs = outputs_to_cache(params, dataset)
    stored: dict[str, tuple[int, ...]] = {}
    if outputs.patches or outputs.block_inputs or outputs.pixels:
        stored = outputs.row_shapes(load_encoder(entry.name, entry.weights, towers="image"))
    shapes = cache_shapes(encoder_identity(entry.name, entry.weights).dim, stored)
    return {name: row_bytes(name, shape) for name, shape in shapes.items()}


def _extraction_size(params: Params, name: str) -> Iterator[DoctorFinding]:
    path = ArtifactPaths().manifest(name)
    source = params.dataset(name).source
    try:
        images = len(read_manifest(path) if path.exists() else load_source(source).manifest)
        needed = images * sum(cache_row_bytes(params, name).values())
    except DuplexError:  # reported by other checks
        return
    free = free_bytes(ArtifactPaths.root)
    message = f"extraction writes {size_text(needed)} for {images:,} images"
    advice = "make room, lower encoder.block_inputs, or set encoder.pixels instead"
    yield DoctorFinding(name, f"{message}; {size_text(free)} are free", advice if needed > free else "")


def _device() -> Iterator[DoctorFinding]:
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield DoctorFinding("device", f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    else:
        yield DoctorFinding("device", f"CPU, {torch.get_num_threads()} threads")


def _dataset(params: Params, name: str) -> Iterator[DoctorFinding]:
    entry = params.datasets[name]
    required = name in params.run.datasets
    yield from _weights(name, entry, required)
    if params.evaluation.word_vectors is None and not _has_text(entry):
        remedy = "set evaluation.word_vectors to a file in GloVe format" if required else ""
        found = "word vectors: missing, and the encoder has no text tower to embed words"
        yield DoctorFinding(name, found, remedy)
    root = entry.source.root
    features = entry.features
    if features is not None and not features.is_file():
        remedy = "correct `features` in params.yaml"
        yield DoctorFinding(name, f"features {features}: missing", remedy)
    is_there = entry.source.kind == "shapes" or is_on_disk(entry.source)
    if is_on_disk(entry.source):
        yield DoctorFinding(name, f"images in {root}: on disk")
    elif entry.source.kind == "shapes":
        yield DoctorFinding(name, f"images in {root}: drawn when needed")
    else:
        remedy = images_remedy(name, root) if required and features is None else ""
        yield DoctorFinding(name, f"images in {root}: missing", remedy)
    paths = ArtifactPaths()
    if required or paths.features(name).exists():
        if features is None and not paths.features(name).exists() and is_there:
            yield from _extraction_size(params, name)
        yield _cache(params, paths, name)


def _weights(name: str, entry: DatasetParams, required: bool) -> Iterator[DoctorFinding]:
    if entry.encoder.name == IMPORTED:
        return
    encoder = " ".join(filter(None, (entry.encoder.name, entry.encoder.weights)))
    try:
        missing = missing_weights(entry.encoder.name, entry.encoder.weights)
        status = f"weights {'on disk' if missing is None else 'not on disk'}"
        if is_random(entry.encoder.weights):
            status = "weights drawn at random, for trials"
        remedy = DOWNLOADED if missing else ""
    except DuplexError as error:
        status = str(error)
        remedy = "correct its encoder in params.yaml"
    yield DoctorFinding(name, f"encoder {encoder}: {status}", remedy if required else "")


def _has_text(entry: DatasetParams) -> bool:
    try:
        return entry.encoder.name == IMPORTED or has_text(entry.encoder.name)
    except DuplexError:  # of a family that cannot be imported, which `_weights` reports
        return True


def _cache(params: Params, paths: ArtifactPaths, name: str) -> DoctorFinding:
    path = paths.features(name)
    if not path.exists():
        state = "incomplete" if partial_path(path).exists() else "missing"
        return DoctorFinding(name, f"{path}: {state}", f"`dvc repro extract@{name}`")
    try:
        ProjectData(params, name, paths).require()
        expected = {ROOT: params.dataset(name).source.recorded_root}
        if paths.manifest(name).is_file():
            expected["manifest"] = sha256(paths.manifest(name))
        features = read_features(path, expect=expected)
    except DuplexError as error:
        return DoctorFinding(name, f"{path} cannot be used", str(error))
    return DoctorFinding(name, f"{path}: {len(features.statuses)} rows, {int(features.bad.sum())} unreadable")


DVC_IN_ABLATIONS = (".dvcignore", ".dvc/config", ".dvc/.gitignore")
ABLATIONS = tuple(f"ablations/{name}" for name in ("params.yaml", *DVC_IN_ABLATIONS))
LINKED = ("dvc.yaml", "pipeline")
COPIED = ("params.yaml", "dvc.yaml", ".dvcignore", *ABLATIONS)
DVC_FILES = (".dvc/config", ".dvc/.gitignore", ".dvc/plots/by_series.json")
GITIGNORE = """__pycache__/
.venv
*.partial
/dvc_plots/
/data/
/tensorboard/
# outputs of the pipeline, tracked by DVC; git tracks the metrics
/artifacts/**
!/artifacts/**/
!/artifacts/metrics.json
/ablations/artifacts/**
!/ablations/artifacts/
!/ablations/artifacts/*.json
# lists written by duplex suspects
/suspects/
"""
README = """# {name}

A project of duplex {version}: parameters in `params.yaml`, stages in `dvc.yaml`.

```sh
dvc repro                        # run the pipeline on the data sets of params.yaml: by default `shapes`, which is drawn
duplex metrics                   # print the results; the report is artifacts/report/index.html
duplex predict IMAGE...          # recognise images with the best run
```

Your own images, as a folder `state/object/*.jpg` or a table: `duplex data add NAME PATH`. `duplex doctor` lists what
is missing. `ablations/` is a project of its own, with the same pipeline: `cd ablations && dvc repro`.

After an upgrade of duplex, `dvc repro` repeats the stages whose code has changed; `dvc repro --force` repeats all.
"""


def init(folder: Path) -> list[str]:
    """Write a new project to `folder` without overwriting files; returns a line per step done."""
    stages = sorted(path.name for path in (shipped_project() / "pipeline").glob("*.py"))
    readme = README.format(name=folder.resolve().name, version=__version__)
    files = {"README.md": readme, ".gitignore": GITIGNORE}
    files |= {name: _text(name) for name in (*COPIED, *(f"pipeline/{stage}" for stage in stages))}
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder")
    if taken := [name for name in files if (folder / name).exists()]:
        raise UsageError(f"{folder / taken[0]} exists; choose an empty folder")
    if find_spec("dvc") is None:
        command = install_command("pipeline")
        raise DuplexError(f"DVC, which runs the pipeline, is not installed; run {command}")
    inside = _inside_git(folder)
    steps = [f"{len(files)} files in {folder}"]
    with report_write_errors(folder):
        _write(folder, files)
        for name in LINKED:  # the pipeline of the ablations is that of the project
            (folder / "ablations" / name).symlink_to(Path("..") / name)
        if not inside:
            _run(["git", "init", "--quiet"], folder)
            steps.append("git init")
        if not (folder / ".dvc").is_dir():
            options = [] if (folder / ".git").exists() else ["--subdir"]
            _run([sys.executable, "-m", "dvc", "init", "--quiet", *options], folder)
            _write(folder, {name: _text(name) for name in DVC_FILES})
            steps.append("dvc init")
    return steps


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _text(name: str) -> str:
    return (shipped_project() / name).read_text(encoding="utf-8")


def _inside_git(folder: Path) -> bool:
    command = ["git", "rev-parse", "--is-inside-work-tree"]
    try:
        done = subprocess.run(command, cwd=_existing(folder), capture_output=True, check=False)
    except FileNotFoundError:
        reason = "git, which DVC needs, is not installed"
        raise DuplexError(f"{reason}; install it and run the same command again") from None
    return done.returncode == 0


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        shown = " ".join(command).replace(f"{sys.executable} -m ", "")
        failed = f"`{shown}` failed in the folder {folder} ({reason}); run it there to see why"
        raise DuplexError(f"{failed}, then empty the folder and run `duplex init` again")
