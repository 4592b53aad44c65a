"""Load the parameters of one stage of the pipeline; raise an error if they changed after the stage `plan` ran.

DVC records a stage's result under the stage's file in `artifacts/plan`. A stage that reads params.yaml minutes later
must find the same values: otherwise its result would be recorded, and later reused, under values it was not made with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.config.run_key import Record, dataset_records, run_records
from duplex.errors import DuplexError


def load_planned(
    dataset: str, *stages: str, method: str | None = None, paths: ArtifactPaths = ArtifactPaths()
) -> Params:
    """Load params.yaml for stages of the pipeline; raise `DuplexError` if it changed since the stage `plan` read it.

    Stages for which `plan` wrote no file, as in a script run by hand, are not checked.

    dataset, method: what the stages are run for; method None for stages of the data set.
    """
    params = load_params()
    folder = paths.plan / dataset / method if method else paths.plan / dataset
    if any((folder / f"{stage}.json").is_file() for stage in stages):
        records = run_records(params, dataset, method) if method else dataset_records(params, dataset, paths)
        _compare({f"{stage}.json": records[stage] for stage in stages}, folder)
    return params


def _compare(records: Mapping[str, Record], folder: Path) -> None:
    for name, record in records.items():
        file = folder / name
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != json.loads(json.dumps(record)):
            raise DuplexError(
                f"params.yaml or the code has changed since {file} was written, so DVC would record this result under "
                "other values; run `dvc repro` again"
            )
