"""Compare methods over splits of a data set and training seeds: AUC, and paired differences with intervals.

    python -m benchmarks.study --dataset shapes --splits 5 --methods clip,cso,dual --of dual
    python -m benchmarks.study --splits 3 --own --methods cso,dual,cso@4,dual@4 --of dual@4
    python -m benchmarks.study --own --methods cso,plid --rates 3e-4,1e-3,3e-3 --of cso
    python -m benchmarks.study --own --methods 'duplex{graph: false},duplex' --of duplex --validation

A row of the table is a method of params.yaml. `METHOD{OPTION: VALUE, ...}` changes options. `METHOD@BLOCKS` trains that
many blocks of the image tower with the adapter `full`, or `METHOD@BLOCKS:ADAPTER` with another one, at the rate
`--block-rate`, and with `--block-epochs` for so many epochs along half a cosine, as `duplex fit` does. `A*B` is the
product of the runs of `A` and `B`, which are listed before it. `METHOD:published` has what the published recipe of the
method changes besides rate, batch, epochs and schedule, and besides blocks of the towers.

`--own` adds the data set's own split to its `--splits` re-splits. They need `duplex data split`, `duplex prepare` and
`duplex extract`, rows with blocks also `block_inputs` in the encoder's entry. With `--rates`, each row has the rate
with the best mean validation AUC over the splits and `--tuning-seeds`; it is the rate of the blocks if a row has any.
Otherwise nothing is tuned. `--validation` tests nothing and compares validation AUC, to choose by.

An error (±) is the standard deviation of AUC between splits, on one split the standard error over seeds. Intervals of
differences are over splits, seeds and images. Finished runs are stored in the folder and made again only if their code
or settings change. Rows that cannot be run are listed with the reason.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import pandas as pd
import torch
from ruamel.yaml import YAML

from benchmarks.measure import emit, options, say, write_csv
from docs.builder.results import markdown_table
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import MethodEntry, Params, load_params, published_recipes
from duplex.data.tables import split_name
from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import Difference, compare_seeds, compare_splits
from duplex.evaluation.metrics import OWN_ANSWERS, PART_METRICS
from duplex.labels import WORLDS
from duplex.methods.registry import method_entry_point
from duplex.options import FinetuneOptions
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import RUN_STAGES, ProjectRun, stage_code
from duplex.project.train import train_stage
from duplex.report.aggregate import at_threshold, standard_error
from duplex.system.plugins import module_of
from duplex.system.threads import keep_freed_memory
from duplex.training.checkpoint import read_checkpoint_header, read_record

ROW = re.compile(r"(?P<method>\w+)(?P<form>:published)?(?P<options>\{.*\})?(@(?P<blocks>\d+)(:(?P<adapter>\w+))?)?")
PRODUCT = "*"
BENCHMARK = "ut-zappos"  # whose values a published form has; if there are none, those of the recipe's first benchmark
FORM = ("weight_decay", "eps", "word_dropout", "select")  # training options that belong to a form
ENDS = {"S": "seen", "U": "unseen", "HM": "hm", "AUC": "auc"}
Runs = list[list[RunPaths]]  # of a row: [splits][seeds]


def split_rows(text: str) -> list[str]:
    """The parts of a list between its commas, except those in braces."""
    rows, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            rows.append("")
        else:
            rows[-1] += letter
    return rows


def with_rows(params: Params, names: Sequence[str], rate: float, epochs: int | None) -> Params:
    """The parameters with an entry for each row that is not a method of params.yaml.

    rate: learning rate of fine-tuned blocks. epochs: of rows with fine-tuned blocks; None: those of the data set.
    """
    entries = dict(params.methods)
    for name in names:
        if PRODUCT in name:
            entries[name] = MethodEntry(kind="product", of=name.split(PRODUCT))
        elif (row := ROW.fullmatch(name)) and (row["form"] or row["options"] or row["blocks"]):
            entry = params.entry(row["method"])
            entry = published_form(row["method"], entry.world) if row["form"] else entry
            changes = YAML(typ="safe").load(row["options"] or "{}")
            entry = entry.model_copy(update=changes)
            if row["blocks"]:
                training = {**entry.training, "epochs": epochs, "schedule": "cosine"} if epochs else entry.training
                finetune = {"blocks": int(row["blocks"]), "adapter": row["adapter"] or "full", "learning_rate": rate}
                entry = entry.model_copy(update={"training": training, "finetune": finetune, "per_dataset": {}})
            entries[name] = entry
    return params.model_copy(update={"methods": entries})


def published_form(name: str, world: Literal["closed", "open", "both"]) -> MethodEntry:
    """A published recipe with the data set's rate, batch, epochs and schedule, and with frozen towers."""
    recipe = MethodEntry.model_validate(published_recipes()[name])
    dataset = BENCHMARK if BENCHMARK in recipe.per_dataset else next(iter(recipe.per_dataset))
    dropped = ["network_rate"]
    if recipe.finetune_for(dataset):
        dropped.append("adapter")  # it belongs to the blocks
    options = {key: value for key, value in recipe.options_for(dataset).items() if key not in dropped}
    training = {key: value for key, value in recipe.training_for(dataset).items() if key in FORM}
    return MethodEntry(kind=recipe.kind, world=world, training=training, **options)


