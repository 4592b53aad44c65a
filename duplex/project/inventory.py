"""The stage `inventory`: hashes of the files of a data set and its runs, for report and maps."""

from __future__ import annotations

from duplex.project.run import ProjectData
from duplex.project.runs import run_shown_in_maps
from duplex.system.files import sha256, write_json

IGNORED = (".gitignore", ".partial", ".stamp.json")  # ends of names of files that are left out


def inventory_stage(data: ProjectData) -> None:
    """Write files.json and featured.json, on which report and maps depend, not on a matrix."""
    paths = data.paths
    dataset = data.dataset
    folder = paths.manifest(dataset).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(IGNORED))
    out = paths.inventory(dataset)
    write_json(out / "files.json", {path.relative_to(folder).as_posix(): sha256(path) for path in files})
    record: dict[str, object] = {}
    if run := run_shown_in_maps(data):
        inputs = (run.files.checkpoint, paths.features(dataset), paths.manifest(dataset), paths.labels(dataset))
        record = {"method": run.method, "seed": run.seed, **{path.name: sha256(path) for path in inputs}}
    write_json(out / "featured.json", record)
