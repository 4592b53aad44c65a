"""Check the machine and the project, for `duplex doctor`."""

from __future__ import annotations

import platform
import shutil
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import DatasetParams, Params, load_params
from duplex.data.dataset_source import is_on_disk
from duplex.data.mirrors import BENCHMARKS
from duplex.data.prepared_source import require_prepared
from duplex.encoders import missing_weights
from duplex.encoders.random_weights import is_random
from duplex.errors import DuplexError, install_command
from duplex.features.identity import IMPORTED, ROOT
from duplex.features.importing import require_imported
from duplex.features.layout import partial_path
from duplex.features.store import open_features
from duplex.system.files import sha256
from duplex.system.precision import dtype_of, float32_arithmetic
from duplex.system.version import __version__

LIBRARIES = ("torch", "torchvision", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "python-multipart", "prometheus_client"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
LOW_DISK = 2e9  # bytes
FASTER = 1.3  # speed over that of fp32 from which a number format is worth its error


@dataclass(frozen=True)
class DoctorFinding:
    """Result of one check of `duplex doctor`. `remedy` is empty unless there is a problem."""

    topic: str
    message: str
    remedy: str = ""


def examine(params_file: Path = Path("params.yaml")) -> list[DoctorFinding]:
    """Return the results of all checks of machine and project, passed or not. Changes and downloads nothing."""
    free = shutil.disk_usage(Path.cwd()).free
    remedy = "free some space before extracting features" if free < LOW_DISK else ""
    disk = DoctorFinding("disk", f"{free / 1e9:.1f} GB free in {Path.cwd()}", remedy)
    findings = [*_versions(), *_device(), disk]
    if not params_file.exists():
        message = f"{params_file} does not exist in this folder"
        return [*findings, DoctorFinding("project", message, "change to a project, or `duplex init FOLDER`")]
    try:
        params = load_params(params_file)
    except DuplexError as error:
        return [*findings, DoctorFinding("project", str(error), "correct params.yaml")]
    for name in params.datasets:
        findings += _dataset(params, name)
    return findings


def _versions() -> Iterator[DoctorFinding]:
    yield DoctorFinding("duplex", f"{__version__}, Python {platform.python_version()} on {platform.system()}")
    yield DoctorFinding("packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in LIBRARIES))
    for extra, names in EXTRAS.items():
        missing = [name for name in names if _version(name) is None]
        status = f"{', '.join(missing)} missing; {install_command(extra)}" if missing else "installed"
        yield DoctorFinding("extra", f"{extra}: {status}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> Iterator[DoctorFinding]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield DoctorFinding("device", f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    else:
        yield DoctorFinding("device", f"CPU, {torch.get_num_threads()} threads")
    size = 768 if device == "cuda" else 256  # bf16 without the processor's instructions is a thousand times slower
    fp32 = _seconds(device, "fp32", size)
    for precision in ("bf16", "tf32") if device == "cuda" else ("bf16",):
        yield DoctorFinding("formats", _speed_message(precision, fp32 / _seconds(device, precision, size)))


def _speed_message(precision: str, speedup: float) -> str:
    if speedup < FASTER:
        slower = "slower than" if speedup < 1 / FASTER else "about as fast as"
        return f"{precision} is {slower} fp32 here; stay with fp32"
    return f"{precision} matrix products are {speedup:.1f} times as fast as fp32; use encoder precision {precision}"


def _seconds(device: str, precision: str, size: int, budget: float = 0.5) -> float:
    """Time matrix products in a number format: return the shortest time, in seconds, of up to 20 products.

    size: width of the square matrices. budget: seconds after which to stop.
    """
    a, times = torch.randn(size, size, device=device).to(dtype_of(precision)), list[float]()
    with float32_arithmetic(precision):
        while len(times) < 2 or (len(times) < 20 and sum(times) < budget):
            times.append(timeit.timeit(lambda: (a @ a).sum().item(), number=1))
    return min(times)


def _dataset(params: Params, name: str) -> Iterator[DoctorFinding]:
    """Yield the results of the checks of one data set: encoder weights, images and feature cache.

    A missing file is a problem only in data sets of `run.datasets`.
    """
    entry, required = params.datasets[name], name in params.run.datasets
    yield from _weights(name, entry, required)
    root, features = entry.source.root, entry.features
    is_imported = features is not None or entry.encoder.name == IMPORTED
    if features is not None and not features.is_file():
        yield DoctorFinding(name, f"features {features}: missing", "correct `features` in params.yaml")
    if is_on_disk(entry.source):
        yield DoctorFinding(name, f"images in {root}: on disk")
    elif entry.source.kind == "shapes":
        yield DoctorFinding(name, f"images in {root}: drawn when needed")
    else:
        download = f"`duplex data download {name}`" if name in BENCHMARKS else "copy them there"
        remedy = f"{download}, or correct its root in params.yaml"
        yield DoctorFinding(name, f"images in {root}: missing", remedy if required and not is_imported else "")
    paths = ArtifactPaths()
    if required or paths.features(name).exists():
        by_hand = is_imported and features is None
        command = f"`duplex cache import FILE --dataset {name}`" if by_hand else f"`dvc repro extract@{name}`"
        yield _cache(entry, paths, name, command)


def _weights(name: str, entry: DatasetParams, required: bool) -> Iterator[DoctorFinding]:
    if entry.encoder.name == IMPORTED:
        return
    encoder = " ".join(filter(None, (entry.encoder.name, entry.encoder.weights)))
    try:
        missing = missing_weights(entry.encoder.name, entry.encoder.weights)
        status = f"weights {'on disk' if missing is None else 'not on disk'}"
        status = "weights drawn at random, for trials" if is_random(entry.encoder.weights) else status
        advice = "downloaded when first needed; without a network, copy them to a folder and use local-dir:FOLDER"
        remedy = advice if missing else ""
    except DuplexError as error:
        status, remedy = str(error), "correct its encoder in params.yaml"
    yield DoctorFinding(name, f"encoder {encoder}: {status}", remedy if required else "")


def _cache(entry: DatasetParams, paths: ArtifactPaths, name: str, command: str) -> DoctorFinding:
    path, manifest = paths.features(name), paths.manifest(name)
    if not path.exists():
        return DoctorFinding(name, f"{path}: {'incomplete' if partial_path(path).exists() else 'missing'}", command)
    try:
        require_prepared(entry.source, paths.source(name))
        require_imported(entry.features, path)
        expected = {ROOT: entry.source.recorded_root}
        features = open_features(path, expect=expected | ({"manifest": sha256(manifest)} if manifest.is_file() else {}))
    except DuplexError as error:
        return DoctorFinding(name, f"{path} cannot be used", str(error))
    return DoctorFinding(name, f"{path}: {len(features.statuses)} rows, {int(features.bad.sum())} unreadable")