@dataclass(frozen=True)
class Bench:
    """Trains and stores the runs on one split."""

    params: Params
    dataset: str
    folder: Path
    epochs: int | None = None
    rates: dict[str, float] = field(default_factory=dict)  # chosen learning rates by row

    def rate(self, name: str) -> float:
        """The learning rate of a row: the chosen one, else that of its blocks or of its training."""
        blocks = self.params.finetune(name, self.dataset)
        own = blocks.learning_rate if isinstance(blocks, FinetuneOptions) else None
        return self.rates.get(name, own or self.params.training(self.dataset, name).learning_rate)

    def at(self, name: str, rate: float) -> Params:
        """The parameters with another learning rate of a row, and with the number of epochs if it is set."""
        entry = self.params.entry(name)
        training = entry.training_for(self.dataset)
        finetune = entry.finetune_for(self.dataset)
        if isinstance(self.params.finetune(name, self.dataset), FinetuneOptions):
            finetune = {**finetune, "learning_rate": rate}
        else:
            training = {**training, "learning_rate": rate}
        if self.epochs:
            training |= {"epochs": self.epochs}
        options = entry.options_for(self.dataset)
        entry = entry.model_copy(update={**options, "training": training, "finetune": finetune, "per_dataset": {}})
        return self.params.model_copy(update={"methods": {**self.params.methods, name: entry}})

    def run(self, name: str, seed: int, *, tested: bool, rate: float | None = None) -> RunPaths:
        """Train once, and evaluate if `tested`; a stored run is used if nothing has changed."""
        rate = self.rate(name) if rate is None else rate
        out, params = self.place(name, rate, seed), self.at(name, rate)
        for member in params.entry(name).members:
            params.methods[member] = self.at(member, self.rate(member)).entry(member)
        mark, key = out.root / "key.json", self._key(params, name, seed)
        same = mark.exists() and mark.read_text() == key
        if not (same and out.checkpoint.exists()):
            out.root.mkdir(parents=True, exist_ok=True)
            out.metrics.unlink(missing_ok=True)
            train_stage(ProjectRun(self.dataset, name, seed, params, StudyPaths(self, name, rate)))
            mark.write_text(key)
        if tested and not out.metrics.exists():
            evaluate_stage(ProjectRun(self.dataset, name, seed, params, StudyPaths(self, name, rate)))
        return out

    def place(self, name: str, rate: float, seed: int) -> RunPaths:
        return RunPaths(self.folder / self.dataset / name / f"{rate:g}" / str(seed))

    def _key(self, params: Params, name: str, seed: int) -> str:
        entry = params.entry(name)
        modules = [module_of(method_entry_point(kind)) for kind in entry.kinds_for(self.dataset)]
        finetune = params.finetune(name, self.dataset)
        settings = {
            "options": params.method(name, self.dataset).to_dict(),
            "training": params.training(self.dataset, name).to_dict(),
            "finetune": finetune.to_dict() if finetune else None,
            "world": entry.world,
            "members": [
                read_checkpoint_header(self.place(member, self.rate(member), seed).checkpoint).fingerprint
                for member in entry.members
            ],
            "code": [stage_code(stage, *modules) for stage in RUN_STAGES],
            "torch": torch.__version__,
        }
        return json.dumps(settings, sort_keys=True)


