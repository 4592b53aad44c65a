"""A look at the machine and at the project."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import DatasetParams, Params, load_params
from duplex.data.mirrors import BENCHMARKS
from duplex.data.source import are_there
from duplex.encoders.source import absent_weights
from duplex.errors import DuplexError
from duplex.features.identity import IMPORTED
from duplex.features.layout import partial_path
from duplex.features.store import open_features
from duplex.system.version import __version__

LIBRARIES = ("torch", "torchvision", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
EXTRAS = {"serve": ("fastapi", "uvicorn", "python-multipart"), "onnx": ("onnx", "onnxscript", "onnxruntime")}
LOW_DISK = 2e9  # bytes


@dataclass(frozen=True)
class Finding:
    """`mend` is what to do, where something is wrong."""

    topic: str
    says: str
    mend: str = ""


def examine(params_file: Path = Path("params.yaml")) -> list[Finding]:
    """Everything in order; nothing is changed or fetched."""
    found = [*_versions(), *_device(), *_disk()]
    if not params_file.exists():
        return [*found, Finding("project", "there is no params.yaml here", "go to a project, or `duplex init FOLDER`")]
    try:
        params = load_params(params_file)
    except DuplexError as error:
        return [*found, Finding("project", str(error), "correct params.yaml")]
    for name in params.datasets:
        found += _dataset(params, name)
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("duplex", f"{__version__}, Python {platform.python_version()} on {platform.system()}")
    yield Finding("packages", ", ".join(f"{name} {_version(name) or 'absent'}" for name in LIBRARIES))
    for extra, names in EXTRAS.items():
        absent = [name for name in names if _version(name) is None]
        yield Finding(
            "extra",
            f"{extra}: " + (f"without {', '.join(absent)}; pip install 'duplex[{extra}]'" if absent else "there"),
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Finding("device", f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    else:
        yield Finding("device", f"CPU, {torch.get_num_threads()} threads")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = _seconds(device, torch.float32)
    gain = plain / _seconds(device, torch.bfloat16)
    advice = "worth it: encoder precision bf16" if gain > 1.3 else "no gain here: stay with fp32"
    yield Finding("formats", f"bf16 products are {gain:.1f} times as fast as fp32 ({advice})")
    if device == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = not before
        other = _seconds(device, torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = before
        yield Finding(
            "formats", f"tf32 products are {(other / plain if before else plain / other):.1f} times as fast as fp32"
        )


def _seconds(device: str, dtype: torch.dtype, size: int = 768) -> float:
    """The best of a few products."""
    a, best = torch.randn(size, size, device=device).to(dtype), float("inf")
    for _ in range(8):
        began = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - began)
    return best


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    mend = "make room before anything is extracted" if free < LOW_DISK else ""
    yield Finding("disk", f"{free / 1e9:.1f} GB free in {Path.cwd()}", mend)


def _dataset(params: Params, name: str) -> Iterator[Finding]:
    """Only what `run:` names has to be there."""
    entry, wanted = params.datasets[name], name in params.run.datasets
    yield from _weights(name, entry, wanted)
    source = entry.source
    there, drawn, brought = are_there(source), source.kind == "shapes", entry.encoder.name == IMPORTED
    bring = f"`duplex data download {name}`, or correct" if name in BENCHMARKS else "bring them, or correct"
    mend = f"{bring} its root in params.yaml" if wanted and not (there or drawn or brought) else ""
    yield Finding(
        name, f"pictures in {source.root}: " + ("there" if there else "drawn when needed" if drawn else "absent"), mend
    )
    if wanted or ArtifactPaths().features(name).exists():
        again = f"`duplex cache import FILE --dataset {name}`" if brought else f"`dvc repro extract@{name}`"
        yield _cache(name, ArtifactPaths().features(name), again)
    if params.augmentation(name) is not None and (wanted or ArtifactPaths().views(name).exists()):
        yield _cache(name, ArtifactPaths().views(name), f"`dvc repro views@{name}`")


def _weights(name: str, entry: DatasetParams, wanted: bool) -> Iterator[Finding]:
    if entry.encoder.name == IMPORTED:
        return
    said = " ".join(filter(None, (entry.encoder.name, entry.encoder.weights)))
    try:
        absent = absent_weights(entry.encoder.name, entry.encoder.weights)
    except DuplexError as error:
        yield Finding(name, f"encoder {said}: {error}", "correct its encoder in params.yaml" if wanted else "")
        return
    mend = "they are fetched when first needed; without a network bring them and name local-dir:FOLDER"
    yield Finding(
        name,
        f"encoder {said}: weights " + ("there" if absent is None else "not on disk"),
        mend if absent and wanted else "",
    )


def _cache(name: str, path: Path, again: str) -> Finding:
    if not path.exists():
        begun = partial_path(path).exists()
        return Finding(name, f"{path}: " + ("begun, not finished" if begun else "not made yet"), again)
    try:
        features = open_features(path)
    except DuplexError as error:
        return Finding(name, f"{path} cannot be used", str(error))
    return Finding(name, f"{path}: {len(features.marks)} rows, {int(features.bad.sum())} bad")
