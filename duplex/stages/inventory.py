"""The stage `inventory`: list a data set's files with hashes, and choose the run for the report's examples and maps.

DVC cannot make one stage depend on all instances of a matrix stage. So this stage depends on the folder of a data set,
and the stages of the report and the maps depend on the two files that this stage writes.
"""

from __future__ import annotations

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.system.files import sha256, write_json
from duplex.training.checkpoint import read_record

IGNORED = (".gitignore", ".partial")  # ends of names


def featured_run(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int]:
    """Return method and seed of the run that the report's examples and maps use.

    The method is the last trained one of `run:` with visual prototypes, else the last one; the seed is the first.
    """
    return run_with_prototypes(params, dataset, paths) or (params.run.methods[-1], params.run.seeds[0])


def run_with_prototypes(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int] | None:
    """Return the last method listed in params.yaml that has a finished run with visual prototypes, and its first seed.

    None if there is no such run. Methods with `shown_as` are skipped, since the report shows them under the name of
    another method.
    """
    seed = params.run.seeds[0]
    for name in reversed(params.run.methods):
        checkpoint = paths.run(dataset, name, seed).checkpoint
        if params.entry(name).shown_as is not None or not checkpoint.exists():
            continue
        if "visual" in read_record(checkpoint).inspectable:
            return name, seed
    return None


def run(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the inventory of a data set's folder of artifacts: `files.json` (file -> sha256) and `featured.json`.

    The latter names the run whose prototypes the maps show, with hashes of the files that the maps are computed from.
    """
    folder = paths.manifest(dataset).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(IGNORED))
    out = paths.inventory(dataset)
    write_json(out / "files.json", {path.relative_to(folder).as_posix(): sha256(path) for path in files})
    record: dict[str, object] = {}
    chosen = run_with_prototypes(params, dataset, paths)
    if chosen is not None:
        checkpoint = paths.run(dataset, *chosen).checkpoint
        inputs = (checkpoint, paths.features(dataset), paths.manifest(dataset), paths.labels(dataset))
        record = {"method": chosen[0], "seed": chosen[1], **{path.name: sha256(path) for path in inputs}}
    write_json(out / "featured.json", record)