class StudyPaths(ArtifactPaths):
    """The pipeline's files, except runs, which are those of the study; the method `name` is tried with `rate`."""

    def __init__(self, bench: Bench, name: str, rate: float) -> None:
        super().__init__()
        self._bench = bench
        self._tried = {name: rate}

    def run(self, dataset: str, method: str, seed: int) -> RunPaths:
        rate = self._tried[method] if method in self._tried else self._bench.rate(method)
        return self._bench.place(method, rate, seed)

    def trained(self, dataset: str, method: str, seed: int) -> Path:
        return self.run(dataset, method, seed).root / "trained.json"


def parameters(run: RunPaths) -> int:
    """Number of trained parameters."""
    return int(json.loads(run.timing.read_text())["parameters"])


def tune(benches: Sequence[Bench], name: str, rates: Sequence[float], seeds: Sequence[int]) -> float:
    """The rate with the best mean validation AUC over splits and seeds; the first one if nothing is trained."""
    found: dict[float, float] = {}
    for rate in rates:
        runs = [bench.run(name, seed, tested=False, rate=rate) for bench in benches for seed in seeds]
        found[rate] = fmean([100 * read_record(run.checkpoint).val_auc for run in runs])
        say(f"  {name} @ {rate:g}: validation AUC {found[rate]:.2f}")
        if not parameters(runs[0]):
            break
    return max(found, key=found.__getitem__)


def run_all(
    benches: Sequence[Bench], names: Sequence[str], seeds: Sequence[int], *, tested: bool = True
) -> tuple[dict[str, Runs], dict[str, str]]:
    """Train every row on every split, one seed after the other.

    Returns:
        The runs of each row, and the reasons why other rows could not be run. Rows that train nothing are run once a
        split, unless a product has them as members.
    """
    runs: dict[str, Runs] = {name: [[] for _ in benches] for name in names}
    left_out: dict[str, str] = {}
    members = {member for name in names if PRODUCT in name for member in name.split(PRODUCT)}
    for seed in seeds:
        for place, bench in enumerate(benches):
            for name in [name for name in names if name not in left_out]:
                done = runs[name][place]
                if done and name not in members and PRODUCT not in name and not parameters(done[0]):
                    done.append(done[0])
                    continue
                try:
                    done.append(bench.run(name, seed, tested=tested))
                except DuplexError as error:
                    left_out[name] = str(error)
                    say(f"{name} is left out: {error}")
                    continue
                auc = 100 * read_record(done[-1].checkpoint).val_auc
                say(f"{bench.dataset} {name} seed {seed}: validation {auc:.2f}")
    return {name: found for name, found in runs.items() if name not in left_out}, left_out


def margins(run: RunPaths, world: str) -> Margins:
    """The biases at which a run's test images become right or wrong."""
    table = pd.read_csv(run.predictions)
    chosen = table[table["world"] == world].sort_values("row", kind="stable")
    seen, margin = chosen["seen"].to_numpy(dtype=bool), chosen["margin"].to_numpy(dtype=float)
    return Margins(margin[seen], margin[~seen], seen)


