"""Compare methods over several re-splits of a data set: test AUC, its deviation, and paired differences.

python -m benchmarks.splits --dataset shapes --splits 5 --seeds 0,1,2,3,4 [--json] [--markdown] [--folder FOLDER]
python -m benchmarks.splits --dataset shapes --splits 3 --own --methods cso,dual,cso@4,dual@4 --of dual@4 --markdown
python -m benchmarks.splits ... --validation    # validation AUC of the same runs, to choose by; nothing is tested

A method `NAME@BLOCKS` is NAME trained with that many fine-tuned blocks, at the rate `--block-rate`, and with
`--block-epochs` for so many epochs along half a cosine, as `duplex fit` does. A method `A*B` is the product of the runs
of `A` and `B`, which are listed before it: their log probabilities are added, and nothing is trained. `--own` adds the
data set's own split.
In the open world `AUC` is as the run is calibrated; `all pairs` and `by words` are its AUC without a feasibility
threshold and with the literature's.

Needs `duplex data split shapes --splits 5`, and `duplex prepare` and `duplex extract` of each re-split. Nothing is
tuned: methods are trained as in params.yaml. Runs go seed by seed and are stored in the folder, so that an interrupted
study can be resumed, and `--seeds` with stored runs prints their table at once. A method that trains nothing runs once
per re-split for all seeds, unless it is part of a product. Differences are paired, with 95 % intervals over re-splits,
seeds and images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import emit, say
from benchmarks.methods import ENDS, Bench, margins, shown_in
from benchmarks.result_tables import write_csv
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.method_entries import MethodEntry
from duplex.config.params import Params, load_params
from duplex.data.dataset import split_name
from duplex.evaluation.uncertainty import compare_splits
from duplex.labels import WORLDS
from duplex.report.aggregate import at_threshold, standard_error
from duplex.system.allocator import keep_freed_memory
from duplex.training.checkpoint import read_record

METHODS = "clip,cso,static,duplex,duplex_open,closed_form,dual"
BY_RULE = {"auc_all": "all pairs", "auc_by_words": "by words"}  # further open-world metrics and their columns
PRODUCT = "*"  # between the methods of a product
Runs = list[list[RunPaths]]  # of a row: [splits][seeds]


def with_blocks(params: Params, names: Sequence[str], rate: float, epochs: int | None) -> Params:
    """Return params.yaml with an entry for each name `METHOD@BLOCKS` (fine-tuned blocks) or `A*B` (product of runs)."""
    entries, changes = {}, {"epochs": epochs, "schedule": "cosine"} if epochs else {}
    for name in names:
        method, _, blocks = name.partition("@")
        if PRODUCT in name:
            entries[name] = MethodEntry("product", {"of": name.split(PRODUCT)})
        elif blocks:
            finetune = {"blocks": int(blocks), "adapter": "full", "learning_rate": rate}
            entry = params.entry(method)
            training = {**entry.training, **changes}
            entries[name] = replace(entry, training=training, finetune=finetune, per_dataset={})
    return params.model_copy(update={"methods": {**params.methods, **entries}})


class StudyPaths(ArtifactPaths):
    """Paths of the pipeline's files, except those of runs, which a study stores in its own folder."""

    def __init__(self, params: Params, folder: Path) -> None:
        super().__init__()
        self._params, self._folder = params, folder

    def run(self, dataset: str, method: str, seed: int) -> RunPaths:
        rate = self._params.training(dataset, method).learning_rate
        return Bench(self._params, dataset, self._folder).place(method, rate, seed)


def run_all(
    params: Params,
    datasets: Sequence[str],
    rows: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    tested: bool = True,
) -> dict[str, Runs]:
    """Train every method in `rows` on every data set, one seed after the other, and test it if `tested`."""
    runs: dict[str, Runs] = {row: [[] for _ in datasets] for row in rows}
    combined = {member for row in rows if PRODUCT in row for member in row.split(PRODUCT)}  # one run per seed
    for seed in seeds:
        for place, dataset in enumerate(datasets):
            for row in rows:
                before, product = runs[row][place], PRODUCT in row
                fixed = (
                    bool(before)
                    and row not in combined
                    and not product
                    and not json.loads(before[0].timing.read_text())["parameters"]
                )
                rate = params.training(dataset, row).learning_rate
                given = {"paths": StudyPaths(params, folder)} if product else {}
                bench = Bench(params, dataset, folder, given=given)
                before.append(before[0] if fixed else bench.run(row, rate, seed, tested=tested))
                if not fixed:
                    found = reached(before[-1]) if tested else validated(before[-1])
                    say(f"{bench.dataset} {row} seed {seed}: {found}")
    return runs


def reached(run: RunPaths) -> str:
    found = json.loads(run.metrics.read_text())
    return "  ".join(f"{world} {found[world]['auc']:.2f}" for world in WORLDS if world in found)


def validated(run: RunPaths) -> str:
    record = read_record(run.checkpoint)
    return f"validation: closed {100 * record.val_auc:.2f}  all pairs {_percent(record.val_auc_all)}"


