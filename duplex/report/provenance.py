"""Origin of the numbers: encoder, weights, versions, seeds, git revision."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from duplex.report.blocks import MISSING, ReportPart, Table, TableRow, columns, text_cell
from duplex.report.results import Results

PACKAGES = ("duplex", "torch", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
IMAGE_ENCODER = ("encoder", "architecture", "weights", "preprocessing", "precision", "dim")
ENCODER = (*IMAGE_ENCODER, "manifest", "torch", "open_clip_torch")


@dataclass(frozen=True)
class Provenance:
    """Git revision and package versions of a report."""

    revision: str = "not in a git repository"
    versions: dict[str, str] = field(default_factory=dict)


def find_provenance(root: Path = Path()) -> Provenance:
    """Return the git revision of `root` and the versions of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return Provenance(_revision(root), versions)


def _revision(root: Path) -> str:
    """Return the commit, `with changes` if tracked files other than outputs of the pipeline differ from it."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!artifacts", ":!dvc.lock")
    except (OSError, subprocess.SubprocessError):
        return Provenance.revision
    return f"{commit} with changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=20)
    return result.stdout.strip()


def provenance_part(results: Results, origin: Provenance) -> ReportPart:
    """Return one table on the run and one per data set on its features."""
    common = [("git revision", origin.revision), ("seeds", ", ".join(map(str, results.seeds)))]
    common += list(origin.versions.items())
    blocks = [_pairs("This run", common)]
    for data in results.datasets:
        identity = [(key, data.identity[key]) for key in ENCODER if key in data.identity]
        blocks.append(_pairs(f"Features of {data.name}", identity or [("encoder", MISSING)]))
    return ReportPart("Where the numbers come from", blocks)


def _pairs(caption: str, rows: list[tuple[str, str]]) -> Table:
    lines = [TableRow([text_cell(name), text_cell(value)]) for name, value in rows]
    return Table(caption, columns("item", "value", texts=2), lines)