def difference(first: Runs, second: Runs, world: str) -> dict[str, Any]:
    """The test AUC of the second row minus that of the first, in points, with its interval."""
    sides = [[[margins(run, world) for run in split] for split in runs] for runs in (first, second)]
    if len(first) == 1:
        gain: Difference = compare_seeds(sides[0][0], sides[1][0])["auc"]
    else:
        gain = compare_splits(sides[0], sides[1]).difference["auc"]
    low, high = gain.interval or (float("nan"), float("nan"))
    return {"auc": 100 * gain.value, "low": 100 * low, "high": 100 * high}


def measured(runs: Runs, world: str) -> dict[str, Any]:
    """Test results of a row: means over splits of means over seeds, in percent."""
    parts = [[json.loads(run.metrics.read_text())[world] for run in split] for split in runs]
    for part in (part for split in parts for part in split):
        if by_words := at_threshold(part):
            part["auc_by_words"] = by_words["auc"]

    def mean(key: str) -> float | None:
        by_split = [[part.get(key) for part in split] for split in parts]
        return None if any(None in split for split in by_split) else fmean(map(fmean, by_split))

    by_split = [fmean([part["auc"] for part in split]) for split in parts]
    several = len(parts) > 1
    keys = [*ENDS.values(), "auc_all", "auc_by_words", *OWN_ANSWERS]
    if not several:
        keys += ["auc_low", "auc_high"]
    error = stdev(by_split) if several else standard_error([part["auc"] for part in parts[0]])
    return {**{key: mean(key) for key in keys}, "auc_error": error}


def validation(runs: Runs, world: str) -> list[float] | None:
    """Validation AUC of each run, in percent; in the open world over all pairs."""
    key = "val_auc" if world == "closed" else "val_auc_all"
    values = [getattr(read_record(run.checkpoint), key) for split in runs for run in split]
    return None if None in values else [100 * value for value in values]


def results(
    benches: Sequence[Bench], runs: dict[str, Runs], of: Sequence[str], *, tested: bool
) -> list[dict[str, Any]]:
    """One record per row and world. All are compared with the rows `of`."""
    bench, records = benches[0], []
    for world in WORLDS:
        entries = {name: bench.params.entry(name) for name in runs}
        rows = {entry.shown_as or name: name for name, entry in entries.items() if world in entry.worlds}
        for shown, name in rows.items():
            record: dict[str, Any] = {"method": shown, "world": world, "rate": bench.rate(name)}
            timing = [json.loads(run.timing.read_text()) for split in runs[name] for run in split]
            record["parameters"] = timing[0]["parameters"]
            record["seconds_per_epoch"] = fmean([one["seconds_per_epoch"] for one in timing])
            if aucs := validation(runs[name], world):
                record["validation"] = {"mean": fmean(aucs), "error": standard_error(aucs)}
            if tested:
                record |= measured(runs[name], world)
            others = [other for other in of if other in rows and other != shown]
            if tested:
                gains = {other: difference(runs[rows[other]], runs[name], world) for other in others}
            else:
                gains = {other: validation_gain(runs[rows[other]], runs[name], world) for other in others}
            records.append({**record, "differences": {other: gain for other, gain in gains.items() if gain}})
    return records


def validation_gain(first: Runs, second: Runs, world: str) -> dict[str, Any] | None:
    """The validation AUC of the second row minus that of the first, with its standard error over pairs of runs."""
    before, after = validation(first, world), validation(second, world)
    if before is None or after is None:
        return None
    gains = [b - a for a, b in zip(before, after, strict=True)]
    return {"auc": fmean(gains), "error": standard_error(gains)}


