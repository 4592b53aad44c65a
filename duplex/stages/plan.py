"""params.yaml and the code -> what every run stands on, one small file a run and stage.

A run's options may be taken over from another row, and the code that it stands on is found by reading imports; neither
can be written as a dependency in dvc.yaml. So stages depend on these files: the content changes when the run would.
"""

from __future__ import annotations

import sys
from typing import Any

from duplex.config.artifacts import ArtifactPaths
from duplex.config.code_hash import code_of_run
from duplex.config.params import Params
from duplex.methods.registry import BrokenMethod
from duplex.report.aggregate import write_json
from duplex.system.files import replaced_folder


def run(params: Params, paths: ArtifactPaths | None = None) -> None:
    """Write `plan/DATASET/METHOD/{train,evaluate}.json` of every run."""
    paths = paths or ArtifactPaths()
    with replaced_folder(paths.plan) as folder:
        for dataset in params.run.datasets:
            for name in params.run.methods:
                for stage, record in planned(params, dataset, name).items():
                    write_json(record, folder / dataset / name / f"{stage}.json")


def planned(params: Params, dataset: str, name: str) -> dict[str, dict[str, Any]]:
    """What training and evaluation of a row on a data set depend on. A kind that cannot be used fails its own rows
    alone, and only when they are run."""
    row = params.row(name)
    try:
        options, training = params.method(name, dataset).to_dict(), params.training(dataset, name).to_dict()
        tail = params.tail(name, dataset)
    except BrokenMethod as error:
        print(f"duplex: {error}", file=sys.stderr)
        broken = {"kind": row.kind, "error": str(error)}
        return {"train": broken, "evaluate": broken}
    code = {stage: code_of_run(f"duplex.stages.{stage}", row.kind) for stage in ("train", "evaluate")}
    what = {"kind": row.kind, "options": options, "training": training, "world": row.world}
    if tail is not None:
        what["tail"] = tail.to_dict()
    return {
        "train": {**what, "code": code["train"]},
        "evaluate": {
            "kind": row.kind,
            "world": row.world,
            "threads": params.training(dataset, name).threads,
            "code": code["evaluate"],
        },
    }
