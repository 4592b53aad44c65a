"""Cropped, squashed or padded: the closed form's AUC by how images become square.

    python -m benchmarks.resize table.csv --images FOLDER --encoder local-dir:FOLDER --csv docs/results/resize.csv
    python -m benchmarks.resize table.csv --images FOLDER --encoder timm:tf_efficientnet_lite0 --weights FILE \\
        --csv docs/results/resize.csv

The table has the columns image, state, object and split; `--most` images are drawn, the same share of each split. Each
image is first cut to what is not white (`--white`, the least of a pixel's three values), as shops cut product
photographs, so that its sides differ. `--no-cut` leaves images as they are. The second call appends to the file. AUC is
that of the closed world, in percent.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

import duplex
from benchmarks.measure import emit, options, say
from docs.builder.results import markdown_table
from duplex.encoders.base import RESIZES

METHOD = "closed_form_visual"  # reads no words, so that all encoders can be compared
LONG = 4 / 3  # ratio of an image's sides


def cut(image: Image.Image, white: int) -> Image.Image:
    """The smallest box of an image that holds all pixels with a value below `white`; all of it if there is none."""
    dark = np.asarray(image.convert("RGB")).min(axis=2) < white
    rows, columns = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
    if len(rows) == 0:
        return image
    return image.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))


def cut_images(names: list[str], images: Path, out: Path, white: int) -> float:
    """Write cut images to `out`; returns the share whose longer side exceeds the shorter one by over a third."""
    long = 0
    for name in names:
        with Image.open(images / name) as image:
            box = cut(image.convert("RGB"), white)
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        box.save(place, format="PNG")
        long += max(box.size) > LONG * min(box.size)
    return long / len(names)


def drawn_rows(table: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most `most` rows, the same share of each split, in the table's order."""
    share = min(1.0, most / len(table))
    return table.groupby("split").sample(frac=share, random_state=0).sort_index()


def measure(resize: Any, table: Path, images: Path, cache: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    """The closed form's validation and test AUC if images become square in this way."""
    options = {"weights": wanted.weights, "images": images, "resize": resize, "cache": cache, "device": "cpu"}
    data = duplex.load_dataset(table, encoder=wanted.encoder, **options)
    run = duplex.fit(data, METHOD)
    metrics = duplex.evaluate(run, data).metrics
    half = (metrics["auc_high"] - metrics["auc_low"]) / 2
    row = {"encoder": wanted.name or wanted.encoder, "resize": resize, "images": str(len(data.manifest))}
    return row | {
        "validation AUC": f"{run.val_auc:.1f}",
        "test AUC": f"{metrics['auc']:.1f}",
        "test AUC ±": f"{half:.1f}",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--name", help="the encoder's name in the table")
    parser.add_argument("--most", type=int, default=1200, help="number of images; default: 1200")
    parser.add_argument("--white", type=int, default=240)
    parser.add_argument("--no-cut", action="store_true")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    wanted = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table = drawn_rows(pd.read_csv(wanted.table, dtype=str), wanted.most)
        table.to_csv(folder / "table.csv", index=False)
        images = wanted.images.resolve()
        if not wanted.no_cut:
            images = folder / "images"
            share = cut_images(table["image"].tolist(), wanted.images, images, wanted.white)
            say(f"sides that differ by more than a third: {share:.0%} of {len(table):,} images")
        for resize in RESIZES:
            rows.append(measure(resize, folder / "table.csv", images, folder / "cache", wanted))
            say(str(rows[-1]))
            if wanted.csv:
                earlier = pd.read_csv(wanted.csv, dtype=str).to_dict("records") if wanted.csv.is_file() else []
                pd.DataFrame([*earlier, rows[-1]]).to_csv(wanted.csv, index=False, lineterminator="\n")
    emit({"rows": rows}) if wanted.json else print(markdown_table(list(rows[0]), rows))


if __name__ == "__main__":
    main()
