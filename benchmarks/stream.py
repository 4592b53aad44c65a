"""Adapt finished runs to the unlabelled test images: AUC beside that of the runs themselves.

    python -m benchmarks.stream --dataset shapes --methods cso,dual --csv docs/results/stream_shapes.csv

Each method has rows for TOMCAT's published options for C-GQA, without and with a warm start, and for the options that
validation chooses. Numbers are means over seeds and orders; ± is the mean over seeds of the standard deviation over
orders. The runs must have been trained (`duplex sweep`).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from benchmarks.measure import emit, options, say
from duplex.config.params import StreamParams, load_params
from duplex.methods.tomcat import TomcatOptions
from duplex.project.stages import evaluate_stage

PUBLISHED = TomcatOptions().to_dict()
VARIANTS: dict[str, dict[str, Any]] = {
    "published": PUBLISHED,
    "published, warm start": {**PUBLISHED, "warm": True},
    "chosen": {},
}


def row(method: str, variant: str, world: str, streams: list[dict[str, Any]]) -> dict[str, str]:
    """A line of the table, from the group `stream` of each seed's metrics."""
    auc = fmean([stream[world]["auc"] for stream in streams])
    plain = fmean([stream[world]["unadapted"]["auc"] for stream in streams])
    return {
        "method": method,
        "world": world,
        "options": variant,
        "AUC": f"{plain:.2f}",
        "adapted": f"{auc:.2f}",
        "gain": f"{auc - plain:+.2f}",
        "adapted ±": f"{fmean([stream[world]['auc_sd'] for stream in streams]):.2f}",
        "validation AUC": f"{fmean([stream['val_auc'] for stream in streams]):.2f}",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--methods", default="cso,dual")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="rows per method, joined by semicolons")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    wanted = parser.parse_args()
    params, rows = load_params(), []
    for variant in wanted.variants.split(";"):
        stream = StreamParams(orders=wanted.orders, options=VARIANTS[variant])
        evaluation = params.evaluation.model_copy(update={"stream": stream, "terms": False})
        changed = params.model_copy(update={"evaluation": evaluation})
        for method in wanted.methods.split(","):
            streams = []
            for seed in map(int, wanted.seeds.split(",")):
                streams.append(evaluate_stage(changed, wanted.dataset, method, seed)["stream"])
                say(f"{method} seed {seed}, {variant}: {streams[-1]['options']}")
            rows += [row(method, variant, world, streams) for world in ("closed", "open") if world in streams[0]]
    emit(rows)
    if wanted.csv:
        pd.DataFrame(rows).to_csv(wanted.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
