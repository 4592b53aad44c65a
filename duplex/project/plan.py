"""The stage `plan`: what every other stage depends on, in one small file a stage.

A stage is a script in `pipeline/`. The arguments of its function `work` say what it is of, and
where its file is:

    work()                       plan/STAGE.json
    work(dataset)                plan/DATASET/STAGE.json
    work(dataset, method, seed)  plan/DATASET/METHOD/STAGE.json
"""

from __future__ import annotations

import ast
import sys

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params, shipped_project
from duplex.errors import DuplexError
from duplex.methods.registry import BrokenMethodError
from duplex.project import stamps
from duplex.project.run import ProjectData, ProjectRun, method_modules, rows_shown, stage_code
from duplex.project.stamps import UNSTAMPED, Stamp
from duplex.system.files import replace_folder, sha256, write_json
from duplex.training.inputs import require_configured_inputs

COMPOSED = ("plan", "product")  # the stage of this module, and one that runs two others


def stages() -> dict[str, int]:
    """The stages of the pipeline, each with the number of arguments of its script."""
    found = {}
    for script in sorted((shipped_project() / "pipeline").glob("*.py")):
        functions = [node for node in ast.parse(script.read_bytes()).body if isinstance(node, ast.FunctionDef)]
        [work] = [function for function in functions if function.name == "work"]
        if script.stem not in COMPOSED:
            found[script.stem] = len(work.args.args)
    return found


def write_plan(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write what stages depend on; `UsageError` for an option or a data set unfit for a method."""
    records: dict[str, Stamp] = {}
    ablations = {"ablations": sha256(paths.ablations)} if paths.ablations.is_file() else {}
    for stage, arguments in stages().items():
        if arguments == 0:
            code = stage_code(stage, *method_modules(params))
            records[stage] = {**ablations, **rows_shown(params), "code": code}
        for dataset in params.run.datasets if arguments else ():
            data = ProjectData(params, dataset, paths)
            if arguments == 1:
                records[f"{dataset}/{stage}"] = data.settings(stage)
                continue
            for method in params.run.methods:
                records[f"{dataset}/{method}/{stage}"] = data.run(method, params.run.seeds[0]).settings(stage)
    for note in recipe_notes(params):
        print(f"recipes: {note}", file=sys.stderr)
    for dataset in params.run.datasets:
        for method in params.run.methods:
            try:
                require_configured_inputs(params, dataset, method)  # which also checks the options
            except BrokenMethodError as error:
                print(error, file=sys.stderr)
    with replace_folder(paths.plan) as scratch:
        for name, record in records.items():
            write_json(scratch / f"{name}.json", record)


def recipe_notes(params: Params) -> list[str]:
    """Which methods have no published recipe, and which have none for a data set."""
    notes = [params.own_settings_note()]
    for dataset in params.run.datasets:
        authors = params.authors_note(dataset)
        notes.append(f"their authors {authors}" if authors else "")
    return [note for note in notes if note]


def planned_data(dataset: str, stage: str) -> ProjectData:
    """A data set for a stage; `DuplexError` if params.yaml or the code changed since `plan`."""
    data = ProjectData(load_params(), dataset)
    _require_planned(f"{dataset}/{stage}", data.settings(stage))
    return data


def planned_run(dataset: str, method: str, seed: str, *stages: str) -> ProjectRun:
    """A run for stages; `DuplexError` if params.yaml or the code changed since `plan`."""
    run = ProjectData(load_params(), dataset).run(method, int(seed))
    for stage in stages:
        _require_planned(f"{dataset}/{method}/{stage}", run.settings(stage))
    return run


def _require_planned(name: str, settings: Stamp) -> None:
    file = ArtifactPaths().plan / f"{name}.json"
    found = stamps.difference(file, settings)
    if found and found != UNSTAMPED:  # `plan` omits what is not under `run:`
        raise DuplexError(
            f"params.yaml or the code has changed since {file} was written ({found}), so DVC "
            "would record this result under the old settings; run `dvc repro` again"
        )
