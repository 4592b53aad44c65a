"""What the numbers came from: encoder, weights, versions, seeds, revision."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from duplex.report.blocks import MISSING, Cell, Column, Part, Row, Table
from duplex.report.results import Results

PACKAGES = ("duplex", "torch", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
ENCODER = (
    "encoder",
    "architecture",
    "weights",
    "preprocessing",
    "precision",
    "dim",
    "manifest",
    "torch",
    "open_clip_torch",
)


@dataclass(frozen=True)
class Provenance:
    revision: str = "not in a git repository"
    versions: dict[str, str] = field(default_factory=dict)


def find_provenance(root: Path = Path()) -> Provenance:
    """The revision that the working tree is based on, and the versions at work."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return Provenance(_revision(root), versions)


def _revision(root: Path) -> str:
    """The commit; `with changes` where tracked files other than the pipeline's own outputs differ from it."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!artifacts", ":!dvc.lock")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return Provenance.revision
    return f"{commit} with changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


def provenance_part(results: Results, origin: Provenance) -> Part:
    """One table of what is common, one of each data set's features."""
    common = [("git revision", origin.revision), ("seeds", ", ".join(map(str, results.seeds)))]
    common += list(origin.versions.items())
    blocks = [_pairs("This run", common)]
    for data in results.datasets:
        known = [(key, data.identity[key]) for key in ENCODER if key in data.identity]
        blocks.append(_pairs(f"Features of {data.name}", known or [("encoder", MISSING)]))
    return Part("Where the numbers come from", blocks)


def _pairs(caption: str, rows: list[tuple[str, str]]) -> Table:
    lines = [Row([Cell(name, name), Cell(value, value)]) for name, value in rows]
    return Table(caption, [Column("what", numeric=False), Column("value", numeric=False)], lines)
