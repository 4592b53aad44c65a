"""When composing pays: accuracy on seen and on unseen pairs, with few images a pair and with many unseen pairs.

    python -m benchmarks.pays --datasets photos --csv docs/results/pays.csv

For each data set, whose images are in the cache, a share of its pairs is drawn by seed as unseen pairs, half of them
for validation and half for test; validation has 10 % and test 20 % of each seen pair's images, and training at most
`--images` of the rest a pair (0: all). Each method is trained once (`dual` with the data set's training options). The
column `fine-tuned` trains four blocks of the image tower, with `dual` or, without a text tower, the closed form; the
encoder's entry needs `block_inputs`.

A cell is the accuracy in percent on test images of seen / unseen pairs, among seen pairs and those of the test images,
at the bias with the best harmonic mean on validation images. Methods that cannot run on an encoder have no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import duplex
from benchmarks.measure import emit, options, say, write_csv
from docs.builder.results import markdown_table
from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.tables import from_rows, read_manifest
from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.library import Dataset
from duplex.options import SplitOptions

METHODS = {"pair classifier": "linear_pairs", "probes": "linear", "closed form": "closed_form_visual", "dual": "dual"}
FINETUNED = "fine-tuned"
BLOCKS = {"finetune": {"blocks": 4, "adapter": "full", "learning_rate": 3e-4}, "epochs": 6, "schedule": "cosine"}


@dataclass(frozen=True)
class SomeRows:
    """Some rows of a feature cache, as a data set's features."""

    path: Path
    rows: Ints

    def require(self) -> tuple[Path, Ints]:
        return self.path, self.rows


def few_shot(rows: pd.DataFrame, share: float, most: int) -> pd.DataFrame:
    """The rows of a new split, with at most `most` training images a pair; 0: all. Indexed by image, in their order."""
    unseen = SplitOptions(val_unseen=share / 2, test_unseen=share / 2)
    split = from_rows(rows, unseen, "the manifest").manifest
    train = split["split"] == "train"
    order = np.random.default_rng(0).permutation(len(split))
    place = split.iloc[order].groupby(["state", "object", "split"]).cumcount().sort_index()
    return split[~train | (place < most) | (most == 0)]


def accuracies(
    params: Params, dataset: str, column: str, rows: pd.DataFrame, features: np.ndarray, places: Ints
) -> tuple[Any, Any]:
    """Accuracy on test images of seen and of unseen pairs, at validation's bias; None where a method cannot run."""
    encoder = params.dataset(dataset).encoder
    has_text = not encoder.name.startswith("timm:")
    names = {"encoder": encoder.name, "weights": encoder.weights} if has_text else {}
    data = Dataset.from_arrays(features[places], rows.reset_index(drop=True), device="cpu", name=dataset, **names)
    settings = params.datasets[dataset].training.to_dict()
    method = METHODS.get(column) or METHODS["dual" if has_text else "closed form"]
    if column == FINETUNED:
        cached: Any = SomeRows(ArtifactPaths().features(dataset), places)
        data = Dataset(dataset, replace(data._data, features=cached, encoder=encoder, skip_frozen_blocks=True))
        settings |= BLOCKS
    try:
        run = duplex.fit(data, method, **settings)
    except UsageError as error:
        say(f"{dataset}, {column}: {error}")
        return None, None
    metrics = duplex.evaluate(run, data).metrics
    return metrics["seen_at_val_bias"], metrics["unseen_at_val_bias"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--datasets", default="shapes")
    parser.add_argument("--images", default="0,20,5,2", help="largest numbers of training images a pair; 0: all")
    parser.add_argument("--shares", default="0.1,0.3,0.5", help="shares of pairs that are unseen")
    parser.add_argument("--csv", type=Path, help="write the table to this file, row by row")
    wanted = parser.parse_args()
    params, paths, table = load_params(), ArtifactPaths(), []
    for dataset in wanted.datasets.split(","):
        manifest, features = read_manifest(paths.manifest(dataset)), duplex.read_features(paths.features(dataset)).cls
        place = pd.Series(range(len(manifest)), manifest["image"])
        for most, share in ((int(n), float(s)) for n in wanted.images.split(",") for s in wanted.shares.split(",")):
            rows = few_shot(manifest[["image", "state", "object"]], share, most)
            cells = {"encoder": params.dataset(dataset).encoder.name, "images a pair": str(most or "all")}
            cells |= {"unseen pairs": f"{share:.0%}"}
            for name in (*METHODS, FINETUNED):
                found = accuracies(params, dataset, name, rows, features, np.array(place[rows["image"]], np.int64))
                cells[name] = "" if found[0] is None else f"{found[0]:.1f} / {found[1]:.1f}"
            say(str(cells))
            table.append(cells)
            write_csv(table, wanted.csv)
    emit({"rows": table}) if wanted.json else print(markdown_table(list(table[0]), table))


if __name__ == "__main__":
    main()
