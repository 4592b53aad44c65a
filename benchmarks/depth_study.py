"""Compare numbers of fine-tuned blocks, adapters and methods, with the same budget for each.

    python -m benchmarks.depth_study --folder runs/depth --jobs 2 [--json] [--markdown]
    python -m benchmarks.depth_study --folder runs/depth --only 'cso_*,dual_full_2' --seeds 0,1 --markdown
    python -m benchmarks.depth_study --folder runs/depth --finished --markdown

A cell is a method with a number of fine-tuned blocks: `cso_0` has the feature adapter alone, `cso_bottleneck_1`,
`cso_lora_2`, `cso_full_4` train something in the last blocks too. Every cell is tuned like benchmarks.methods:
`--rates` (three) x `--tuning-seeds` (two, none of the reported ones), by validation AUC. The rate is that of `finetune`
if there is one, else that of training; with `--tuned-by cso` all methods use the rate found for that one with the same
blocks. The best rate is trained with `--seeds` and tested. One model serves both worlds, trained for the closed one.

Runs are stored in the folder and not repeated. Several processes may share a folder, each taking cells that no other
one works on (`--jobs` starts some). `--finished` trains nothing and prints the finished combinations. A cache with the
block inputs is written there too, so that no frozen block runs in training.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import emit, say
from benchmarks.methods import Bench, difference, measured, tune
from benchmarks.result_tables import write_csv
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.method_entries import MethodEntry
from duplex.config.params import Params, load_params
from duplex.errors import DuplexError, require
from duplex.labels import WORLDS
from duplex.library.inputs import InputsCache
from duplex.report.aggregate import standard_error
from duplex.stages.extract import extract
from duplex.stages.prepare import prepare
from duplex.system.allocator import keep_freed_memory
from duplex.training.checkpoint import read_record

METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> a method of params.yaml, and changed options
    "cso": ("cso", {}),
    "closed_form": ("dual", {"weights": [0, 0, 1]}),  # its paths train the blocks and have no weight in the score
    "dual": ("dual", {}),
    "static": ("duplex", {"graph": False}),
    "recomputed": ("duplex", {"graph": False, "rows": "recomputed"}),
    "duplex": ("duplex", {}),
}
FROZEN = {"closed_form": {"losses": [], "inference": ["gaussian"], "weights": None}}  # with frozen features
ADAPTERS = ("bottleneck", "lora", "full")
BUSY = 5.0  # seconds between two attempts at a cell that another process works on


@dataclass(frozen=True)
class Cell:
    """A method with something trained in the last `depth` blocks."""

    method: str
    depth: int
    adapter: str  # of `finetune`; `feature` without fine-tuned blocks

    @property
    def name(self) -> str:
        return f"{self.method}_{self.adapter}_{self.depth}" if self.depth else f"{self.method}_0"

    def of(self, method: str) -> Cell:
        return replace(self, method=method)

    @property
    def frozen(self) -> Cell:
        return Cell(self.method, 0, "feature")

    def row(self, params: Params) -> MethodEntry:
        base, changes = METHODS[self.method]
        entry = params.entry(base)
        options = {**entry.options, **changes, **(FROZEN.get(self.method, {}) if self.depth == 0 else {})}
        finetune = {"blocks": self.depth, "adapter": self.adapter} if self.depth else {}
        return replace(entry, options=options, world="both", shown_as=None, finetune=finetune)


def cells(methods: Sequence[str], depths: Sequence[int], adapters: Sequence[str], only: Sequence[str]) -> list[Cell]:
    """Return all cells, or those whose names match a pattern; methods alternate, so that rates are found early."""
    every = [
        Cell(method, depth, adapter)
        for method in methods
        for depth in depths
        for adapter in (adapters if depth else ("feature",))
    ]
    return [cell for cell in every if not only or any(fnmatch(cell.name, pattern) for pattern in only)]


class FinetuneBench(Bench):
    """Tunes the learning rate of `finetune` if the method has one."""

    def at(self, name: str, rate: float) -> Params:
        entry = self.params.entry(name)
        if not entry.finetune:
            return super().at(name, rate)
        params = super().at(name, self.params.training(self.dataset, name).learning_rate)
        finetune = {**entry.finetune_for(self.dataset), "learning_rate": rate}
        methods = {**params.methods, name: replace(params.entry(name), finetune=finetune)}
        return params.model_copy(update={"methods": methods})


@dataclass(frozen=True)
class Study:
    """The settings that all processes of a study share."""

    dataset: str
    folder: Path
    rates: tuple[float, ...]
    tuning: tuple[int, ...]
    seeds: tuple[int, ...]
    tuned_by: str | None
    epochs: int | None
    params: Path = Path("params.yaml")

    def paths(self, depth: int) -> ArtifactPaths:
        return ArtifactPaths(self.folder / f"depth-{depth}")

    def bench(self, cell: Cell) -> FinetuneBench:
        """Return the bench of a cell. Inputs are loaded once per cell and freed with it."""
        params = load_params(self.params)
        names = {cell} | ({cell.of(self.tuned_by)} if self.tuned_by else set())
        params = params.model_copy(
            update={"methods": {**params.methods, **{cell.name: cell.row(params) for cell in names}}}
        )
        given = {"paths": self.paths(cell.depth), "load": InputsCache()}
        return FinetuneBench(params, self.dataset, self.folder / "runs", self.epochs, given)

    def cache(self, depth: int) -> None:
        """Return the data set's cache with `depth` blocks' inputs, written by the first process that needs it."""
        params = load_params(self.params)
        entry, paths = params.dataset(self.dataset), self.paths(depth)
        deep = entry.model_copy(update={"encoder": entry.encoder.model_copy(update={"block_inputs": depth})})
        with claim(self.folder / "pictures.lock", wait=True):
            if not paths.features(self.dataset).exists():
                prepare(params, self.dataset, paths)
                params = params.model_copy(update={"datasets": {**params.datasets, self.dataset: deep}})
                extract(params, self.dataset, paths, progress=False)

    def rate(self, cell: Cell, bench: FinetuneBench) -> tuple[float, dict[str, float]]:
        chooser = cell.of(self.tuned_by) if self.tuned_by else cell
        with claim(self.folder / f"{chooser.name}.tuning.lock", wait=True):
            return tune(bench, chooser.name, self.rates, self.tuning)

    def runs(self, cell: Cell) -> tuple[float, dict[str, float], list[RunPaths]]:
        """Return a cell's rate, the tuning results and the tested runs; train those that are missing."""
        bench = self.bench(cell)
        rate, tuned = self.rate(cell, bench)
        return rate, tuned, [bench.run(cell.name, rate, seed, tested=True) for seed in self.seeds]

    def finished(self, cell: Cell) -> bool:
        """Return whether all runs of a cell exist."""
        bench = self.bench(cell)
        chooser = cell.of(self.tuned_by) if self.tuned_by else cell
        untrained = chooser.depth == 0 and chooser.method in FROZEN  # its first rate is as good as any
        rates = self.rates[:1] if untrained else self.rates
        if not all(bench.kept(chooser.name, rate, seed, tested=False) for rate in rates for seed in self.tuning):
            return False
        rate, _ = tune(bench, chooser.name, self.rates, self.tuning)
        return all(bench.kept(cell.name, rate, seed, tested=True) for seed in self.seeds)

    def record(self, cell: Cell, frozen: Sequence[RunPaths] | None) -> dict[str, Any]:
        """Return a finished cell's numbers, and its gain over the same method with no block trained."""
        rate, tuned, runs = self.runs(cell)
        records = [read_record(run.checkpoint) for run in runs]
        opened = [(one.calibration or {})["open"].val_auc_all_feasible for one in records]
        features = self.paths(cell.depth).features(self.dataset)
        found: dict[str, Any] = {
            "method": cell.method,
            "depth": cell.depth,
            "adapter": cell.adapter,
            "rate": rate,
            "tuning": tuned,
            "epoch": fmean([one.epoch for one in records]),
            "validation": _spread([100 * one.val_auc for one in records]),
            "cache_bytes": features.stat().st_size,
            **measured(runs),
        }
        if all(value is not None for value in opened):  # without words there is no feasibility to look through
            found["validation_open"] = _spread([value for value in opened if value is not None])
        if frozen is not None and cell.depth:
            gains = {world: difference(frozen, runs, world) for world in WORLDS}
            found["gain"] = {world: gain for world, gain in gains.items() if gain is not None}
        return found


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"mean": fmean(values), "se": standard_error(values)}


