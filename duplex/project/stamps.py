"""Stamps record what an artifact was made from, in a file beside it, to tell if it is outdated.

A stamp is one JSON dict: the values of params.yaml that a stage uses, with checksums of files that
they name; a hash of the stage's code (`duplex.system.code`); and checksums of the files that the
stage reads and writes. `ProjectData` and `ProjectRun` (`duplex.project.run`) make them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from duplex.system.files import sha256, sha256_once, write_json

Stamp = dict[str, Any]

UNSTAMPED = "no stage of the pipeline wrote it"  # an artifact that no stage wrote
CHANGES = {  # key of a stamp -> what it means if it differs
    "code": "its code has changed",
    "encoder_files": "its encoder's files have changed",
    "features": "its file of features has changed",
    "images.files": "its image files have changed",
    "source.images": "its image files have changed",
    "source.content": "its table, lists or image files have changed",
    "word_vectors": "its word vectors have changed",
    "inputs.manifest.csv": "its images, labels or splits have changed",
    "inputs.labels.json": "its states, objects or pairs have changed",
    "inputs.features.h5": "its features have changed",
    "inputs.checkpoint.safetensors": "its checkpoint has been replaced",
}


def write(path: Path, made: Stamp, outputs: Iterable[Path] = ()) -> None:
    """Write a stamp, with checksums of the stage's `outputs`, which lie in the same folder."""
    write_json(path, {**made, "outputs": {file.name: sha256(file) for file in outputs}})


def read(path: Path) -> Stamp | None:
    """Read a stamp; returns an empty dict if the file is damaged, and None if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def difference(path: Path, wanted: Stamp) -> str:
    """How a stamp differs from `wanted`, in words, or "". Inputs missing here are ignored."""
    made = read(path)
    if made is None:
        return UNSTAMPED
    outputs = made.pop("outputs", {})
    if found := _first_difference("", made, json.loads(json.dumps(wanted))):
        return found
    for name, checksum in outputs.items():
        file = path.parent / name
        if not file.is_file() or sha256_once(file) != checksum:
            return f"its {name} has changed since {path.name} was written"
    return ""


def _first_difference(place: str, made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for key in sorted(made.keys() | wanted.keys(), key=lambda key: (key in ("inputs", "code"), key == "code", key)):
        here = f"{place}{key}"
        before = made.get(key)
        after = wanted.get(key)
        if before == after or (after is None and here.startswith(("inputs.", "evaluation.stream"))):
            continue
        if here not in CHANGES and isinstance(before, Mapping) and isinstance(after, Mapping):
            if found := _first_difference(f"{here}.", before, after):
                return found
            continue
        if place == "inputs.members.":
            return "a run that it combines was trained again"
        known = CHANGES.get("code" if key == "code" else here)
        return known or f"{here} was {before!r} and is now {after!r}"
    return ""
