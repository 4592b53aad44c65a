"""Write one small file per pipeline stage with all that its result depends on: values of params.yaml, hashes of code.

dvc.yaml cannot list options that a method inherits from another, or code found by following imports, as dependencies.
Stages depend on these files instead. The stage `plan` runs at each `dvc repro`, to notice changed plug-ins; it does not
import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.config.run_key import Record, dataset_records, report_record, run_records
from duplex.library.requirements import require_inputs
from duplex.methods.registry import BrokenMethod
from duplex.system.files import json_digest, replace_folder, write_json, write_text


def run(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the files on which pipeline stages depend: settings of params.yaml and hashes of code.

    They are `plan/report.json`, `plan/DATASET/STAGE.json` and `plan/DATASET/METHOD/{train,evaluate}.json`. Raise
    UsageError if a method has a wrong option, or a data set lacks an input that the method needs.
    """
    records = {"report.json": report_record(params, paths)}
    for dataset in params.run.datasets:
        for stage, record in dataset_records(params, dataset, paths).items():
            records[f"{dataset}/{stage}.json"] = record
        for method in params.run.methods:
            for stage, record in run_records(params, dataset, method).items():
                records[f"{dataset}/{method}/{stage}.json"] = record
    check_options(params, params.run.datasets, params.run.methods, records, paths.checked_options)
    write_json_folder(records, paths.plan)


def write_json_folder(records: dict[str, Record], folder: Path) -> None:
    """Replace all files of a folder by JSON files, given as path inside the folder -> content."""
    with replace_folder(folder) as scratch:
        for name, record in records.items():
            write_json(scratch / name, record)


def check_options(
    params: Params, datasets: tuple[str, ...], methods: tuple[str, ...], records: dict[str, Record], mark: Path
) -> None:
    """Check that methods' options are valid and data sets have the inputs that methods need; skip what passed before.

    Raises UsageError for a wrong option or a missing input. For a method kind that cannot be imported, prints a
    warning: only runs of this kind fail.

    records: contents of the plan files; nothing is checked if the same contents have passed before.
    mark: file that stores the digest of the contents that passed.
    """
    digest = json_digest(records)
    if mark.exists() and mark.read_text(encoding="utf-8") == digest:
        return
    problems = set()
    for dataset in datasets:
        for method in methods:
            try:
                require_inputs(params, dataset, method)  # which also checks the options
            except BrokenMethod as error:
                problems.add(str(error))
    for problem in sorted(problems):
        print(f"duplex: {problem}", file=sys.stderr)
    if not problems:
        write_text(mark, digest)
