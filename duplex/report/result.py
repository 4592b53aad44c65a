"""Metrics of one run as a Python object, which a notebook draws, and differences of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from duplex.errors import UsageError, require_type
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.intervals import compare_seeds
from duplex.evaluation.metrics import METRICS, OPEN_METRICS, interval_of
from duplex.labels import World
from duplex.report import blocks
from duplex.report.aggregate import mean_curve

SHARED_COLUMNS = ["image", "label", "seen"]  # of predictions, equal in results that are compared


@dataclass(frozen=True, eq=False)  # arrays and tables have no single truth value
class Result:
    """Metrics of one run in one world on one split, in percent; `duplex.evaluate` returns it."""

    name: str  # of the run: method and seed
    dataset: str
    world: World
    split: str
    metrics: dict[str, Any]  # as in the run's metrics.json
    predictions: pd.DataFrame  # one row per image, as in predictions.csv
    margins: Margins

    @property
    def seen(self) -> float:
        """S: accuracy in percent on images of seen pairs, with only seen pairs as candidates."""
        return float(self.metrics["seen"])

    @property
    def unseen(self) -> float:
        """U: accuracy in percent on images of unseen pairs, with only unseen candidates."""
        return float(self.metrics["unseen"])

    @property
    def hm(self) -> float:
        """HM: the best harmonic mean of seen and unseen accuracy over all biases, in percent."""
        return float(self.metrics["hm"])

    @property
    def auc(self) -> float:
        """AUC: the area under the curve of unseen against seen accuracy, in percent."""
        return float(self.metrics["auc"])

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of AUC, in percent; None if there are too few images."""
        return interval_of(self.metrics)

    @cached_property
    def curve(self) -> pd.DataFrame:
        """The seen–unseen curve: columns bias, and seen, unseen and hm in percent."""
        table = Curve.of(self.margins).table()
        return table.assign(**{name: 100 * table[name] for name in ("seen", "unseen", "hm")})

    def table(self) -> pd.DataFrame:
        """S, U, HM and AUC in percent, one row each: value, low and high end of the 95 % interval.

        In the open world, another row has the AUC with all pairs as candidates.
        """
        columns = {"value": "", "low": "_low", "high": "_high"}
        titles = dict(METRICS)
        if self.world == "open":
            titles["auc_all"] = OPEN_METRICS["auc_all"]
        rows = {}
        for key, title in titles.items():
            rows[title] = {column: self.metrics.get(key + end) for column, end in columns.items()}
        return pd.DataFrame.from_dict(rows, orient="index").astype(float)

    def __repr__(self) -> str:
        return f"{self._title}\n{self.table().round(2)}"

    def _repr_html_(self) -> str:
        rows = []
        for title, values in self.table().astype(object).replace(float("nan"), None).iterrows():
            cells = [blocks.number_cell(value, "{:.2f}") for value in values]
            rows.append(blocks.TableRow([blocks.text_cell(str(title)), *cells]))
        columns = blocks.headings("metric", "value", "low", "high")
        table = blocks.Table("Percent, with 95 % intervals", columns, rows)
        mean = mean_curve([self.margins])
        alt = f"Unseen against seen accuracy of {self._title}"
        lines = [values.tolist() for values in (mean.seen, mean.unseen, mean.low, mean.high)]
        series = blocks.Series(self.name, *lines)
        chart = blocks.Chart(alt, "seen accuracy (%)", "unseen accuracy (%)", [series])
        return blocks.render_for_notebook(self._title, [table, blocks.Figure("curve", blocks.draw(chart), alt)])

    @property
    def _title(self) -> str:
        return f"{self.name} on {self.dataset}, {self.world} world, {self.split} images"


def compare(
    first: Result | Sequence[Result], second: Result | Sequence[Result], *others: Result | Sequence[Result]
) -> pd.DataFrame:
    """`second` minus `first` in S, U, HM and AUC: percentage points, 95 % interval, p-value.

    For single results, the interval of AUC is by DeLong's method and the others come from a
    bootstrap over images; for lists, all come from a bootstrap over runs and images.

    first: a result, or a list with one per seed.
    second: a result on the same images, or a list for the same seeds in the same order.
    others: more of these; each minus `first` adds four rows, and the column `other` names it.
    """
    sides: list[list[Any]] = [
        list(side) if isinstance(side, list | tuple) else [side] for side in (first, second, *others)
    ]
    for side in sides:
        for result in side:
            require_type(result, Result, "a result")
    tables = []
    for other in sides[1:]:
        table = _differences(sides[0], other)
        if others:
            table.insert(0, "other", _name_of(other))
        tables.append(table)
    return pd.concat(tables)


def _name_of(results: Sequence[Result]) -> str:
    if len(results) == 1:
        return results[0].name
    names = [result.name.partition(" seed ")[0] for result in results]
    return ", ".join(dict.fromkeys(names))


def _differences(one: Sequence[Result], other: Sequence[Result]) -> pd.DataFrame:
    _check_same_images([*one, *other])
    for result, against in zip(one, other, strict=False):
        if result is against:
            same = f"{result._title!r} is compared with itself"
            raise UsageError(f"{same}: both are the same result; give two results")
    gains = compare_seeds([result.margins for result in one], [result.margins for result in other])
    rows = {}
    for key, gain in gains.items():
        low, high = gain.interval or (float("nan"), float("nan"))
        row = {"difference": 100 * gain.value, "low": 100 * low, "high": 100 * high, "p": gain.p}
        rows[METRICS[key]] = row
    return pd.DataFrame.from_dict(rows, orient="index").astype(float)


def _check_same_images(results: Sequence[Result]) -> None:
    for other in results[1:]:
        for key in ("world", "split"):
            here = getattr(results[0], key)
            there = getattr(other, key)
            if here != there:
                differ = f"the results differ in {key}: {here} and {there}"
                raise UsageError(f"{differ}; evaluate both with the same {key}")
        if not results[0].predictions[SHARED_COLUMNS].equals(other.predictions[SHARED_COLUMNS]):
            titles = f"{results[0]._title!r} and {other._title!r}"
            raise UsageError(f"{titles} have different images; evaluate both on one data set")
