"""Compare methods on one data set with one budget: learning rates by validation AUC, then test results over seeds.

python -m benchmarks.methods --dataset shapes --methods cso,duplex,compcos [--json] [--markdown] [--folder FOLDER]

Every method gets the same tuning: `--rates` (three) x `--tuning-seeds` (two, none of the reported ones), by validation
AUC. The best rate is trained with `--seeds` (five) and tested: closed and open AUC with intervals over images, seconds
per epoch, trained parameters, and paired differences to each of `--against`. Runs are stored in the folder and not
repeated unless their inputs changed; methods that cannot run here are listed with the reason. Needs `duplex prepare`
and `duplex extract` of the data set; methods over patch tokens need `extraction.tokens: patch`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch

from benchmarks.measure import emit, say
from benchmarks.products import by_onednn
from benchmarks.result_tables import write_csv
from duplex.artifacts import RunPaths
from duplex.config.params import Params, load_params
from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import compare_seeds
from duplex.labels import WORLDS
from duplex.methods.registry import method_source
from duplex.report.aggregate import standard_error
from duplex.stages import evaluate, train
from duplex.system.allocator import keep_freed_memory
from duplex.system.code_hash import code_hash
from duplex.system.plugins import module_of
from duplex.training.checkpoint import read_checkpoint, read_record

ENDS = ("seen", "unseen", "hm", "auc")


@dataclass(frozen=True)
class Bench:
    """Settings of the runs on one data set."""

    params: Params
    dataset: str
    folder: Path
    epochs: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # what the stages are told: paths, a loader

    def at(self, name: str, rate: float) -> Params:
        """Return params.yaml with a method's learning rate, and the number of epochs if it is set."""
        row = self.params.entry(name)
        settings = {**row.training_for(self.dataset), "learning_rate": rate}
        if self.epochs:
            settings |= {"epochs": self.epochs, "warm_up": 0}
        on = {self.dataset: {k: v for k, v in row.per_dataset.get(self.dataset, {}).items() if k != "training"}}
        methods = {**self.params.methods, name: replace(row, training=settings, per_dataset=on)}
        return self.params.model_copy(update={"methods": methods})

    def run(self, name: str, rate: float, seed: int, *, tested: bool) -> RunPaths:
        """Train once, and evaluate if `tested`; reuse a stored run if nothing has changed."""
        params, out, mark = self.at(name, rate), self.place(name, rate, seed), self._mark(name, rate, seed)
        if not self.kept(name, rate, seed, tested=tested):
            trained = self.kept(name, rate, seed, tested=False)
            out.root.mkdir(parents=True, exist_ok=True)
            if not trained:
                out.metrics.unlink(missing_ok=True)
                train.run(params, self.dataset, name, seed, out=out, **self.given)
            if tested:
                evaluate.run(params, self.dataset, name, seed, out=out, **self.given)
            mark.write_text(self._key(params, name, seed))
        return out

    def kept(self, name: str, rate: float, seed: int, *, tested: bool) -> bool:
        """Return whether a run is stored that was made by this code with these settings."""
        out, mark = self.place(name, rate, seed), self._mark(name, rate, seed)
        last = out.metrics if tested else out.checkpoint
        return last.exists() and mark.exists() and mark.read_text() == self._key(self.at(name, rate), name, seed)

    def place(self, name: str, rate: float, seed: int) -> RunPaths:
        return RunPaths(self.folder / self.dataset / name / f"{rate:g}" / str(seed))

    def _mark(self, name: str, rate: float, seed: int) -> Path:
        return self.place(name, rate, seed).root / "key.json"

    def _key(self, params: Params, name: str, seed: int) -> str:
        kind = params.entry(name).kind
        module = module_of(method_source(kind))
        code = code_hash("train", "evaluate", modules=[module])
        finetune = params.finetune(name, self.dataset)
        options = params.method(name, self.dataset).to_dict(), params.training(self.dataset, name).to_dict()
        finetunes = [] if finetune is None else [finetune.to_dict()]
        members = [self.given["paths"].run(self.dataset, member, seed) for member in params.entry(name).members]
        runs = [read_checkpoint(run.checkpoint).fingerprint for run in members]
        return json.dumps([*options, *finetunes, *runs, code, torch.__version__], sort_keys=True)


def tune(bench: Bench, name: str, rates: Sequence[float], seeds: Sequence[int]) -> tuple[float, dict[str, float]]:
    """Return the rate with the best mean validation AUC, and the mean of each rate in percent.

    A method that trains nothing has one rate.
    """
    found = {}
    for rate in rates:
        runs = [bench.run(name, rate, seed, tested=False) for seed in seeds]
        found[rate] = fmean([100 * read_record(run.checkpoint).val_auc for run in runs])
        say(f"  {name} @ {rate:g}: validation AUC {found[rate]:.2f}")
        if not json.loads(runs[0].timing.read_text())["parameters"]:
            break
    return max(found, key=found.__getitem__), {f"{rate:g}": value for rate, value in found.items()}


def measured(runs: Sequence[RunPaths]) -> dict[str, Any]:
    """Return means over seeds with standard errors, and the mean interval over images."""
    metrics = [json.loads(run.metrics.read_text()) for run in runs]
    timing = [json.loads(run.timing.read_text()) for run in runs]
    found: dict[str, Any] = {
        "parameters": timing[0]["parameters"],
        "seconds_per_epoch": fmean([one["seconds_per_epoch"] for one in timing]),
    }
    for world in WORLDS:
        if all(world in one for one in metrics):
            parts = [one[world] for one in metrics]
            said = {key: fmean([part[key] for part in parts]) for key in ENDS}
            said["auc_se"] = standard_error([part["auc"] for part in parts])
            ends = {end: [part.get(f"auc_{end}") for part in parts] for end in ("low", "high")}
            said |= {f"auc_{end}": fmean(values) for end, values in ends.items() if None not in values}
            found[world] = said
    return found