@contextmanager
def claim(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file without waiting; yield whether this process has it. The system releases locks of dead processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            taken = False
        else:
            taken = True
        yield taken


def work(study: Study, wanted: Sequence[Cell]) -> None:
    """Run all cells in turn; those that another process works on come last."""
    keep_freed_memory()
    waiting = list(wanted)
    while waiting:
        later = []
        for cell in waiting:
            with claim(study.folder / f"{cell.name}.lock") as mine:
                if mine:
                    say(cell.name)
                    study.cache(cell.depth)
                    study.runs(cell)
                else:
                    later.append(cell)
        if len(later) == len(waiting):
            time.sleep(BUSY)
        waiting = later


def table(study: Study, wanted: Sequence[Cell]) -> dict[str, Any]:
    """Return the record of every finished cell, and the names of the others."""
    finished = [cell for cell in wanted if study.finished(cell)]
    frozen = {cell.method: study.runs(cell)[2] for cell in finished if cell.depth == 0}
    rows = {cell.name: study.record(cell, frozen.get(cell.method)) for cell in finished}
    settings = {"rates": study.rates, "tuning_seeds": study.tuning, "seeds": study.seeds, "tuned_by": study.tuned_by}
    missing = [cell.name for cell in wanted if cell not in finished]
    return {"dataset": study.dataset, **settings, "epochs": study.epochs, "rows": rows, "missing": missing}


def markdown(record: dict[str, Any]) -> str:
    """Return the table of docs/results/finetuned_blocks.csv."""
    header = ["method", "blocks", "adapter", "validation closed", "validation, all pairs"]
    header += ["test closed", "closed over 0 blocks", "test open", "open over 0 blocks"]
    header += ["s per epoch", "trained", "cache", "rate", "best epoch"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in record["rows"].values():
        cells = [f"`{row['method']}`", str(row["depth"]), row["adapter"]]
        cells += [_plus_minus(row.get(key)) for key in ("validation", "validation_open")]
        for world in WORLDS:
            part = row.get(world)
            cells.append("–" if part is None else _plus_minus({"mean": part["auc"], "se": part["auc_se"]}))
            cells.append(_gain(row.get("gain", {}).get(world)))
        cells += [f"{row['seconds_per_epoch']:.1f}", f"{row['parameters']:,}", f"{row['cache_bytes'] / 1e6:.1f} MB"]
        lines.append("| " + " | ".join([*cells, f"{row['rate']:g}", f"{row['epoch']:.0f}"]) + " |")
    missing = record["missing"]
    return "\n".join([*lines, *([f"\nNot finished: {', '.join(missing)}"] if missing else [])])


def _plus_minus(part: dict[str, float | None] | None) -> str:
    if part is None or part["mean"] is None:
        return "–"
    return f"{part['mean']:.1f}" + (f" ± {part['se']:.1f}" if part["se"] is not None else "")


def _gain(gain: dict[str, float | None] | None) -> str:
    if gain is None:
        return "–"
    low, high = gain["low"], gain["high"]
    return f"{gain['auc']:+.1f}" + ("" if low is None else f" ({low:+.1f} to {high:+.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--folder", type=Path, required=True, help="folder of caches and runs")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--depths", default="0,1,2,4", help="4 is all of the packaged tower")
    parser.add_argument("--adapters", default=",".join(ADAPTERS))
    parser.add_argument("--only", default="", help="patterns of cell names")
    parser.add_argument("--rates", default="3e-4,1e-3,3e-3")
    parser.add_argument("--tuning-seeds", default="100,101")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--tuned-by", help="method whose rate all others use with the same blocks and adapter")
    parser.add_argument("--epochs", type=int, help="epochs per run; default: the data set's")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--finished", action="store_true", help="train nothing; print the finished combinations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    parser.add_argument("--csv", type=Path, help="write the table to this file, as in docs/results")
    given = parser.parse_args()

    methods, adapters, only = (_words(text) for text in (given.methods, given.adapters, given.only))
    for names, known, what in ((methods, METHODS, "method"), (adapters, ADAPTERS, "adapter")):
        for name in names:
            require(name, known, f"{what} of the study")
    if given.tuned_by:
        require(given.tuned_by, METHODS, "method of the study")
    rates, depths = tuple(float(one) for one in _words(given.rates)), [int(one) for one in _words(given.depths)]
    tuning, seeds = (tuple(int(one) for one in _words(text)) for text in (given.tuning_seeds, given.seeds))
    study = Study(given.dataset, given.folder, rates, tuning, seeds, given.tuned_by, given.epochs)
    wanted = cells(methods, depths, adapters, only)
    if not given.finished:
        _run(study, wanted, given.jobs)
    record = table(study, wanted)
    if given.json:
        emit(record)
    if given.markdown or not given.json:
        print(markdown(record))
    if given.csv:
        write_csv(markdown(record), given.csv)


def _run(study: Study, wanted: list[Cell], jobs: int) -> None:
    """Work in this process and in others; cells that fail in another process are repeated here."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=work, args=(study, wanted)) for _ in range(jobs - 1)]
    for process in others:
        process.start()
    try:
        work(study, wanted)
    finally:
        for process in others:
            process.join()


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    try:
        main()
    except DuplexError as error:
        raise SystemExit(str(error)) from None
