"""Measure what a newcomer gets: `python -m benchmarks.first_minutes [--csv FILE] [--json]`, after `make repro`.

Runs `duplex fit` with its defaults on the folder of drawn images and on three re-splits of it, as tables. Each row has
the test AUC in the closed world, and accuracy on seen and on new pairs at the share of new pairs that is stored with
the model (as few images are answered), at the share estimated from the test images, and at their true one, beside two
logistic regressions. Then the folder's model answers new images of pairs without training images, chosen before
looking: four striped hearts, and two images of each of the first ten other pairs in alphabetical order.

`--models NAME=FOLDER ...` lists finished fits instead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from benchmarks.measure import emit, options, say, write_csv
from duplex.artifacts import ArtifactPaths
from duplex.data.shapes import OBJECTS, STATES, draw, shapes_manifest
from duplex.data.tables import read_manifest, split_name
from duplex.recognition.export import read_fit

IMAGES = Path("data/shapes")
PAIRS = 10
HEARTS = [f"striped_heart/{number:04d}.png" for number in range(1, 5)]


def new_images() -> list[str]:
    """Names of the images to ask for: of pairs that no image of `shapes` shows."""
    known = {tuple(pair) for pair in shapes_manifest()[["state", "object"]].drop_duplicates().to_numpy()}
    lacking = sorted(f"{s}_{o}" for s in STATES for o in OBJECTS if (s, o) not in known)
    first = [pair for pair in lacking if pair != "striped_heart"][:PAIRS]
    return [*HEARTS, *(f"{pair}/{number:04d}.png" for pair in first for number in (1, 2))]


def duplex(*arguments: object) -> str:
    command = [str(Path(sys.executable).with_name("duplex")), *map(str, arguments)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout


def sources(folder: Path, splits: int) -> Iterator[tuple[str, list[object]]]:
    """Names and arguments of `duplex fit`: the folder, and re-splits as tables."""
    yield "the folder", [IMAGES]
    if splits:
        duplex("data", "split", "shapes", "--splits", splits, "--no-run")
    for number in range(1, splits + 1):
        name = split_name("shapes", number)
        duplex("prepare", "--dataset", name)
        table = folder / f"{name}.csv"
        read_manifest(ArtifactPaths().manifest(name)).to_csv(table, index=False)
        yield f"re-split {number}", [table, "--images", IMAGES]


def fitted(name: str, arguments: list[object], out: Path) -> dict[str, Any]:
    """Fit, and return the row of the table."""
    say(duplex("fit", *arguments, "--out", out))
    return row_of(name, out)


def row_of(name: str, model: Path) -> dict[str, Any]:
    """The table's row of a fitted model."""
    record = read_fit(model)
    measured = record["measured"]
    rival = measured["regressions"]
    row: dict[str, Any] = {"images": name, "AUC": measured["metrics"]["closed"]["auc"]}
    for origin in ("stored", "estimated", "true"):
        at = measured["at_shares"].get(origin)
        row[f"{origin} share"] = at and 100 * at["new_share"]
        row[f"known pairs right, {origin}"] = at and at["accuracy_seen"]
        row[f"new pairs right, {origin}"] = at and at["accuracy_unseen"]
    row["regressions: AUC"] = rival and rival["metrics"]["closed"]["auc"]
    for key, group in (("accuracy_seen", "known"), ("accuracy_unseen", "new")):
        row[f"regressions: {group} pairs right, true"] = rival and rival["at_shares"]["true"][key]
    return row | {"recipe": record["chosen"]}


def answers(model: Path, folder: Path) -> list[dict[str, Any]]:
    """The model's first answer to each new image."""
    names = new_images()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        draw(name).save(folder / name)
    files = [folder / name for name in names]
    printed = duplex("predict", *files, "--model", model, "--top", 1, "--format", "jsonl")
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    rows = []
    for name, answer in zip(names, found, strict=True):
        best = answer["top"][0]
        label = Path(name).parent.name.replace("_", " ")
        said = f"{best['state']} {best['object']}"
        rows.append({"image": name, "answer": said, "probability": best["probability"], "right": said == label})
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--models", nargs="+", help="finished fits, as NAME=FOLDER")
    given = parser.parse_args()
    if given.models:
        listed = [text.partition("=") for text in given.models]
        table = pd.DataFrame([row_of(name, Path(folder)) for name, _, folder in listed]).round(1)
        say(table.to_string(index=False))
        write_csv(table, given.csv)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tried = enumerate(sources(folder, given.splits))
        rows = [fitted(name, arguments, folder / f"model{number}") for number, (name, arguments) in tried]
        mean = {key: fmean(row[key] for row in rows) for key, value in rows[0].items() if isinstance(value, float)}
        said = answers(folder / "model0", folder)
    rows.append({"images": "mean", **mean})
    table = pd.DataFrame(rows).round(1)
    say(table.to_string(index=False))
    say(pd.DataFrame(said).to_string(index=False))
    say(f"{sum(row['right'] for row in said)} of {len(said)} right")
    write_csv(table, given.csv)
    if given.json:
        emit({"fits": rows, "answers": said})


if __name__ == "__main__":
    main()
