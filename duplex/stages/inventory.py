"""What the report reads of a data set: its files with their hashes, and the one run whose prototypes are shown.

DVC cannot make one stage depend on every cell of a matrix. The inventory is where a data set's runs meet: the report
depends on all inventories, the maps on the shown run alone.
"""

from __future__ import annotations

from pathlib import Path

from duplex.config.artifacts import ArtifactPaths
from duplex.config.code_hash import code_of_run
from duplex.config.params import Params
from duplex.report.aggregate import write_json
from duplex.system.files import sha256
from duplex.training.checkpoint import read_record

UNFINISHED = ".partial"


def shown_run(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int]:
    """The run that the report shows: one with visual prototypes where there is any, else the last method."""
    return prototype_run(params, dataset, paths) or (params.run.methods[-1], params.run.seeds[0])


def prototype_run(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int] | None:
    """The last method of `run:` that has visual prototypes, with the first seed; None where none has. A method that
    tables show as another one is passed over: that other one stands for it."""
    seed = params.run.seeds[0]
    for name in reversed(params.run.methods):
        checkpoint = paths.run(dataset, name, seed).checkpoint
        if params.row(name).shown_as is None and checkpoint.exists() and "visual" in read_record(checkpoint).exhibits:
            return name, seed
    return None


def run(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """Write `files.json` and `shown.json` of a data set."""
    paths = paths or ArtifactPaths()
    manifest = paths.manifest(dataset)
    files = sorted(path for path in manifest.parent.rglob("*") if path.is_file() and _counts(path))
    hashes = {path.relative_to(manifest.parent).as_posix(): sha256(path) for path in files}
    out = paths.inventory(dataset)
    write_json(hashes, out / "files.json")
    shown: dict[str, object] = {}
    if (chosen := prototype_run(params, dataset, paths)) is not None:
        checkpoint = paths.run(dataset, *chosen).checkpoint
        inputs = (checkpoint, paths.features(dataset), manifest, paths.labels(dataset))
        code = code_of_run("duplex.stages.maps", params.row(chosen[0]).kind)
        hashes = {path.name: sha256(path) for path in inputs}
        shown = {"method": chosen[0], "seed": chosen[1], "code": code, **hashes}
    write_json(shown, out / "shown.json")


def _counts(path: Path) -> bool:
    return path.suffix != UNFINISHED and path.name != ".gitignore"
