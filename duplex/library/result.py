"""`Result`: the metrics of a run on a split, and `duplex.compare`: the difference of two results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from duplex.errors import UsageError, require_type
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.uncertainty import compare_seeds
from duplex.labels import World
from duplex.metric_table import METRICS, OPEN_METRICS
from duplex.report.charts import Chart, Series, draw
from duplex.report.results import mean_curve

SHARED_COLUMNS = ["image", "label", "seen"]  # of predictions; must agree between results that are compared


@dataclass(frozen=True, eq=False)  # arrays and tables have no single truth value
class Result:
    """Metrics in percent of one run in one world on one split; `duplex.evaluate` returns it."""

    name: str  # of the run: method and seed
    dataset: str
    world: World
    split: str
    metrics: dict[str, Any]  # those of the run's metrics.json
    predictions: pd.DataFrame  # one row per image, as in predictions.csv
    margins: Margins

    @property
    def seen(self) -> float:
        """S: accuracy in percent on images of seen pairs, with only seen pairs as candidates."""
        return float(self.metrics["seen"])

    @property
    def unseen(self) -> float:
        """U: accuracy in percent on images of unseen pairs, with only unseen pairs as candidates."""
        return float(self.metrics["unseen"])

    @property
    def hm(self) -> float:
        """HM: the best harmonic mean of seen and unseen accuracy over all biases on unseen pairs, in percent."""
        return float(self.metrics["hm"])

    @property
    def auc(self) -> float:
        """The area under the curve of unseen against seen accuracy, in percent."""
        return float(self.metrics["auc"])

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of AUC, in percent; None if there are too few images."""
        low, high = self.metrics.get("auc_low"), self.metrics.get("auc_high")
        return None if low is None or high is None else (low, high)

    @cached_property
    def curve(self) -> pd.DataFrame:
        """Points of the seen–unseen curve: columns bias (on unseen pairs), and seen, unseen and hm in percent."""
        table = Curve.of(self.margins).table()
        return table.assign(**{name: 100 * table[name] for name in ("seen", "unseen", "hm")})

    def table(self) -> pd.DataFrame:
        """A table with a row for each of S, U, HM and AUC, in percent, and their 95 % intervals.

        In the open world, another row has the AUC with every pair a candidate.
        """
        columns = {"value": "", "low": "_low", "high": "_high"}
        titles = {**METRICS, "auc_all": OPEN_METRICS["auc_all"]} if self.world == "open" else METRICS
        rows = {
            title: {column: self.metrics.get(key + end) for column, end in columns.items()}
            for key, title in titles.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").astype(float)

    def __repr__(self) -> str:
        return f"{self._title}\n{self.table().round(2)}"

    def _repr_html_(self) -> str:
        from duplex.report.blocks import Figure, Table, TableRow, columns, number_cell, text_cell
        from duplex.report.page import render_notebook

        rows = []
        for title, values in self.table().astype(object).replace(float("nan"), None).iterrows():
            rows.append(TableRow([text_cell(str(title)), *(number_cell(value, "{:.2f}") for value in values)]))
        table = Table("Percent, with 95 % intervals", columns("metric", "value", "low", "high"), rows)
        mean = mean_curve([self.margins])
        seen, unseen, low, high = (values.tolist() for values in (mean.seen, mean.unseen, mean.low, mean.high))
        alt = f"Unseen against seen accuracy of {self._title}"
        chart = Chart(alt, "seen accuracy (%)", "unseen accuracy (%)", [Series(self.name, seen, unseen, low, high)])
        return render_notebook(self._title, [table, Figure("curve", draw(chart), alt)])

    @property
    def _title(self) -> str:
        return f"{self.name} on {self.dataset}, {self.world} world, {self.split} images"


def compare(first: Result | Sequence[Result], second: Result | Sequence[Result]) -> pd.DataFrame:
    """Table of `second` minus `first` in S, U, HM, AUC: percentage points, bounds of a 95 % interval, p-value.

    For single results, the interval of AUC is DeLong's and the others come from a bootstrap over images; for lists, all
    come from a bootstrap over runs and images.

    Args:
        first: a result, or a list with one per seed.
        second: a result on the same images, or a list in the order of the same seeds.

    Raises:
        UsageError: for results on different images.
    """
    one: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
    other: list[Any] = list(second) if isinstance(second, list | tuple) else [second]
    for each in (*one, *other):
        require_type(each, Result, "a result")
    _check_same_images([*one, *other])
    gains = compare_seeds([result.margins for result in one], [result.margins for result in other])
    rows = {}
    for key, gain in gains.items():
        low, high = gain.interval or (float("nan"), float("nan"))
        rows[METRICS[key]] = {"difference": 100 * gain.value, "low": 100 * low, "high": 100 * high, "p": gain.p}
    return pd.DataFrame.from_dict(rows, orient="index").astype(float)


def _check_same_images(results: Sequence[Result]) -> None:
    for other in results[1:]:
        for key in ("world", "split"):
            here, there = getattr(results[0], key), getattr(other, key)
            if here != there:
                raise UsageError(f"the results are for {key} {here} and for {key} {there}; expected one {key}")
        if not results[0].predictions[SHARED_COLUMNS].equals(other.predictions[SHARED_COLUMNS]):
            raise UsageError(
                f"{results[0]._title}, and {other._title} have different images; evaluate both on one data set"
            )
