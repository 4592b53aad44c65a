"""The figures' numbers as tables, for DVC's own plots: `dvc plots show` and `dvc plots diff` draw them by `series`."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from duplex.report.results import Results


def curve_table(results: Results) -> pd.DataFrame:
    """Mean seen-unseen curves with their intervals, percent."""
    parts = [
        pd.DataFrame({"seen": c.seen, "unseen": c.unseen, "low": c.low, "high": c.high}).assign(
            series=f"{data.name} {method} {world}"
        )
        for data in results.datasets
        for world in data.curves
        for method, c in data.curves[world].items()
    ]
    return _joined(parts, ["series", "seen", "unseen", "low", "high"])


def training_table(results: Results) -> pd.DataFrame:
    """Validation AUC by epoch of every run that trained, percent."""
    parts = [
        pd.DataFrame({"epoch": run.history["epoch"], "val_auc": 100 * run.history["val_auc"]}).assign(
            series=f"{data.name} {method} seed {seed}"
        )
        for data in results.datasets
        for method, runs in data.runs.items()
        for seed, run in runs.items()
        if run.history is not None and len(run.history) > 1
    ]
    return _joined(parts, ["series", "epoch", "val_auc"])


def _joined(parts: Iterable[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    found = list(parts)
    return pd.concat(found)[columns] if found else pd.DataFrame(columns=columns)