def validation_table(runs: Mapping[str, Runs], of: str) -> str:
    """Return a table of each method's validation AUC and of its difference from that of the method `of`.

    Each run is compared with the run of `of` with the same re-split and seed; a difference has its standard error over
    these pairs of runs.
    """
    header = ["method", "closed", f"`{of}` minus it", "all pairs", f"`{of}` minus it"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row, splits in runs.items():
        cells = [f"`{row}`"]
        for key in ("val_auc", "val_auc_all"):
            aucs, aucs_of = (_validation_aucs(each, key) for each in (splits, runs[of]))
            gains = [b - a for a, b in zip(aucs, aucs_of, strict=bool(aucs and aucs_of))]
            gain = "" if row == of or not gains else f"{fmean(gains):+.1f} ± {standard_error(gains):.1f}"
            cells += [f"{fmean(aucs):.1f}" if aucs else "–", gain]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _validation_aucs(splits: Runs, key: str) -> list[float]:
    """Return the validation AUC of each run in percent; none if the runs are not for this world."""
    values = [getattr(read_record(run.checkpoint), key) for split in splits for run in split]
    return [] if None in values else [100 * value for value in values]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def measured(runs: Runs, world: str) -> dict[str, Any]:
    """Return means over seeds and re-splits, and the standard deviation of the AUC between re-splits."""
    parts = [[_world_metrics(run, world) for run in split] for split in runs]
    by_split = [fmean([part["auc"] for part in split]) for split in parts]
    middle = fmean(by_split)
    spread = (sum((auc - middle) ** 2 for auc in by_split) / (len(by_split) - 1)) ** 0.5
    said = {key: fmean([fmean([part[key] for part in split]) for split in parts]) for key in ENDS}
    for key in BY_RULE:
        if all(key in part for split in parts for part in split):
            said[key] = fmean([fmean([part[key] for part in split]) for split in parts])
    return {**said, "auc_deviation": spread, "auc_by_split": by_split}


def _world_metrics(run: RunPaths, world: str) -> dict[str, Any]:
    """Return a run's metrics in a world; with its AUC at the threshold by words, if it has one."""
    metrics: dict[str, Any] = json.loads(run.metrics.read_text())[world]
    by_words = at_threshold(metrics, "words")
    return {**metrics, **({"auc_by_words": by_words["auc"]} if by_words else {})}


def difference(first: Runs, second: Runs, world: str) -> dict[str, Any]:
    """Return the AUC of the second minus the first, in points."""
    sides = [[[margins(run, world) for run in split] for split in runs] for runs in (first, second)]
    found = compare_splits(*sides)  # type: ignore[arg-type]  # both are for this world
    gain = found.difference["auc"]
    low, high = gain.interval or (float("nan"), float("nan"))
    by_split = [100 * one["auc"] for one in found.by_split]
    return {"auc": 100 * gain.value, "low": 100 * low, "high": 100 * high, "p": gain.p, "by_split": by_split}


def table(params: Params, runs: dict[str, Runs], of: str) -> dict[str, Any]:
    """Return world -> method -> numbers, and the gain of the method `of`; a method `shown_as` another replaces it."""
    found: dict[str, Any] = {}
    for world in WORLDS:
        here = {shown: row for row in runs if (shown := shown_in(params, row, world))}
        found[world] = {shown: measured(runs[row], world) for shown, row in here.items()}
        for shown, row in here.items():
            if shown != of and of in here:
                found[world][shown]["difference"] = difference(runs[row], runs[here[of]], world)
    return found


def markdown(found: dict[str, Any], of: str) -> str:
    header = ["method", *(text for world in WORLDS for text in (f"{world} AUC", f"`{of}` minus it, {world}"))]
    rules = {key: title for key, title in BY_RULE.items() if any(key in row for row in found["open"].values())}
    header += [f"open AUC {title}" for title in rules.values()]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name in dict.fromkeys(name for world in WORLDS for name in found[world]):
        cells = [f"`{name}`"]
        for world in WORLDS:
            row = found[world].get(name)
            gain = row and row.get("difference")
            cells.append(f"{row['auc']:.1f} ± {row['auc_deviation']:.1f}" if row else "–")
            cells.append(f"{gain['auc']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})" if gain else "")
        row = found["open"].get(name) or {}
        cells += [f"{row[key]:.1f}" if key in row else "–" for key in rules]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--methods", default=METHODS, help="methods or ablations of params.yaml")
    parser.add_argument("--own", action="store_true", help="include the data set's own split")
    parser.add_argument("--block-rate", type=float, default=1e-3, help="learning rate of fine-tuned blocks")
    parser.add_argument("--block-epochs", type=int, help="epochs of methods with fine-tuned blocks")
    parser.add_argument("--of", default="dual", help="method that is compared with all others")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "duplex-splits")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    parser.add_argument("--validation", action="store_true", help="print validation AUC and test nothing")
    parser.add_argument("--csv", type=Path, help="write the table to this file, as in docs/results")
    wanted = parser.parse_args()
    keep_freed_memory()

    names, seeds = wanted.methods.split(","), [int(seed) for seed in wanted.seeds.split(",")]
    params = with_blocks(load_params(), names, wanted.block_rate, wanted.block_epochs)
    own = [wanted.dataset] if wanted.own else []
    datasets = own + [split_name(wanted.dataset, number) for number in range(1, wanted.splits + 1)]
    if len(datasets) < 2 and not wanted.validation:
        parser.error("a deviation between splits needs two of them; raise --splits, or add --own")
    if wanted.of not in names:
        parser.error(f"--of is {wanted.of}, which is not among --methods; add it there")
    if wanted.validation and (wanted.json or wanted.markdown or wanted.csv):
        parser.error("--validation prints its own table; leave out --json, --markdown and --csv")
    runs = run_all(params, datasets, names, seeds, wanted.folder, tested=not wanted.validation)
    if wanted.validation:
        print(validation_table(runs, wanted.of))
        return
    found = table(params, runs, wanted.of)
    if wanted.json:
        emit({"dataset": wanted.dataset, "splits": wanted.splits, "seeds": seeds, "of": wanted.of, **found})
    if wanted.markdown:
        print(markdown(found, wanted.of))
    if wanted.csv:
        write_csv(markdown(found, wanted.of), wanted.csv)


if __name__ == "__main__":
    main()