def margins(run: RunPaths, world: str) -> Margins | None:
    """Return the margins of a run's images; None if the run is not for this world."""
    table = pd.read_csv(run.predictions)
    chosen = table[table["world"] == world].sort_values("row", kind="stable")
    if chosen.empty:
        return None
    seen, margin = chosen["seen"].to_numpy(dtype=bool), chosen["margin"].to_numpy(dtype=float)
    return Margins(margin[seen], margin[~seen], seen)


def difference(first: Sequence[RunPaths], second: Sequence[RunPaths], world: str) -> dict[str, float | None] | None:
    """Return the AUC of the second minus the first in points, paired by seeds and images."""
    sides = [[margins(run, world) for run in runs] for runs in (first, second)]
    if any(found is None for side in sides for found in side):
        return None
    gain = compare_seeds(*sides).get("auc")  # type: ignore[arg-type]
    if gain is None:
        return None
    low, high = gain.interval or (None, None)
    return {
        "auc": 100 * gain.value,
        "low": None if low is None else 100 * low,
        "high": None if high is None else 100 * high,
        "p": gain.p,
    }


def markdown(record: dict[str, Any]) -> str:
    """Return the table of docs/results/methods_shapes.csv and methods_photos.csv."""
    against = record["against"]
    header = ["method", "world", "S", "U", "HM", "AUC", "AUC 95 %", *(f"over `{name}`" for name in against)]
    header += ["s per epoch", "trained", "rate"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name, row in record["rows"].items():
        for world in WORLDS:
            if world not in row:
                continue
            part = row[world]
            cells = [f"`{name}`", world, *(f"{part[key]:.1f}" for key in ENDS[:3])]
            cells += [f"{part['auc']:.1f} ± {part['auc_se']:.1f}"]
            cells += [f"{part['auc_low']:.1f}–{part['auc_high']:.1f}" if "auc_low" in part else "–"]
            for other in against:
                gain = row["differences"].get(other, {}).get(world)
                cells.append("–" if gain is None or gain["low"] is None else _gain(gain))
            cells += [f"{row['seconds_per_epoch']:.2f}", f"{row['parameters']:,}", f"{row['rate']:g}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n`{name}`: {why}" for name, why in record["left_out"].items())])


def _gain(gain: dict[str, float]) -> str:
    return f"{gain['auc']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})"


def compared(bench: Bench, runs: dict[str, list[RunPaths]], name: str, against: Sequence[str]) -> dict[str, Any]:
    """Return the differences to other methods, in the worlds of both; a method `shown_as` another replaces it there."""
    found: dict[str, dict[str, Any]] = {}
    for other in against:
        for world in WORLDS:
            stands = next((row for row in runs if shown_in(bench.params, row, world) == other), None)
            if stands is not None and stands != name:
                gain = difference(runs[stands], runs[name], world)
                if gain is not None:
                    found.setdefault(other, {})[world] = gain
    return found


def shown_in(params: Params, name: str, world: str) -> str | None:
    """Return the name under which tables show a method in a world."""
    row = params.entry(name)
    return (row.shown_as or name) if world in row.worlds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--methods", default="", help="methods of params.yaml; default: all")
    parser.add_argument("--rates", default="3e-4,1e-3,3e-3")
    parser.add_argument("--tuning-seeds", default="100,101")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--against", default="cso,duplex")
    parser.add_argument("--epochs", type=int, help="epochs per run; default: the data set's")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "duplex-methods")
    parser.add_argument(
        "--onednn", action="store_true", help="compute linear layers with oneDNN: faster on AMD processors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    parser.add_argument("--csv", type=Path, help="write the table to this file, as in docs/results")
    wanted = parser.parse_args()
    keep_freed_memory()
    if wanted.onednn and not torch.backends.mkldnn.is_available():
        parser.error("--onednn: this torch was built without oneDNN; leave it out")
    if wanted.onednn:
        by_onednn()

    bench = Bench(load_params(), wanted.dataset, wanted.folder, wanted.epochs)
    names = [name for name in wanted.methods.split(",") if name] or list(bench.params.methods)
    rates, seeds = ([float(r) for r in wanted.rates.split(",")], [int(s) for s in wanted.seeds.split(",")])
    tuning, against = [int(s) for s in wanted.tuning_seeds.split(",")], wanted.against.split(",")
    rows: dict[str, Any] = {}
    runs: dict[str, list[RunPaths]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            rate, tuned = tune(bench, name, rates, tuning)
            runs[name] = [bench.run(name, rate, seed, tested=True) for seed in seeds]
        except DuplexError as error:
            left_out[name] = str(error)
            say(f"{name} is left out: {error}")
            continue
        rows[name] = {"rate": rate, "tuning": tuned, **measured(runs[name])}
        reached = (f"{world} AUC {rows[name][world]['auc']:.2f}" for world in WORLDS if world in rows[name])
        say(f"{name}: " + "  ".join(reached))
    for name, row in rows.items():
        row["differences"] = compared(bench, runs, name, against)
    record = {"dataset": wanted.dataset, "seeds": seeds, "against": against, "rows": rows, "left_out": left_out}
    if wanted.json:
        emit(record)
    if wanted.markdown:
        print(markdown(record))
    if wanted.csv:
        write_csv(markdown(record), wanted.csv)


if __name__ == "__main__":
    main()