def table(records: Sequence[dict[str, Any]], of: Sequence[str]) -> list[dict[str, str]]:
    """The table with one number per cell, by column."""
    rows = []
    for record in records:
        row = {"method": record["method"], "world": record["world"]}

        def add(column: str, value: float | None, form: str = ".1f", row: dict[str, str] = row) -> None:
            row[column] = "" if value is None or math.isnan(value) else format(value, form)

        for column, key in ENDS.items():
            add(column, record.get(key))
        for part, key in {"±": "auc_error", "low": "auc_low", "high": "auc_high"}.items():
            add(f"AUC {part}", record.get(key))
        for other in of:
            gain = record["differences"].get(other, {})
            add(f"over {other}", gain.get("auc"), "+.1f")
            add(f"over {other} ±", gain.get("error"))
            add(f"over {other} low", gain.get("low"), "+.1f")
            add(f"over {other} high", gain.get("high"), "+.1f")
        add("AUC all pairs", record.get("auc_all"))
        add("AUC by words", record.get("auc_by_words"))
        for key in OWN_ANSWERS:
            add(PART_METRICS[key], record.get(key))
        aucs = record.get("validation", {})
        add("validation AUC", aucs.get("mean"))
        add("validation AUC ±", aucs.get("error"))
        add("s per epoch", record["seconds_per_epoch"], ".2f")
        add("trained", record["parameters"], "d")
        add("rate", record["rate"], "g")
        rows.append(row)
    empty = {column for column in (rows[0] if rows else ()) if not any(row[column] for row in rows)}
    return [{column: value for column, value in row.items() if column not in empty} for row in rows]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--splits", type=int, default=0, help="number of re-splits")
    parser.add_argument("--own", action="store_true", help="include the data set's own split")
    parser.add_argument("--methods", default="clip,cso,duplex_static,duplex,duplex_open,closed_form,dual")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--of", default="dual", help="rows that all others are compared with")
    parser.add_argument("--rates", help="learning rates to choose from")
    parser.add_argument("--tuning-seeds", default="100,101")
    parser.add_argument("--tuned-by", help="method whose chosen rate the rows with the same blocks use")
    parser.add_argument("--block-rate", type=float, default=1e-3, help="learning rate of fine-tuned blocks")
    parser.add_argument("--block-epochs", type=int, help="epochs of rows with fine-tuned blocks")
    parser.add_argument("--epochs", type=int, help="epochs of every run; default: the data set's")
    parser.add_argument("--validation", action="store_true", help="compare validation AUC and test nothing")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "duplex-study")
    parser.add_argument("--csv", type=Path, help="write the table to this file too, as in docs/results")
    wanted = parser.parse_args()
    names, of = split_rows(wanted.methods), split_rows(wanted.of)
    seeds = [int(seed) for seed in wanted.seeds.split(",")]
    numbers = range(1, wanted.splits + 1)
    own = [wanted.dataset] if wanted.own or not wanted.splits else []
    datasets = own + [split_name(wanted.dataset, number) for number in numbers]
    if unknown := set(of) - set(names):
        parser.error(f"--of has {', '.join(sorted(unknown))}, which is not among --methods; add it there")
    keep_freed_memory()
    chosen: dict[str, float] = {}
    tuned_by = {name: name.replace(name.partition("@")[0], wanted.tuned_by or name.partition("@")[0]) for name in names}
    params = with_rows(load_params(), [*tuned_by.values(), *names], wanted.block_rate, wanted.block_epochs)
    benches = [Bench(params, dataset, wanted.folder, wanted.epochs, chosen) for dataset in datasets]
    if wanted.rates:
        rates, tuning = [float(rate) for rate in wanted.rates.split(",")], wanted.tuning_seeds.split(",")
        for name in (name for name in names if PRODUCT not in name):
            try:
                chosen[name] = tune(benches, tuned_by[name], rates, [int(seed) for seed in tuning])
            except DuplexError as error:
                say(f"{name}: {error}")  # and once more below, where it is left out
    runs, left_out = run_all(benches, names, seeds, tested=not wanted.validation)
    records = results(benches, runs, of, tested=not wanted.validation)
    rows = table(records, of)
    if wanted.json:
        emit({"datasets": datasets, "seeds": seeds, "of": of, "rows": records, "left_out": left_out})
    else:
        print(markdown_table(list(rows[0]) if rows else [], rows))
        print("".join(f"\n{name}: {reason}" for name, reason in left_out.items()))
    write_csv(rows, wanted.csv)


if __name__ == "__main__":
    main()
